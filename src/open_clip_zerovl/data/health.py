"""What a run loses to bad data and what it waits for: counted by source and reason, warned of once; too many losses end it.

Workers deliver a `Report` with each batch; the training process adds them up in a `Ledger`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from open_clip_zerovl.core.errors import UserError, printable
from open_clip_zerovl.shards.remote import Wait

# Within an epoch the share of lost samples is taken of at least so many: one broken shard at its beginning must not end a run.
JUDGED_SAMPLES = 100_000

TOLD_FULL_SHARE = 0.02  # a warning comes if at least this share of a source's captions fills the context


@dataclass(frozen=True)
class Fault:
    """Why a sample cannot be shown.

    Attributes:
        reason: a few words to count by ("no caption").
        detail: a verb phrase for messages ("has no caption (txt)").
    """

    reason: str
    detail: str


@dataclass(frozen=True)
class Loss:
    """One sample that was replaced.

    Attributes:
        source: index of its source.
        reason: a few words to count by.
        key, shard: where it lies; the key is empty where the shard is lost.
        detail: what exactly was wrong.
        position: number of the lost sample in its source's cycle.
    """

    source: int
    reason: str
    key: str
    shard: str
    detail: str
    position: int


@dataclass
class Report:
    """What a worker says about a batch.

    Attributes:
        delivered: source -> samples in the batch, replaced ones included.
        losses: one entry for each replaced sample.
        notes: sentences about odd things through which no sample is lost.
        waits: (source, retries of one of its shards).
        full: source -> samples whose caption fills the text tower's context.
    """

    delivered: dict[int, int] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    waits: list[tuple[int, Wait]] = field(default_factory=list)
    full: dict[int, int] = field(default_factory=dict)


@dataclass
class Waited:
    """Retries of a source's shards in an epoch: how many shards had some, their seconds, and reason -> retries."""

    shards: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, other: Waited) -> None:
        """Add another one's numbers."""
        self.shards += other.shards
        self.seconds += other.seconds
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count


@dataclass
class Books:
    """What one rank, or all ranks, have delivered, lost and waited for in an epoch.

    Attributes:
        delivered: source -> samples, replaced ones included.
        lost: source -> reason -> samples.
        waited: source -> retries of its shards.
        full: source -> samples whose caption fills the text tower's context.
    """

    delivered: dict[str, int] = field(default_factory=dict)
    lost: dict[str, dict[str, int]] = field(default_factory=dict)
    waited: dict[str, Waited] = field(default_factory=dict)
    full: dict[str, int] = field(default_factory=dict)

    def add(self, other: Books) -> None:
        """Add another rank's numbers."""
        _count(self.delivered, other.delivered)
        _count(self.full, other.full)
        for name, reasons in other.lost.items():
            mine = self.lost.setdefault(name, {})
            for reason, count in reasons.items():
                mine[reason] = mine.get(reason, 0) + count
        for name, waited in other.waited.items():
            self.waited.setdefault(name, Waited()).add(waited)


