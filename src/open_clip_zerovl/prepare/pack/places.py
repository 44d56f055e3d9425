"""Where the pictures of a file of pairs lie: paths, addresses, and the names of them that shards may show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.rows import ADDRESS, PairRow


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
        folder = self._found_elsewhere(os.path.relpath(first.place, self.folder))
        advice = (
            f"a file of that name lies in {folder}: give --pictures-in {folder}"
            if folder
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
