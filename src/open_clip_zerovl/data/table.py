"""Tables of pairs as sources: open_clip's (`filepath`, `title`), ZeroVL's (`image,image_id,caption,caption_id`) and others.

The table is scanned once for the offsets of its rows; a row is read from the file when it is needed. Only arrays of numbers
stay in memory, which loader workers share with the process that made them. A list of captions would be copied to each worker.

Image paths are relative to the table's folder. `columns.choose` finds the columns, as for `zerovl data pack`.

`csv_rows` defines rows and the mistakes in them.
"""

from __future__ import annotations

import csv
import logging
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.columns import (
    CAPTION_FLAG,
    PICTURE_FLAG,
    Wanted,
    choose,
    guess_separator,
)
from open_clip_zerovl.data.csv_rows import CsvRow, CsvRows, as_it_stands
from open_clip_zerovl.data.splits import split_of_word
from open_clip_zerovl.shards.members import opened
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS
from open_clip_zerovl.shards.texts import encoding_of

EXTENSIONS = (".csv", ".tsv")
PACKED = "pack.json"  # marks an output of `zerovl data pack`, whose table lists refused rows
BLOCK_SAMPLES = (
    64  # a block of rows takes the place of a shard: blocks are shuffled, then rows in the window
)
_PICTURES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
_NAMED_LINES = 5  # of each mistake, in messages


@dataclass(frozen=True)
class CsvFormat:
    """The format of a table; a field that is None is taken from the header.

    Attributes:
        image_key, caption_key: names of the columns (open_clip's `--csv-img-key`, `--csv-caption-key`).
        separator: between columns (open_clip's `--csv-separator`).
    """

    image_key: str | None = None
    caption_key: str | None = None
    separator: str | None = None


class TableSample(NamedTuple):
    """One sample of a table: its rows.

    Attributes:
        numbers: row numbers, from 0 below the header.
        rows: fields of each row.
        image: the picture's path, as the first row names it.
        captions: bytes of each row's caption, without rows that have none.
        readable: whether the first row can be shown.
    """

    numbers: list[int]
    rows: list[list[str]]
    image: str
    captions: list[bytes]
    readable: bool


@dataclass(frozen=True)
class CsvTable:
    """A scanned table.

    Attributes:
        path: the path of the table.
        separator: between columns.
        columns: the header.
        image_column, caption_columns: their numbers.
        rows: (R, 2) offset and length in bytes of each row; the length is negative where quotes are plain characters, and 0
            where the row cannot be shown.
        members: (R,) row numbers, those of a sample next to each other.
        ends: (n,) where each sample ends in `members`; a sample is a row, or all rows of one image.
        stamp: size in bytes and modification time in ns of the scanned file.
    """

    path: str
    separator: str
    columns: tuple[str, ...]
    image_column: int
    caption_columns: tuple[int, ...]
    rows: np.ndarray
    members: np.ndarray
    ends: np.ndarray
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return len(self.ends)

    def rows_of(self, sample: int) -> np.ndarray:
        """Row numbers of a sample."""
        return self.members[self.ends[sample - 1] if sample else 0 : self.ends[sample]]

    def without(self, rows: np.ndarray) -> CsvTable:
        """The table without the samples that have one of these rows."""
        lengths = np.diff(self.ends, prepend=0)
        sample_of = np.repeat(np.arange(len(self)), lengths)
        gone = np.zeros(len(self), dtype=bool)
        gone[sample_of[np.isin(self.members, rows)]] = True
        members = self.members[~gone[sample_of]]
        return replace(self, members=members, ends=np.cumsum(lengths[~gone]))

    def samples(self, begin: int = 0, end: int | None = None) -> Iterator[TableSample]:
        """Samples `begin` .. `end` - 1, read from the file.

        Raises:
            ShardError: the table cannot be opened.
            UserError: it has changed since it was scanned, so that the offsets of its rows are unknown.
        """
        with opened(self.path) as descriptor:
            if _stamp(descriptor) != self.stamp:
                raise UserError(
                    f"table {self.path} has changed since the run began; start the run again, with --resume to go on, and do "
                    "not change the table while it runs"
                )
            for sample in range(begin, len(self) if end is None else end):
                rows = self.rows_of(sample).tolist()
                fields = [self._fields(descriptor, row) for row in rows]
                texts = (
                    row[column]
                    for row, column in product(fields, self.caption_columns)
                    if len(row) > column
                )
                yield TableSample(
                    rows,
                    fields,
                    fields[0][self.image_column] if len(fields[0]) > self.image_column else "",
                    # a quoted line break would make two captions
                    [" ".join(text.split()).encode("utf-8", "surrogateescape") for text in texts],
                    bool(self.rows[rows[0], 1]),
                )

    def _fields(self, descriptor: int, row: int) -> list[str]:
        """The fields of one row, with invalid UTF-8 as surrogates; a short row has fewer fields than columns."""
        offset, length = self.rows[row].tolist()
        text = os.pread(descriptor, abs(length), offset).decode("utf-8", "surrogateescape")
        if length < 0:
            return as_it_stands(text, self.separator)
        if sys.version_info < (3, 11):  # its csv refuses a NUL
            text = text.replace("\0", "\ufffd")
        return next(csv.reader([text], delimiter=self.separator), [])

    def image_path(self, image: str) -> str:
        """The path of an image, as a row names it."""
        return os.path.join(os.path.dirname(self.path), image)


