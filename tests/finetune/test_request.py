"""The key of each flag of `zerovl finetune`, and calls on a folder whose training had another model or is not over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from open_clip_zerovl import api
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.cli import parser_of
from open_clip_zerovl.core import flags as command
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.finetune.data import DataArguments
from open_clip_zerovl.finetune.finetuning import Training, _finished, _same_request
from open_clip_zerovl.finetune.request import FinetuneRequest
from open_clip_zerovl.shards.files import write_retrieval_set, write_source
from open_clip_zerovl.shards.tar import Sample
from support.pairs import picture
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, register

NO_DATA = DataArguments({})
# Words that give the flag another value than the call has, and the key that it changes.
KEYS = {
    "--from": (["--from", "other.pt"], "training"),
    "--data": (["--data", "other"], "training"),
    "--out": (["--out", "other"], None),  # the folder itself
    "--set": (["--set", "lr=1"], "training"),
    "training": (["--", "--lr", "1"], "training"),
    "--retrieval-data": (["--retrieval-data", "x=/d"], "training"),
    "--keep-data": (["--keep-data", "other=/d"], "training"),
    "--keep-share": (["--keep-share", "0.4"], "training"),
    "--seed": (["--seed", "1"], "training"),
    "--model-name": (["--model-name", "{folder}/own-tiny.json"], "training"),
    "--text-model": (["--text-model", "/bert"], "training"),
    "--kept": (["--kept", "coco=/d"], "curve"),
    "--zero-shot-data": (["--zero-shot-data", "things=/d"], "curve"),
    "--alphas": (["--alphas", "0.5"], "curve"),
    "--rule": (["--rule", "new"], "curve"),
    "--keep": (["--keep", "0.5"], "curve"),
    "--patience": (["--patience", "1"], None),
    "--skip-overlap": (["--skip-overlap"], None),
    "--device": (["--device", "cpu"], None),
    "--batch-size": (["--batch-size", "1"], None),
    "--workers": (["--workers", "1"], None),
}


def test_every_flag_belongs_to_one_key(tmp_path, monkeypatch):
    """A flag in neither key may have another value later without an effect on the results; FREE gives the reasons."""
    (tmp_path / "own-tiny.json").write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT})
    )
    parser, seen = parser_of("finetune"), []
    monkeypatch.setattr(
        "open_clip_zerovl.finetune.finetuning.run_finetune",
        lambda request, say: seen.append(request),
    )
    monkeypatch.setattr(api, "read_json", lambda file: {"table": ""})
    declared = {(action.option_strings or [action.dest])[-1] for action in parser._actions}
    declared -= {"--help", "--debug"}
    assert declared == KEYS.keys()

    def keys(*words: str) -> list[str]:
        base = ["--from", "a.pt", "--data", "b", "--out", "c", "--keep-data", "old=/old"]
        parsed = parser.parse_args([*base, *(word.format(folder=tmp_path) for word in words)])
        command.run(api.finetune, parsed)
        return [json.dumps(seen[-1].of_training()), json.dumps(seen[-1].of_curve(NO_DATA))]

    first = keys()
    for flag, (words, key) in KEYS.items():
        assert [a != b for a, b in zip(keys(*words), first, strict=True)] == [
            key == "training",
            key == "curve",
        ], flag


def write_pairs(folder: Path, first: int) -> str:
    samples = [
        Sample(f"{number:03d}", {"png": picture(first + number), "txt": b"a"})
        for number in range(9)
    ]
    write_source(folder, samples, shard_size=9)
    return str(folder)


def write_set(folder: Path, first: int) -> None:
    write_retrieval_set(folder, [Sample("0", {"png": picture(first), "txt": b"a"})])


@pytest.fixture
def claimed(tmp_path):
    """A call on OUT, which returns its data arguments; the model's weights are not read."""
    register(tmp_path, "request-tiny", NATIVE_VISION, CLIP_TEXT)
    (tmp_path / "bare.pt").write_bytes(b"weights")
    write_pairs(tmp_path / "mine" / "train", 0)
    write_pairs(tmp_path / "old", 30)
    write_set(tmp_path / "set", 50)

    def call(model: str = "bare.pt", name: str | None = "request-tiny", **changed: str | None):
        given = {
            "data": str(tmp_path / "mine"),
            "keep_data": f"old={tmp_path / 'old'}",
            "retrieval_data": str(tmp_path / "set"),
        }
        start = Encoder(str(tmp_path / model), model_name=name)
        request = FinetuneRequest(start, out=tmp_path / "out", **given | changed)
        return _same_request(request, print).given

    return call


