"""Tables of pairs as sources: open_clip's (`filepath`, `title`) and ZeroVL's (`image,image_id,caption,caption_id`).

The table is scanned once for the offsets of its rows; a row is read from the file when it is needed. Only arrays of numbers
stay in memory, which loader workers share with the process that made them. A list of captions would be copied to each worker.

Image paths are relative to the table's folder.

A row is a line, or several lines where a quoted field holds line breaks. Two mistakes are found and named by line: a stray
quote at the beginning of a field, which for the csv module takes in the lines after it, and a separator in a field without
quotes:

    a.jpg<tab>"great" they said        a stray quote: the line is read by itself, quotes included
    b.jpg,a dog, running               more fields than the header: the row is not shown
"""

from __future__ import annotations

import csv
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.tar.members import IMAGE_EXTENSIONS

EXTENSIONS = (".csv", ".tsv")
BLOCK_SAMPLES = (
    64  # a block of so many rows is to a table what a shard is to tars: blocks are shuffled, then rows in the window
)
_LONGEST_ROW_LINES, _LONGEST_ROW_BYTES = 200, 1 << 20  # a longer row comes of a stray quote
_PICTURES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
_NAMED_LINES = 5  # of each mistake, in messages
_PLAIN_LINE_BYTES = 100_000  # the csv module takes fields of up to 131,072 characters
# Columns of a layout: image, caption, and the one whose equal values say that rows show the same image.
LAYOUTS = (("filepath", "title", "filepath"), ("image", "caption", "image_id"))


@dataclass(frozen=True)
class CsvFormat:
    """How a table is written; None for what its header says.

    Attributes:
        image_key, caption_key: names of the columns (open_clip's `--csv-img-key`, `--csv-caption-key`).
        separator: between columns (open_clip's `--csv-separator`).
    """

    image_key: str | None = None
    caption_key: str | None = None
    separator: str | None = None


