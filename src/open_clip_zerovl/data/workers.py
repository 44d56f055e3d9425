"""Loader worker processes: numbers shared with the training process, signals, and the sentence for a worker that was lost."""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Sequence

from open_clip_zerovl.core.processes import end_with_parent
from open_clip_zerovl.data.sources import Source


class SharedNumbers:
    """Whole numbers in memory that the training process and its loader workers share."""

    def __init__(self, *values: int) -> None:
        self._values = multiprocessing.RawArray("q", values)

    def set(self, *values: int) -> None:
        """Replace the numbers, as many as before."""
        self._values[:] = values

    def get(self) -> tuple[int, ...]:
        """The numbers as they are now."""
        return tuple(self._values)


def begin_worker(_worker: int, *, parent: int | None = None) -> None:
    """What a loader worker does first: ignore the signals that the training process handles, and end when that process ends.

    Schedulers and terminals signal all processes of a job. A training process that handles SIGTERM, SIGUSR1 or Ctrl-C still
    needs data until it has written a checkpoint. So a worker ignores these signals, and `MixtureLoader` ends it by SIGKILL.

    Args:
        parent: process number of the training process; None where it starts its workers from another thread than its main
            one (see `processes.end_with_parent`).
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)
    if parent is not None:
        end_with_parent(signal.SIGKILL, parent)


def reading_words(activity: tuple[int, ...], sources: Sequence[Source]) -> str:
    """What a worker is doing, as the end of a sentence.

    Args:
        activity: (process number, source, shard), -1 for what it does not have yet.
        sources: of the mixture.
    """
    _, source, shard = activity
    if source < 0:
        return " (it has not opened a shard yet)"
    return f" while reading shard {sources[source].shards[shard]} of source {sources[source].name!r}"


def explain_worker_error(
    error: RuntimeError,
    activity: Sequence[tuple[int, ...]],
    sources: Sequence[Source],
    *,
    rank: int,
    next_worker: int,
    timeout_seconds: float,
) -> str | None:
    """The sentence for an error that torch's DataLoader raises about its workers, None for any other error.

    Args:
        activity: (process number, source, shard) of each worker, -1 for what it does not have yet.
        sources: of the mixture.
        rank: of this process.
        next_worker: the worker whose batch was waited for.
        timeout_seconds: the loader's time-out.
    """

    def doing(worker: int) -> str:
        return reading_words(activity[worker], sources)

    words = str(error)
    if words.startswith("DataLoader timed out"):
        return (
            f"loader worker {next_worker} of rank {rank} has delivered nothing for {timeout_seconds:g} s"
            f"{doing(next_worker)}; check where the shard comes from, or raise --loader-timeout"
        )
    if not re.match(r"(DataLoader worker \(pid|Pin memory thread)", words):
        return None
    named = {int(number) for number in re.findall(r"\d+", words.splitlines()[0])}
    lost = [worker for worker, (process, _, _) in enumerate(activity) if process in named]
    who = f"loader worker {lost[0]}" if lost else "a loader worker"
    return (
        f"{who} of rank {rank} was lost{doing(lost[0]) if lost else ''} ({words.splitlines()[0].split('. ')[0].rstrip('.')}); "
        "if the machine ran out of memory, lower --workers or --batch-size"
    )
