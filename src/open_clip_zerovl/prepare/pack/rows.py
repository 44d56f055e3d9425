"""What every reader yields: rows of a picture and its captions, and where they stand in the input."""

from __future__ import annotations

import ast
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from open_clip_zerovl.core.files import regular_file
from open_clip_zerovl.core.flags import flag
from open_clip_zerovl.prepare.public.pictures import Failure

#: Endings of pictures, as a file's name has them; what a file is, its bytes say.
PICTURE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp"),
        *(".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm", ".ico"),
    )
)
ADDRESS = ("http://", "https://")

_TEXT_KEYS = ("raw", "caption", "text", "sentence")  # of captions that are objects: {"raw": "a dog", "tokens": [...]}


class PairRow(NamedTuple):
    """One row of an input.

    Attributes:
        place: of its picture: an address, or whatever the reader's `obtain` takes. Rows of one place have one picture.
        captions: as the input has them: text, a list, nothing; `texts_of` says which captions they are.
        file, line: where the row stands, for messages; line 0 where the file is the row.
        source: the value of the source column; None where there is none.
        content: the picture's bytes where they come with the row, and the reader cannot find them again; else None.
        refused: why the row cannot be read at all; "" where it can.
    """

    place: str
    captions: Sequence[Any]
    file: str
    line: int = 0
    source: Any = None
    content: bytes | None = None
    refused: str = ""


@dataclass(frozen=True)
class Columns:
    """What the command line says of columns; None for what is guessed.

    Attributes:
        picture: the column of the picture.
        captions: columns of captions, all of them used.
        source: the column whose values are the sources.
        pictures_in: the folder that relative paths are relative to; None for that of the file.
        separator: between the columns of a table.
    """

    picture: str | None = flag(None, "path, address or bytes of the picture", option="--picture-column", metavar="COL")
    captions: tuple[str, ...] | None = flag(
        None, "caption; several: all of them are captions", option="--caption-column", nargs="+", metavar="COL"
    )
    source: str | None = flag(
        None,
        "one source for each value (folder: each folder of a folder of pictures)",
        option="--source-column",
        metavar="COL",
    )
    pictures_in: Path | None = flag(None, "folder that relative paths lead from (default: the table's)", metavar="DIR")
    separator: str | None = flag(None, "between columns (default: found in the first line)", metavar="CHAR")


class Reader(ABC):
    """One input in one form.

    Attributes:
        path: of the input.
        form: its name in messages.
        columns: which columns are read, in words; "" where there are none.
        files: the files whose names and sizes say whether the input is still the same.
        total: number of rows; None where counting would take long.
        notes: what is odd about rows that are read nevertheless, in words; known once they are read.
    """

    path: Path
    form: str
    columns: str = ""
    files: list[Path]
    total: int | None = None
    notes: Sequence[str] = ()

    @abstractmethod
    def rows(self) -> Iterator[PairRow]:
        """The rows, the same at each call. UserError for an input that is not what it should be."""

    def obtain(self, place: str) -> bytes:
        """The bytes of a picture that is no address; any thread may call it, and at any time. Failure where there is none."""
        return read_file(place)


def read_file(place: str | Path, *, largest_bytes: int = -1, kind: str = "picture") -> bytes:
    """The bytes of a picture's or a caption's file.

    Raises:
        Failure: there is none, it is no regular file (a pipe might never be written to), or it is too large.
    """
    try:
        with regular_file(place) as file:
            content = file.read(largest_bytes if largest_bytes < 0 else largest_bytes + 1)
    except FileNotFoundError as error:
        raise Failure(f"{kind} missing") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise Failure(f"{kind} cannot be read") from error
    if 0 <= largest_bytes < len(content):
        raise Failure(f"{kind} too large")
    return content


def texts_of(values: Sequence[Any]) -> tuple[list[str], str]:
    """The captions in the cells of a row, each once, white space made single; and why there are none.

    A cell holds a caption, a list of captions, an object with the caption, or the text of a JSON or Python list.
    """
    problem = "empty caption"
    texts: dict[str, None] = {}
    for value in _flat(values):
        if isinstance(value, bytes):
            value = value.decode("utf-8", "surrogateescape")
        if not isinstance(value, str):
            if value is not None and not (isinstance(value, float) and math.isnan(value)):
                problem = "caption not text"
            continue
        text = " ".join(value.split())
        if not text:
            continue
        if not _is_utf8(text):
            problem = "caption not UTF-8"
            continue
        texts[text] = None
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
    """The list of texts that a cell spells out, as JSON or as Python prints one; else the cell."""
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and found and all(isinstance(item, str) for item in found):
            return found
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