@dataclass(frozen=True)
class CsvTable:
    """A scanned table.

    Attributes:
        path: of the table.
        separator: between columns.
        columns: the header.
        image_column, caption_column: their numbers.
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
    caption_column: int
    rows: np.ndarray
    members: np.ndarray
    ends: np.ndarray
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return len(self.ends)

    def rows_of(self, sample: int) -> np.ndarray:
        """Row numbers of a sample."""
        return self.members[self.ends[sample - 1] if sample else 0 : self.ends[sample]]

    def part(self, samples: np.ndarray) -> CsvTable:
        """The table of these samples alone, (n,) numbers. Each sample of the table must be a single row."""
        assert len(self.members) == len(self.ends)
        return replace(self, members=self.members[samples], ends=np.arange(1, len(samples) + 1))

    def read_fields(self, descriptor: int, row: int) -> list[str]:
        """The fields of one row, with bytes that are no UTF-8 as surrogates; a short row has fewer than there are columns.

        Args:
            descriptor: of the opened table.
        """
        offset, length = self.rows[row].tolist()
        text = os.pread(descriptor, abs(length), offset).decode("utf-8", "surrogateescape")
        if length < 0:
            return _as_it_stands(text, self.separator)
        return next(csv.reader([text], delimiter=self.separator), [])

    def read_row(self, descriptor: int, row: int) -> tuple[str, bytes | None]:
        """Path of the image and bytes of the caption of one row; None for a caption that the row does not have."""
        return self.image_and_caption(self.read_fields(descriptor, row))

    def image_and_caption(self, fields: Sequence[str]) -> tuple[str, bytes | None]:
        """`read_row` of fields that have been read."""
        image = fields[self.image_column] if len(fields) > self.image_column else ""
        if len(fields) <= self.caption_column:
            return image, None
        return image, fields[self.caption_column].encode("utf-8", "surrogateescape")

    def is_readable(self, row: int) -> bool:
        """Whether the row can be shown."""
        return bool(self.rows[row, 1])

    def check_unchanged(self, descriptor: int) -> None:
        """UserError where the opened file is not the one that was scanned: the offsets of its rows are unknown."""
        if _stamp(descriptor) != self.stamp:
            raise UserError(
                f"table {self.path} has changed since the run began; start the run again, with --resume to go on, and do not "
                "change the table while it runs"
            )

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
    if not folder.is_dir() or any(folder.glob("*.tar")):
        return None
    tables = sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if len(tables) > 1:
        raise UserError(
            f"folder {component} holds {len(tables)} tables ({tables[0].name}, {tables[1].name} ...); name the one to "
            "train on"
        )
    return str(tables[0]) if tables else None


def open_table(path: str, style: CsvFormat | None = None, *, by_image: bool = False, strict: bool = False) -> CsvTable:
    """Scan a table.

    Args:
        style: columns and separator; None for those that the header shows.
        by_image: make all rows of one image a sample (of one `image_id`, or of one path where there is no such column).
        strict: refuse a table with odd rows; otherwise a warning names them, and those that cannot be read are replaced.

    Raises:
        UserError: no such file, no header that names an image and a caption, no rows, or odd rows (`strict`, or all of them).
    """
    style = style or CsvFormat()
    odd: dict[str, list[int]] = {}  # what is odd -> lines
    unreadable = 0
    try:
        with open(path, "rb") as file:
            separator = style.separator or ("\t" if b"\t" in file.readline() else ",")
            file.seek(0)
            stamp = _stamp(file.fileno())
            scanner = _Scanner(file, separator)
            records = iter(scanner)
            header = next(records, _Row(0, 0, 1, [])).fields
            image, caption, identity = _columns(path, header, style)
            scanner.width, scanner.image = len(header), image
            rows: list[tuple[int, int]] = []
            images: list[int] = []
            number: dict[str, int] = {}
            for record in records:
                rows.append((record.offset, record.length))
                if record.odd:
                    odd.setdefault(record.odd, []).append(record.line)
                unreadable += not record.length
                if by_image:
                    known = identity < len(record.fields)
                    name = record.fields[identity] if known else f"\0row {len(rows)}"
                    images.append(number.setdefault(name, len(number)))
    except OSError as error:
        raise UserError(f"table {path} cannot be read ({error.strerror}); correct its path") from error
    if not rows:
        raise UserError(f"table {path} holds no rows below its header; check the file")
    told = "; ".join(f"{what}, {_lines(lines)}" for what, lines in odd.items())
    if odd and (strict or unreadable == len(rows)):
        raise UserError(
            f"table {path} cannot be read as CSV ({told}); put quotes around fields that hold the separator, and write a quote "
            'in them twice ("")'
        )
    if odd:
        logging.warning(f"Table {path}: {told}. Others stand in for the {unreadable} rows that cannot be read.")
    members, ends = np.arange(len(rows)), np.arange(1, len(rows) + 1)
    if by_image:
        members, ends = np.argsort(images, kind="stable"), np.cumsum(np.bincount(images))
    return CsvTable(
        path, separator, tuple(header), image, caption, np.array(rows, dtype=np.int64), members, ends, stamp
    )


def block_sizes(samples: int) -> tuple[int, ...]:
    """Samples in each block of a table."""
    return tuple(min(BLOCK_SAMPLES, samples - begin) for begin in range(0, samples, BLOCK_SAMPLES))


@dataclass
class _Row:
    """A scanned row: offset and length as in `CsvTable.rows`, number of its first line, fields, what is odd about it."""

    offset: int
    length: int
    line: int
    fields: list[str]
    odd: str = ""


class _TooLong(Exception):
    """A row has more lines or bytes than a row may have."""


class _Scanner:
    """The rows of a table, stray quotes included. The caller sets `width` and `image` when it has read the header."""

    def __init__(self, file: BinaryIO, separator: str) -> None:
        self.file, self.separator = file, separator
        self.width, self.image = 0, 0  # fields of the header, and which one is the image
        self._waiting: deque[bytes] = deque()  # lines that a stray quote had taken into a row
        self._taken: list[bytes] = []  # lines of the current row
        self._first = True

    def __iter__(self) -> Iterator[_Row]:
        offset, line = 0, 1
        reader = self._reader()
        while True:
            self._taken.clear()
            odd, fields = "", []
            raw = self._waiting.popleft() if self._waiting else self.file.readline()
            if self.width and b'"' not in raw and raw.find(b"\r", 0, -2) < 0 and 0 < len(raw) < _PLAIN_LINE_BYTES:
                # Nearly every line. The csv module takes three times as long.
                fields = _as_it_stands(raw.decode("utf-8", "surrogateescape"), self.separator)
                if fields != [""]:
                    more = any(fields[self.width :])
                    length = 0 if more else len(raw)
                    yield _Row(offset, length, line, fields, "more fields than the header" if more else "")
                offset, line = offset + len(raw), line + 1
                continue
            self._waiting.appendleft(raw)
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                odd = str(error) if "larger" in str(error) else "a stray quote"
            except _TooLong:
                odd = "a stray quote"
            if not odd and self._has_stray_quote():
                odd = "a stray quote"
            if odd:  # the first line is the row; the others are read again
                self._waiting.extendleft(reversed(self._taken[1:]))
                del self._taken[1:]
                reader = self._reader()
            length = begin = sum(map(len, self._taken))
            if odd:
                fields = _as_it_stands(self._text(0), self.separator)
                length = -length if odd == "a stray quote" and len(fields) == self.width else 0
            elif self.width and any(fields[self.width :]):
                odd, length = "more fields than the header", 0
            if fields:
                yield _Row(offset, length, line, fields, odd)
            offset, line = offset + begin, line + len(self._taken)
            self._first = False

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._lines(), delimiter=self.separator, strict=True)

    def _lines(self) -> Iterator[str]:
        """The lines that the csv reader takes, kept in `_taken`."""
        while line := self._waiting.popleft() if self._waiting else self.file.readline():
            self._taken.append(line)
            if len(self._taken) > _LONGEST_ROW_LINES or sum(map(len, self._taken)) > _LONGEST_ROW_BYTES:
                raise _TooLong
            yield self._text(-1)

    def _text(self, index: int) -> str:
        """Line `index` of the current row, without the file's byte-order mark."""
        mark = self._first and len(self._taken) == 1
        return self._taken[index].decode("utf-8-sig" if mark else "utf-8", "surrogateescape")

    def _has_stray_quote(self) -> bool:
        """Whether a row of several lines is several rows: its first line and another one have all fields by themselves."""
        lines = [_as_it_stands(self._text(index), self.separator) for index in range(len(self._taken))]
        if len(lines) == 1 or not self.width or len(lines[0]) != self.width:
            return False
        return any(
            len(fields) == self.width
            and (fields[self.image].lower().endswith(_PICTURES) or not any('"' in field for field in fields))
            for fields in lines[1:]
        )