def find_table(component: str) -> str | None:
    """The table that a component of `--train-data` names: a .csv or .tsv, or a folder with one and no tar; else None.

    Raises:
        UserError: the folder has several tables.
    """
    if component.lower().endswith(EXTENSIONS):
        return component
    folder = Path(component)
    if not folder.is_dir() or (folder / PACKED).is_file() or any(folder.glob("*.tar")):
        return None
    tables = sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if len(tables) > 1:
        raise UserError(
            f"folder {component} holds {len(tables)} tables ({tables[0].name}, {tables[1].name} ...); name the one to "
            "train on"
        )
    return str(tables[0]) if tables else None


def open_table(
    path: str,
    style: CsvFormat | None = None,
    *,
    by_image: bool = False,
    strict: bool = False,
    split: str | None = None,
) -> CsvTable:
    """Scan a table.

    Args:
        style: columns and separator; None for those that the header shows.
        by_image: make all rows of one image a sample (of one `image_id`, or of one path in a table without that column).
        strict: refuse a table with odd rows. Without it a warning names them, and unreadable rows are replaced.
        split: leave out the rows of other splits, of a table with a column of splits; None for all rows.

    Raises:
        UserError: no such file, no header that names an image and a caption, a separator of several characters, no rows, or
            odd rows (`strict`, or all of them).
    """
    style = style or CsvFormat()
    path = find_table(path) or path
    if style.separator and len(style.separator) != 1:
        raise UserError(
            f"--csv-separator {style.separator!r} has {len(style.separator)} characters, and columns are separated by one; "
            "give ',' or ';', or a tab as $'\\t'"
        )
    odd: dict[str, list[int]] = {}  # kind of mistake -> lines
    unreadable = 0
    try:
        with open(path, "rb") as file:
            header_line = file.readline()
            encoding = encoding_of(header_line)
            if not encoding.startswith("utf-8"):
                raise UserError(f"table {path} is {encoding.upper()} text; save it as UTF-8")
            separator = style.separator or guess_separator(header_line.decode("utf-8", "replace"))
            file.seek(0)
            stamp = _stamp(file.fileno())
            scanner = CsvRows(file, separator, _PICTURES)
            records = iter(scanner)
            header = next(records, CsvRow(0, 0, 1, [])).fields
            image, captions, identity, split_place = _columns(path, header, style)
            scanner.width, scanner.image = len(header), image
            rows: list[tuple[int, int]] = []
            images: list[int] = []
            number: dict[str, int] = {}
            pictures: dict[str, str] = {}  # identity -> picture
            splits: list[str] = []  # of each row
            for record in records:
                if (
                    not rows
                    and record.fields[image : image + 1]
                    and _is_address(record.fields[image])
                ):
                    raise UserError(
                        f"table {path} holds addresses of pictures ({record.fields[image][:80]}); fetch them into shards with "
                        f"`zerovl data pack {shlex.quote(path)} --out DIR`"
                    )
                rows.append((record.offset, record.length))
                if split_place is not None:
                    cell = record.fields[split_place : split_place + 1]
                    splits.append(split_of_word(*cell or [""]) or "train")
                if record.odd:
                    odd.setdefault(record.odd, []).append(record.line)
                unreadable += not record.length
                if by_image:
                    known = max(identity, image) < len(record.fields)
                    name = record.fields[identity] if known else f"\0row {len(rows)}"
                    if known and identity != image:
                        picture = record.fields[image]
                        first = pictures.setdefault(name, picture)
                        if picture != first:
                            raise UserError(
                                f"table {path}, line {record.line}: the {header[identity]} {name!r} is of two pictures "
                                f"({first!r} and {picture!r}); give each picture an id of its own, or leave the column out"
                            )
                    images.append(number.setdefault(name, len(number)))
    except (OSError, csv.Error) as error:
        raise UserError(
            f"table {path} cannot be read ({getattr(error, 'strerror', None) or error}); correct its path"
        ) from error
    if not rows:
        raise UserError(f"table {path} holds no rows below its header; check the file")
    mistakes = "; ".join(f"{kind}, {_lines(lines)}" for kind, lines in odd.items())
    if odd and (strict or unreadable == len(rows)):
        raise UserError(
            f"table {path} cannot be read as CSV ({mistakes}); put quotes around fields that hold the separator, and write a "
            'quote in them twice ("")'
        )
    if odd:
        logging.warning(
            f"Table {path}: {mistakes}. Other rows replace the {unreadable} that cannot be read."
        )
    members, ends = np.arange(len(rows)), np.arange(1, len(rows) + 1)
    if by_image:
        members, ends = np.argsort(images, kind="stable"), np.cumsum(np.bincount(images))
    table = CsvTable(
        path,
        separator,
        tuple(header),
        image,
        captions,
        np.array(rows, dtype=np.int64),
        members,
        ends,
        stamp,
    )
    return table if split is None else _of_split(table, splits, split)


