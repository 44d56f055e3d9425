"""The log of a run: the numbers of its steps in each place, and warnings of a slow loader, a loss of chance, equal captions."""

from __future__ import annotations

import argparse
import logging
from functools import partial

import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.losses.contrastive import Report
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.report.run import read_record
from open_clip_zerovl.sampling.schedule import Batching
from training import log as log_module
from training.log import BySource, RunLog, StepLog
from training.train import warn_of_equal_captions

ARGS = argparse.Namespace(
    batch_size=10,
    workers=2,
    rank=0,
    local_rank=0,
    log_local=False,
    log_every_n_steps=1,
    world_size=1,
    wandb=False,
)


def log_of(
    epoch: int = 0, steps: int = 3, *, run_log=None, chance=None, recovers=False, **args
) -> StepLog:
    """The log of an epoch with effective batches of 20."""
    given = argparse.Namespace(**{**vars(ARGS), **args})
    run_log = run_log or RunLog(given, AllFlags())
    return StepLog(
        run_log, given, epoch, steps, 20 * steps, Batching(10, 2), chance=chance, recovers=recovers
    )


def take(
    log: StepLog, *, first: int = 0, loss=lambda index: 1.0, clock=None, wait=lambda index: 0.0
) -> None:
    """All steps of an epoch, each a second after the loader's wait."""
    clock = clock or [0.0]
    for index in range(log.steps):
        clock[0] += wait(index)
        log.data_ready()
        clock[0] += 1.0
        log.step_done(index, first + index, {"loss": loss(index), "logit_scale": 1.0}, 1e-3)


@pytest.fixture
def clock(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(log_module.time, "time", lambda: now[0])
    caplog.set_level(logging.INFO)
    return now


@pytest.mark.parametrize("wait, said", [(3.0, 1), (0.01, 0)])
def test_an_epoch_says_it_once_without_its_first_step(clock, caplog, wait, said):
    # the first step waits for the workers' start
    take(log_of(4, 5), clock=clock, wait=lambda index: 1000.0 if index == 0 else wait)
    lines = [message for message in caplog.messages if "waited for data" in message]
    begin = "Epoch 4: 75% of the time waited for data, with 2 workers on"
    assert len(lines) == said and all(line.startswith(begin) for line in lines)


@pytest.mark.parametrize(
    "loss, chance, first, said",
    [
        (2.99, 2.996, 200, 1),
        (3.5, 2.996, 200, 1),
        (float("nan"), 2.996, 200, 0),
        (2.99, 2.996, 0, 0),
        (2.99, None, 200, 0),
        (1.5, 2.996, 200, 0),
    ],
    ids=[
        "stuck",
        "above chance",
        "no number",
        "at the beginning of a run",
        "another loss",
        "learning",
    ],
)
def test_an_epoch_that_learned_nothing(caplog, loss, chance, first, said):
    take(log_of(4, chance=chance, recovers=True), first=first, loss=lambda _: loss)
    words = f"the loss, {loss:.4g}, is that of chance, 2.996: the model does not tell"
    assert sum(words in message for message in caplog.messages) == said


def test_losses_by_source_are_means_since_they_were_last_taken():
    """A hundred steps of 16,384 pairs, as between two logged lines; added pair by pair the mean is off by 0.3 %."""
    by_source, total = BySource(["sbu", "vg", "cc3m"]), 0.0
    for seed in range(100):
        losses = 2.7 + 0.3 * torch.rand(16_384, generator=torch.Generator().manual_seed(seed))
        by_source.see(Report(losses, torch.zeros(16_384, dtype=torch.long)))
        total += losses.double().sum().item()
    by_source.see(Report(torch.tensor([2.0, 9.0, 6.0]), torch.tensor([1, 0, 1])))  # of both
    means = {"sbu": (total + 9) / (100 * 16_384 + 1), "vg": 4.0}
    assert by_source.take() == pytest.approx(means, rel=1e-5) and by_source.take() == {}


def no_disk(*_) -> None:
    raise UserError("the disk is full")


def test_a_step_is_written_to_the_record_and_to_tensorboard(tmp_path, caplog, monkeypatch):
    """With the same numbers, one step of a source each: the curve of a source knows only its own."""
    written = {}
    caplog.set_level(logging.INFO)

    class Writer:
        def add_scalar(self, name, value, step):
            written.setdefault(name, []).append((step, value))

    args = argparse.Namespace(
        **vars(ARGS), model="m", epochs=1, save_logs=True, logs=str(tmp_path), name="", log_path=""
    )
    run_log = RunLog(args, AllFlags())
    run_log.begin(Batching(2), 2)
    log = StepLog(run_log, args, 0, 2, 4, Batching(2), Writer(), ["sbu", "vg"])
    for index, value in enumerate((1.0, 9.0)):
        log.by_source.see(Report(torch.full((2,), value), torch.full((2,), index)))
        log.step_done(
            index, index, {"loss": torch.tensor(value), "logit_scale": torch.tensor(1.0)}, 1e-3
        )
    assert written["train/loss/sbu"] == [(0, 1.0)] and written["train/loss/vg"] == [(1, 9.0)]
    assert written["train/loss"] == [(0, 1.0), (1, 9.0)]
    steps = read_record(tmp_path)["step"]
    assert [(step["at"], step["loss"]) for step in steps] == [(0.5, 1.0), (1.0, 9.0)]
    assert [step["by_source"] for step in steps] == [{"sbu": 1.0}, {"vg": 9.0}]
    for name in ("lr", "scale", "samples_per_second", "batch_time"):
        assert [step[name] for step in steps] == [value for _, value in written[f"train/{name}"]]
    monkeypatch.setattr(log_module, "write_run_page", no_disk)
    run_log.end("done")  # a page that cannot be written is a warning
    assert "run.html is not written (UserError: the disk is full)" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("recovers", [True, False])
def test_a_loss_that_is_not_finite_ends_the_run_unless_a_scaler_leaves_it_out(
    caplog, recovers, rank
):
    """On every rank, at the first logged step: weights of NaN cannot recover, and an epoch of them is worth nothing."""
    run_log = RunLog(ARGS, AllFlags())
    losses = {2: "nan", 3: "nan", 7: "inf"}
    log = log_of(0, 80, log_every_n_steps=4, run_log=run_log, recovers=recovers, rank=rank)
    steps = partial(take, log, loss=lambda index: torch.tensor(float(losses.get(index, 1.0))))
    if not recovers:
        with pytest.raises(
            UserError, match="in 2 of the steps up to step 5 of epoch 0 .* with a lower --lr"
        ):
            steps()
        return
    steps()
    said = [message for message in caplog.messages if "is not a finite number in 2 " in message]
    assert len(said) == (rank == 0) and run_log.not_finite == 3


def test_equal_captions_in_most_of_the_first_batch_name_the_flag(caplog):
    """Without labelled sets or retrieval sets, nothing else in a run has a word about them."""
    texts = torch.tensor([[1, 2], [1, 2], [3, 4], [5, 6]])
    warn_of_equal_captions([(None, texts)])  # two of four
    assert not caplog.messages
    warn_of_equal_captions([(None, texts), (None, torch.tensor([[1, 2]]))])
    (said,) = caplog.messages
    assert said.startswith("3 of the 5 captions") and "--positives caption" in said