def _as_it_stands(line: str, separator: str) -> list[str]:
    """The fields of a line in which quotes mean nothing."""
    return line.rstrip("\r\n").split(separator)


def _lines(numbers: Sequence[int]) -> str:
    """ "lines 3, 8 and 12"; of many the first five and how many more."""
    shown = ", ".join(map(str, numbers[:_NAMED_LINES])) + (
        f" and {len(numbers) - _NAMED_LINES} more" if numbers[_NAMED_LINES:] else ""
    )
    return f"line{'s' if len(numbers) > 1 else ''} {shown}"


def _stamp(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def _columns(path: str, header: Sequence[str], style: CsvFormat) -> tuple[int, int, int]:
    """Numbers of the columns of a layout: image, caption, identity. UserError where the header has none of the layouts."""
    layouts = list(LAYOUTS)
    if style.image_key is not None and style.caption_key is not None:
        layouts.insert(0, (style.image_key, style.caption_key, "image_id"))
    for image, caption, identity in layouts:
        if image in header and caption in header:
            place = header.index(image)
            return place, header.index(caption), header.index(identity) if identity in header else place
    known = " or ".join(f"{image!r} and {caption!r}" for image, caption, _ in layouts)
    seen = ", ".join(repr(name) for name in header[:6]) or "nothing"
    raise UserError(
        f"the header of {path} has no columns {known} but {seen}; name them with --csv-img-key and --csv-caption-key"
    )
