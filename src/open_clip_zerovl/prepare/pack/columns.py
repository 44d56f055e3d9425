"""Which columns hold picture, captions and source: as they are named, else guessed from their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from open_clip_zerovl.core.errors import UserError, nearest
from open_clip_zerovl.prepare.pack.rows import Columns

#: Names of picture columns, the likelier first: the picture itself, then a path, then an address.
PICTURE_NAMES = (
    *("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp"),
    *("filepath", "file_path", "image_path", "img_path", "picture_path", "path", "file_name", "filename"),
    *("image_file", "image_name", "img_name", "image_filename", "picture_file", "file", "images", "photo_id"),
    *("url", "image_url", "img_url", "picture_url", "photo_url", "photo_image_url", "link"),
)
CAPTION_NAMES = (
    *("caption", "captions", "title", "text", "texts", "txt", "sentence", "sentences", "description", "descriptions"),
    *("alt_text", "alttext", "alt", "prompt", "comment", "raw", "report"),
)
_NUMBERED = re.compile(r"(caption|title|text|sentence|description)s?_?\d+")


@dataclass(frozen=True)
class Chosen:
    """The names of the columns that are read, and what is said of them."""

    picture: str
    captions: tuple[str, ...]
    source: str | None
    words: str


def choose(where: str, names: Sequence[str], wanted: Columns, *, pictures: Sequence[str] | None = None) -> Chosen:
    """The columns of a table.

    Args:
        where: the file, for messages.
        names: of all its columns.
        wanted: what the command line says.
        pictures: columns that hold pictures, where the file says so; the first is taken before any name is looked at.

    Raises:
        UserError: a column that is not there, or none whose name says what it holds.
    """
    picture = (
        find(where, names, wanted.picture, "--picture-column")
        if wanted.picture is not None
        else pictures[0]
        if pictures
        else guess_picture(names)
    )
    if picture is None:
        raise UserError(
            f"no column of {where} is called as one with pictures is (image, filepath, url ...); its columns are "
            f"{listed(names)}: name the one with --picture-column{_nearest(names, PICTURE_NAMES)}"
        )
    if wanted.captions is not None:
        captions = tuple(find(where, names, name, "--caption-column") for name in wanted.captions)
    else:
        captions = guess_captions(names, picture)
    if not captions:
        raise UserError(
            f"no column of {where} is called as one with captions is (caption, title, text ...); its columns are "
            f"{listed(names)}: name the one with --caption-column{_nearest(names, CAPTION_NAMES)}"
        )
    source = find(where, names, wanted.source, "--source-column") if wanted.source is not None else None
    guessed = [
        flag
        for flag, given in (("--picture-column", wanted.picture), ("--caption-column", wanted.captions))
        if given is None
    ]
    words = f"picture {picture!r}, caption {listed(captions)}" + (
        f" (guessed; name others with {' and '.join(guessed)})" if guessed else ""
    )
    return Chosen(picture, captions, source, words)


def find(where: str, names: Sequence[str], name: str, flag: str) -> str:
    """The column of this name. UserError with the columns that are there where it is not."""
    if name in names:
        return name
    same = [known for known in names if _plain(known) == _plain(name)]
    if len(same) == 1:
        return same[0]
    plain = {_plain(known): known for known in names}
    near = nearest(_plain(name), plain)
    meant = f"; did you mean {flag} {plain[near]!r}?" if near else ""
    raise UserError(f"{where} has no column {name!r}, given with {flag}; its columns are {listed(names)}{meant}")


def _nearest(names: Sequence[str], usual: Sequence[str]) -> str:
    """The column whose name is nearly a usual one; "" where none is."""
    flag = "--picture-column" if usual is PICTURE_NAMES else "--caption-column"
    for name in names:
        if nearest(_plain(name), usual, cutoff=0.75):
            return f"; did you mean {flag} {name!r}?"
    return ""


def guess_picture(names: Sequence[str]) -> str | None:
    """The column that is most likely the picture's, by its name."""
    plain = {_plain(name): name for name in reversed(names)}
    return next((plain[name] for name in PICTURE_NAMES if name in plain), None)


def guess_captions(names: Sequence[str], picture: str | None = None) -> tuple[str, ...]:
    """The column that is most likely the captions', by its name; several where they are numbered."""
    plain = {_plain(name): name for name in reversed(names) if name != picture}
    found = next((plain[name] for name in CAPTION_NAMES if name in plain), None)
    if found is not None:
        return (found,)
    return tuple(name for name in names if _NUMBERED.fullmatch(_plain(name)) and name != picture)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence, of many the first."""
    return ", ".join(map(repr, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _plain(name: str) -> str:
    return re.sub(r"[\s\-.]+", "_", name.strip().lower())
