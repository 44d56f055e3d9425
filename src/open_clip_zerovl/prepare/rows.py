"""Rows of a picture and its captions, as every reader yields them: where the picture lies, and the source of the row."""

from __future__ import annotations

import os
import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import CLASS_NAMES
from open_clip_zerovl.data.splits import FolderSplits, by_file_name, split_above
from open_clip_zerovl.prepare.pictures import Failure
from open_clip_zerovl.shards.pictures import (
    LARGEST_PICTURE_BYTES,
    BadFile,
    Listing,
    list_pictures,
    notes_of,
    read_foreign,
)

ADDRESS = ("http://", "https://")


def is_address(place: str) -> bool:
    """Return whether a picture is fetched from the web."""
    return place.lower().startswith(ADDRESS)


class Row(NamedTuple):
    """One row of an input.

    Attributes:
        place: an address of its picture, or a key for the reader's `obtain`. Rows of one place have one picture.
        captions: as the input has them: text, a list, nothing. `columns.texts_of` makes captions of them.
        file, line: where the row stands, for messages. Line 0 where the file is the row.
        source: the value of the source column. None if there is none.
        content: the picture's bytes if the row holds them and the reader cannot find them again. Else None.
        refused: why the row cannot be read at all. "" if it can.
        name: the name of the picture's file, as the input has it. "" if it has none.
        label: the picture's class. None if there are no classes.
        split: the word of the input for its split. "" if the input says none.
    """

    place: str
    captions: Sequence[Any]
    file: str
    line: int = 0
    source: Any = None
    content: bytes | None = None
    refused: str = ""
    name: str = ""
    label: str | None = None
    split: str = ""


