"""Inputs of pictures that are files or members of tars, without a table.

1.jpg, 1.txt                   lines of the text are captions
1.jpg, 1.json                  an object that holds the caption
hat/1.jpg, web/hat/1.jpg       a class, or a source and a class: captions are made from templates
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import class_order, class_words, names_beside
from open_clip_zerovl.data.splits import split_column
from open_clip_zerovl.prepare.columns import choose
from open_clip_zerovl.prepare.columns import listed as shown_names
from open_clip_zerovl.prepare.pictures import Failure
from open_clip_zerovl.prepare.rows import (
    NAME_THEM,
    ClassTemplates,
    Reader,
    Row,
    read_file,
    word_of,
)
from open_clip_zerovl.prepare.settings import Columns
from open_clip_zerovl.shards.fetch import ShardCache
from open_clip_zerovl.shards.pictures import (
    UNREAD,
    Listing,
    notes_of,
    walk,
)
from open_clip_zerovl.shards.tar import (
    TEXT_EXTENSION,
    ShardError,
    image_of,
    locate_samples,
    object_of,
    why_no_pairs,
)
from open_clip_zerovl.shards.texts import caption_lines

#: The source column that a folder of pictures has by itself: the first folder on a picture's path.
FOLDER_COLUMN = "folder"
_JSON_EXTENSION = "json"
_LARGEST_TEXT_BYTES = 1 << 20  # beside a picture
_LOOKED_AT = 20  # samples, for the keys of their JSON


class SampleReader(Reader):
    """Captions are the lines of texts, or under keys of JSON objects.

    Attributes:
        keys: JSON keys of the captions. None if captions are text files.
    """

    wanted: Columns
    keys: tuple[str, ...] = ()

    def _choose(self, where: str, tables: Iterable[bytes], *, has_text: bool) -> None:
        """Set `keys` and `columns` from the first JSON objects.

        Raises:
            UserError: a key that is not there, or none with a name of captions.
        """
        objects = [object_of(table) for table in tables]
        # Without a JSON the named columns belong to other inputs, such as a table.
        names = list(dict.fromkeys(name for fields in objects for name in fields or {}))
        self.split_column = split_column(names)
        if not objects or (has_text and self.wanted.captions is None):
            self.columns = "captions in .txt, one a line"
            return
        # the picture and the source are not among the keys
        wanted = replace(self.wanted, picture=None, source=None)
        self.keys = choose(where, names, wanted, pictures=("",)).captions
        guessed = (
            " (guessed; name another with --caption-column)" if self.wanted.captions is None else ""
        )
        self.columns = f"caption {shown_names(self.keys)} of the .json files{guessed}"

    def _row(self, row: Row, text: bytes | None, table: bytes | None) -> Row:
        """Make a row with the captions and the source of its sample."""
        fields: dict[str, Any] | None = {}
        if table is not None and (self.keys or self.wanted.source or self.split_column):
            fields = object_of(table)
        if fields is None:
            if self.keys or self.wanted.source:
                return row._replace(refused="no JSON object")
            fields = {}
        row = row._replace(split=word_of(fields.get(self.split_column or "")) or row.split)
        source = fields.get(self.wanted.source) if self.wanted.source is not None else None
        if self.keys:
            return row._replace(captions=[fields.get(key) for key in self.keys], source=source)
        if text is None:
            return row._replace(refused="no text of its name", source=source)
        return row._replace(captions=caption_lines(text), source=source)


class FolderReader(SampleReader):
    """Pictures with texts beside them, in a folder and the folders below it."""

    form = "folder"
    names_pictures = True

    def __init__(self, path: Path, wanted: Columns) -> None:
        self.wanted = wanted
        listed = self._find_pictures(path)
        here = {str(file) for file in listed.others if file.suffix in (".txt", ".json")}
        stems = [os.path.splitext(picture)[0] for picture in self.pictures]
        # paths of texts and JSON files beside pictures
        self.texts = {f"{stem}{end}" for stem in stems for end in (".txt", ".json")} & here
        self.notes = notes_of({"": listed}, used={Path(text) for text in self.texts})
        self.files = list(map(Path, sorted(self.texts)))
        if not self.texts:
            first = self.picture_names[0]
            table = min(here, default="a table of pictures and captions")
            raise UserError(
                f"{path} has {len(self.pictures)} pictures and no captions: no text file has the name of a picture; give "
                f"{table} (with --pictures-in for names in another folder), write the caption of {first} into "
                f"{os.path.splitext(first)[0]}.txt, or sort the pictures into folders of classes, CLASS/PICTURE or "
                "SOURCE/CLASS/PICTURE"
            )
        tables = sorted(text for text in self.texts if text.endswith(".json"))
        objects: list[bytes] = []
        for table in tables[:_LOOKED_AT]:
            with suppress(Failure):
                objects.append(_read(table))
        self._choose(f"the JSON files of {path}", objects, has_text=len(tables) < len(self.texts))

    def rows(self) -> Iterator[Row]:
        for file, name in zip(self.pictures, self.picture_names, strict=True):
            stem = os.path.splitext(file)[0]
            inside, split = self.splits(name)
            row = Row(str(file), (), name, name=name, split=split)
            try:
                text, table = (
                    _read(path) if path in self.texts else None
                    for path in (f"{stem}.txt", f"{stem}.json")
                )
            except Failure as failure:
                yield row._replace(refused=failure.reason)
                continue
            row = self._row(row, text, table)
            if self.wanted.source == FOLDER_COLUMN and row.source is None:
                folder, below, _ = inside.partition(os.sep)
                in_split = self.path.name if inside != name else None
                row = row._replace(source=folder if below else in_split)
            yield row


class ClassReader(Reader):
    """Pictures in folders of classes, `CLASS/1.jpg` or `SOURCE/CLASS/1.jpg`.

    `data.names` has the words of a class. Each picture has the captions of all templates. The upper folders are the values of
    the source column.
    """

    form = "folders of classes"
    names_pictures = True

    def __init__(self, path: Path, wanted: Columns, templates: Sequence[str] | None) -> None:
        self.templates = ClassTemplates(templates)
        self.classes = self.templates.zero_shot
        listed = self._find_pictures(path)
        self.files = []
        levels = class_levels(self.splits(name)[0] for name in self.picture_names)
        if levels is None:
            raise UserError(
                f"{path} has no pictures of two classes or more, each in a folder "
                "CLASS/PICTURE or SOURCE/CLASS/PICTURE: sort them"
            )
        self.upper = levels > 1
        if wanted.source is not None and (wanted.source != FOLDER_COLUMN or not self.upper):
            raise UserError(
                f"{path} holds folders of classes and no column {wanted.source!r}: sort the pictures into SOURCE/CLASS/PICTURE "
                f"(folders of splits are no sources) and give --source-column {FOLDER_COLUMN}, which makes each SOURCE a source"
            )
        labels = sorted({self._class(name) for name in self.picture_names}, key=class_order)
        names_given = names_beside(path, labels)
        classes = class_words(labels, names_given, path, NAME_THEM, numbers=templates is not None)
        self.words = dict(zip(labels, classes, strict=True))
        self.given_words = classes if names_given else ()
        words = "two levels, of which the lower one is the class" if self.upper else "one level"
        captions = shown_names(self.templates.captions)
        self.columns = (
            f"{len(classes)} classes ({shown_names(classes)}; {words}), captions {captions}"
        )
        self.notes = notes_of({"": listed} | self._empty(path))
        if self.upper and wanted.source is None:
            self.notes.append(
                f"--source-column {FOLDER_COLUMN} makes each folder of the upper level a source"
            )

    def rows(self) -> Iterator[Row]:
        for file, name in zip(self.pictures, self.picture_names, strict=True):
            inside, split = self.splits(name)
            label = self.words[self._class(name)]
            captions = self.templates.of(label)
            source = Path(inside).parts[-3:][0]
            yield Row(str(file), captions, name, 0, source, name=name, label=label, split=split)

    def _empty(self, path: Path) -> dict[str, Listing]:
        """Return the folders at the level of classes that hold no picture, by name."""
        level = len(self.pictures[0].relative_to(path).parts) - 1
        full = {str(file.parent) for file in self.pictures}
        folders = [Path(folder) for folder, _ in walk(path)]
        return {
            folder.name: Listing([], [], [])
            for folder in folders
            if len(folder.relative_to(path).parts) == level and str(folder) not in full
        }

    def _class(self, name: str) -> str:
        return Path(self.splits(name)[0]).parent.name


def class_levels(pictures: Iterable[str]) -> int | None:
    """Count the levels of folders around pictures of classes: 1 for `CLASS/1.jpg`, 2 for `SOURCE/CLASS/1.jpg`.

    Folders that are the only one at the top, as archives have them, do not count.

    Returns:
        None for other layouts, and for fewer than two classes.
    """
    folders = {os.path.dirname(picture) for picture in pictures}
    depths = {folder.count(os.sep) + bool(folder) for folder in folders}
    if len(depths) != 1 or len({os.path.basename(folder) for folder in folders}) < 2:
        return None
    tops = os.path.commonpath(folders)
    common = min(tops.count(os.sep) + bool(tops), max(depths) - 1)
    levels = max(depths) - common
    return levels if levels <= 2 else None


#: Key, place of the picture ("" without one), its bytes if they cannot be read there again, texts by suffix.
_Member = tuple[str, str, bytes | None, Mapping[str, bytes | None]]


class TarReader(SampleReader):
    """Local shards, of img2dataset or of any other program.

    A picture in a plain tar is found again by its offset. One in a compressed tar comes with its row.
    """

    form = "webdataset"

    def __init__(self, path: Path, files: list[Path], wanted: Columns) -> None:
        self.path = path
        self.files = files
        self.wanted = wanted
        self.splits = self._splits_of_files()
        first: list[_Member] = []
        for file in files:
            with suppress(ShardError):
                first.extend(islice(self._samples(file), _LOOKED_AT))
            if first:
                break
        captioned = {TEXT_EXTENSION, _JSON_EXTENSION}
        if not any(place and captioned & texts.keys() for _, place, _, texts in first):
            with ShardCache().borrowed(str(files[0])) as plain:
                why = why_no_pairs(plain)
            if why:
                raise UserError(f"{files[0]} holds no pairs: {why}")
        tables = [texts[_JSON_EXTENSION] or b"" for *_, texts in first if _JSON_EXTENSION in texts]
        has_text = any(TEXT_EXTENSION in texts for *_, texts in first)
        self._choose(f"the json members of {files[0]}", tables, has_text=has_text)

    def rows(self) -> Iterator[Row]:
        for file in self.files:
            split = self._split_of(file)
            try:
                for key, place, content, texts in self._samples(file):
                    name = f"{file.name}/{key}"
                    row = Row(
                        place, (), f"{file.name} {key}", content=content, name=name, split=split
                    )
                    if place:
                        yield self._row(row, texts.get(TEXT_EXTENSION), texts.get(_JSON_EXTENSION))
                    else:
                        unread = next((end for end in UNREAD if end in texts), None)
                        named = f": .{unread} {UNREAD[unread]}" if unread else ""
                        yield row._replace(refused=f"no picture{named}")
            except ShardError as error:
                yield Row("", (), file.name, refused=error.reason)

    def _samples(self, file: Path) -> Iterator[_Member]:
        with ShardCache().borrowed(str(file)) as path:
            samples = locate_samples(path, whole=True)
            for number, (key, members) in enumerate(samples, start=1):
                place, content, picture = "", None, image_of(members)
                if picture is not None:
                    place = f"{file}#{picture.offset}+{picture.size}"
                if picture is not None and path != str(file):  # an unpacked copy, which may go
                    place, content = f"{file}#{number}", picture.content()
                read = (TEXT_EXTENSION, _JSON_EXTENSION)
                texts = {
                    name: member.content() if name in read else None
                    for name, member in members.items()
                }
                yield key, place, content, texts

    def obtain(self, place: str) -> bytes:
        file, _, extent = place.rpartition("#")
        offset, _, size = extent.partition("+")
        try:
            with open(file, "rb") as shard:
                shard.seek(int(offset))
                content = shard.read(int(size))
        except OSError as error:
            raise Failure("picture cannot be read") from error
        if len(content) < int(size):
            raise Failure("truncated shard")
        return content


def _read(path: str) -> bytes:
    """Read a text beside a picture by `read_file`."""
    return read_file(path, most_bytes=_LARGEST_TEXT_BYTES, kind="text")
