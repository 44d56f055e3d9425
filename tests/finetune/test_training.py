"""The watched training: the best epoch, the early end, the checkpoints kept on disk, and the message of a failure."""

from __future__ import annotations

import sys

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.finetune import finetuning as module
from open_clip_zerovl.finetune.finetuning import Training, train

# Stands for the training program: an epoch's scores are written, then its checkpoint; SIGTERM ends it as preemption does.
PROGRAM = """
import json, pathlib, signal, sys, time
scores, status, words = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
arguments = dict(zip(sys.argv[4::2], sys.argv[5::2]))
folder = pathlib.Path(arguments["--logs"], arguments["--name"], "checkpoints")
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
done = max([int(path.stem[6:]) for path in folder.glob("epoch_*.pt")], default=0)
print("Train Epoch: 0 [16/90] Memory: 0.1 GiB ETA: 3 min 20 s", flush=True)
for epoch, score in list(enumerate(scores, 1))[done:]:
    with open(folder / "results.jsonl", "a") as file:
        scores = {f"{name}_{key}": value for key in ("rsum", "top1") for name, value in (("a", score), ("b", 0.0))}
        file.write(json.dumps({"epoch": epoch, **scores}) + "\\n")
    (folder / f"epoch_{epoch}.pt").write_text(str(score))
    time.sleep(0.2)
print(words, file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(scores, ...) -> the training of a program that writes them."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)

    def make(scores, *, patience=0, epochs=None, status=0, words="", measure="rsum") -> Training:
        def command(arguments, processes):
            return [sys.executable, "-c", PROGRAM, str(scores), str(status), words, *arguments]

        monkeypatch.setattr("open_clip_zerovl.core.processes.training_command", command)
        return Training(tmp_path, (), 1, epochs or len(scores), patience, ("a", "b"), measure)

    return make


def names(training: Training) -> list[str]:
    return sorted(path.name for path in training.checkpoints.glob("*.pt"))


def test_the_best_epoch_and_the_newest_checkpoint_are_kept(run):
    said: list[str] = []
    training = run([10, 40, 30, 20])
    epoch, checkpoint = train(training, said.append)
    assert (epoch, checkpoint.read_text()) == (2, "40")
    assert names(training) == ["epoch_2.pt", "epoch_4.pt"]
    assert said[1] == "about 3 min 20 s left if all 4 epochs are needed"
    assert "RSUM 20.0 on a, b" in said[3]
    assert train(training, said.append)[0] == 2 and len(said) == 6  # nothing is started again


def test_classes_are_scored_by_zero_shot_accuracy(run):
    said: list[str] = []
    assert train(run([0.1, 0.4, 0.3], measure="top1"), said.append)[0] == 2
    assert "zero-shot top-1 20.0 % on a, b" in said[3]


def test_training_ends_when_the_score_does_not_rise(run):
    training = run([10, 40, *range(39, 9, -1)], patience=3)
    epoch, _ = train(training, lambda line: None)
    assert epoch == 2 and 5 <= max(training.saved()) < 20
    before = training.saved()
    assert train(training, lambda line: None)[0] == 2 and training.saved() == before


def test_a_call_goes_on_where_one_stopped(run):
    with pytest.raises(UserError, match="make the same call again"):
        train(run([10, 40], epochs=4, status=85), lambda line: None)
    said: list[str] = []
    assert train(run([10, 40, 50, 20]), said.append)[0] == 3
    assert len(said) == 5  # epochs 3 and 4 alone


@pytest.mark.parametrize(
    ("scores", "patience", "expected"),
    [
        ({}, 3, False),
        ({1: 5, 2: 4, 3: 3}, 2, True),
        ({1: 5, 2: 4}, 2, False),
        ({1: 5, 2: 5, 3: 5}, 2, True),
        ({1: 5, 9: 1}, 0, False),
    ],
)
def test_patience(tmp_path, monkeypatch, scores, patience, expected):
    monkeypatch.setattr(Training, "scores", lambda training: scores)
    assert Training(tmp_path, (), 1, 9, patience, ("a",)).gave_up() is expected