def _of_split(table: CsvTable, splits: Sequence[str], split: str) -> CsvTable:
    """Return a table without the rows of other splits. UserError if no row is left."""
    counts = Counter(splits)
    if len(counts) < 2 and (not counts or split in counts):
        return table
    wanted = "val" if split == "test" and "test" not in counts else split
    words = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    if wanted not in counts:
        raise UserError(f"table {table.path} has no rows of the split {split!r}; it has {words}")
    logging.info(f"Table {table.path}: rows by their column of splits: {words}; {wanted} is read")
    return table.without(np.flatnonzero(np.array(splits) != wanted))


def block_sizes(samples: int) -> tuple[int, ...]:
    """Samples in each block of a table."""
    return tuple(min(BLOCK_SAMPLES, samples - begin) for begin in range(0, samples, BLOCK_SAMPLES))


def _lines(numbers: Sequence[int]) -> str:
    """ "lines 3, 8 and 12"; of many the first five and how many more."""
    shown = ", ".join(map(str, numbers[:_NAMED_LINES])) + (
        f" and {len(numbers) - _NAMED_LINES} more" if numbers[_NAMED_LINES:] else ""
    )
    return f"line{'s' if len(numbers) > 1 else ''} {shown}"


def _is_address(picture: str) -> bool:
    return picture.strip().lower().startswith(("http://", "https://"))


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _columns(
    path: str, header: Sequence[str], style: CsvFormat
) -> tuple[int, tuple[int, ...], int, int | None]:
    """Numbers of the columns: image, captions, the one that is equal in rows of the same image, splits (None without them).

    Raises:
        UserError: the header lacks such columns, or has one of them several times.
    """
    names = [name.strip() for name in header]
    captions = None if style.caption_key is None else [style.caption_key]
    try:
        chosen = choose(
            path, names, Wanted(style.image_key, captions), flags=(PICTURE_FLAG, CAPTION_FLAG)
        )
    except UserError as error:
        raise UserError(
            f"{error}; the flags are those of training, and `zerovl data pack {shlex.quote(path)} --out DIR` makes shards"
        ) from error
    logging.info(f"Table {path}: {chosen.words}")
    image = names.index(chosen.picture)
    identity = names.index("image_id") if "image_id" in names else image
    split = None if chosen.split is None else names.index(chosen.split)
    return image, tuple(names.index(name) for name in chosen.captions), identity, split
