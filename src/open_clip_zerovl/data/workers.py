"""Loader worker processes: numbers that they share with the training process, signals, and what is said when one is lost."""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Sequence

from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.processes import end_with_parent


class SharedNumbers:
    """Whole numbers that the training process and its loader workers see change."""

    def __init__(self, *values: int) -> None:
        self._values = multiprocessing.RawArray("q", values)

    def set(self, *values: int) -> None:
        self._values[:] = values

    def get(self) -> tuple[int, ...]:
        return tuple(self._values)


def begin_worker(_worker: int, *, parent: int | None = None) -> None:
    """What a loader worker does first: outlive the signals that the training process outlives, and end when that one ends.

    Schedulers and terminals signal all processes of a job. A training process that handles SIGTERM, SIGUSR1 or Ctrl-C still
    needs its data until it has written a checkpoint; a worker ignores those signals, and `MixtureLoader` ends it by SIGKILL.

    Args:
        parent: the training process, None where it does not start its workers from its main thread (see
            `processes.end_with_parent`).
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)
    if parent is not None:
        end_with_parent(signal.SIGKILL, parent)


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
        activity: (process, source, shard) of each worker, -1 where there is none yet.
        next_worker: the worker whose batch was waited for.
    """

    def doing(worker: int) -> str:
        _, source, shard = activity[worker]
        if source < 0:
            return " (it has not opened a shard yet)"
        return f" while reading shard {sources[source].shards[shard]} of source {sources[source].name!r}"

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
