"""`StepLog`: the loss of each source beside the pooled one."""

import argparse

import pytest
import torch

from open_clip_zerovl.losses.problem import Report
from training.step_log import BySource, StepLog


def test_losses_by_source_are_means_since_they_were_last_taken():
    by_source = BySource(["sbu", "vg", "cc3m"])
    by_source.see(Report(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]), torch.tensor([True, False, False])))
    by_source.see(Report(torch.tensor([3.0, 4.0]), torch.tensor([0, 1]), torch.tensor([True, True])))
    metrics, line = by_source.take()
    assert metrics == pytest.approx({"loss/sbu": 2.0, "twins/sbu": 2 / 3, "loss/vg": 5.0, "twins/vg": 0.5})
    assert line == " By source: sbu 2.0000 (2 of 3 samples have a twin), vg 5.0000 (1 of 2 samples have a twin)"
    assert by_source.take() == ({}, "")


def test_the_mean_of_a_million_pairs_is_not_rounded():
    """A hundred steps of 16,384 pairs, as between two logged lines; added pair by pair it is off by 0.3 %."""
    by_source, total = BySource(["sbu", "vg"]), 0.0
    for seed in range(100):
        losses = 2.7 + 0.3 * torch.rand(16_384, generator=torch.Generator().manual_seed(seed))
        by_source.see(Report(losses, torch.zeros(16_384, dtype=torch.long)))
        total += losses.double().sum().item()
    metrics, _ = by_source.take()
    assert metrics["loss/sbu"] == pytest.approx(total / (100 * 16_384), rel=1e-5)


def test_one_source_is_not_told_apart():
    by_source = BySource(["sbu"])
    by_source.see(Report(torch.tensor([1.0]), torch.tensor([0])))
    assert by_source.take() == ({}, "")


def test_tensorboard_has_a_curve_for_each_source():
    """Names of metrics, one step of a source each: the curve of a source knows only its own."""
    written = {}

    class Writer:
        def add_scalar(self, name, value, step):
            written.setdefault(name, []).append((step, value))

    args = argparse.Namespace(
        batch_size=2, rank=0, world_size=1, log_every_n_steps=1, wandb=False, log_local=False, local_rank=0, workers=2,
    )  # fmt: skip
    log = StepLog(args, 0, 2, 4, 1, Writer(), ["sbu", "vg"])
    for index, value in enumerate((1.0, 9.0)):
        log.by_source.see(Report(torch.full((2,), value), torch.full((2,), index)))
        log.step_done(index, index, {"loss": torch.tensor(value), "logit_scale": torch.tensor(1.0)}, 1e-3)
    assert written["train/loss/sbu"] == [(0, 1.0)] and written["train/loss/vg"] == [(1, 9.0)]
    assert written["train/loss"] == [(0, 1.0), (1, 9.0)]
