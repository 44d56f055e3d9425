"""Tables and JSON: CSV and TSV, JSON lines and lists, MS-COCO's and Karpathy's annotations.

A row of a CSV file is a line, or several lines where a quoted field holds line breaks. Two mistakes are found and named by
line: a stray quote at the beginning of a field, which for the csv module takes in the lines after it, and a separator in a
field without quotes:

    a.jpg<tab>"great" they said        a stray quote: the line is read by itself, quotes included
    b.jpg,a dog, running               more fields than the header: the row is not shown
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.columns import (
    Chosen,
    ColumnReader,
    RowFields,
    choose,
    guess_separator,
    listed,
    names_a_picture,
    names_of,
    opened_table,
)
from open_clip_zerovl.prepare.rows import Reader, Row
from open_clip_zerovl.prepare.settings import Columns
from open_clip_zerovl.shards.pictures import PICTURE_SUFFIXES
from open_clip_zerovl.shards.texts import json_array

_LONGEST_ROW_LINES, _LONGEST_ROW_BYTES = 200, 1 << 20  # a longer row comes of a stray quote
_TOO_MANY = "more fields than the header"
_PLAIN_LINE_BYTES = 100_000  # the csv module takes fields of up to 131,072 characters


@dataclass
class CsvRow:
    """A row of a table.

    Attributes:
        line: number of its first line, from 1.
        fields: its columns.
        odd: the fault of its quoting in words, "" for none.
        readable: False for a row that cannot be used. A stray quote may be read as it stands.
    """

    line: int
    fields: list[str]
    odd: str = ""
    readable: bool = True


class _TooLong(Exception):
    """A row has more lines or bytes than a row may have."""


class CsvRows:
    """The rows of a table, stray quotes included. The caller sets `width` and `image` when it has read the header.

    Args:
        file: the table, at its beginning.
        separator: between columns.
        line: the number of the file's next line.
        pictures: endings of picture files (".jpg"): a line of a longer row is a row if its `image` has such an ending.
    """

    def __init__(
        self, file: BinaryIO, separator: str, pictures: tuple[str, ...], line: int = 1
    ) -> None:
        self.file = file
        self.separator = separator
        self.pictures = pictures
        self.width, self.image = 0, 0  # fields of the header, and which one is the image
        self._waiting: deque[bytes] = deque()  # lines that a stray quote had taken into a row
        self._taken: list[bytes] = []  # lines of the current row
        self._first, self._line = True, line

    def __iter__(self) -> Iterator[CsvRow]:
        line = self._line
        reader = self._reader()
        while True:
            self._taken.clear()
            odd, fields = "", []
            raw = self._waiting.popleft() if self._waiting else self.file.readline()
            if (
                self.width
                and b'"' not in raw
                and raw.find(b"\r", 0, -2) < 0
                and 0 < len(raw) < _PLAIN_LINE_BYTES
            ):
                # Nearly every line. The csv module takes three times as long.
                fields = as_it_stands(raw.decode("utf-8", "surrogateescape"), self.separator)
                if fields != [""]:
                    more = any(fields[self.width :])
                    yield CsvRow(line, fields, _TOO_MANY if more else "", not more)
                line += 1
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
            if odd:  # the first line is the row; the other lines are read again
                self._waiting.extendleft(reversed(self._taken[1:]))
                del self._taken[1:]
                reader = self._reader()
            readable = True
            if odd:
                fields = as_it_stands(self._text(0), self.separator)
                readable = odd == "a stray quote" and len(fields) == self.width
            elif self.width and any(fields[self.width :]):
                odd, readable = _TOO_MANY, False
            if fields:
                yield CsvRow(line, fields, odd, readable)
            line += len(self._taken)
            self._first = False

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._lines(), delimiter=self.separator, strict=True)

    def _lines(self) -> Iterator[str]:
        """Yield the lines that the csv reader takes, kept in `_taken`."""
        while line := self._waiting.popleft() if self._waiting else self.file.readline():
            self._taken.append(line)
            if (
                len(self._taken) > _LONGEST_ROW_LINES
                or sum(map(len, self._taken)) > _LONGEST_ROW_BYTES
            ):
                raise _TooLong
            yield self._text(-1)

    def _text(self, index: int) -> str:
        """Line `index` of the current row, without the file's byte-order mark."""
        mark = self._first and len(self._taken) == 1
        return self._taken[index].decode("utf-8-sig" if mark else "utf-8", "surrogateescape")

    def _has_stray_quote(self) -> bool:
        """Return whether a row of several lines is several rows: its first line and another one each have all fields."""
        lines = [
            as_it_stands(self._text(index), self.separator) for index in range(len(self._taken))
        ]
        if len(lines) == 1 or not self.width or len(lines[0]) != self.width:
            return False
        return any(
            len(fields) == self.width
            and (
                fields[self.image].lower().endswith(self.pictures)
                or not any('"' in field for field in fields)
            )
            for fields in lines[1:]
        )


