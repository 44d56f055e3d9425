"""The loader of a mixture: its worker processes, the step that an epoch begins with, the count of lost samples.

An error in a worker travels to the training process as a value and is raised there as one sentence. An exception in the worker
would show its traceback, and one that got lost would leave the other ranks waiting.

Workers deliver a `BatchReport` with each batch; the training process adds them up in `DataStats`, which counts lost samples by
source and reason, warns of each kind once, and ends a run that loses too many.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from open_clip_zerovl.core.errors import UserError, printable
from open_clip_zerovl.data.mixture import Mixture
from open_clip_zerovl.data.sample_stream import BatchReport
from open_clip_zerovl.data.workers import (
    BufferPool,
    PooledBatch,
    handed_over,
    stall_watchdog,
    worker_start,
)

# The least denominator of the share of lost samples within an epoch: one broken shard at its beginning must not end a run.
JUDGED_SAMPLES = 100_000

FULL_SHARE = 0.02  # a warning comes if at least this share of a source's captions fills the context


@dataclass
class EpochStats:
    """Samples that one rank, or all ranks, have delivered and lost in an epoch.

    Attributes:
        delivered: source -> samples, replaced ones included.
        lost: source -> reason -> samples.
        full: source -> samples whose caption fills the text tower's context.
    """

    delivered: Counter[str] = field(default_factory=Counter)
    lost: dict[str, Counter[str]] = field(default_factory=dict)
    full: Counter[str] = field(default_factory=Counter)

    def add(self, other: EpochStats) -> None:
        """Add another rank's numbers."""
        self.delivered.update(other.delivered)
        self.full.update(other.full)
        for name, reasons in other.lost.items():
            self.lost.setdefault(name, Counter()).update(reasons)


@dataclass
class DataStats:
    """The count of one rank's losses.

    Attributes:
        names: the names of the sources.
        max_bad_share: share of a source's samples that may be lost.
        epoch: of this rank, in this epoch.
        whole: of this epoch on all ranks, once it is closed.
        totals: source -> samples of this epoch on all ranks.
    """

    names: Sequence[str]
    max_bad_share: float
    epoch: EpochStats = field(default_factory=EpochStats)
    whole: EpochStats | None = None
    totals: dict[str, int] = field(default_factory=dict)
    _warned: set[object] = field(default_factory=set, repr=False)

    def open_epoch(self, totals: Sequence[int]) -> None:
        """Begin an epoch.

        Args:
            totals: (S,) samples of each source in the epoch, on all ranks together.
        """
        self.epoch, self.whole = EpochStats(), None
        self.totals = dict(zip(self.names, totals, strict=True))

    def add(self, report: BatchReport) -> None:
        """Count a batch, and warn of new kinds of losses.

        Raises:
            UserError: a source has lost too many samples, whatever the rest of the epoch brings.
        """
        names, epoch = self.names, self.epoch
        epoch.delivered.update({names[source]: count for source, count in report.delivered.items()})
        epoch.full.update({names[source]: count for source, count in report.full.items()})
        for drop in report.dropped:
            epoch.lost.setdefault(names[drop.source], Counter())[drop.reason] += 1
            self._warn(
                f"Source {names[drop.source]}: {f'sample {drop.key!r} in ' if drop.key else ''}{drop.shard} is replaced by "
                f"another one ({drop.reason}: {drop.detail}). Further ones of this kind are only counted.",
                (drop.source, drop.reason),
            )
        for note in report.notes:
            self._warn(f"{note[:1].upper()}{note[1:]}.", note)
        for name in {names[drop.source] for drop in report.dropped}:
            self._judge(name, epoch.lost[name], epoch.delivered[name])

    def _warn(self, message: str, *subjects: object) -> None:
        """Log a message unless all of its subjects have had one."""
        if not self._warned.issuperset(subjects):
            self._warned.update(subjects)
            logging.warning(printable(message))

    def _judge(self, name: str, reasons: Counter[str], delivered: int) -> None:
        # Within an epoch a rank knows its own losses only. A rank that has lost one of its two shards has lost half of its
        # share, but perhaps little of the source. So it stops only where its own losses are too many for the whole source
        # (`totals`, the samples of all ranks). The sum over ranks is checked at the end of the epoch.
        count, of = sum(reasons.values()), min(self.totals[name], max(delivered, JUDGED_SAMPLES))
        if count > self.max_bad_share * of:
            raise UserError(
                f"source {name!r} has lost {count} samples ({_listed(reasons)}), more than {self.max_bad_share:.0%} of {of}; "
                "mend its shards, or allow more with --max-bad-share"
            )

    def close_epoch(
        self, all_ranks: Iterable[EpochStats] | None = None, *, log: bool = True
    ) -> None:
        """Log the epoch's losses and cut captions, and check the losses against `max_bad_share`.

        Args:
            all_ranks: the numbers of every rank; None for this rank alone.
            log: whether this rank logs; of ranks that gather their numbers, one does.

        Raises:
            UserError: a source has lost more than `max_bad_share` of its epoch.
        """
        self.whole = whole = EpochStats()
        for stats in all_ranks if all_ranks is not None else [self.epoch]:
            whole.add(stats)
        if log:
            self._log(whole)
        for name, reasons in sorted(whole.lost.items()):
            self._judge(name, reasons, whole.delivered[name])

    def _log(self, whole: EpochStats) -> None:
        for name, count in sorted(whole.full.items()):
            share = count / whole.delivered[name]
            if share >= FULL_SHARE:
                self._warn(
                    f"Source {name}: {share:.0%} of the captions fill the text tower's context; longer ones are cut. "
                    "--force-context-length or another model reads more of them.",
                    ("full", name),
                )
        for name, reasons in sorted(whole.lost.items()):
            total, delivered = sum(reasons.values()), whole.delivered[name]
            logging.warning(
                f"Source {name}: {total} of {delivered} samples ({total / delivered:.2%}) were replaced ({_listed(reasons)})."
            )


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


