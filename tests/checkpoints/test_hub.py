"""Pushing an exported folder to a hub that stands on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import huggingface_hub
import pytest

from open_clip_zerovl.checkpoints.export import push_folder
from open_clip_zerovl.cli import main
from support.servers import ModelHub
from support.tiny_clip import (
    NATIVE_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)


def new_session():
    """Let huggingface_hub before 1.0 read HF_HUB_OFFLINE again, which its session keeps."""
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The stub hub as huggingface_hub's, with the token of one who may write."""
    with ModelHub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "writer")
        new_session()
        yield hub
        new_session()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    bert = write_bert(home / "bert")
    register(home / "configs", "hub-bert", NATIVE_VISION, bert_text(bert))
    results = {
        "epoch": 1,
        **{
            f"coco_{way}_R@{k}": 0.5
            for way in ("image_to_text", "text_to_image")
            for k in (1, 5, 10)
        },
    }
    path = write_run(
        home / "run",
        random_model("hub-bert"),
        {"model": "hub-bert", "train_data": "sbu=/secret/sbu", "lr": 0.1},
    )
    (path.parent / "results.jsonl").write_text(json.dumps(results) + "\n")
    return path


@pytest.mark.parametrize("format", ["open_clip", "transformers"])
def test_a_push_is_one_commit_with_a_card(hub, checkpoint, tmp_path, capsys, format):
    command = f"export {checkpoint} {tmp_path / 'out'} --format {format} --license mit".split()
    assert main([*command, "--push-to-hub", "me/model", "--private"]) == 0
    out = capsys.readouterr().out
    assert f"Pushed: {hub.address}/me/model/commit/" in out and "after moving" not in out
    assert hub.commits == ["me/model"] and hub.private == {"me/model"}
    files = hub.repositories["me/model"]
    assert set(files) == {path.name for path in (tmp_path / "out").iterdir()}
    card = files["README.md"].decode()
    assert (
        f"library_name: {format}" in card
        and "license: mit" in card
        and "- sbu" in card
        and "- `--lr`: 0.1" in card
    )
    assert "| coco | text to image R@10 in % | 50.0 |" in card and "/path/to" not in card
    assert (
        'from_pretrained("me/model")' if format == "transformers" else '"hf-hub:me/model"'
    ) in card
    assert (
        str(tmp_path)
        not in b"".join(content for name, content in files.items() if name.endswith("n")).decode()
    )
    if format == "open_clip":
        text_cfg = json.loads(files["open_clip_config.json"])["model_cfg"]["text_cfg"]
        assert text_cfg["hf_model_name"] == text_cfg["hf_tokenizer_name"] == "me/model"
        # The folder itself still opens here.
        assert str(tmp_path) in (tmp_path / "out" / "open_clip_config.json").read_text()


@pytest.mark.slow  # a process that imports open_clip; the files of the push are compared in the fast test
def test_stock_open_clip_loads_the_pushed_model_from_the_hub(hub, checkpoint, tmp_path):
    assert (
        main(["export", str(checkpoint), str(tmp_path / "out"), "--push-to-hub", "me/model"]) == 0
    )
    (tmp_path / "out").rename(tmp_path / "gone")
    code = (
        "import open_clip, sys\nmodel, _, _ = open_clip.create_model_and_transforms('hf-hub:me/model')\n"
        "print(open_clip.get_tokenizer('hf-hub:me/model')(['a cat']).shape, float(model.logit_scale))"
    )
    outside = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    outside |= {"HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=outside, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"torch.Size([1, 12]) {random_model('hub-bert').logit_scale.item()}" in done.stdout


def test_an_impossible_push_is_refused_before_the_work(
    hub, checkpoint, tmp_path, capsys, monkeypatch
):
    def said(repo: str = "me/model", *more: str) -> str:
        assert (
            main(["export", str(checkpoint), str(tmp_path / "out"), "--push-to-hub", repo, *more])
            == 2
        )
        assert not (tmp_path / "out").exists() and not hub.repositories
        *progress, error = capsys.readouterr().err.splitlines()
        assert progress == ["zerovl: loading open_clip"]
        return error

    assert "Repo id must use alphanumeric chars" in said("a b")
    monkeypatch.setenv("HF_TOKEN", "reader")
    assert "the hub's token of me may only read" in said()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    # httpx's name, and that of requests in releases of the hub before 1.0
    assert re.search("Connect(ion)?Error", said())


def test_a_push_that_fails_leaves_the_repository_as_it_was(hub, checkpoint, tmp_path, monkeypatch):
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    push_folder(tmp_path / "out", "model")  # the owner of the token is filled in
    before = dict(hub.repositories["me/model"])
    with pytest.raises(OSError, match="403"):
        push_folder(tmp_path / "out", "others/model")
    (tmp_path / "out" / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(
        "time.sleep", lambda seconds: None
    )  # between huggingface_hub's own attempts
    for fault in ("upload", "commit"):
        hub.fault = fault
        weights = tmp_path / "out" / "open_clip_model.safetensors"
        weights.write_bytes(weights.read_bytes() + b" ")
        with pytest.raises(Exception, match=r"500|Error|disconnected"):
            push_folder(tmp_path / "out", "me/model")
        assert hub.repositories["me/model"] == before
