"""The rows and pictures of a call on the disk: memory does not grow with the data.

Bytes of pictures stand in a spool, from which a call that continues after a kill takes them, and all else in an SQLite file. It
is made anew by each call, from the inputs and the spool, and removed at the end. So it needs no durability.

    rows       one a row of the inputs: the number of its picture, its source, or the reason why it is refused
    captions   those of a row
    pictures   one a place (path, address ...): its outcome, and the hash of its pixels, which is the sample's key
    samples    one a source and key, as it will be written, in the order of a hash of seed and key
    good       view: rows with a picture;  texts: with each of their captions;  written: of samples that are not dropped
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of
from open_clip_zerovl.data.names import class_order
from open_clip_zerovl.data.splits import (
    FolderSplits,
    first_of_training,
    position,
    split_of_word,
)
from open_clip_zerovl.prepare.rows import Row

_TABLES = """
CREATE TABLE rows (id INTEGER PRIMARY KEY, input INT, file TEXT, line INT, source TEXT, picture INT, reason TEXT, label TEXT,
    split TEXT);
CREATE TABLE captions (row INT, text TEXT);
CREATE TABLE pictures (number INTEGER PRIMARY KEY, hash BLOB UNIQUE, input INT, place TEXT, name TEXT, key TEXT, extension TEXT,
    offset INT, size INT, width INT, height INT, sum TEXT, turned INT, shrunk INT, whitened INT,
    reason TEXT, transient INT DEFAULT 0);
CREATE TABLE samples (source TEXT, key TEXT, position INT, picture INT, split TEXT, dropped TEXT);
CREATE VIEW good AS SELECT rows.id AS row, rows.input, file, line, source, label, key, number, place, rows.split AS
    given_split FROM rows JOIN pictures ON pictures.number = rows.picture WHERE key IS NOT NULL AND rows.reason IS NULL;
