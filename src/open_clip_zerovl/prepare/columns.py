"""Inputs whose rows have named columns: which column is the picture, the caption, the source, and the captions in a cell."""

from __future__ import annotations

import ast
import codecs
import csv
import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.splits import split_column
from open_clip_zerovl.prepare.rows import Places, Reader, Row, is_address, public_name, word_of
from open_clip_zerovl.prepare.settings import Columns
from open_clip_zerovl.shards.pictures import PICTURE_SUFFIXES
from open_clip_zerovl.shards.texts import (
    EMPTY,
    BadCaption,
    caption_of,
    encoding_of,
    open_member,
)

CAPTION_NAMES = (
    *(
        "caption",
        "captions",
        "title",
        "text",
        "texts",
        "txt",
        "sentence",
        "sentences",
        "description",
        "descriptions",
    ),
    *("alt_text", "alttext", "alt", "prompt", "comment", "raw", "report"),
)
#: Names of picture columns, the likelier first: the picture itself, then a path, then an address.
PICTURE_NAMES = (
    *("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp"),
    *(
        "filepath",
        "file_path",
        "image_path",
        "img_path",
        "picture_path",
        "path",
        "file_name",
        "filename",
    ),
    *(
        "image_file",
        "image_name",
        "img_name",
        "image_filename",
        "picture_file",
        "file",
        "images",
        "photo_id",
    ),
    *("url", "image_url", "img_url", "picture_url", "photo_url", "photo_image_url", "link"),
)
_FLAGS = ("--picture-column", "--caption-column")
_SEPARATORS = ("\t", ",", ";", "|")
_NUMBERED = re.compile(r"(caption|title|text|sentence|description)s?_?\d+")
# of captions that are objects: {"raw": "a dog", "tokens": [...]}
_TEXT_KEYS = ("raw", "caption", "text", "sentence")


def find(where: str, names: Sequence[str], name: str, flag: str) -> str:
    """Find the column of this name.

    Raises:
        UserError: it is missing. The sentence lists the existing columns.
    """
    if name in names:
        return name
    same = [known for known in names if plain(known) == plain(name)]
    if len(same) == 1:
        return same[0]
    raise UserError(
        f"{where} has no column {name!r}, given with {flag}; its columns are {listed(names)}"
    )


def guess_captions(names: Sequence[str], picture: str | None = None) -> tuple[str, ...]:
    """Guess the column of captions by its name, or several columns that are numbered."""
    known = {plain(name): name for name in reversed(names) if name != picture}
    numbered = [name for name in names if _NUMBERED.fullmatch(plain(name)) and name != picture]
    likely = next((known[name] for name in CAPTION_NAMES if name in known), None)
    return tuple(numbered) if likely is None else (likely,)


def guess_picture(names: Sequence[str]) -> str | None:
    """Guess the picture's column by its name."""
    known = {plain(name): name for name in reversed(names)}
    return next((known[name] for name in PICTURE_NAMES if name in known), None)


def guess_separator(header: str) -> str:
    """Guess the separator with which a header has columns that are known by name, else the one that it has most of."""
    there = sorted((s for s in _SEPARATORS if s in header), key=header.count, reverse=True)
    for separator in there:
        if guess_picture(next(csv.reader([header], delimiter=separator), [])):
            return separator
    return there[0] if there else ","


@dataclass(frozen=True)
class Chosen:
    """The names of the columns that are read, and a description of them."""

    picture: str
    captions: tuple[str, ...]
    source: str | None
    words: str
    split: str | None = None

    @property
    def read(self) -> list[str]:
        """Name all columns that are read, each once."""
        chosen = (self.picture, *self.captions, self.source, self.split)
        return list(dict.fromkeys(name for name in chosen if name is not None))


def choose(
    where: str,
    names: Sequence[str],
    wanted: Columns,
    *,
    pictures: Sequence[str] = (),
) -> Chosen:
    """Choose the columns of a table.

    Args:
        where: the file, for messages.
        names: the names of all its columns.
        wanted: the columns that the command line names.
        pictures: columns that hold pictures by their type. The first takes precedence over guesses from names.

    Raises:
        UserError: a column that is not there or has the name of another, or none with a name of a picture or a caption.
    """
    if wanted.picture is not None:
        picture: str | None = find(where, names, wanted.picture, _FLAGS[0])
    else:
        picture = pictures[0] if pictures else guess_picture(names)
    if wanted.captions is not None:
        captions = tuple(find(where, names, name, _FLAGS[1]) for name in wanted.captions)
    else:
        captions = guess_captions(names, picture)
    if picture is None or not captions:
        raise UserError(_not_found(where, names, picture, captions))
    source = (
        find(where, names, wanted.source, "--source-column") if wanted.source is not None else None
    )
    for name in filter(None, (picture, *captions, source)):
        count = list(names).count(name)
        if count > 1:
            raise UserError(
                f"{where} has {count} columns named {name!r}: give each column its own name"
            )
    guessed = [
        flag
        for flag, given in zip(_FLAGS, (wanted.picture, wanted.captions), strict=True)
        if given is None
    ]
    words = f"picture {picture!r}, caption {listed(captions)}" + (
        f" (guessed; choose other columns with {' and '.join(guessed)})" if guessed else ""
    )
    split = split_column([name for name in names if name not in (picture, *captions, source)])
    if split is not None:
        words += f", split {split!r}"
    return Chosen(picture, captions, source, words, split)


