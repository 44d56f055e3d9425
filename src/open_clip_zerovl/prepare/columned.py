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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
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

_LONGEST_ROW_LINES = 200  # a longer row comes of a stray quote
_LONGEST_ROW = 1 << 20  # characters
_PLAIN_LINE = 100_000  # the csv module takes fields of up to 131,072 characters
_TOO_MANY, _STRAY = "more fields than the header", "a stray quote"


def csv_rows(
    file: IO[bytes], separator: str, width: int, image: int, line: int = 1
) -> Iterator[tuple[int, list[str], str]]:
    """Yield the rows of a table, stray quotes included.

    Each is (number of its first line, columns, the fault of its quoting in words, "" for none). A row without columns cannot be
    used; one with a stray quote may be, as it stands.

    Args:
        file: the table, at the beginning of a row.
        separator: between columns.
        width: the number of columns.
        image: the place of the picture's column.
        line: the number of the file's next line.
    """
    waiting: deque[str] = deque()  # lines that a stray quote had taken into a row

    def read() -> str:
        return waiting.popleft() if waiting else file.readline().decode("utf-8", "surrogateescape")

    text = read().removeprefix("\ufeff")
    while text:
        taken, odd = [text], ""
        fields = as_it_stands(text, separator)
        # Nearly every line is plain. The csv module takes three times as long.
        if '"' in text or "\r" in text[:-2] or len(text) >= _PLAIN_LINE:
            fields, odd = _quoted_row(taken, read, separator)
            if odd or _are_rows(taken, separator, width, image):
                # the first line is the row; the other lines are read again
                waiting.extendleft(reversed(taken[1:]))
                del taken[1:]
                odd = odd or _STRAY
                fields = as_it_stands(text, separator) if odd == _STRAY else []
                fields = fields if len(fields) == width else []
        if not odd and any(fields[width:]):
            odd, fields = _TOO_MANY, []
        if (fields or odd) and text.rstrip("\r\n"):
            yield line, fields, odd
        line += len(taken)
        text = read()


def _quoted_row(taken: list[str], read: Callable[[], str], separator: str) -> tuple[list[str], str]:
    """Parse a row with the csv module, and return its fields and the fault of its quoting.

    Args:
        taken: its first line. Further ones are added.
    """

    def lines() -> Iterator[str]:
        yield taken[0]
        while more := read():
            taken.append(more)
            if len(taken) > _LONGEST_ROW_LINES or sum(map(len, taken)) > _LONGEST_ROW:
                return
            yield more

    try:
        return next(csv.reader(lines(), delimiter=separator, strict=True), []), ""
    except csv.Error as error:
        return [], str(error) if "larger" in str(error) else _STRAY


def _are_rows(taken: Sequence[str], separator: str, width: int, image: int) -> bool:
    """Return whether a row of several lines is several rows: its first line and another one each have all fields."""
    first, *others = (as_it_stands(text, separator) for text in taken)
    return len(first) == width and any(
        len(fields) == width
        and (
            fields[image].lower().endswith(tuple(PICTURE_SUFFIXES))
            or not any('"' in field for field in fields)
        )
        for fields in others
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

    def _choose(self) -> Chosen:
        path, wanted = self.path, self.wanted
        with opened_table(path) as file:
            first, second = file.readline(1 << 20), file.readline(1 << 20)
        if b"\0" in first:
            raise UserError(
                f"{path} is not UTF-8 text (UTF-16 without its mark?): save it as CSV in UTF-8"
            )
        header = first.decode("utf-8-sig", "replace").rstrip("\r\n")
        said = re.fullmatch(r"sep=(.)", header)  # a spreadsheet's line of its own
        self.begin = 1 if said else 0
        if said:
            header = second.decode("utf-8", "replace").rstrip("\r\n")
        # a long field, or a carriage return between fields
        with reading(path, "save it as CSV with line ends of Unix or Windows"):
            self.separator = wanted.separator or (said[1] if said else guess_separator(header))
            fields = next(csv.reader([header], delimiter=self.separator), [])
        self.names = [name.strip() for name in fields]
        self.has_header = not any(names_a_picture(name) for name in self.names)
        chosen = choose(str(path), self.names, wanted) if self.has_header else self._headerless()
        words = f"{chosen.words}, separator {self.separator!r}"
        return replace(chosen, words=words if self.has_header else f"{words}; no header line")

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        places = {name: self.names.index(name) for name in self.chosen.read}
        shape = len(self.names), places[self.chosen.picture]
        stray: list[int] = []
        with opened_table(file) as table:
            for _ in range(self.begin):
                table.readline()
            rows = csv_rows(table, self.separator, *shape, line=1 + self.begin)
            for line, fields, odd in islice(rows, int(self.has_header), None):
                if not fields:
                    yield line, odd
                elif len(fields) <= max(places.values()):
                    yield line, "fewer fields than the header"
                else:
                    if odd:  # read as it stands
                        stray.append(line)
                    yield line, {name: fields[place] for name, place in places.items()}
        if stray:
            shown = ", ".join(map(str, stray[:3])) + (" ..." if len(stray) > 3 else "")
            self.notes = [
                f"a stray quote in {len(stray)} lines, which are read as they stand, quote included: {shown}"
            ]

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

    def _choose(self) -> Chosen:
        path = self.path
        with opened_table(path) as file:
            first = file.readline(1 << 20).decode("utf-8-sig", "replace").lstrip()
        self.is_list = first.startswith("[")
        names = names_of(fields for _, fields in islice(self.records(path), _LOOKED_AT))
        if not names:
            raise UserError(
                f"{path} holds no JSON objects, neither one a line nor in a list (it begins with {first[:40]!r}): write one "
                'object a line, as {"image": "1.jpg", "caption": "a dog"}'
            )
        return choose(str(path), names, self.wanted)

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

    A row is an annotation.
    """

    form = "json"

    def _choose(self) -> Chosen:
        self.annotations = self._entries("annotations")
        images = [each for each in self._entries("images") if isinstance(each.get("id"), int | str)]
        self.images = {image["id"]: image for image in images}
        names = names_of(self.annotations[:_LOOKED_AT])
        chosen = choose(
            str(self.path),
            names_of([*islice(self.images.values(), _LOOKED_AT), dict.fromkeys(names)]),
            replace(self.wanted, picture="file_name"),
        )
        words = f"annotations as MS-COCO's, caption {listed(chosen.captions)}"
        return replace(chosen, words=words)

    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        for number, fields in enumerate(self.annotations, start=1):
            wanted = fields.get("image_id")
            image = self.images.get(wanted, {}) if isinstance(wanted, int | str) else {}
            yield number, {**image, **fields, "file_name": image.get("file_name")}

    def _entries(self, key: str) -> list[dict[str, Any]]:
        with opened_table(self.path) as file:
            entries = json_array(file, str(self.path), key=key)
        return [entry if isinstance(entry, dict) else {} for entry in entries]


class KarpathyReader(ColumnReader):
    """Karpathy's splits of MS-COCO and Flickr30K, one JSON object whose `images` are the rows, each with its sentences."""

    form = "json"

    def _choose(self) -> Chosen:
        words = "annotations as Karpathy's, captions of 'sentences', split 'split'"
        return Chosen("file_name", ("sentences",), self.wanted.source, words, "split")

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
