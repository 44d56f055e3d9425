"""Pictures that a table names: addresses, and paths relative to its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.rows import ADDRESS, PairRow

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
        self.given = pictures_in is not None
        self._names: dict[str, str] = {}  # of the first paths: path -> the name that it was resolved from
        self._missing: tuple[str, str] | None = (
            None  # the first picture that is not there: where it is named, and its path
        )
        self._looked_at = 0

    def place(self, name: str) -> str:
        """An address as it is, a path made absolute."""
        name = name.strip()
        if name.lower().startswith(ADDRESS) or not name:
            return name
        name = name.removeprefix("file://")
        path = os.path.normpath(os.path.join(self.folder, os.path.expanduser(name)))
        if "\\" in name and not os.path.exists(path):  # written on Windows
            path = os.path.normpath(os.path.join(self.folder, name.replace("\\", "/")))
        if len(self._names) < LOOKED_AT:
            self._names.setdefault(path, name)
        return path

    def checked(self, rows: Iterable[PairRow]) -> Iterator[PairRow]:
        """The rows. UserError where not one of the first pictures exists."""
        held: list[PairRow] | None = []
        for row in rows:
            if held is None:
                yield row
                continue
            held.append(row)
            if self._is_there(row):
                yield from held
                held = None
            elif self._looked_at >= LOOKED_AT:
                self._refuse()
        if held is not None:
            if self._looked_at:
                self._refuse()
            yield from held  # rows that name no picture at all

    def _is_there(self, row: PairRow) -> bool:
        """Whether a row shows that paths are right: its picture exists, or is no file. Remembers the first that is missing."""
        if row.refused or not row.place:
            return False
        if row.content is not None or row.place.lower().startswith(ADDRESS) or os.path.exists(row.place):
            return True
        self._looked_at += 1
        if self._missing is None:
            self._missing = (f"line {row.line}" if row.line else row.file, row.place)
        return False

    def _refuse(self) -> None:
        assert self._missing is not None
        where, path = self._missing
        found = self._found_elsewhere(self._names.get(path, path))
        advice = (
            f"a file of that name lies in {found}: give --pictures-in {found}"
            if found
            else f"paths are taken as relative to {self.folder}: give the folder that they are relative to with --pictures-in"
        )
        raise UserError(
            f"none of the {self._looked_at} pictures that {self.file} names first exists; {self._names.get(path, path)!r} in "
            f"{where} was looked for at {path}; {advice}"
        )

    def _found_elsewhere(self, picture: str) -> str | None:
        """A folder, the file's own or below it, from which this path, or else its last part, leads to a file."""
        name, seen = os.path.basename(picture.replace("\\", "/")), 0
        for folder, _, names in os.walk(self.file.parent):
            if name in names:
                found = os.path.join(folder, name)
                return found[: -len(picture)].rstrip(os.sep) if found.endswith(os.sep + picture) else folder
            seen += len(names)
            if seen > _SEARCHED_ENTRIES:
                return None
        return None
