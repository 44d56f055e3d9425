"""The held-out set, and pictures that are left out. Both go by pictures: rows and files with the same pixels are one.

`data.held_out` says which pictures are held out, each by itself. With more data in a later call they stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.held_out import first_of_training
from open_clip_zerovl.data.splits import SPLITS
from open_clip_zerovl.prepare.pack.store import PairDatabase, Stored


class Candidate(NamedTuple):
    """A sample before it is written: its key, source and split (of SPLITS); `content()` reads its picture's bytes."""

    key: str
    source: str
    split: str
    content: Callable[[], bytes]


@dataclass(frozen=True)
class Exclusion:
    """Pictures to leave out.

    Attributes:
        reason: a few words to count by ("near coco").
        keys: candidates, each picture of each source once -> keys of those to leave out, in all sources.
        settings: a description that must be the same in a later call on the folder.
    """

    reason: str
    keys: Callable[[Iterator[Candidate]], Iterable[str]]
    settings: str = ""


def hold_out(store: PairDatabase, share: float) -> None:
    """Move a share of the pictures into the split "test", at least one of each source, unless its rows name that split.

    Raises:
        UserError: a source that has too few pictures to hold one out.
    """
    if not share:
        return
    divided = "SELECT DISTINCT source FROM good WHERE given_split = 'test'"
    named = {source for (source,) in store.db.execute(divided)}
    sources = [source for source in store.sources() if source not in named]
    move = "UPDATE samples SET split = 'test' WHERE key IN (SELECT key FROM samples WHERE source = ? AND split = 'train' "
    for source in sources:
        pictures = store.count(source)
        if pictures < 2:
            raise UserError(
                f"source {source!r} has {pictures} picture, and --test-share {share:g} holds at least one of each source out: "
                "give more pictures, or leave out --test-share"
            )
        store.db.execute(f"{move} AND position < ?)", (source, first_of_training(share)))
    for source in sources:
        if not store.count(source, "test"):
            store.db.execute(f"{move} ORDER BY position, key LIMIT 1)", (source,))


def exclude(
    store: PairDatabase, exclusions: Iterable[Exclusion], read: Callable[[Stored], bytes]
) -> None:
    """Mark the pictures that the exclusions name as dropped."""
    for exclusion in exclusions:
        keys = list(exclusion.keys(_candidates(store, read)))
        store.db.executemany(
            "UPDATE samples SET dropped = ? WHERE key = ? AND dropped IS NULL",
            [(exclusion.reason, key) for key in keys],
        )


def _candidates(store: PairDatabase, read: Callable[[Stored], bytes]) -> Iterator[Candidate]:
    for source in store.sources():
        for split in SPLITS:
            for sample in store.samples(source, split):
                yield Candidate(sample.key, source, split, lambda sample=sample: read(sample))  # type: ignore[misc]