@dataclass
class Ledger:
    """The count of one rank's losses.

    Attributes:
        names: of the sources.
        max_bad_share: share of a source's samples that may be lost.
        books: of this epoch.
        whole: of this epoch on all ranks, once it is closed.
        totals: source -> samples of this epoch on all ranks.
    """

    names: Sequence[str]
    max_bad_share: float
    books: Books = field(default_factory=Books)
    whole: Books | None = None
    totals: dict[str, int] = field(default_factory=dict)
    _said: set[object] = field(default_factory=set, repr=False)

    def open_epoch(self, totals: Sequence[int]) -> None:
        """Begin an epoch.

        Args:
            totals: (S,) samples of each source in the epoch, on all ranks together.
        """
        self.books, self.whole = Books(), None
        self.totals = dict(zip(self.names, totals, strict=True))

    def add(self, report: Report) -> None:
        """Count a batch, and warn of what is new.

        Raises:
            UserError: a source has lost too many samples, whatever the rest of the epoch brings.
        """
        lost, delivered = self.books.lost, self.books.delivered
        _count(delivered, {self.names[source]: count for source, count in report.delivered.items()})
        _count(self.books.full, {self.names[source]: count for source, count in report.full.items()})
        for loss in report.losses:
            name = self.names[loss.source]
            reasons = lost.setdefault(name, {})
            reasons[loss.reason] = reasons.get(loss.reason, 0) + 1
            self._say(
                (name, loss.reason),
                f"Source {name}: {f'sample {loss.key!r} in ' if loss.key else ''}{loss.shard} is replaced by others "
                f"({loss.reason}: {loss.detail}). Further ones of this kind are only counted.",
            )
        for note in report.notes:
            self._say(note, f"{note[:1].upper()}{note[1:]}.")
        for source, wait in report.waits:
            self._add_wait(self.names[source], wait)
        for name in {self.names[loss.source] for loss in report.losses}:
            self._judge(name, lost[name], delivered[name])

    def _add_wait(self, name: str, wait: Wait) -> None:
        self.books.waited.setdefault(name, Waited()).add(Waited(1, wait.seconds, dict(wait.reasons)))
        new = [reason for reason in wait.reasons if ("wait", name, reason) not in self._said]
        self._said.update(("wait", name, reason) for reason in new)
        if new:
            logging.warning(
                printable(
                    f"Source {name}: {wait.shard} took {_retries(wait.reasons)} and {wait.seconds:.0f} s. Further ones of this "
                    "kind are only counted."
                )
            )

    def _say(self, subject: object, message: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            logging.warning(printable(message))

    def _judge(self, name: str, reasons: dict[str, int], delivered: int) -> None:
        # Within an epoch a rank knows its own losses only. A rank that has lost one of its two shards has lost half of its
        # share, but perhaps little of the source. So it stops only where its own losses are too many for the whole source
        # (`totals`, the samples of all ranks). The sum over ranks is checked at the end of the epoch.
        count, of = sum(reasons.values()), min(self.totals[name], max(delivered, JUDGED_SAMPLES))
        if count > self.max_bad_share * of:
            raise UserError(
                f"source {name!r} has lost {count} samples ({_listed(reasons)}), more than {self.max_bad_share:.0%} of {of}; "
                "mend its shards, or allow more with --max-bad-share"
            )

    def close_epoch(self, all_ranks: Iterable[Books] | None = None, *, log: bool = True) -> None:
        """Log what the epoch has lost, cut and waited for, and check the losses against `max_bad_share`.

        Args:
            all_ranks: the books of every rank; None for this rank alone.
            log: whether this rank logs; of ranks that gather their books, one does.

        Raises:
            UserError: a source has lost more than `max_bad_share` of its epoch.
        """
        whole = Books()
        for books in all_ranks if all_ranks is not None else [self.books]:
            whole.add(books)
        self.whole = whole
        for name, waited in sorted(whole.waited.items()) if log else ():
            logging.warning(
                f"Source {name}: {waited.shards} of the shards opened in this epoch took {_retries(waited.reasons)} and "
                f"{waited.seconds:.0f} s of its readers."
            )
        for name, count in sorted(whole.full.items()) if log else ():
            share = count / whole.delivered[name]
            if share >= TOLD_FULL_SHARE:
                self._say(
                    ("full", name),
                    f"Source {name}: {share:.0%} of the captions fill the text tower's context; what is longer is cut. "
                    "--force-context-length or another model reads more of them.",
                )
        for name, reasons in sorted(whole.lost.items()) if log else ():
            total, delivered = sum(reasons.values()), whole.delivered[name]
            logging.warning(
                f"Source {name}: {total} of {delivered} samples ({total / delivered:.2%}) were replaced ({_listed(reasons)})."
            )
        for name, reasons in sorted(whole.lost.items()):
            self._judge(name, reasons, whole.delivered[name])


def _count(sums: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        sums[name] = sums.get(name, 0) + count


def _retries(reasons: Mapping[str, int]) -> str:
    """ "3 retries (2 cut off, 1 server answered 503)" """
    count = sum(reasons.values())
    return f"{count} {'retry' if count == 1 else 'retries'} ({_listed(reasons)})"


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
