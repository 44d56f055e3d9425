"""Where the pictures of a file of pairs lie: paths, addresses, and the names of them that shards may show."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from urllib.parse import unquote

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.rows import ADDRESS, Row


def public_name(name: str) -> str:
    """Name a picture as shards may show it: without the folders of an absolute path, or an address' user and query."""
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
        if name.lower().startswith(ADDRESS) or not name:
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
        missing: list[Row] = []
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

    def _wrong(self, missing: list[Row]) -> UserError:
        first = missing[0]
        folder = self._found_elsewhere(os.path.relpath(first.place, self.folder))
        advice = (
            f"a file of that name lies in {folder}: give --pictures-in {folder}"
            if folder
            else f"relative paths start at {self.folder}: if the pictures are elsewhere, give their folder with --pictures-in"
        )
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
            f"{advice}"
        )

    def _found_elsewhere(self, picture: str) -> str | None:
        """Find a folder, the file's own or below it, from which this path, or else its last part, leads to a file."""
        name, seen = os.path.basename(picture), 0
        for folder, _, names in os.walk(self.file.parent):
            if name in names:
                path = os.path.join(folder, name)
                return (
                    path[: -len(picture)].rstrip(os.sep)
                    if path.endswith(os.sep + picture)
                    else folder
                )
            seen += len(names)
            if seen > _SEARCHED_ENTRIES:
                return None
        return None
