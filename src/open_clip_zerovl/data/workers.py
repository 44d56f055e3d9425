"""Loader worker processes: their signals and errors, numbers shared with the training process, and a watchdog on stalls.

An error that is raised in a worker reaches the caller inside the worker's traceback. So workers yield a `UserError` as an item,
and the calling process raises it (`read_batches`, `MixtureLoader`).
"""

from __future__ import annotations

import logging
import multiprocessing.queues
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.processes import end_with_parent

FIRST_WARNING_SECONDS = 30.0  # of a wait
NEXT_WARNING_SECONDS = 300.0

Item = TypeVar("Item")


class SharedNumbers:
    """Whole numbers in memory that the training process and its loader workers share."""

    def __init__(self, *values: int) -> None:
        self._values = multiprocessing.RawArray("q", values)

    def set(self, *values: int) -> None:
        """Replace the numbers by as many others."""
        self._values[:] = values

    def get(self) -> tuple[int, ...]:
        """Return the numbers as they are now."""
        return tuple(self._values)


def worker_start() -> Callable[[int], None]:
    """Make the `worker_init_fn` of a DataLoader whose workers are started now, by this process.

    Workers ignore the signals that this process handles, and end when it ends. Schedulers and terminals signal all processes of
    a job. A training process that handles SIGTERM, SIGUSR1 or Ctrl-C still needs data until it has written a checkpoint. So a
    worker ignores these signals, and `MixtureLoader` ends it by SIGKILL.
    """
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
    batches = iter(loader)
    while True:
        try:
            batch = next(batches, None)
        except RuntimeError as error:
            if not first_line(error).startswith("DataLoader worker (pid"):
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
