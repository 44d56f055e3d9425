"""The held-out set, and pictures that are left out. Both go by pictures: rows and files with the same pixels are one.

`data.splits` says which pictures are held out, each by itself. With more data in a later call they stay so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.splits import SPLITS, FolderSplits, first_of_training
from open_clip_zerovl.prepare.pack.store import PairDatabase, Stored


class Candidate(NamedTuple):
    """A sample before it is written: its key, source and split (of SPLITS). `content()` reads its picture's bytes."""

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


def split_by_folders(store: PairDatabase, inputs: int) -> None:
    """Give each row without a split that of the folders on its picture's path, "train" if they say none.

    The pictures of an input are the files of `FolderSplits`: a table of `train2014/1.jpg` and `val2014/2.jpg` names splits.
    """
    store.db.create_function("folder", 1, os.path.dirname, deterministic=True)
    unsaid = "FROM rows JOIN pictures ON number = picture WHERE rows.input = ? AND split = ''"
    for number in range(inputs):
        query = f"SELECT DISTINCT folder(place) {unsaid} AND place LIKE '/%'"
        folders = [folder for (folder,) in store.db.execute(query, (number,))]
        if len(folders) > 1:
            top = os.path.commonpath(folders)
            splits = FolderSplits(os.path.relpath(os.path.join(name, "x"), top) for name in folders)
            if splits.says:
                kinds = {
                    name: splits(os.path.relpath(os.path.join(name, "x"), top))[1]
                    for name in folders
                }
                store.db.create_function(
                    "split_of", 1, lambda place, kinds=kinds: kinds.get(os.path.dirname(place), "")
                )
                store.db.execute(
                    "UPDATE rows SET split = (SELECT split_of(place) FROM pictures WHERE number = picture) "
                    "WHERE input = ? AND split = '' AND picture IS NOT NULL",
                    (number,),
                )
    store.db.execute("UPDATE rows SET split = 'train' WHERE split = ''")


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
