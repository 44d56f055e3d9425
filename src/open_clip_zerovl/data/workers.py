"""Loader worker processes: their signals and errors, a watchdog on stalls, and batches of images in reused shared memory.

An error that is raised in a worker reaches the caller inside the worker's traceback. So workers yield a `UserError` as an item,
and the calling process raises it (`read_batches`, `MixtureLoader`).

A DataLoader copies each batch into a new segment of shared memory, which the system fills with zeros and maps page by page into
both processes. Here a worker writes its images into a block that it keeps:

    worker 0            block 3 is free, images are written into it, PooledBatch(block 3) goes through the queue
    training process    makes a tensor over block 3's memory; when no tensor uses it any more, tells worker 0 that it is free

A worker without a free block makes a new one; it ends up with one block per batch in use. The message that a block is free goes
through a pipe, which also orders the memory accesses before and after it.
"""

from __future__ import annotations

import logging
import multiprocessing.queues
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.processes import end_with_parent

FIRST_WARNING_SECONDS = 30.0  # of a wait
NEXT_WARNING_SECONDS = 300.0
_LOST = "DataLoader worker (pid"  # begins torch's sentences on a worker that has ended

Item = TypeVar("Item")
# Message: process and number of a block that is free; shorter than PIPE_BUF, so never in parts.
_WORD = struct.Struct("<IB")
_MOST_BLOCKS = 256  # of a worker; further batches are sent as a DataLoader sends them


def worker_start() -> Callable[[int], None]:
    """Make the `worker_init_fn` of a DataLoader whose workers are started now, by this process.

    Workers ignore the signals that this process handles, and end when it ends. Schedulers and terminals signal all processes of
    a job. A training process that handles SIGTERM, SIGUSR1 or Ctrl-C still needs data until it has written a checkpoint. So a
    worker ignores these signals, and `MixtureLoader` ends it by SIGKILL.
    """
    if getattr(sys.unraisablehook, "func", None) is not _unless_a_worker_is_lost:
        sys.unraisablehook = partial(_unless_a_worker_is_lost, sys.unraisablehook)
    # From another thread than the main one, the end of the process is not noticed (`processes.end_with_parent`).
    in_main_thread = threading.current_thread() is threading.main_thread()
    return partial(_begin_worker, parent=os.getpid() if in_main_thread else None)


def _begin_worker(_worker: int, *, parent: int | None) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)
    if parent is not None:
        end_with_parent(signal.SIGKILL, parent)
    # By default the thread that hands over batches drops one that it cannot hand over, and the caller waits for it for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    sys.excepthook = _unless_left  # of the thread that hands over the memory of a batch


