"""CSV, TSV and JSON lines as inputs: one row a line, the picture as a path or an address."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from open_clip_zerovl.core.csv_rows import CsvRow, CsvRows
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.columns import Chosen, choose, guess_picture, listed
from open_clip_zerovl.prepare.pack.paths import Places
from open_clip_zerovl.prepare.pack.rows import ADDRESS, PICTURE_SUFFIXES, Columns, PairRow, Reader
from open_clip_zerovl.shards.archives import json_array, members, open_member

_SEPARATORS = ("\t", ",", ";", "|")
_LOOKED_AT_OBJECTS = 100


class TableReader(Reader):
    """A CSV or TSV file, also gzipped; separator and columns are told from its first line."""

    form = "table"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self.path, self.files, self.wanted = path, [path], wanted
        self.places = Places(path, wanted.pictures_in)
        header = self._first_line()
        try:
            self.separator = wanted.separator or _separator(header)
            self.names = [name.strip() for name in next(csv.reader([header], delimiter=self.separator), [])]
        except csv.Error as error:  # a field of more than 128 KiB, or a carriage return between fields
            lines = (
                " (lines that end in a carriage return alone, as some programs save them?)" if "\r" in header else ""
            )
            raise UserError(
                f"the first line of {path} cannot be read as columns{lines}: save it as CSV with line ends of Unix or Windows"
            ) from error
        self.has_header = not any(_names_a_picture(name) for name in self.names)
        self.chosen = self._headerless() if not self.has_header else choose(str(path), self.names, wanted)
        header_words = "" if self.has_header else "; no header line"
        self.columns = f"{self.chosen.words}, separator {self.separator!r}{header_words}"

    def rows(self) -> Iterator[PairRow]:
        return self.places.checked(self._rows())

    def _rows(self) -> Iterator[PairRow]:
        picture = self.names.index(self.chosen.picture)
        captions = [self.names.index(name) for name in self.chosen.captions]
        source = self.names.index(self.chosen.source) if self.chosen.source is not None else None
        least = max([picture, *captions, source or 0])
        stray: list[int] = []
        name = self.path.name
        with opened_table(self.path) as file:
            records = CsvRows(cast(BinaryIO, file), self.separator, tuple(PICTURE_SUFFIXES))
            if not self.has_header:
                records.width, records.image = len(self.names), picture
            for number, record in enumerate(records):
                if number == 0 and self.has_header:
                    records.width, records.image = len(self.names), picture
                    continue
                refused = _odd(record) or ("fewer fields than the header" if len(record.fields) <= least else "")
                if refused:
                    yield PairRow("", (), name, record.line, refused=refused)
                    continue
                if record.odd:
                    stray.append(record.line)
                place = self.places.place(record.fields[picture])
                value = record.fields[source].strip() if source is not None else None
                yield PairRow(place, [record.fields[i] for i in captions], name, record.line, value)
        if stray:
            shown = ", ".join(map(str, stray[:3])) + (" ..." if len(stray) > 3 else "")
            self.notes = [f"a stray quote in {len(stray)} lines, which are read as they stand, quote included: {shown}"]

    def _first_line(self) -> str:
        with opened_table(self.path) as file:
            first = file.readline(1 << 20)
        if first.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in first:
            raise UserError(
                f"{self.path} is not UTF-8 text (UTF-16, as some programs save it?): save it as CSV in UTF-8"
            )
        text = first.decode("utf-8-sig", "replace").rstrip("\r\n")
        if not text.strip():
            raise UserError(f"{self.path} has no first line with the names of its columns: check the file")
        return text

    def _headerless(self) -> Chosen:
        """The columns of a table whose first line is a row: numbers, or one picture and one caption."""
        fields, self.names = self.names, [str(number + 1) for number in range(len(self.names))]
        wanted, shown = self.wanted, _shown(fields)
        if wanted.picture is None and wanted.captions is None and len(fields) == 2:
            picture = next(name for name, field in zip(self.names, fields, strict=True) if _names_a_picture(field))
            caption = next(name for name in self.names if name != picture)
            return Chosen(picture, (caption,), None, f"picture {picture}, caption {caption} (counted from 1, guessed)")
        if wanted.picture is None or wanted.captions is None:
            raise UserError(
                f"{self.path} has no header line (its first line is {shown}): number its columns, as --picture-column 1 "
                "--caption-column 2, or write their names above"
            )
        return choose(str(self.path), self.names, wanted)


class JsonReader(Reader):
    """JSON lines, or one JSON list of objects; also gzipped."""

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self.path, self.files, self.wanted = path, [path], wanted
        self.places = Places(path, wanted.pictures_in)
        with opened_table(path) as file:
            first = file.readline(1 << 20).decode("utf-8-sig", "replace").lstrip()
        self.is_list = first.startswith("[")
        names: dict[str, None] = {}
        for _, (_, value) in zip(range(_LOOKED_AT_OBJECTS), self._objects(), strict=False):
            if isinstance(value, dict):
                names.update(dict.fromkeys(value))
        if not names:
            raise UserError(
                f"{path} holds no JSON objects, neither one a line nor in a list (it begins with {first[:40]!r}): write one "
                'object a line, as {"image": "1.jpg", "caption": "a dog"}'
            )
        self.chosen = choose(str(path), list(names), wanted)
        self.columns = self.chosen.words

    def rows(self) -> Iterator[PairRow]:
        return self.places.checked(self._rows())

    def _rows(self) -> Iterator[PairRow]:
        chosen, name = self.chosen, self.path.name
        for line, value in self._objects():
            if not isinstance(value, dict):
                yield PairRow("", (), name, line, refused="no JSON object")
                continue
            picture = value.get(chosen.picture)
            if isinstance(picture, dict):  # the picture column of Hugging Face, written as JSON
                picture = picture.get("path")
            source = value.get(chosen.source) if chosen.source is not None else None
            if not isinstance(picture, str):
                yield PairRow("", (), name, line, refused="no picture named")
                continue
            yield PairRow(self.places.place(picture), [value.get(key) for key in chosen.captions], name, line, source)

    def _objects(self) -> Iterator[tuple[int, Any]]:
        """(line, or number in the list, from 1; value); None for a line that is no JSON."""
        with opened_table(self.path) as file:
            if self.is_list:
                yield from enumerate(json_array(file, str(self.path)), start=1)
                return
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    yield line, json.loads(text.decode("utf-8-sig"))
                except (ValueError, RecursionError):
                    yield line, None


@contextmanager
def opened_table(path: Path) -> Iterator[IO[bytes]]:
    """The plain bytes of a table, gzipped or not. UserError for a zip, or a file that cannot be read."""
    if path.suffix.lower() == ".zip":
        raise UserError(
            f"{path} is a zip with {listed(members(path)[:3])}: unpack it, and give the folder or the table"
        )
    try:
        with open_member(path, path.name) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path") from error


def _shown(fields: list[str]) -> str:
    """The fields of a row, cut for a message."""
    return listed([field if len(field) <= 40 else f"{field[:40]}..." for field in fields])


def _separator(header: str) -> str:
    """The separator with which a header has columns that are known by name, else the one that it has most of."""
    there = sorted((s for s in _SEPARATORS if s in header), key=header.count, reverse=True)
    for separator in there:
        if guess_picture(next(csv.reader([header], delimiter=separator), [])):
            return separator
    return there[0] if there else ","


def _names_a_picture(field: str) -> bool:
    """Whether a field is an address, or the name of a picture's file."""
    field = field.strip().lower()
    return field.startswith(ADDRESS) or field.endswith(tuple(PICTURE_SUFFIXES))


def _odd(record: CsvRow) -> str:
    """Why a row cannot be read; "" for one that can, as it stands where a stray quote is in it."""
    if record.length > 0 or (record.length < 0 and record.odd):
        return ""
    return record.odd or "unreadable row"
