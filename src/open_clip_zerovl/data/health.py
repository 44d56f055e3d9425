"""What a run loses to rotten data: counted by source and reason, said once, and ended where it is too much.

Workers hand a `Report` over with each batch; the training process keeps the books in a `Ledger`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from open_clip_zerovl.errors import UserError, printable

# A share is judged on no fewer samples: one shard written by a broken process must not end a run that loses nothing else.
JUDGED_SAMPLES = 100_000


@dataclass(frozen=True)
class Fault:
    """Why a sample cannot be shown: the reason in a few words, and a verb phrase for messages."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Loss:
    """One sample that was replaced.

    Attributes:
        source: index of its source.
        reason: in a few words, the same for all losses of a kind.
        key, shard: where it lies; no key where the shard is lost.
        detail: what exactly was wrong.
        position: of the lost sample in its source's cycle.
    """

    source: int
    reason: str
    key: str
    shard: str
    detail: str
    position: int


@dataclass
class Report:
    """What a worker says about a batch: samples delivered and lost of each source, and oddities that lose nothing."""

    delivered: dict[int, int] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Ledger:
    """The books of one rank.

    Attributes:
        names: of the sources.
        max_bad_share: of a source's samples that may be lost.
        lost: source -> reason -> samples lost in this epoch.
        delivered: source -> samples delivered in this epoch, replaced ones included.
        totals: source -> samples of this epoch on all ranks.
    """

    names: Sequence[str]
    max_bad_share: float
    lost: dict[str, dict[str, int]] = field(default_factory=dict)
    delivered: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    _said: set[object] = field(default_factory=set, repr=False)

    def open_epoch(self, totals: Sequence[int]) -> None:
        """Begin an epoch that takes this many samples of each source on all ranks together."""
        self.lost, self.delivered = {}, {}
        self.totals = dict(zip(self.names, totals, strict=True))

    def add(self, report: Report) -> None:
        """Book a batch, and warn of what is new.

        Raises:
            UserError: a source has lost more than it may, whatever is still to come.
        """
        for source, count in report.delivered.items():
            name = self.names[source]
            self.delivered[name] = self.delivered.get(name, 0) + count
        for loss in report.losses:
            name = self.names[loss.source]
            reasons = self.lost.setdefault(name, {})
            reasons[loss.reason] = reasons.get(loss.reason, 0) + 1
            self._say(
                (name, loss.reason),
                f"Source {name}: {f'sample {loss.key!r} in ' if loss.key else ''}{loss.shard} is replaced by others "
                f"({loss.reason}: {loss.detail}). Further ones of this kind are only counted.",
            )
        for note in report.notes:
            self._say(note, note[:1].upper() + note[1:] + ". What is beyond is not read.")
        for name in {self.names[loss.source] for loss in report.losses}:
            self._judge(name, self.lost[name], self.delivered[name])

    def _say(self, subject: object, message: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            logging.warning(printable(message))

    def _judge(self, name: str, reasons: dict[str, int], delivered: int) -> None:
        # Within an epoch a rank knows its own losses only. One that has lost one of its two shards has lost much of its share
        # and perhaps little of the source. So it stops only where its losses alone are too many for the source as a whole
        # (`totals`, all ranks' samples); the sum over ranks is judged at the epoch's end.
        count, of = sum(reasons.values()), min(self.totals[name], max(delivered, JUDGED_SAMPLES))
        if count > self.max_bad_share * of:
            raise UserError(
                f"source {name!r} has lost {count} samples ({_listed(reasons)}), more than {self.max_bad_share:.0%} of {of}; "
                "mend its shards, or allow more with --max-bad-share"
            )

    def close_epoch(self, all_ranks: Iterable[tuple[dict[str, dict[str, int]], dict[str, int]]] | None = None) -> None:
        """Log what the epoch has lost, and judge it.

        Args:
            all_ranks: (lost, delivered) of every rank; by default this one's alone.

        Raises:
            UserError: a source has lost more than `max_bad_share` of its epoch.
        """
        lost: dict[str, dict[str, int]] = {}
        delivered: dict[str, int] = {}
        for of_rank, delivered_by_rank in all_ranks if all_ranks is not None else [(self.lost, self.delivered)]:
            for name, count in delivered_by_rank.items():
                delivered[name] = delivered.get(name, 0) + count
            for name, reasons in of_rank.items():
                for reason, count in reasons.items():
                    lost.setdefault(name, {})[reason] = lost.get(name, {}).get(reason, 0) + count
        for name, reasons in sorted(lost.items()):
            total = sum(reasons.values())
            logging.warning(
                f"Source {name}: {total} of {delivered[name]} samples ({total / delivered[name]:.2%}) were replaced "
                f"({_listed(reasons)})."
            )
        for name, reasons in sorted(lost.items()):
            self._judge(name, reasons, delivered[name])


def _listed(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