def _unless_left(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print the traceback of an error, but for that of a process that ended while it took a batch."""
    if not issubclass(kind, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _unless_a_worker_is_lost(report: Callable[[Any], Any], ignored: Any) -> None:
    """Report an error that a finalizer cannot raise, but for that of torch's signal handler.

    The next batch finds the worker dead.
    """
    if not str(ignored.exc_value).startswith(_LOST):
        report(ignored)


def _end_worker(error: BaseException, _batch: object) -> None:
    logging.error(
        "A loader worker cannot hand over a batch (%s): where memory or /dev/shm is full, lower --workers, or start the "
        "container with --shm-size=8g.", first_line(error)
    )  # fmt: skip
    os._exit(1)


def stall_watchdog(items: Iterator[Item], sentence: Callable[[float, int], str]) -> Iterator[Item]:
    """Yield the same items, and warn after FIRST_WARNING_SECONDS without one and again every NEXT_WARNING_SECONDS.

    A separate thread watches the clock, because the caller's thread waits. Time that the caller spends on an item is not
    counted.

    Args:
        sentence: (seconds waited, items that have come) -> the warning.
    """
    waiting: list[tuple[float, int] | None] = [None]  # since when, and how many items had come
    ended = threading.Event()

    def watch() -> None:
        since, due = None, FIRST_WARNING_SECONDS
        while not ended.wait(min(1.0, FIRST_WARNING_SECONDS / 4)):
            now = waiting[0]
            if now != since:
                since, due = now, FIRST_WARNING_SECONDS
            if now is None:
                continue
            waited = time.monotonic() - now[0]
            if waited >= due:
                logging.warning(sentence(waited, now[1]))
                due += NEXT_WARNING_SECONDS

    thread = threading.Thread(target=watch, name="stall watchdog", daemon=True)
    thread.start()
    count = 0
    try:
        while True:
            waiting[0] = time.monotonic(), count
            item = next(items, ended)
            waiting[0] = None
            if item is ended:
                return
            count += 1
            yield item  # type: ignore[misc]
    finally:
        waiting[0] = None
        ended.set()


def handed_over(batches: Iterator[Item]) -> Iterator[Item]:
    """Yield the batches of worker processes, with torch's kind of error for one that dies while it hands a batch over.

    Raises:
        RuntimeError: a connection to a worker has ended. Errors within a worker come as their own type, "Caught ..." before.
    """
    try:
        yield from batches
    except (EOFError, ConnectionError, FileNotFoundError) as error:
        if str(error).startswith("Caught "):
            raise
        raise RuntimeError(
            f"DataLoader worker (pid unknown) ended while it handed over a batch: {type(error).__name__}"
        ) from error


class ItemSet(Dataset):
    """A dataset whose `read` may raise UserError, which then is the item. Subclasses define `read` and `__len__`."""

    def read(self, index: int) -> Any:
        """Read item `index`. UserError if it cannot be read."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        try:
            return self.read(index)
        except UserError as error:
            return error


class _Collate:
    """Collates items, or returns the first error among them. A class, so that it can be pickled for a worker."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Any]) -> Any:
        return next((item for item in items if isinstance(item, UserError)), None) or self.collate(
            items
        )


def read_batches(
    dataset: Dataset, collate: Callable[[Sequence[Any]], Any], **loader_options: Any
) -> Iterator[Any]:
    """Yield batches of a dataset whose items may be errors (an `ItemSet`, or an iterable one that yields them).

    Args:
        collate: items of a batch -> the batch.
        loader_options: keyword arguments of torch's DataLoader.

    Raises:
        UserError: the first bad item, after the batches before it; a worker process that was lost.
    """
    loader = DataLoader(
        dataset, collate_fn=_Collate(collate), worker_init_fn=worker_start(), **loader_options
    )
    batches = handed_over(iter(loader)) if loader.num_workers else iter(loader)
    while True:
        try:
            batch = next(batches, None)
        except RuntimeError as error:
            if not first_line(error).startswith(_LOST):
                raise
            raise UserError(
                f"a loader worker was lost ({first_line(error).split('. ')[0].rstrip('.')}); if memory or /dev/shm is full, "
                "lower --workers"
            ) from error
        if batch is None:
            return
        if isinstance(batch, UserError):
            # The workers end now. In the cycle of the error and its traceback, torch would wait 5 seconds for each of them.
            del batches
            raise batch
        yield batch


# ---------------------------------------------------------------------------------------------------------------------
# Batches in shared memory
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PooledBatch:
    """A micro-batch on its way to the training process.

    Attributes:
        worker, process: number and process of the worker.
        block: number of the block.
        images: tensor over the block's memory.
        others: the other items of the batch (small), sent through the queue.
        pinned: images and `others` in pinned memory, copied by the DataLoader's pinning thread; None without it.
    """

    worker: int
    process: int
    block: int
    images: torch.Tensor
    others: tuple[Any, ...]
    pinned: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls, worker: int, block: int, images: torch.Tensor, others: Sequence[Any]
    ) -> PooledBatch:
        """Make the micro-batch (images, *others), in the worker. Other tensors travel as arrays: as tensors, each would take a
        segment of shared memory and a descriptor."""
        sent = _each(torch.Tensor, torch.Tensor.numpy, tuple(others))
        return cls(worker, os.getpid(), block, images, sent)

    def received(self) -> tuple[Any, ...]:
        """Return `others` with arrays as tensors again."""
        return _each(np.ndarray, torch.from_numpy, self.others)

    def pin_memory(self) -> PooledBatch:
        """Return a copy with `pinned`, for torch's DataLoader, which calls this on items that are not tensors."""
        return replace(
            self,
            pinned=_each(torch.Tensor, torch.Tensor.pin_memory, (self.images, *self.received())),
        )


def _each(kind: type, function: Callable[[Any], Any], parts: Any) -> Any:
    """Apply a function to each item of a type, also in nested tuples."""
    if isinstance(parts, tuple):
        return tuple(_each(kind, function, part) for part in parts)
    return function(parts) if isinstance(parts, kind) else parts


class BufferPool:
    """The blocks of a loader's workers, and the pipes by which they are given back.

    It is made in the training process before the workers, which get a copy each.
    """

    def __init__(self, workers: int) -> None:
        self._pipes = [Pipe(duplex=False) for _ in range(workers)]
        for ends in self._pipes:
            for end in ends:
                os.set_blocking(end.fileno(), False)
        self._made: list[torch.Tensor] = []  # a worker's blocks, in its own process
        self._free: list[int] = []  # numbers of those that nobody uses
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}  # keeps received memory mapped

    def __getstate__(self) -> dict[str, Any]:  # for a spawned worker
        return {**self.__dict__, "_made": [], "_free": [], "_mapped": {}}

    def block(self, worker: int, like: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Find or make a free block of shared memory (number, tensor), in the worker, None if it has _MOST_BLOCKS in use.

        Args:
            like: has the wanted shape, type and strides; may be a meta tensor.

        Raises:
            UserError: the machine's shared memory is full.
        """
        self._collect(worker)
        for number in self._free:
            made = self._made[number]
            if (
                made.shape == like.shape
                and made.dtype == like.dtype
                and made.stride() == like.stride()
            ):
                self._free.remove(number)
                return number, made
        if len(self._made) == _MOST_BLOCKS:
            return None
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        try:
            made.share_memory_()
        except RuntimeError as error:
            if "No space left" not in str(error):
                raise
            raise UserError(
                f"the shared memory (/dev/shm) has no room for another batch of {made.nbytes / 2**20:.1f} MiB; each "
                f"loader worker keeps several ({first_line(error)}); start a container with a larger one (--shm-size=8g), or "
                "lower --workers or --batch-size"
            ) from error
        self._made.append(made)
        return len(self._made) - 1, made

    def _collect(self, worker: int) -> None:
        """Read from the pipe which blocks are free again."""
        descriptor = self._pipes[worker][0].fileno()
        while True:
            try:
                words = os.read(descriptor, 4096 // _WORD.size * _WORD.size)
            except BlockingIOError:
                return
            self._free += [
                block for process, block in _WORD.iter_unpack(words) if process == os.getpid()
            ]

    def receive(self, batch: PooledBatch) -> tuple[Any, ...]:
        """Return (images, *others), in training. The block is given back when no tensor uses its memory any more."""
        give_back = partial(
            _give_back, self._pipes[batch.worker][1], batch.process, batch.block, os.getpid()
        )
        if batch.pinned is not None:
            give_back()
            return batch.pinned
        self._mapped[batch.process, batch.block] = batch.images
        array: np.ndarray = batch.images.numpy()
        weakref.finalize(array, give_back).atexit = False
        return torch.from_numpy(array), *batch.received()  # the tensor keeps `array` alive


def _give_back(pipe: Connection, process: int, block: int, holder: int) -> None:
    """Tell worker process `process` that `block` is free. A fork of process `holder` sends nothing: it has only a copy."""
    if os.getpid() != holder:
        return
    # By the pipe object, not its descriptor's number, which another file may have got since.
    with suppress(OSError):  # full: the worker makes a new block; closed: it has ended
        os.write(pipe.fileno(), _WORD.pack(process, block))
