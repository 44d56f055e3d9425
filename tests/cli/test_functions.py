"""The Python functions: a call asks for what its command does; results; a call that was interrupted goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import open_clip_zerovl.api as zerovl
from open_clip_zerovl.checkpoints.weights import read_state_dict
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import words_of
from open_clip_zerovl.core.processes import follow_training
from open_clip_zerovl.evaluate.search import Hit
from support import warm
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION

PYTHON = sys.executable
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
CLASSES = list(COLOURS)
TRAIN = {
    "device": "cpu",
    "precision": "fp32",
    "batch_size": 8,
    "dga_steps": 2,
    "epochs": 2,
    "warmup": 1,
    "workers": 0,
    "save_every_steps": 1,
}


@pytest.fixture(scope="module", autouse=True)
def warm_trainings():
    """Trainings are children that `sys.executable` starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm.python())
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """`pictures`: noisy colours with captions. `packed`: the same as shards. `tiny.json`: a model."""
    home = tmp_path_factory.mktemp("functions")
    rng = np.random.default_rng(0)
    (home / "pictures").mkdir()
    for number in range(60):
        colour = CLASSES[number % 3]
        pixels = np.clip(np.array(COLOURS[colour]) + rng.integers(-30, 30, (40, 40, 3)), 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(home / f"pictures/{number:02d}.png")
        (home / "pictures" / f"{number:02d}.txt").write_text(f"a {colour} house of tree {number}")
    config = {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}
    (home / "tiny.json").write_text(json.dumps(config))
    return home


@pytest.fixture(scope="module")
def packed(home):
    return zerovl.pack(home / "pictures", out=home / "packed", test_share=0.2)


@pytest.fixture(scope="module")
def run(home, packed):
    """A run by the function."""
    return zerovl.train(
        name="call",
        logs=home / "logs",
        model_config=home / "tiny.json",
        train_data=packed,
        **TRAIN,
    )


def test_keyword_arguments_are_the_words_of_a_command_line():
    words = words_of(
        {"from_": Path("m"), "lr": 1e-05, "lock_image": True, "wd": None, "amp": False}
        | {"image": ["a", "b"], "image_mean": (0.5, 0.4), "set": {"lr": 0.1, "siglip": True}},
        {"--image", "--set"},
    )
    line = "--from=m --lr=1e-05 --lock-image --image=a --image=b --image-mean 0.5 0.4 --set=lr=0.1 --set=siglip"
    assert words == line.split()


def test_errors_are_user_errors(home, tmp_path):
    with pytest.raises(UserError, match=r"no flag --test-shar; did you mean --test-share\?"):
        zerovl.pack(home / "pictures", out=tmp_path / "x", test_shar=0.1)
    with pytest.raises(UserError, match=r"ended with status 2: there is no flag --modelx"):
        zerovl.train(name="x", logs=tmp_path, modelx="tiny")


def test_pack(packed, home):
    assert packed.train_data.endswith("packed/train") and packed.held_out.endswith("packed")
    assert packed.page().path.name == "report.html" and "<iframe" in packed._repr_html_()


def test_train(home, run, packed):
    words = words_of(TRAIN | {"model_config": home / "tiny.json"}, ())
    words += [f"--train-data={packed.train_data}", f"--retrieval-data={packed.held_out}"]
    command = [sys.executable, "-m", "open_clip_zerovl.cli", "train", *words]
    subprocess.run([*command, "--name=command", "--logs", str(home / "logs")], check=True)
    expected = read_state_dict(home / "logs" / "command" / "checkpoints" / "epoch_2.pt")
    found = read_state_dict(run.model_path)
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    assert list(run.checkpoints) == [1, 2] and run.page().path.name == "run.html"
    assert run.scores[2]["held-out_rsum"] > 0 and len(run.curve) > 0
    assert run.model()[0].encode_text(run.model()[2](["a red house"])).shape == (1, 24)


def test_an_interrupted_training_goes_on_with_the_same_call(home, run, packed):
    """As a notebook's kernel does: the interrupt comes in the middle of a step's line."""
    asked = {
        "model_config": home / "tiny.json",
        "train_data": packed.train_data,
        "retrieval_data": packed.held_out,
        "log_every_n_steps": 1,
        **TRAIN,
    }
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if "Train Epoch: 0" in line and len([one for one in lines if "Train Epoch" in one]) == 1:
            signal.raise_signal(signal.SIGINT)

    # Of a kernel; trainings in this process, by earlier tests, have left handlers of their own.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    words = words_of(asked | {"name": "stopped", "logs": home / "logs", "resume": "latest"}, ())
    with pytest.raises(KeyboardInterrupt):
        follow_training(words, 1, interrupt)
    signal.signal(signal.SIGINT, handler)
    assert any("The same command goes on" in line for line in lines), lines[-5:]
    assert not (home / "logs/stopped/checkpoints/epoch_2.pt").exists()
    again = zerovl.train(name="stopped", logs=home / "logs", **asked)
    first, second = read_state_dict(run.model_path), read_state_dict(again.model_path)
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def test_evaluate(home, run, packed, tmp_path):
    output = tmp_path / "scores.json"
    scores = zerovl.evaluate(run, packed.held_out, device="cpu", output=output)
    assert json.loads(json.dumps(scores)) == json.loads(output.read_text())["results"]
    assert "RSUM" in scores._repr_html_() and "chance" in scores._repr_html_()


def test_search(home, run, packed, tmp_path):
    options = {"device": "cpu", "cache": tmp_path / "cache", "best": 3}
    hits = zerovl.search(run, home / "pictures", "a <b>red</b> house", **options)
    assert len(hits) == 3 and hits._repr_html_().count("<figure>") == 3
    pixels = {file: np.array(Image.open(file)) for file in (home / "pictures").glob("*.png")}
    of_shards = zerovl.search(run, packed, "a red house", **options)
    for number, hit in enumerate([*hits, *of_shards]):
        picture = hit.open()  # of a file, or of a member of a shard
        assert picture.mode == "RGB" and picture.size == (40, 40)
        same = [file for file, array in pixels.items() if np.array_equal(array, np.array(picture))]
        assert len(same) == 1 and (number >= 3 or same[0].name in hit.picture)
    with pytest.raises(UserError, match=r"x\.png has gone or changed since it was embedded"):
        Hit("x.png", 1.0, "", None).open()


def test_finetune_asks_for_what_its_command_does(home, tmp_path, monkeypatch):
    """As all functions of `core.flags.command` do, whose keywords its parser reads."""
    requests = []

    def record(request, **_):
        requests.append(request)
        record = {"table": "", "curve": [{"alpha": 1.0}], "epochs": {"1": 250.0, "2": 251.5}}
        tmp_path.joinpath("finetune.json").write_text(json.dumps(record))

    monkeypatch.setattr("open_clip_zerovl.finetune.finetuning.run_finetune", record)
    asked = {"set": {"lr": 5e-4, "siglip": True}, "alphas": "0.5", "device": "cpu", "kept": "a=b"}
    tuned = zerovl.finetune(from_="m", data=home, out=tmp_path, **asked)
    words = ["finetune", "--from=m", f"--data={home}", f"--out={tmp_path}", "--alphas=0.5"]
    assert main([*words, "--device=cpu", "--kept=a=b", "--set=lr=0.0005", "--set=siglip"]) == 0
    assert requests[0] == requests[1]
    assert tuned.curve == [(1, 250.0), (2, 251.5)] and tuned.scores == [{"alpha": 1.0}]