CREATE VIEW texts AS SELECT good.row, source, key, label, captions.rowid AS place, text FROM good JOIN captions USING (row);
CREATE VIEW written AS SELECT texts.*, position FROM samples JOIN texts USING (source, key) WHERE dropped IS NULL;
"""
_INDICES = """
CREATE INDEX rows_by_picture ON rows (picture);
CREATE INDEX captions_by_row ON captions (row);
CREATE INDEX pictures_by_key ON pictures (key);
"""


SPOOL = "pictures.spool"
MOST_WORDS = 5  # that name no split, of an input

_STORED = "samples.key, extension, offset, size, name"


class Stored(NamedTuple):
    """A sample to write.

    Attributes:
        key: the key of the sample.
        extension: file ending of its picture.
        offset, size: bytes of the picture in the spool.
        name: the name of its file, as the input has it.
    """

    key: str
    extension: str
    offset: int
    size: int
    name: str


class Spool:
    """A file of pictures, each behind a line of JSON about it, which a kill at any byte leaves readable.

    Not thread-safe: one thread appends.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  # closed by `close`

    def recovered(self) -> Iterator[dict[str, Any]]:
        """Yield what an earlier call knew of its pictures, with their places, and cut off a partial last record."""
        total = self._file.seek(0, os.SEEK_END)
        end = self._file.seek(0)
        while line := self._file.readline():
            try:
                facts = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                facts = None
            offset = self._file.tell()
            if facts is None or offset + facts["size"] > total:
                break
            end = self._file.seek(facts["size"], os.SEEK_CUR)
            yield {**facts, "offset": offset}
        self._file.truncate(end)

    def add(self, content: bytes, **facts: Any) -> dict[str, Any]:
        """Append a picture, b"" for none, and return the facts about it with its place."""
        facts["size"] = len(content)
        line = json.dumps(facts).encode() + b"\n"
        offset = self._file.seek(0, os.SEEK_END) + len(line)
        self._file.write(line + content)  # one write, of which a kill leaves a beginning
        self._file.flush()
        return {**facts, "offset": offset}

    def content(self, offset: int, size: int) -> bytes:
        """Read the bytes of a picture."""
        self._file.seek(offset)
        return self._file.read(size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PairDatabase:
    """The tables of a call and its spool, for one thread."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.path = folder / "rows.sqlite"
        self.path.unlink(missing_ok=True)
        self.spool = Spool(folder / SPOOL)
        self.db = sqlite3.connect(self.path, isolation_level=None)
        self.db.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-200000;" + _TABLES
        )
        self.db.create_function("position", 1, lambda key: position(seed, key), deterministic=True)
        self.db.execute("BEGIN")
        self.pictures = self.row_count = 0
        self.odd_splits: defaultdict[int, set[str]] = defaultdict(set)  # words by input, some

    def close(self) -> None:
        """Close the files, and remove the tables."""
        self.db.close()
        self.path.unlink(missing_ok=True)
        self.spool.close()  # which fails where the disk is full

    def content(self, sample: Stored) -> bytes:
        """Read the bytes of a sample's picture."""
        return self.spool.content(sample.offset, sample.size)

    def number_of(self, place: str | bytes, input: int, name: str = "") -> tuple[int, bool]:
        """Return the number of the picture at a place, or with these bytes, and whether it is new."""
        digest = bytes.fromhex(digest_of(place))  # of bytes another one than of a place
        known = self.db.execute("SELECT number FROM pictures WHERE hash = ?", (digest,)).fetchone()
        if known:
            return known[0], False
        shown = "" if isinstance(place, bytes) else _shown(place)
        about = {"hash": digest, "input": input, "place": shown, "name": _shown(name)}
        self.add_facts(self.pictures, about)
        self.pictures += 1
        return self.pictures - 1, True

    def add_row(
        self,
        input: int,
        row: Row,
        source: str | None,
        picture: int | None,
        captions: list[str],
        reason: str,
    ) -> None:
        """Keep a row of an input: its source, the number of its picture, its captions, or why it is refused."""
        self.row_count += 1
        label = row.label and _shown(row.label)
        split = split_of_word(row.split) or ""
        if row.split and not split and len(self.odd_splits[input]) < MOST_WORDS:
            self.odd_splits[input].add(row.split)
        self.db.execute(
            "INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.row_count,
                input,
                _shown(row.file),
                row.line,
                source,
                picture,
                reason or None,
                label,
                split,
            ),
        )
        self.db.executemany(
            "INSERT INTO captions VALUES (?, ?)", [(self.row_count, text) for text in captions]
        )

    def add_facts(self, number: int, facts: Mapping[str, Any]) -> None:
        """Keep what is known of a picture (columns of `pictures`): where it was found, or what became of it."""
        names = ("number", *facts)
        marks = ", ".join("?" * len(names))
        news = ", ".join(f"{name} = excluded.{name}" for name in facts)
        self.db.execute(
            f"INSERT INTO pictures ({', '.join(names)}) VALUES ({marks}) ON CONFLICT (number) DO UPDATE SET {news}",
            (number, *facts.values()),
        )

    def make_samples(self) -> None:
        """Fill `samples`, once all rows and outcomes are in: a key once a source, in the split of its rows.

        A picture that is in several splits is held out in all sources: in "test" rather than "val", and not in "train".
        """
        self.db.executescript(_INDICES)  # which ends the transaction, too
        self.db.execute(
            "INSERT INTO samples SELECT source, key, position(key), MIN(number), 'train', NULL FROM good GROUP BY source, key"
        )
        self.db.executescript(
            "CREATE INDEX samples_in_order ON samples (source, split, position, key);"
            "CREATE INDEX samples_by_key ON samples (key, source);"
        )
        for split in ("val", "test"):
            self.db.execute(
                "UPDATE samples SET split = ? WHERE key IN (SELECT key FROM good WHERE given_split = ?)",
                (split, split),
            )
        # validation pictures are the test split of a source that has no other
        self.db.execute(
            "UPDATE samples SET split = 'test' WHERE split = 'val' AND source NOT IN "
            "(SELECT source FROM samples WHERE split = 'test')"
        )

    def sums(self) -> Iterator[str]:
        """Yield the hashes of pictures that are files, in the order of the rows."""
        sums = self.db.execute("SELECT sum FROM pictures WHERE sum IS NOT NULL ORDER BY number")
        return (each for (each,) in sums)

    def sources(self) -> list[str]:
        """Name the sources that have samples, in order."""
        return [
            name
            for (name,) in self.db.execute("SELECT DISTINCT source FROM samples ORDER BY source")
        ]

    def count(self, source: str | None = None, split: str | None = None) -> int:
        """Count the samples that are not dropped, of a source and a split or of all."""
        return self.value(
            "SELECT COUNT(*) FROM samples WHERE dropped IS NULL AND (? IS NULL OR source = ?) AND (? IS NULL OR split = ?)",
            *(source, source, split, split),
        )

    def stored(self, which: str, *parameters: str) -> Iterator[Stored]:
        """Yield the samples of which a condition on `samples` holds."""
        cursor = self.db.execute(
            f"SELECT {_STORED} FROM samples JOIN pictures ON pictures.number = samples.picture WHERE dropped IS NULL AND "
            + which,
            parameters,
        )
        return (Stored(*row) for row in cursor)

    def pairs(self, source: str, split: str) -> Iterator[tuple[Stored, list[str], str | None]]:
        """Yield the samples to be written, in their order, each with its captions in the order of the rows, and its class.

        The class is the first one that a row gives the picture. None if no row does.
        """
        cursor = self.db.execute(
            f"SELECT {_STORED}, label, text FROM samples JOIN pictures ON pictures.number = samples.picture JOIN texts ON "
            "texts.key = samples.key AND texts.source = samples.source WHERE dropped IS NULL AND samples.source = ? AND "
            "split = ? ORDER BY position, samples.key, texts.row, texts.place",
            (source, split),
        )
        for sample, rows in groupby(cursor, key=lambda row: row[:-2]):
            labelled_texts = list(rows)
            label = next((label for *_, label, _ in labelled_texts if label is not None), None)
            yield Stored(*sample), list(dict.fromkeys(text for *_, text in labelled_texts)), label

    def classes(self, source: str | None = None) -> dict[str, int]:
        """Count the pictures of each class, of a source or of all, in the order of `class_order`."""
        query = (
            "SELECT label, COUNT(DISTINCT key) FROM good WHERE label IS NOT NULL AND (? IS NULL OR source = ?) "
            "GROUP BY label"
        )
        counts = self.counts(query, source, source)
        return {label: counts[label] for label in sorted(counts, key=class_order)}

    def counts(self, query: str, *parameters: Any) -> dict[str, int]:
        """Return the pairs of a text and a number that a query gives."""
        return dict(self.db.execute(query, parameters).fetchall())

    def value(self, query: str, *parameters: Any) -> Any:
        """Return the one value that a query gives."""
        return self.db.execute(query, parameters).fetchone()[0]


def _shown(text: str) -> str:
    """Write a name with escapes for bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Exclusion:
    """Pictures to leave out.

    Attributes:
        reason: a few words to count by ("near coco").
        keys: (source, key, encoded picture) of each training sample -> keys of those to leave out, in all sources.
        settings: a description that must be the same in a later call on the folder.
    """

    reason: str
    keys: Callable[[Iterator[tuple[str, str, bytes]]], Iterable[str]]
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


def exclude(store: PairDatabase, exclusion: Exclusion) -> None:
    """Mark the pictures that an exclusion names as dropped."""
    samples = (
        (source, sample.key, store.content(sample))
        for source in store.sources()
        for sample in store.stored(
            "samples.source = ? AND split = 'train' ORDER BY position, samples.key", source
        )
    )
    store.db.executemany(
        "UPDATE samples SET dropped = ? WHERE key = ? AND dropped IS NULL",
        [(exclusion.reason, key) for key in exclusion.keys(samples)],
    )