class Reader(ABC):
    """One input in one form.

    Attributes:
        path: the path of the input.
        form: its name in messages.
        columns: the columns that are read, in words. "" if there are none.
        files: the files that rows are read from.
        pictures, picture_names: the files of pictures of a folder, each of them a row, and their names in it.
        names_pictures: whether rows name pictures by paths or addresses, rather than places in `files`.
        total: number of rows. None if counting would take long.
        notes: oddities of rows that are read nevertheless, in words. Known once they are read.
        classes: templates for zero-shot classification. () if pictures have no classes.
        given_words: the words for its classes, if a file beside the input names them.
        splits: those that the names of folders or files say.
        split_column: the column or key that says the split of a row. None without one.
    """

    path: Path
    form: str
    columns: str = ""
    files: list[Path]
    pictures: Sequence[Path] = ()
    picture_names: Sequence[str] = ()
    names_pictures: bool = False
    total: int | None = None
    notes: Sequence[str] = ()
    classes: Sequence[str] = ()
    given_words: Sequence[str] = ()
    splits: FolderSplits = FolderSplits()
    split_column: str | None = None

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Yield the rows, the same at each call.

        Raises:
            UserError: an input of another form.
        """

    def _find_pictures(self, path: Path) -> Listing:
        """Take a folder for the input, with the pictures in it and below it.

        Raises:
            UserError: it holds none, but perhaps links that lead out of it.
        """
        listed = list_pictures(path)
        self.path = path
        self.pictures = listed.pictures
        self.total = len(self.pictures)
        if not self.pictures:
            notes = "; ".join(notes_of({"": listed})) or "add pictures"
            raise UserError(f"{path} holds no picture that is read; {notes}")
        self.picture_names = [str(file.relative_to(path)) for file in self.pictures]
        self.splits = FolderSplits(self.picture_names, split_above(path))
        return listed

    def _splits_of_files(self) -> FolderSplits:
        """Find the splits of an input whose files hold many pairs each."""
        names = (by_file_name(self.inside(file)) for file in self.files)
        return FolderSplits(names, split_above(self.path))

    def _split_of(self, file: Path) -> str:
        return self.splits(by_file_name(self.inside(file)))[1]

    def inside(self, file: Path) -> str:
        return file.name if file == self.path else str(file.relative_to(self.path))

    def obtain(self, place: str) -> bytes:
        """Read the bytes of a picture of this input, in any thread and at any time.

        Raises:
            Failure: there is none.
        """
        return read_file(place)


def word_of(cell: Any) -> str:
    """Write the cell of a split as text, "" for an empty one."""
    return "" if cell is None or cell != cell else str(cell).strip()


def read_file(
    path: str | Path, *, most_bytes: int = LARGEST_PICTURE_BYTES, kind: str = "picture"
) -> bytes:
    """Read a file that holds a picture or captions.

    Raises:
        Failure: `read_foreign` finds or reads none.
    """
    try:
        return read_foreign(path, most_bytes)
    except BadFile as error:
        raise Failure(error.reason.replace("file", kind, 1)) from error


# ---------------------------------------------------------------------------------------------------------- sources

MOST_SOURCES = 1_000
#: Files and folders that lie beside the sources' folders in an output, or are taken for splits.
_RESERVED = {
    "train",
    "val",
    "test",
    "pack.json",
    "report.json",
    "report.html",
    "refused.csv",
    "origins.csv.gz",
}
_RESERVED |= {"near.json", "near.html", "dataset_type.txt"}
_LONGEST_BYTES = 200  # of a folder's name; file systems take 255


@dataclass(frozen=True)
class SourceNames:
    """Names of the sources of one input: its own, or the values of the source column.

    Args:
        name: the name of the input.
        column: the source column. None if all rows are of one source.
        known: name -> value of the sources that are already known, shared by all inputs.
    """

    name: str
    column: str | None
    known: dict[str, str]

    def of(self, value: Any) -> tuple[str | None, str]:
        """Return (name of the source, why there is none) of a row with this value in the source column.

        Raises:
            UserError: two values give one name, or there are more sources than a mixture has.
        """
        if self.column is None:
            return self.name, ""
        text = "" if value is None else " ".join(str(value).split())
        if not text:
            return None, "no source"
        if not is_utf8(text):
            return None, "source not UTF-8"
        name = source_name(text)
        if name not in self.known and len(self.known) >= MOST_SOURCES:
            raise UserError(
                f"the source column {self.column!r} has more than {MOST_SOURCES} values (the last is {text[:60]!r}): a source "
                "is where pairs come from, a few at most; name another column"
            )
        if self.known.setdefault(name, text) != text:
            raise UserError(
                f"the sources {self.known[name]!r} and {text!r} (column {self.column!r}) would both be called {name!r}: rename "
                "one"
            )
        return name, ""


def source_name(text: str) -> str:
    """Turn a text into the name of a source and a folder: letters of any script, digits and ._-"""
    name = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", text)).strip("-._")
    name = name.encode("utf-8", "ignore")[:_LONGEST_BYTES].decode("utf-8", "ignore") or "source"
    return f"{name}-source" if name.lower() in _RESERVED else name


# --------------------------------------------------------------------------------------------------- captions of classes

#: Caption of a class. One alone: pictures of a class then share it, which `--positives caption` needs.
TEMPLATE = "a photo of a {}."
#: CLIP's short list for zero-shot classification, an ensemble over the texts of a class.
ZERO_SHOT_TEMPLATES = (
    *("itap of a {}.", "a bad photo of the {}.", "a origami {}.", "a photo of the large {}."),
    *("a {} in a video game.", "art of the {}.", "a photo of the small {}."),
)
NAME_THEM = f"name the classes by their folders, or in a {CLASS_NAMES} there (a name a line, in the order of the classes)"
# A word that is spoken with a vowel first: an hourglass, an umbrella; but a unicycle, a European.
_VOWEL_FIRST = re.compile(r"hour|heir|honest|honou?r|(?!uni|use|uk|eu|one\b)[aeiou]", re.IGNORECASE)


class ClassTemplates:
    """The templates of a call.

    Args:
        given: those of the command line. None for TEMPLATE.

    Attributes:
        captions: templates of the captions of training.
        zero_shot: those of zero-shot classification.
        given: whether the command line gives them.

    Raises:
        UserError: a template without a place for the class, or with several.
    """

    def __init__(self, given: Sequence[str] | None) -> None:
        self.given = given is not None
        self.captions = tuple(given or (TEMPLATE,))
        self.zero_shot = tuple(given or ZERO_SHOT_TEMPLATES)
        if wrong := [template for template in self.captions if template.count("{}") != 1]:
            raise UserError(
                f"--template {wrong[0]!r} has no place for the class, or several: write {{}} once, as in {TEMPLATE!r}"
            )

    def of(self, words: str) -> list[str]:
        """Write the captions of a class."""
        return [class_caption(template, words) for template in self.captions]


def class_caption(template: str, label: str) -> str:
    """Put a class in place of `{}`, after "an" for "a" where the class begins with a spoken vowel."""
    if _VOWEL_FIRST.match(label):
        template = re.sub(r"\b([Aa]) \{\}", r"\1n {}", template)
    return template.replace("{}", label)


def public_name(name: str) -> str:
    """Name a picture as shards may show it: without the folders of an absolute path, or an address' user and query."""
    name = name.strip()
    if is_address(name):
        return re.sub(r"^(\w+://)[^/]*@", r"\1", name.partition("?")[0])
    if PureWindowsPath(name).is_absolute():
        return PureWindowsPath(name).name
    return (
        os.path.basename(name)
        if os.path.isabs(os.path.expanduser(name.removeprefix("file://")))
        else name
    )