class MixtureLoader:
    """A loader of a `Mixture`, with the attributes that open_clip's training loop reads.

    Args:
        mixture: what to load; its `batching.workers` is `workers`, or 1 where `workers` is 0.
        workers: loader processes; 0 reads in this one.
        pin_memory: as in torch's DataLoader.
        stall_timeout_seconds: end the run after this time without a batch; 0 waits forever.
        max_bad_share: share of a source's samples that may be replaced; beyond it the run ends.
        gather: object of this rank -> list of all ranks' objects, as `torch.distributed.all_gather_object`. Called once at the
            end of every epoch that is read to its end, so that `max_bad_share` is checked over all ranks.

    Attributes:
        num_batches: optimizer steps of an epoch (T); iterating yields K micro-batches a step.
        num_samples: samples of an epoch (T*N).
        batch_size: B.

    Raises:
        UserError: another number of workers than that of the mixture, a time-out or a share out of range, and the errors that
            `Mixture.schedule` refuses. While iterating: a sentence of a worker, a worker process that was lost or stalled, too
            many bad samples.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        workers: int,
        pin_memory: bool = False,
        stall_timeout_seconds: float = 600,
        max_bad_share: float = 0.10,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self.mixture = mixture
        self.workers = workers
        self.pin_memory = pin_memory
        self.stall_timeout_seconds = stall_timeout_seconds
        self.gather = gather
        first = mixture.schedule(0)
        self.num_batches = first.steps
        self.num_samples = first.steps * first.effective_batch
        self.batch_size = mixture.batching.micro_batch
        self.stats = DataStats([source.name for source in mixture.sources], max_bad_share)
        # Each process reads so many micro-batches ahead that all of a step can be ready when the step begins.
        prefetch = max(2, -(-mixture.batching.dga_steps // max(1, workers)) + 1)
        mixture.pool = self._pool = BufferPool(workers) if workers > 0 else None
        mixture.timeout_seconds = stall_timeout_seconds
        self._loader: DataLoader = DataLoader(
            mixture,
            batch_size=None,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers > 0 else None,
            timeout=stall_timeout_seconds if workers > 0 else 0,
        )
        self._end_workers = weakref.finalize(self, _end_workers, self._loader)

    @property
    def lost(self) -> Mapping[str, Mapping[str, int]]:
        """Count the samples that this rank has replaced in the epoch, source -> reason -> samples."""
        return self.stats.epoch.lost

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the epoch of the next iteration, and the optimizer step that it begins with.

        The batches are those of the whole epoch from that step on, bit for bit. The epoch is empty for
        `start_step = num_batches`.

        Raises:
            UserError: the epoch has no such step.
        """
        if not 0 <= start_step <= self.num_batches:
            raise UserError(
                f"epoch {epoch} has {self.num_batches} steps and cannot begin at step {start_step}"
            )
        self.mixture.start[:] = epoch, start_step

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        epoch, step = self.mixture.start
        micro_batches = (self.num_batches - step) * self.mixture.batching.dga_steps
        self.stats.open_epoch(self.mixture.schedule(epoch).taken.tolist())
        seen = 0
        for item in self._items():
            if isinstance(item, UserError):
                self.abandon()
                raise item
            *batch, report = item
            self.stats.add(report)
            seen += 1
            if isinstance(batch[0], PooledBatch):
                assert self._pool is not None
                batch[:] = self._pool.receive(batch[0])
            yield tuple(batch)
        if seen != micro_batches:
            raise UserError(
                f"the loader ended after {seen} of {micro_batches} micro-batches; a worker process was lost"
            )
        mine = self.stats.epoch
        all_ranks = self.gather(mine) if self.gather is not None else None
        self.stats.close_epoch(all_ranks, log=all_ranks is None or self.mixture.rank == 0)

    def _items(self) -> Iterator[Any]:
        count = 0
        self._loader.worker_init_fn = worker_start()
        try:
            batches: Iterator[Any] = iter(self._loader)
            if self.workers:
                batches = handed_over(batches)
            # At exit before the clean-ups of torch and multiprocessing, which would wait for workers that ignore their SIGTERM.
            atexit.unregister(self._end_workers)
            atexit.register(self._end_workers)
            for item in stall_watchdog(batches, self._wait_sentence):
                yield item
                count += 1
        except RuntimeError as error:
            sentence = self.explain(error, count)
            if sentence is None:
                raise
            self.abandon()
            raise UserError(sentence) from error

    def _wait_sentence(self, seconds: float, delivered: int) -> str:
        """Make the warning of a wait: its length, and the shard that is being read."""
        worker = delivered % max(1, self.workers)
        reader = f"loader worker {worker}" if self.workers else "the process"
        limit = ""
        if self.workers and self.stall_timeout_seconds:
            limit = f"; it is given {self.stall_timeout_seconds:g} s"
        return (
            f"Waiting for data: no batch has come for {seconds:.0f} s from {reader} of rank {self.mixture.rank}"
            f"{self._activity(worker)}{limit}"
        )

    def abandon(self) -> None:
        """Kill the worker processes, after an error of one of them. The next iteration starts others."""
        _end_workers(self._loader)

    def explain(self, error: RuntimeError, delivered: int = 0) -> str | None:
        """Make the sentence for an error that torch's DataLoader raises about its workers, None for any other error.

        Such an error may be raised anywhere in training, by torch's signal handler, and not only in this loader.

        Args:
            delivered: batches that this iteration has yielded before the error.
        """
        first, rank = str(error).split("\n")[0], self.mixture.rank
        if first.startswith("DataLoader timed out"):
            worker = delivered % max(1, self.workers)
            return (
                f"loader worker {worker} of rank {rank} has delivered nothing for {self.stall_timeout_seconds:g} s"
                f"{self._activity(worker)}; check where the shard comes from, and go on with --resume latest"
            )
        if not re.match(r"(DataLoader worker \(pid|Pin memory thread)", first):
            # While a checkpoint is written, torch's writer ends with an error of its own on top of this one.
            before = error.__context__
            return self.explain(before, delivered) if isinstance(before, RuntimeError) else None
        processes = [process for process, *_ in self.mixture.activity]
        lost = [
            worker
            for worker, process in enumerate(processes)
            if str(process) in re.findall(r"\d+", first)
        ]
        who, doing = (
            (f"loader worker {lost[0]}", self._activity(lost[0]))
            if lost
            else ("a loader worker", "")
        )
        return (
            f"{who} of rank {rank} was lost{doing} ({first.split('. ')[0].rstrip('.')}); if the machine ran out of memory, "
            "lower --workers or --batch-size"
        )

    def _activity(self, worker: int) -> str:
        """Name the shard that a worker reads, as the end of a sentence."""
        _, source, shard = self.mixture.activity[worker]
        if source < 0:
            return " (it has not opened a shard yet)"
        read = self.mixture.sources[source]
        return f" while reading shard {read.shards[shard]} of source {read.name!r}"


def _end_workers(loader: DataLoader) -> None:
    """Kill the worker processes of a DataLoader whose workers are persistent, unless another process has started them: a fork.

    It replaces torch's shutdown, which waits for a lock that a killed worker may have held. And of an iterator that the garbage
    collector finds in a cycle the queues end first, so that torch waits 5 seconds for each worker.
    """
    iterator = loader._iterator
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return
    workers: list[Any] = iterator._workers
    if any(worker._parent_pid != os.getpid() for worker in workers):
        return
    loader._iterator = None
    iterator._shutdown = True
    if iterator._worker_pids_set:
        # torch's signal handler raises when a registered worker dies, anywhere in this process
        torch.utils.data._utils.signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    if iterator._pin_memory:
        iterator._pin_memory_thread_done_event.set()
    for worker in workers:
        worker.kill()
        worker.join()
