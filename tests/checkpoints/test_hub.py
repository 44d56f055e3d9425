"""Pushing an exported folder: what a hub gets, and that stock open_clip loads it from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi

from open_clip_zerovl.cli import main
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)

RECALLS = {f"coco_{way}_R@{k}": 0.5 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}  # fmt: skip


class Hub:
    """The calls of huggingface_hub, each with its signature, and the files of each commit."""

    def __init__(self, monkeypatch) -> None:
        self.role, self.made, self.commits = "write", [], []
        for call in (self.whoami, self.create_repo, self.create_commit):
            spec = create_autospec(getattr(HfApi, call.__name__), side_effect=call)
            monkeypatch.setattr(HfApi, call.__name__, spec)

    def whoami(self, _) -> dict:
        return {"name": "me", "auth": {"accessToken": {"role": self.role}}}

    def create_repo(self, _, repo, *, private, exist_ok):
        self.made.append((repo, private, exist_ok))
        return SimpleNamespace(repo_id=repo)

    def create_commit(self, _, repo, operations, *, commit_message):
        files = {}
        for operation in operations:
            with operation.as_file() as file:
                files[operation.path_in_repo] = file.read()
        self.commits.append((repo, files))
        return SimpleNamespace(commit_url=f"hub/{repo}/commit/{len(self.commits)}")


@pytest.fixture
def hub(monkeypatch) -> Hub:
    return Hub(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    register(home / "configs", "hub-bert", NATIVE_VISION, bert_text(write_bert(home / "bert")))
    params = {"model": "hub-bert", "train_data": "sbu=/secret/sbu", "lr": 0.1}
    path = write_run(home / "run", random_model("hub-bert"), params)
    (path.parent / "results.jsonl").write_text(json.dumps({"epoch": 1, **RECALLS}) + "\n")
    return path


@pytest.mark.parametrize("format", ["open_clip", "transformers"])
def test_a_push_is_one_commit_with_a_card(hub, checkpoint, tmp_path, capsys, format):
    command = f"export {checkpoint} {tmp_path / 'out'} --format {format} --license mit".split()
    assert main([*command, "--push-to-hub", "me/model", "--private"]) == 0
    assert "Pushed: hub/me/model/commit/1" in capsys.readouterr().out
    ((name, files),) = hub.commits
    assert name == "me/model" and hub.made == [("me/model", True, True)]
    assert set(files) == {path.name for path in (tmp_path / "out").iterdir()}
    card = files["README.md"].decode()
    load = 'from_pretrained("me/model")' if format == "transformers" else '"hf-hub:me/model"'
    told = (f"library_name: {format}", "license: mit", "- sbu", "- `--lr`: 0.1", load)
    assert all(words in card for words in (*told, "| coco | text to image R@10 in % | 50.0 |"))
    assert "/path/to" not in card and "--here" not in card
    texts = b"".join(content for name, content in files.items() if name.endswith(("n", "md")))
    assert str(tmp_path).encode() not in texts and b"/secret" not in texts
    if format == "open_clip":
        text_cfg = json.loads(files["open_clip_config.json"])["model_cfg"]["text_cfg"]
        assert text_cfg["hf_model_name"] == text_cfg["hf_tokenizer_name"] == "me/model"
        # The folder itself still opens here.
        assert str(tmp_path) in (tmp_path / "out" / "open_clip_config.json").read_text()


@pytest.mark.slow  # a process that imports open_clip; the files of the push are compared in the fast test
def test_stock_open_clip_loads_the_pushed_model_from_the_hub(hub, checkpoint, tmp_path):
    """From the hub's cache, in which its files lie as they were pushed."""
    command = ["export", str(checkpoint), str(tmp_path / "out"), "--push-to-hub", "me/model"]
    assert main(command) == 0
    (tmp_path / "out").rename(tmp_path / "gone")
    cached = tmp_path / "cache" / "hub" / "models--me--model"
    (cached / "snapshots" / "0").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    for name, content in hub.commits[0][1].items():
        (cached / "snapshots" / "0" / name).write_bytes(content)
    code = (
        "import open_clip\nmodel, _, _ = open_clip.create_model_and_transforms('hf-hub:me/model')\n"
        "print(open_clip.get_tokenizer('hf-hub:me/model')(['a cat']).shape, float(model.logit_scale))"
    )
    place = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, env=os.environ | place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"torch.Size([1, 12]) {random_model('hub-bert').logit_scale.item()}" in done.stdout


def test_a_token_that_may_only_read_is_refused_before_the_work(hub, checkpoint, tmp_path, capsys):
    hub.role = "read"
    command = ["export", str(checkpoint), str(tmp_path / "out"), "--push-to-hub", "me/model"]
    assert main(command) == 2 and not (tmp_path / "out").exists() and not hub.made
    assert "the hub's token of me may only read" in capsys.readouterr().err