@pytest.mark.parametrize(
    "changed",
    ["open_clip_model.safetensors", "open_clip_config.json", "tokenizer.json", "../bare.pt"],
)
def test_a_model_that_was_overwritten_is_another_one(claimed, tmp_path, changed):
    """The files of an export, or a checkpoint."""
    folder, out = tmp_path / "export", tmp_path / "out"
    of_model = {} if changed == "../bare.pt" else {"model": "export", "name": None}
    folder.mkdir()
    config = {
        "model_cfg": {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT},
        "preprocess_cfg": {},
    }
    for file in ("open_clip_model.safetensors", "tokenizer.json"):
        (folder / file).write_text("first")
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    claimed(**of_model)
    (out / "data").mkdir()
    other = json.dumps({**config, "preprocess_cfg": {"mean": [0, 0, 0]}})
    (folder / changed).write_text(other if changed == "open_clip_config.json" else "other")
    (out / "run").mkdir()
    with pytest.raises(
        UserError, match="out was begun before the content of --from changed; repeat"
    ):
        claimed(**of_model)
    (out / "run").rmdir()
    claimed(**of_model)  # nothing was trained
    assert not (out / "data").exists()


@pytest.mark.parametrize(
    ("flag", "place", "pairs"),
    [
        ("data", "mine", "mine/train"),
        ("keep_data", "old", "old"),
        ("retrieval_data", "set", None),
        ("data", "mine", None),  # with the held-out set that comes with it
    ],
)
def test_a_copy_of_the_data_is_the_same_and_keeps_its_names(claimed, tmp_path, flag, place, pairs):
    """Other data at the same path is refused, once something was trained."""
    given: dict[str, str | None] = {}
    if (flag, pairs) == ("data", None):
        given["retrieval_data"] = None
        write_set(tmp_path / "mine", 50)
    first = claimed(**given)
    (tmp_path / "out" / "run").mkdir()
    copy = tmp_path / "another"
    shutil.copytree(tmp_path / place, copy)
    again = claimed(**given | {flag: f"other={copy}" if flag == "keep_data" else str(copy)})
    named = [{name: text.partition("=")[0] for name, text in of.items()} for of in (first, again)]
    assert named[0] == named[1]
    option = "--" + ("retrieval_data" if "retrieval_data" in given else flag).replace("_", "-")
    assert str(copy) in again[option]
    write_set(tmp_path / place, 60) if pairs is None else write_pairs(tmp_path / pairs, 10)
    with pytest.raises(UserError, match=f"before the content of {option} changed"):
        claimed(**given)


def test_a_finished_call_goes_on_with_more_patience(tmp_path):
    """Epoch 1 is the best of two; --patience 1 has ended the training, and 0 lets it run to its end."""
    request = FinetuneRequest(Encoder("x"), "d", tmp_path)
    (tmp_path / "model").mkdir()
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)

    def finished(patience: int) -> bool:
        return _finished(request, NO_DATA, Training(tmp_path, [], 1, 3, patience, ("a",)))

    def scored(*rows: float) -> None:
        lines = [
            json.dumps({"epoch": epoch, "a_rsum": row}) + "\n"
            for epoch, row in enumerate(rows, start=1)
        ]
        (checkpoints / "results.jsonl").write_text("".join(lines))
        (checkpoints / f"epoch_{len(rows)}.pt").touch()

    def told(**epochs: float) -> None:
        content = {
            "epochs": {key.strip("e"): score for key, score in epochs.items()},
            "curve": {"asked": request.of_curve(NO_DATA)},
        }
        (tmp_path / "finetune.json").write_text(json.dumps(content))

    scored(10.0, 9.5)
    assert not finished(1)
    told(e1=10.0, e2=9.5)
    assert finished(1) and not finished(0) and not finished(2)
    scored(10.0, 9.5, 11.25)  # the training went on, and the call was killed before its result
    assert not finished(0)
    told(e1=10.0, e2=9.5, e3=11.25)
    assert finished(0) and finished(1)
