"""The log of a run: its short form on the console, a line a logged step, and warnings of a slow loader and a loss of chance."""

from __future__ import annotations

import argparse
import io
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
from training.log import (
    BySource,
    RunLog,
    StepLog,
    early_handler,
    loader_sentence,
    shorten,
)
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
OURS, HOST = log_module.__file__, "/site-packages/open_clip/factory.py"


@pytest.mark.parametrize(
    ("path", "level", "rank", "is_shown"),
    [
        (OURS, logging.INFO, 0, True),
        (HOST, logging.INFO, 0, False),
        ("/site-packages/open_clip_train/train.py", logging.INFO, 0, True),
        (HOST, logging.WARNING, 0, True),
        (HOST, logging.WARNING, 1, False),
        (OURS, logging.WARNING, 1, True),
    ],
)
def test_which_messages_the_short_form_has(monkeypatch, path, level, rank, is_shown):
    """On the console; a log file has them all."""
    root, shown, file = logging.root, io.StringIO(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    root.addHandler(logging.StreamHandler(shown))
    root.addHandler(handler := type("File", (logging.StreamHandler,), {})(file))
    shorten(rank)
    root.handle(logging.LogRecord("root", level, path, 1, "words", None, None))
    assert (shown.getvalue() == "words\n") is is_shown
    assert file.getvalue() == "words\n" and not handler.filters


def test_a_message_comes_once_before_and_after_the_log_is_set_up(monkeypatch, capsys):
    root, theirs = logging.root, io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    early_handler()
    logging.warning("before")
    root.addHandler(logging.StreamHandler(theirs))
    logging.warning("after")
    assert capsys.readouterr().err.endswith("| WARNING | before\n")
    assert theirs.getvalue() == "after\n"


def test_the_sentence():
    assert loader_sentence(62.0, 100.0, 94_000, 8) == (
        "62% of the time waited for data: 8 workers deliver 940 samples/s, a rank takes 2,474; 22 workers would be enough, or "
        "smaller images"
    )
    assert "give --workers" in loader_sentence(50.0, 100.0, 1000, 0)
    assert "1 worker delivers" in loader_sentence(50.0, 100.0, 1000, 1)
    assert loader_sentence(5.0, 100.0, 94_000, 8) is None
    assert loader_sentence(0.0, 0.0, 0, 8) is None


def log_of(
    epoch: int = 0, steps: int = 3, *, run_log=None, judged=False, recovers=False, **args
) -> StepLog:
    """The log of an epoch with effective batches of 20."""
    given = argparse.Namespace(**{**vars(ARGS), **args})
    run_log = run_log or RunLog(given, AllFlags())
    return StepLog(
        run_log, given, epoch, steps, 20 * steps, Batching(10, 2), judged=judged, recovers=recovers
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
    begin = "Epoch 4: 75% of the time waited for data: 2 workers deliver 5 samples/s, a rank takes 20; 8 "
    assert len(lines) == said and all(line.startswith(begin) for line in lines)


def test_a_run_warns_once_of_its_loader_and_of_chance(caplog, clock):
    """Each of fifteen epochs had logged `give --workers`, and five the long sentence about chance."""
    run_log = RunLog(ARGS, AllFlags())
    for epoch in range(3):
        log = log_of(epoch, workers=0, judged=True, run_log=run_log)
        take(log, first=200, loss=lambda _: 2.99, clock=clock, wait=lambda _: 1.0)
    told = [message for message in caplog.messages if not message.startswith("Train")]
    assert len(told) == 2
    assert "give --workers" in caplog.text and "the model does not tell which" in caplog.text


@pytest.mark.parametrize(
    "loss, judged, first, said",
    [
        (2.99, True, 200, 1),
        (3.5, True, 200, 1),
        (float("nan"), True, 200, 0),
        (2.99, True, 0, 0),
        (2.99, False, 200, 0),
        (1.5, True, 200, 0),
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
def test_an_epoch_that_learned_nothing(caplog, loss, judged, first, said):
    take(log_of(4, judged=judged, recovers=True), first=first, loss=lambda _: loss)
    words = f"the loss, {loss:.4g}, is that of chance, ln 20 = 2.996: the model does not tell"
    assert sum(words in message for message in caplog.messages) == said


def test_losses_by_source_are_means_since_they_were_last_taken():
    by_source = BySource(["sbu", "vg", "cc3m"])
    by_source.see(Report(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1])))
    by_source.see(Report(torch.tensor([3.0, 4.0]), torch.tensor([0, 1])))
    assert by_source.take() == pytest.approx({"sbu": 2.0, "vg": 5.0})
    assert by_source.take() == {}
    single = BySource(["sbu"])
    single.see(Report(torch.tensor([1.0]), torch.tensor([0])))
    assert single.take() == {}


def test_the_mean_of_a_million_pairs_is_not_rounded():
    """A hundred steps of 16,384 pairs, as between two logged lines; added pair by pair it is off by 0.3 %."""
    by_source, total = BySource(["sbu", "vg"]), 0.0
    for seed in range(100):
        losses = 2.7 + 0.3 * torch.rand(16_384, generator=torch.Generator().manual_seed(seed))
        by_source.see(Report(losses, torch.zeros(16_384, dtype=torch.long)))
        total += losses.double().sum().item()
    assert by_source.take()["sbu"] == pytest.approx(total / (100 * 16_384), rel=1e-5)


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
    RunLog(args, AllFlags()).end("failed")  # before its first step
    assert not read_record(tmp_path)["end"]
    RunLog(args, AllFlags()).end("done")  # a resume that finds nothing left to train
    assert read_record(tmp_path)["end"][-1]["how"] == "done" and (tmp_path / "run.html").is_file()
    assert not [line for line in caplog.messages if line.startswith("Next:")]  # no checkpoint
    monkeypatch.setattr("open_clip_zerovl.report.run.write_atomically", no_disk)
    RunLog(args, AllFlags()).end("done")
    assert "The run's record is not written any more" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("every", "steps", "logged"), [(100, 7, 7), (100, 400, 21), (10, 400, 41), (1000, 10_000, 21)]
)
def test_an_epoch_is_logged_at_least_twenty_times(every, steps, logged, caplog):
    with caplog.at_level(logging.INFO):
        take(log_of(0, steps, log_every_n_steps=every))
    assert sum(message.startswith("Train Epoch") for message in caplog.messages) == logged


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
    said = [message for message in caplog.messages if "is not a finite number" in message]
    if rank == 0:
        assert [message.partition(":")[0] for message in said] == [
            "Step 5 of epoch 0",
            "Step 9 of epoch 0",
        ]
        assert "in 2 of the last" in said[0] and "in 1 of the last" in said[1]
    assert len(said) == (2 if rank == 0 else 0) and run_log.not_finite == 3


def test_equal_captions_in_most_of_the_first_batch_name_the_flag(caplog):
    """Without labelled sets or retrieval sets, nothing else in a run has a word about them."""
    texts = torch.tensor([[1, 2], [1, 2], [3, 4], [5, 6]])
    warn_of_equal_captions([(None, texts)])  # two of four
    assert not caplog.messages
    warn_of_equal_captions(
        [(None, texts), (None, texts.view(2, 2, 2))]
    )  # the second with two captions per picture
    warn_of_equal_captions([(None, texts), (None, torch.tensor([[1, 2]]))])
    warn_of_equal_captions(
        [(None, texts[:2]), (None, torch.tensor([[1, 2, 0]]))]
    )  # of another width
    assert [message.split(" captions")[0] for message in caplog.messages] == [
        "8 of the 8",
        "3 of the 5",
        "2 of the 3",
    ]
    assert "--positives caption" in caplog.text
