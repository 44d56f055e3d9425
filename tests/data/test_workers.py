"""Loader workers: waits, errors, a scheduler's signals, blocks of shared memory that are used again and never too early."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data import workers as workers_module
from open_clip_zerovl.data.workers import (
    BufferPool,
    ItemSet,
    PooledBatch,
    read_batches,
    worker_start,
)
from support.loading import loader_of
from support.tars import write_source


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(workers_module, "FIRST_WARNING_SECONDS", 0.2)
    monkeypatch.setattr(workers_module, "NEXT_WARNING_SECONDS", 0.3)


def waiting_loader(tmp_path, transform, workers):
    source = f"far={write_source(tmp_path / 'far', 0, 6, 6)}"
    return loader_of(source, 2, workers=workers, transform=transform, stall_timeout_seconds=60)


class Slow:
    """A picture takes half a second."""

    def __call__(self, image) -> torch.Tensor:
        time.sleep(0.5)
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_is_reported_while_it_lasts(tmp_path, short, caplog, workers):
    batches = iter(waiting_loader(tmp_path, Slow(), workers))
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
    for _ in waiting_loader(tmp_path, lambda image: torch.zeros(1), 0):
        time.sleep(0.4)
    time.sleep(0.2)
    assert not [record for record in caplog.records if "Waiting for data" in record.getMessage()]
    assert not [
        thread for thread in workers_module.threading.enumerate() if thread.name == "stall watchdog"
    ]


class Items(ItemSet):
    """Yields what it is given, and raises errors among it."""

    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def read(self, index: int) -> object:
        if isinstance(self.items[index], UserError):
            raise self.items[index]
        return self.items[index]


@pytest.fixture
def handled():
    """This process handles SIGTERM, as a training does that saves a checkpoint first; yields the signals that it heard."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def test_workers_of_the_training_go_on_too(handled, tmp_path):
    """The data is needed until the checkpoint is written."""
    loader = loader_of(f"s={write_source(tmp_path / 's', 0, 40, 40)}", 2, workers=1)
    for count, _ in enumerate(loader):
        if count == 0:
            os.kill(loader.mixture.activity[0][0], signal.SIGTERM)
    assert count == 19 and not handled


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_item_is_raised_after_the_batches_before_it(workers: int):
    seen, before = [], multiprocessing.active_children()
    items = Items(*range(7), UserError("number 7 is bad"), *range(8, 12))
    with pytest.raises(UserError, match="number 7 is bad") as raised:
        for batch in read_batches(items, list, batch_size=2, num_workers=workers):
            seen += batch
    assert seen == list(range(6))
    # The workers have ended, although the traceback is still there.
    assert raised.value.__traceback__ and set(multiprocessing.active_children()) <= set(before)


def test_workers_end_with_an_error_and_the_loader_can_be_read_again(tmp_path):
    folder, before = write_source(tmp_path / "s", 0, 40, 40), multiprocessing.active_children()
    (shard,) = tmp_path.glob("s/*.tar")
    loader = loader_of(f"s={folder}", 2, workers=2, on_bad_sample="fail")
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
    loader = loader_of(f"s={write_source(tmp_path / 's', 0, 40, 40)}", 2, workers=2)
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


def ended_connection() -> None:
    raise EOFError


class OfAKilledWorker:
    def __reduce__(self):
        return ended_connection, ()  # called where the batch is taken


@pytest.mark.timeout(60)
@pytest.mark.parametrize("item", [Untransferable(), OfAKilledWorker()])
def test_a_batch_that_cannot_be_handed_over_ends_the_reading(item):
    """As with a full /dev/shm, where the reader would wait for ever, and with a worker that is killed as it sends one."""
    with pytest.raises(
        UserError,
        match=r"a loader worker was lost .*; if memory or /dev/shm is full, lower --workers",
    ):
        list(read_batches(Items(item, item), list, num_workers=1))


