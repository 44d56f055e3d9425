"""Loader workers: waits are reported while they last, bad items raise sentences, and workers survive a scheduler's signals."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
import threading
import time

import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data import workers as workers_module
from open_clip_zerovl.data.workers import ItemSet, read_batches
from support import loading
from support.tars import write_source


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(workers_module, "FIRST_WARNING_SECONDS", 0.2)
    monkeypatch.setattr(workers_module, "NEXT_WARNING_SECONDS", 0.3)


def loader_of(tmp_path, transform, workers):
    source = f"far={write_source(tmp_path / 'far', 0, 6, 6)}"
    return loading.loader_of(
        source, 2, workers=workers, transform=transform, stall_timeout_seconds=60
    )


class Slow:
    """A picture takes half a second."""

    def __call__(self, image) -> torch.Tensor:
        time.sleep(0.5)
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_is_reported_while_it_lasts(tmp_path, short, caplog, workers):
    batches = iter(loader_of(tmp_path, Slow(), workers))
    next(batches)
    told = [
        record.getMessage()
        for record in caplog.records
        if "Waiting for data" in record.getMessage()
    ]
    assert len(told) >= 2, told  # 0.2 and 0.5 s into a wait of a second
    reader = "loader worker 0" if workers else "the process"
    assert f"no batch has come for 0 s from {reader} of rank 0" in told[0]
    assert any(
        f"while reading shard {tmp_path}/far/00000.tar of source 'far'" in line for line in told
    )
    assert ("it is given 60 s" in told[0]) == (workers > 0)
    del batches


def test_handling_a_batch_is_not_a_wait_and_the_thread_ends(tmp_path, short, caplog):
    for _ in loader_of(tmp_path, lambda image: torch.zeros(1), 0):
        time.sleep(0.4)
    time.sleep(0.2)
    assert not [record for record in caplog.records if "Waiting for data" in record.getMessage()]
    assert not [
        thread for thread in workers_module.threading.enumerate() if thread.name == "stall watchdog"
    ]


class Numbers(ItemSet):
    """Each item is (its number, the process that has read it); number 7 is bad where asked."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def read(self, index: int) -> tuple[int, int]:
        if index == self.bad:
            raise UserError("number 7 is bad")
        return index, os.getpid()


@pytest.fixture
def handled():
    """This process handles SIGTERM, as a training does that saves a checkpoint first; yields the signals that it heard."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def test_workers_go_on_after_the_signal_of_a_scheduler_that_the_training_handles(handled):
    """SIGTERM reaches every process of a job: the workers of an evaluation."""
    numbers = []
    for batch in read_batches(Numbers(), list, batch_size=2, num_workers=1):
        worker = batch[0][1]
        assert worker != os.getpid()
        if not numbers:
            os.kill(worker, signal.SIGTERM)
        numbers += [number for number, _ in batch]
    assert numbers == list(range(12)) and not handled


def test_workers_of_the_training_go_on_too(handled, tmp_path):
    """The data is needed until the checkpoint is written."""
    loader = loading.loader_of(f"s={write_source(tmp_path / 's', 0, 40, 40)}", 2, workers=1)
    for count, _ in enumerate(loader):
        if count == 0:
            os.kill(loader.mixture.activity[0].get()[0], signal.SIGTERM)
    assert count == 19 and not handled


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_item_is_raised_after_the_batches_before_it(workers: int):
    seen, before = [], multiprocessing.active_children()
    with pytest.raises(UserError, match="number 7 is bad") as raised:
        for batch in read_batches(Numbers(bad=7), list, batch_size=2, num_workers=workers):
            seen += [number for number, _ in batch]
    assert seen == list(range(6))
    # The workers have ended, although the traceback is still there.
    assert raised.value.__traceback__ and set(multiprocessing.active_children()) <= set(before)


def test_workers_end_with_an_error_and_the_loader_can_be_read_again(tmp_path):
    folder, before = write_source(tmp_path / "s", 0, 40, 40), multiprocessing.active_children()
    (shard,) = tmp_path.glob("s/*.tar")
    loader = loading.loader_of(f"s={folder}", 2, workers=2, on_bad_sample="fail")
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        with pytest.raises(UserError, match=f"{shard.name} of source 's'"):
            list(loader)
        assert set(multiprocessing.active_children()) <= set(before)
    shard.write_bytes(whole)
    assert len(list(loader)) == 20


def test_the_workers_of_a_loader_in_a_cycle_are_killed(tmp_path):
    """torch's own shutdown would wait 5 seconds for each, and end it by SIGTERM: its queues are collected before it."""
    before = multiprocessing.active_children()
    loader = loading.loader_of(f"s={write_source(tmp_path / 's', 0, 40, 40)}", 2, workers=2)
    next(iter(loader))
    workers = set(multiprocessing.active_children()) - set(before)
    pid = os.fork()
    if pid == 0:  # a fork, which has a copy of the loader, leaves them alone
        loader._end_workers()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(workers) == 2 and all(worker.is_alive() for worker in workers)
    for thread in threading.enumerate():
        if thread.name == "stall watchdog":  # ends with the iteration, and knows the loader
            thread.join()
    loader.itself = loader
    del loader
    gc.collect()
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2


class Untransferable:
    def __reduce__(self):
        raise RuntimeError(
            "unable to resize file </torch_1_2_3> to the right size: No space left on device (28)"
        )


class FullMemory(ItemSet):
    def read(self, index: int) -> Untransferable:
        return Untransferable()

    def __len__(self) -> int:
        return 2


@pytest.mark.timeout(60)
def test_a_batch_that_cannot_be_handed_over_ends_the_reading():
    """As with a full /dev/shm: the worker's queue drops such a batch, and the reader would wait for ever."""
    with pytest.raises(
        UserError,
        match=r"a loader worker was lost .*; if memory or /dev/shm is full, lower --workers",
    ):
        list(read_batches(FullMemory(), list, num_workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_is_left_early_prints_nothing(tmp_path, monkeypatch, workers):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    loader = loading.loader_of(f"a={write_source(tmp_path / 'a', 0, 24, 6)}", 2, workers=workers)
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
    del iterator
    for _ in loader:
        break
    del loader
    gc.collect()
    assert unraisable == []


def test_a_worker_is_silent_about_a_caller_that_ended_while_it_took_a_batch(capsys, monkeypatch):
    """After Ctrl-C a traceback of multiprocessing's resource_sharer followed the sentence, once in 40 kills."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    queue = multiprocessing.queues.Queue
    monkeypatch.setattr(queue, "_on_queue_feeder_error", queue._on_queue_feeder_error)
    workers_module._begin_worker(0, parent=None)
    for error in (EOFError(), ConnectionResetError()):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == ""
    sys.excepthook(ValueError, ValueError("a defect"), None)
    assert "a defect" in capsys.readouterr().err