#: Rows of a file whose pictures are looked for before work begins: if none of them is there, the paths are wrong.
LOOKED_AT = 200
_LONGEST_NAME, _LONGEST_PATH = 255, 1024  # of a file; a longer text is no path


class Places:
    """Resolves the names of one file's pictures, and notices when none of the first ones is there.

    Args:
        file: that names the pictures.
        pictures_in: the folder that they are relative to. None for the file's own.
    """

    def __init__(self, file: Path, pictures_in: Path | None) -> None:
        self.file = file
        self.folder = str((pictures_in or file.parent).absolute())
        self._names: dict[str, tuple[Counter[str], list[str]]] = {}  # of folders

    def place(self, name: str) -> str:
        """Make a path absolute, and leave an address as it is."""
        name = name.strip()
        if is_address(name) or not name:
            return name
        name = name.removeprefix("file://")
        path = os.path.normpath(os.path.join(self.folder, os.path.expanduser(name)))
        return path if os.path.exists(path) else self._otherwise(path) or path

    def _otherwise(self, path: str) -> str | None:
        """Return the file that a path means which is not there as it is written, None if there is none.

        Tables are written on Windows, on a Mac (decomposed letters), with %20, without case, and with `#0` behind the name of
        a picture (Flickr30K's captions).
        """
        spellings = [path.rpartition("#")[0], unquote(path), path.replace("\\", "/")]
        spellings += [unicodedata.normalize(form, path) for form in ("NFC", "NFD")]
        written = next((each for each in spellings if each and os.path.isfile(each)), None)
        if written is not None:
            return os.path.normpath(written)
        folder, name = os.path.split(path)
        if folder not in self._names:
            names = os.listdir(folder) if os.path.isdir(folder) else []
            self._names[folder] = Counter(each.lower() for each in names), names
        counts, names = self._names[folder]
        if counts[name.lower()] != 1:
            return None
        return os.path.join(folder, next(each for each in names if each.lower() == name.lower()))

    def checked(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows.

        Raises:
            UserError: not one of the first pictures exists.
        """
        rows, held = iter(rows), []
        for row in islice(rows, LOOKED_AT):
            held.append(row)
            if row.content is not None or is_address(row.place) or os.path.exists(row.place):
                break
        else:
            if missing := [row for row in held if row.place]:
                raise self._wrong(missing)
        yield from held
        yield from rows

    def _wrong(self, missing: list[Row]) -> UserError:
        first = missing[0]
        where = f"line {first.line}" if first.line else first.file
        text = first.place.removeprefix(f"{self.folder}/")
        if (
            text.startswith("data:")
            or len(text) > _LONGEST_PATH
            or len(os.path.basename(text)) > _LONGEST_NAME
        ):
            return UserError(
                f"the picture of {where} of {self.file} is a text of {len(text):,} characters ({text[:20]}...), not a path: "
                "base64 becomes files, or bytes of a parquet file"
            )
        return UserError(
            f"none of the first {len(missing)} pictures of {self.file} exists; that of {where} should be {first.place}; "
            f"relative paths start at {self.folder}: if the pictures are elsewhere, give their folder with --pictures-in"
        )


def is_utf8(text: str) -> bool:
    """Return whether a text has no bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