def _not_found(
    where: str,
    names: Sequence[str],
    picture: str | None,
    captions: Sequence[str],
) -> str:
    """Write the sentence for a table without a column that is named like a picture, or like a caption, or both."""
    missing = {}
    if picture is None:
        missing[_FLAGS[0]] = "a picture (image, filepath, url ...)"
    if not captions:
        missing[_FLAGS[1]] = "a caption (caption, title, text ...)"
    return (
        f"no column of {where} is named like {' or '.join(missing.values())}; its columns are {listed(names)}: "
        f"name {'it' if len(missing) == 1 else 'them'} with {' and '.join(missing)}"
    )


def listed(names: Sequence[str]) -> str:
    """Write names in a sentence, the first ones of many."""
    return ", ".join(map(repr, names[:12])) + (
        f" and {len(names) - 12} more" if len(names) > 12 else ""
    )


def plain(name: str) -> str:
    """Write the name of a column without case, blanks and dashes."""
    return re.sub(r"[\s\-.]+", "_", name.strip().lower())


def texts_of(values: Sequence[Any]) -> tuple[list[str], str]:
    """Return the captions in the cells of a row (`shards.texts`), each once, and the reason if there are none.

    A cell holds a caption, a list of captions, an object with the caption, or the text of a JSON or Python list.
    """
    problem = EMPTY
    texts: dict[str, None] = {}
    for value in _flat(values):
        if isinstance(value, bytes):
            value = value.decode("utf-8", "surrogateescape")
        if not isinstance(value, str):
            if value is not None and not (isinstance(value, float) and math.isnan(value)):
                problem = "caption not text"
            continue
        try:
            texts[caption_of(value)] = None
        except BadCaption as error:
            if error.reason != EMPTY:
                return [], error.reason
    return list(texts), "" if texts else problem


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, str) and value[:1] == "[" and value.rstrip()[-1:] == "]":
            value = _listed(value)
        if isinstance(value, dict):
            value = next((value[key] for key in _TEXT_KEYS if key in value), 0)
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _listed(text: str) -> Any:
    """Return the list of texts that a cell spells out, as JSON or as Python prints one, else the cell."""
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return value
    return text


#: A row by the names of its columns, or the reason why it cannot be read.
RowFields = Mapping[str, Any] | str


class ColumnReader(Reader):
    """One of the columns names a row's picture (a path, an address), or holds it: bytes, or Hugging Face's {bytes, path}."""

    names_pictures = True

    def __init__(self, path: Path, wanted: Columns, files: Sequence[Path] = ()) -> None:
        self.path, self.wanted = path, wanted
        self.files = list(files) or [path]
        self.splits = self._splits_of_files()
        self.chosen = self._choose()
        self.columns, self.split_column = self.chosen.words, self.chosen.split

    @abstractmethod
    def _choose(self) -> Chosen:
        """Choose the columns, and describe them."""

    @abstractmethod
    def records(self, file: Path) -> Iterator[tuple[int, RowFields]]:
        """Yield (line, or number from 1, and record) of each row of a file, with at least the columns that are chosen."""

    def rows(self) -> Iterator[Row]:
        for file in self.files:
            places = Places(file, self.wanted.pictures_in)
            split = self._split_of(file) if self.splits.says else ""
            for row in places.checked(self._rows(file, places)):
                yield row if row.split else row._replace(split=split)

    def _rows(self, file: Path, places: Places) -> Iterator[Row]:
        chosen = self.chosen
        for line, fields in self.records(file):
            if isinstance(fields, str):
                yield Row("", (), file.name, line, refused=fields)
                continue
            picture, name = fields.get(chosen.picture), ""
            if isinstance(picture, dict):
                content, name = picture.get("bytes"), str(picture.get("path") or "")
                picture = content if isinstance(content, bytes) and content else picture.get("path")
            captions, label = self._captions(fields)
            row = Row(
                "",
                captions,
                file.name,
                line,
                fields.get(chosen.source) if chosen.source else None,
                label=label,
                split=word_of(fields.get(chosen.split)) if chosen.split else "",
            )
            if label == "":
                yield row._replace(label=None, refused="no class")
            elif isinstance(picture, bytes) and picture:
                yield row._replace(place=f"{file}#{line}", content=picture, name=public_name(name))
            elif isinstance(picture, str):
                yield row._replace(place=places.place(picture), name=public_name(picture))
            else:
                yield row._replace(refused="no picture named")

    def _captions(self, fields: Mapping[str, Any]) -> tuple[list[Any], str | None]:
        """Return the captions of a row, and its class: None without classes, "" for a row that has none."""
        return [fields.get(name) for name in self.chosen.captions], None


@contextmanager
def opened_table(path: Path) -> Iterator[IO[bytes]]:
    """Open the plain bytes of a table, gzipped or not, converted to UTF-8 if it has a byte-order mark.

    Raises:
        UserError: a file that cannot be read.
    """
    try:
        with open_member(path, path.name) as file:
            encoding = encoding_of(file.read(4))
            file.seek(0)
            yield (
                file
                if encoding.startswith("utf-8")
                else cast(IO[bytes], codecs.EncodedFile(file, "utf-8", encoding))
            )
    except UnicodeError as error:
        raise UserError(
            f"{path} is not the {encoding.upper()} that its first bytes say ({error}): save it as UTF-8"
        ) from error


def names_of(records: Iterable[Any]) -> list[str]:
    """List the keys of objects, in the order in which they first come."""
    return list(
        dict.fromkeys(name for record in records if isinstance(record, dict) for name in record)
    )


def names_a_picture(field: str) -> bool:
    """Return whether a field is an address or the name of a picture's file."""
    field = re.sub(r"#\d+$", "", field.strip().lower())  # Flickr30K's captions
    return is_address(field) or field.endswith(tuple(PICTURE_SUFFIXES))