def as_it_stands(line: str, separator: str) -> list[str]:
    """Split a line into fields where quotes mean nothing."""
    return line.rstrip("\r\n").split(separator)


_LOOKED_AT = 100  # objects of a JSON file, for the names of columns
_COCO_LISTS = re.compile(rb'"(images|annotations)"\s*:\s*\[')
_SENTENCES = re.compile(rb'"sentences"\s*:\s*\[')  # of an image of Karpathy's
_BEGINNING_BYTES = 1 << 20


class TableReader(ColumnReader):
    """A CSV or TSV file, also gzipped, whose first line tells separator and columns."""

    form = "table"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        header = self._first_line()
        # a spreadsheet's line of its own
        said = re.fullmatch(r"sep=(.)", header)
        self.begin = 1 if said else 0
        try:
            header = self._first_line(skip=self.begin)
            self.separator = wanted.separator or (said[1] if said else guess_separator(header))
            self.names = [
                name.strip() for name in next(csv.reader([header], delimiter=self.separator), [])
            ]
        except (
            csv.Error
        ) as error:  # a field of more than 128 KiB, or a carriage return between fields
            lines = (
                " (lines that end in a carriage return alone, as some programs save them?)"
                if "\r" in header
                else ""
            )
            raise UserError(
                f"the first line of {path} cannot be read as columns{lines}: save it as CSV with line ends of Unix or Windows"
            ) from error
        self.has_header = not any(names_a_picture(name) for name in self.names)
        self.chosen = (
            choose(str(path), self.names, wanted) if self.has_header else self._headerless()
        )
        header_words = "" if self.has_header else "; no header line"
        self.columns = f"{self.chosen.words}, separator {self.separator!r}{header_words}"

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        chosen = self.chosen
        places = [(name, self.names.index(name)) for name in chosen.read]
        least = max(place for _, place in places)
        stray: list[int] = []
        with opened_table(file) as table:
            for _ in range(self.begin):
                table.readline()
            records = CsvRows(
                cast(BinaryIO, table), self.separator, tuple(PICTURE_SUFFIXES), line=1 + self.begin
            )
            shape = len(self.names), self.names.index(chosen.picture)
            if not self.has_header:
                records.width, records.image = shape
            for number, record in enumerate(records):
                if number == 0 and self.has_header:
                    records.width, records.image = shape
                elif not record.readable:
                    yield record.line, record.odd
                elif len(record.fields) <= least:
                    yield record.line, "fewer fields than the header"
                else:
                    if record.odd:  # read as it stands
                        stray.append(record.line)
                    yield record.line, {name: record.fields[place] for name, place in places}
        if stray:
            shown = ", ".join(map(str, stray[:3])) + (" ..." if len(stray) > 3 else "")
            self.notes = [
                f"a stray quote in {len(stray)} lines, which are read as they stand, quote included: {shown}"
            ]

    def _first_line(self, skip: int = 0) -> str:
        with opened_table(self.path) as file:
            for _ in range(skip):
                file.readline(1 << 20)
            first = file.readline(1 << 20)
        if b"\0" in first:
            raise UserError(
                f"{self.path} is not UTF-8 text (UTF-16 without its mark?): save it as CSV in UTF-8"
            )
        return first.decode("utf-8-sig", "replace").rstrip("\r\n")

    def _headerless(self) -> Chosen:
        """Choose the columns of a table whose first line is a row: numbers, or one picture and one caption."""
        fields, self.names = self.names, [str(number + 1) for number in range(len(self.names))]
        wanted = self.wanted
        if wanted.picture is None and wanted.captions is None and len(fields) == 2:
            picture = next(
                name
                for name, field in zip(self.names, fields, strict=True)
                if names_a_picture(field)
            )
            caption = next(name for name in self.names if name != picture)
            return Chosen(
                picture,
                (caption,),
                None,
                f"picture {picture}, caption {caption} (counted from 1, guessed)",
            )
        if wanted.picture is None or wanted.captions is None:
            shown = listed([field if len(field) <= 40 else f"{field[:40]}..." for field in fields])
            raise UserError(
                f"{self.path} has no header line (its first line is {shown}): number its columns, as --picture-column 1 "
                "--caption-column 2, or write their names above"
            )
        return choose(str(self.path), self.names, wanted)


