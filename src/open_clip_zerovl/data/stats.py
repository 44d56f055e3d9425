"""Samples that a run loses to bad data: counted by source and reason, warned of once.

Workers deliver a `BatchReport` with each batch; the training process adds them up in `DataStats`, which ends a run that loses
too many samples.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from open_clip_zerovl.core.errors import UserError, printable

# The least denominator of the share of lost samples within an epoch: one broken shard at its beginning must not end a run.
JUDGED_SAMPLES = 100_000

FULL_SHARE = 0.02  # a warning comes if at least this share of a source's captions fills the context


@dataclass(frozen=True)
class DroppedSample:
    """One sample that was replaced.

    Attributes:
        source: index of its source.
        reason: a few words to count by.
        key, shard: where it lies; the key is empty where the shard is lost.
        detail: the exact fault.
        position: number of the lost sample in its source's cycle.
    """

    source: int
    reason: str
    key: str
    shard: str
    detail: str
    position: int


@dataclass
class BatchReport:
    """A worker's report on a batch.

    Attributes:
        delivered: source -> samples in the batch, replaced ones included.
        dropped: one entry for each replaced sample.
        notes: sentences about odd things through which no sample is lost.
        full: source -> samples whose caption fills the text tower's context.
    """

    delivered: dict[int, int] = field(default_factory=dict)
    dropped: list[DroppedSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    full: dict[int, int] = field(default_factory=dict)


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
