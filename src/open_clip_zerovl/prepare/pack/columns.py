"""The columns of pictures, captions and sources, named or guessed from their names, and the paths in a picture column."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from open_clip_zerovl.core.errors import UserError, nearest
from open_clip_zerovl.data.columns import CAPTION_NAMES, find, guess_captions, listed, plain
from open_clip_zerovl.prepare.pack.rows import ADDRESS, Columns, PairRow

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


@dataclass(frozen=True)
class Chosen:
    """The names of the columns that are read, and a description of them."""

    picture: str
    captions: tuple[str, ...]
    source: str | None
    words: str


def choose(
    where: str, names: Sequence[str], wanted: Columns, *, pictures: Sequence[str] | None = None
) -> Chosen:
    """The columns of a table.

    Args:
        where: the file, for messages.
        names: the names of all its columns.
        wanted: the columns that the command line names.
        pictures: columns that hold pictures by their type; the first takes precedence over guesses from names.

    Raises:
        UserError: a column that is not there or has the name of another, or none with a name of a picture or a caption.
    """
    if wanted.picture is not None:
        picture: str | None = find(where, names, wanted.picture, "--picture-column")
    else:
        picture = pictures[0] if pictures else guess_picture(names)
    if wanted.captions is not None:
        captions = tuple(find(where, names, name, "--caption-column") for name in wanted.captions)
    else:
        captions = guess_captions(names, picture)
    if picture is None or not captions:
        raise UserError(_not_found(where, names, picture, captions))
    source = (
        find(where, names, wanted.source, "--source-column") if wanted.source is not None else None
    )
    for name in filter(None, (picture, *captions, source)):
        if (count := [*names].count(name)) > 1:
            raise UserError(
                f"{where} has {count} columns named {name!r}: give each column its own name"
            )
    guessed = [
        flag
        for flag, given in (
            ("--picture-column", wanted.picture),
            ("--caption-column", wanted.captions),
        )
        if given is None
    ]
    words = f"picture {picture!r}, caption {listed(captions)}" + (
        f" (guessed; choose other columns with {' and '.join(guessed)})" if guessed else ""
    )
    return Chosen(picture, captions, source, words)


def _not_found(
    where: str, names: Sequence[str], picture: str | None, captions: Sequence[str]
) -> str:
    """The sentence for a table without a column that is named like a picture, or like a caption, or both."""
    missing: list[tuple[str, str, Sequence[str]]] = []
    if picture is None:
        missing.append(("a picture (image, filepath, url ...)", "--picture-column", PICTURE_NAMES))
    if not captions:
        missing.append(("a caption (caption, title, text ...)", "--caption-column", CAPTION_NAMES))
    near = {
        flag: next((name for name in names if nearest(plain(name), usual, cutoff=0.75)), None)
        for _, flag, usual in missing
    }
    meant = " ".join(f"{flag} {name!r}" for flag, name in near.items() if name)
    return (
        f"no column of {where} is named like {' or '.join(words for words, _, _ in missing)}; its columns are {listed(names)}: "
        f"name {'it' if len(missing) == 1 else 'them'} with {' and '.join(near)}"
        + (f"; did you mean {meant}?" if meant else "")
    )


def guess_picture(names: Sequence[str]) -> str | None:
    """The column that is most likely the picture's, by its name."""
    known = {plain(name): name for name in reversed(names)}
    return next((known[name] for name in PICTURE_NAMES if name in known), None)


# ------------------------------------------------------------------------------------------------------------ paths


def public_name(name: str) -> str:
    """The name of a picture that shards may show: without the folders of an absolute path, or an address' user and query."""
    name = name.strip()
    if name.lower().startswith(ADDRESS):
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
_SEARCHED_ENTRIES = 20_000


class Places:
    """Resolves the names of one file's pictures, and notices when none of the first ones is there.

    Args:
        file: that names the pictures.
        pictures_in: the folder that they are relative to; None for the file's own.
    """

    def __init__(self, file: Path, pictures_in: Path | None) -> None:
        self.file = file
        self.folder = str((pictures_in or file.parent).absolute())

    def place(self, name: str) -> str:
        """An address as it is, a path made absolute."""
        name = name.strip()
        if name.lower().startswith(ADDRESS) or not name:
            return name
        name = name.removeprefix("file://")
        path = os.path.normpath(os.path.join(self.folder, os.path.expanduser(name)))
        if "\\" in name and not os.path.exists(path):  # written on Windows
            path = os.path.normpath(os.path.join(self.folder, name.replace("\\", "/")))
        return path

    def checked(self, rows: Iterable[PairRow]) -> Iterator[PairRow]:
        """The rows. UserError if not one of the first pictures exists."""
        rows, held = iter(rows), []
        missing: list[PairRow] = []
        for row in rows:
            held.append(row)
            if row.refused or not row.place:
                continue
            if (
                row.content is not None
                or row.place.lower().startswith(ADDRESS)
                or os.path.exists(row.place)
            ):
                missing = []
                break
            missing.append(row)
            if len(missing) == LOOKED_AT:
                break
        if missing:
            raise self._wrong(missing)
        yield from held
        yield from rows

    def _wrong(self, missing: list[PairRow]) -> UserError:
        first = missing[0]
        found = self._found_elsewhere(os.path.relpath(first.place, self.folder))
        advice = (
            f"a file of that name lies in {found}: give --pictures-in {found}"
            if found
            else f"relative paths start at {self.folder}: if the pictures are elsewhere, give their folder with --pictures-in"
        )
        where = f"line {first.line}" if first.line else first.file
        return UserError(
            f"none of the first {len(missing)} pictures of {self.file} exists; that of {where} should be {first.place}; "
            f"{advice}"
        )

    def _found_elsewhere(self, picture: str) -> str | None:
        """A folder, the file's own or below it, from which this path, or else its last part, leads to a file."""
        name, seen = os.path.basename(picture), 0
        for folder, _, names in os.walk(self.file.parent):
            if name in names:
                found = os.path.join(folder, name)
                return (
                    found[: -len(picture)].rstrip(os.sep)
                    if found.endswith(os.sep + picture)
                    else folder
                )
            seen += len(names)
            if seen > _SEARCHED_ENTRIES:
                return None
        return None