class JsonReader(ColumnReader):
    """JSON lines, or one JSON list of objects, also gzipped."""

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        with opened_table(path) as file:
            first = file.readline(1 << 20).decode("utf-8-sig", "replace").lstrip()
        self.is_list = first.startswith("[")
        names = names_of(fields for _, fields in islice(self.records(path), _LOOKED_AT))
        if not names:
            raise UserError(
                f"{path} holds no JSON objects, neither one a line nor in a list (it begins with {first[:40]!r}): write one "
                'object a line, as {"image": "1.jpg", "caption": "a dog"}'
            )
        self.chosen = choose(str(path), names, wanted)
        self.columns = self.chosen.words

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        for line, value in self._values(file):
            yield line, value if isinstance(value, dict) else "no JSON object"

    def _values(self, file: Path) -> Iterator[tuple[int, Any]]:
        with opened_table(file) as table:
            if self.is_list:
                yield from enumerate(json_array(table, str(file)), start=1)
                return
            for line, text in enumerate(table, start=1):
                if text.strip():
                    try:
                        yield line, json.loads(text.decode("utf-8-sig", "surrogateescape"))
                    except (ValueError, RecursionError):
                        yield line, None


class CocoReader(ColumnReader):
    """Captions as MS-COCO publishes them: one JSON object with `images` (id, file_name) and `annotations` (image_id, caption).

    A row is an annotation. The entries of all images are in memory.
    """

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        with opened_table(path) as file:
            images = (
                image
                for image in json_array(file, str(path), key="images")
                if isinstance(image, dict)
            )
            self.images = {
                image["id"]: image for image in images if isinstance(image.get("id"), int | str)
            }
        names = names_of(fields for fields in islice(self._annotations(path), _LOOKED_AT))
        self.chosen = choose(
            str(path),
            names_of([*islice(self.images.values(), _LOOKED_AT), dict.fromkeys(names)]),
            replace(wanted, picture="file_name"),
        )
        self.columns = f"annotations as MS-COCO's, caption {listed(self.chosen.captions)}"

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        for number, fields in enumerate(self._annotations(file), start=1):
            wanted = fields.get("image_id")
            image = self.images.get(wanted, {}) if isinstance(wanted, int | str) else {}
            yield number, {**image, **fields, "file_name": image.get("file_name")}

    def _annotations(self, file: Path) -> Iterator[dict[str, Any]]:
        with opened_table(file) as table:
            for entry in json_array(table, str(file), key="annotations"):
                yield entry if isinstance(entry, dict) else {}


class KarpathyReader(ColumnReader):
    """Karpathy's splits of MS-COCO and Flickr30K, one JSON object whose `images` are the rows, each with its sentences."""

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self._of_file(path, wanted)
        words = "annotations as Karpathy's, captions of 'sentences', split 'split'"
        self.chosen = Chosen("file_name", ("sentences",), wanted.source, words, "split")
        self.columns = words

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        with opened_table(file) as table:
            for number, image in enumerate(json_array(table, str(file), key="images"), start=1):
                if not isinstance(image, dict) or not isinstance(image.get("filename"), str):
                    yield number, "no picture named"
                    continue
                folder = str(image.get("filepath") or "")
                yield number, {**image, "file_name": os.path.join(folder, image["filename"])}


class SplitTables(Reader):
    """The tables of a folder, each of one split: `train.csv` and `test.csv`, `train/metadata.csv` and `test/metadata.csv`."""

    names_pictures = True

    def __init__(self, path: Path, readers: Sequence[ColumnReader]) -> None:
        self.path, self.readers = path, readers
        self.files = [reader.path for reader in readers]
        self.form = readers[0].form
        self.columns = "; ".join(dict.fromkeys(reader.columns for reader in readers))
        self.splits = self._splits_of_files()

    def rows(self) -> Iterator[Row]:
        for reader in self.readers:
            yield from reader.rows()
        self.notes = [note for reader in self.readers for note in reader.notes]


def open_json(path: Path, wanted: Columns) -> ColumnReader:
    """Return the reader of a JSON file, by its beginning: MS-COCO's annotations, Karpathy's, or objects."""
    with opened_table(path) as file:
        beginning = file.read(_BEGINNING_BYTES)
    is_object = beginning.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{")
    if not is_object or _COCO_LISTS.search(beginning) is None:
        return JsonReader(path, wanted)
    return (KarpathyReader if _SENTENCES.search(beginning) else CocoReader)(path, wanted)