def test_the_end_of_the_other_process_prints_no_traceback(capsys, monkeypatch):
    """After Ctrl-C one followed the sentence, once in 40 kills: of the thread that hands over a batch, or of a finalizer."""
    for error in (EOFError(), ConnectionResetError(), ValueError("a defect")):
        workers_module._unless_left(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: a defect\n"
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    worker_start()
    worker_start()  # of a second loader
    lost = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    for error in (lost, ValueError("a defect")):
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert [type(ignored.exc_value) for ignored in reported] == [ValueError]


LIKE = torch.empty(
    (4, 3, 8, 8), dtype=torch.uint8, memory_format=torch.channels_last, device="meta"
)


class Pooled(NamedTuple):
    """A pool of one worker, whose block 0 is under way."""

    pool: BufferPool
    block: torch.Tensor

    def receive(self, *others) -> tuple:
        return self.pool.receive(PooledBatch.of(0, 0, self.block, others))

    def next_block(self) -> int:
        return self.pool.block(0, LIKE)[0]


@pytest.fixture
def pooled() -> Pooled:
    pool = BufferPool(1)
    number, block = pool.block(0, LIKE)
    assert (number, block.shape, block.stride(), block.dtype) == (
        0,
        LIKE.shape,
        LIKE.stride(),
        LIKE.dtype,
    )
    return Pooled(pool, block)


def test_a_block_comes_back_when_its_last_tensor_is_gone(pooled):
    pooled.block.copy_(torch.arange(pooled.block.numel()).view(4, 3, 8, 8) % 256)
    images, texts, name = pooled.receive(torch.tensor([[5]]), "name")
    assert torch.equal(images, pooled.block) and images.stride() == pooled.block.stride()
    assert (
        images.data_ptr() == pooled.block.data_ptr() and texts.tolist() == [[5]] and name == "name"
    )
    row = images[2]
    del images
    assert pooled.next_block() == 1  # `row` still reads block 0
    del row
    assert [pooled.next_block(), pooled.next_block()] == [0, 2]  # blocks 0 and 1 are under way


def test_blocks_are_alike_or_new(pooled):
    pooled.receive()  # dropped at once
    for other in (LIKE[:3], LIKE.contiguous(), LIKE.to(torch.float32)):
        number, block = pooled.pool.block(0, other)
        assert number > 0 and block.stride() == other.stride() and block.dtype == other.dtype
    assert pooled.next_block() == 0


def test_a_word_from_another_process_frees_nothing(pooled):
    """A worker that took the place of a lost one has blocks of its own under the same numbers."""
    workers_module._give_back(pooled.pool._pipes[0][1], os.getpid() + 1, 0, os.getpid())
    assert pooled.next_block() == 1


def test_beyond_the_last_block_batches_go_their_old_way(pooled, monkeypatch):
    monkeypatch.setattr(workers_module, "_MOST_BLOCKS", 2)
    assert pooled.next_block() == 1 and pooled.pool.block(0, LIKE) is None


def test_a_full_pipe_and_a_closed_one_stop_nobody(pooled):
    receiver, sender = pooled.pool._pipes[0]
    with pytest.raises(BlockingIOError):
        while True:
            os.write(sender.fileno(), b"\0" * 4095)
    pooled.receive()
    receiver.close()
    sender.close()


def test_a_batch_that_outlives_its_loader_writes_into_no_other_file(tmp_path):
    """The descriptor of the loader's pipe would be the next file's, had the batch kept its number alone."""
    pool = BufferPool(1)
    number, block = pool.block(0, LIKE)
    images, *_ = pool.receive(PooledBatch.of(0, number, block, ()))
    del pool, block
    files = [(tmp_path / str(number)).open("wb", buffering=0) for number in range(8)]
    del images
    for file in files:
        file.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 8


def test_full_shared_memory_gets_a_sentence(monkeypatch):
    """The words are torch's, of a /dev/shm of 4 MiB."""

    def full(_):
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_7_1>: No space left on device (28)"
        )

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(
        UserError, match=r"shared memory \(/dev/shm\) has no room .*--shm-size=8g.* lower --workers"
    ):
        BufferPool(1).block(0, LIKE)


def test_a_fork_that_drops_its_copy_frees_nothing(pooled):
    images, *_ = pooled.receive()
    child = os.fork()
    if child == 0:
        del images
        os._exit(0)
    os.waitpid(child, 0)
    assert pooled.next_block() == 1
    del images
    assert pooled.next_block() == 0


def test_pinned_batches_free_their_block(pooled, monkeypatch):
    """Without a GPU nothing can be pinned; a copy stands in for it."""
    copied = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: copied.append(tensor) or tensor.clone()
    )
    pooled.block.fill_(7)
    others = torch.tensor([1]), None, (torch.tensor([2]), torch.tensor([3]))
    pinned = PooledBatch.of(0, 0, pooled.block, others).pin_memory()
    assert len(copied) == 4
    assert pooled.next_block() == 1  # not free before it is received
    images, texts, nothing, pair = pooled.pool.receive(pinned)
    assert [part.item() for part in pair] == [2, 3]
    assert images.data_ptr() != pooled.block.data_ptr() and images.unique().tolist() == [7]
    assert texts.tolist() == [1] and nothing is None
    assert pooled.next_block() == 0


def _fill(book: BufferPool, conversation) -> None:
    for value in (1, 2):
        number, block = book.block(0, LIKE)
        block.fill_(value)
        conversation.send(PooledBatch.of(0, number, block, (torch.tensor([value]),)))
        conversation.recv()


@pytest.mark.slow  # a new interpreter imports torch; forked workers are tested in the fast tier
def test_workers_that_are_spawned():
    book = BufferPool(1)
    book.block(0, LIKE)  # the blocks of this process are not the worker's
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_fill, args=(book, there))
    worker.start()
    for value in (1, 2):
        assert here.poll(120)
        images, texts = book.receive(here.recv())
        assert images.unique().tolist() == [value] and texts.tolist() == [value]
        del images
        here.send("dropped")
    worker.join()
    assert [block for _, block in book._mapped] == [0]  # block 0 twice


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source") / "a", 0, 240, 60)


def test_every_batch_of_two_epochs_kept_at_once(source):
    """Whoever keeps all batches gets each with its own pixels."""
    one = {
        int(number): image
        for images, ids in loader_of(f"a={source}")
        for image, number in zip(images, ids, strict=True)
    }
    loader = loader_of(f"a={source}", workers=2)
    for _ in range(2):
        loader.set_epoch(0)
        kept = list(loader)
        assert len(kept) == len({images.data_ptr() for images, _ in kept}) == 60
        assert len(loader._pool._mapped) == 60  # the second epoch used the first one's blocks
        assert sorted(number for _, ids in kept for number in ids.tolist()) == list(range(240))
        for images, ids in kept:
            for number, image in zip(ids.tolist(), images, strict=True):
                assert torch.equal(image, one[number])
        del kept, images, image


def test_a_block_that_is_given_back_too_early_is_noticed(source, monkeypatch):
    """Negative control: without the lease, kept batches change under the reader's eyes."""
    loader = loader_of(f"a={source}", workers=2)
    real = BufferPool.receive

    def receive(self, batch):
        got = real(self, batch)
        workers_module._give_back(
            self._pipes[batch.worker][1], batch.process, batch.block, os.getpid()
        )
        return got

    monkeypatch.setattr(BufferPool, "receive", receive)
    kept = [images for images, _ in loader]
    assert len({images.data_ptr() for images in kept}) < len(kept)
