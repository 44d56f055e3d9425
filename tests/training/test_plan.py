"""`--plan`: two real steps, the numbers that follow from them, and nothing left behind."""

from __future__ import annotations

import argparse
import re

import pytest
import torch

from open_clip_zerovl import cli as program
from open_clip_zerovl.cli import main as zerovl
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.step import RecipeStep
from support.tars import write_source
from support.tiny_clip import NATIVE_VISION, NUMBERED, bert_text, register, write_bert
from training.main import main
from training.train import StepTimer, checkpoints_kept, relative_cost


@pytest.fixture
def run(tmp_path, monkeypatch) -> list[str]:
    """The words of a training of six steps an epoch."""
    model = register(
        tmp_path / "configs",
        "plan-tiny",
        NATIVE_VISION,
        bert_text(write_bert(tmp_path / "bert", words=NUMBERED)),
    )
    write_source(tmp_path / "a", 0, 48, 24)
    monkeypatch.chdir(tmp_path)
    words = f"--model {model} --train-data a={tmp_path / 'a'} --device cpu --precision fp32 --workers 0 --epochs 3"
    more = "--batch-size 2 --dga-steps 4 --warmup 1 --name mine --resume latest --logs logs --save-every-steps 2"
    return [*words.split(), *more.split()]


def test_a_plan_takes_two_steps_and_leaves_nothing(run, tmp_path, monkeypatch, capfd):
    before = sorted(tmp_path.rglob("*"))
    taken, take = [], RecipeStep.take

    def counted(self, micro_batches, step):
        taken.append(len(micro_batches))
        return take(self, micro_batches, step)

    monkeypatch.setattr(RecipeStep, "take", counted)
    assert main([*run, "--plan"]) == 0
    assert taken == [2, 2]  # of K = 4 on a CPU
    out = capfd.readouterr().out
    assert re.search(
        r"^step      \S+ s for 8 pairs \(.*; timed with 2 of its 4 micro-batches$", out, re.M
    )
    assert "run       18 steps, " in out and re.search(
        r"^memory    \S+ of \S+ GiB at the peak", out, re.M
    )
    # Each of three epochs, two step checkpoints, and one being written.
    assert re.search(r"^disk      6 checkpoints of \S+ MiB", out, re.M)
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert all(".zerovl-index" in str(path) for path in left), left


def test_the_command_is_a_training_with_the_flag(monkeypatch):
    became = []
    monkeypatch.setattr(program.os, "execv", lambda program, words: became.append(words))
    zerovl(["plan", "--gpus", "2", "--", "--model", "x", "--train-data", "a=/x"])
    (words,) = became
    assert words[-5:] == ["--plan", "--model", "x", "--train-data", "a=/x"] and "2" in words


@pytest.mark.parametrize(
    ("dga_steps", "retain", "cost"),
    [(1, 1, 1), (4, 4, 4), (4, 1, 5), (4, "auto", 4), (16, 1, 21), (2, 0, 2 + 2 / 3)],
)
def test_the_time_of_the_whole_step_follows_from_its_part(dga_steps, retain, cost):
    """Of the second of two steps; a replayed micro-batch costs a third more."""
    timer = StepTimer(torch.device("cpu"), 5)
    for last in (False, True):
        assert timer.shortened([1, 2, 3, 4]) == [1, 2] and timer.is_last() == last
    timer.wait_seconds, timer.step_seconds = 1.0, relative_cost(2, retain)
    assert timer.seconds(dga_steps, retain) == pytest.approx(1 + cost)


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ({}, 11),  # ten epochs, and one being written
        ({"save_frequency": 3}, 5),
        ({"save_frequency": 0}, 2),
        ({"save_every_steps": 5}, 13),
        ({"delete_previous_checkpoint": True, "save_most_recent": True}, 3),
    ],
)
def test_checkpoints_on_the_disk(values, count):
    args = argparse.Namespace(
        epochs=10,
        **{"save_frequency": 1, "delete_previous_checkpoint": False, "save_most_recent": False}
        | {name: value for name, value in values.items() if name != "save_every_steps"},
    )
    config = AllFlags(save_every_steps=values.get("save_every_steps"))
    assert checkpoints_kept(args, config) == count
