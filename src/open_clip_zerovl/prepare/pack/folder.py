"""A folder of pictures, each with a text of the same name: `1.jpg` with `1.txt`, or with `1.json` that holds the caption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.columns import find, guess_captions, listed
from open_clip_zerovl.prepare.pack.rows import PICTURE_SUFFIXES, Columns, PairRow, Reader

#: The source column that a folder of pictures has by itself: the first folder on a picture's path.
FOLDER_COLUMN = "folder"
_LOOKED_AT = 20


class FolderReader(Reader):
    """Pictures with texts beside them, in a folder and the folders below it. Lines of a `.txt` are captions of one picture."""

    form = "folder"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self.path, self.wanted = path, wanted
        self.files = []
        self.pictures: list[tuple[str, str]] = []  # (path without its ending, relative to the folder; ending)
        texts: set[str] = set()
        for folder, names in walk(path):
            stems = {name for name in names if name.endswith((".txt", ".json"))}
            for name in names:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in PICTURE_SUFFIXES:
                    here = os.path.relpath(os.path.join(folder, stem), path)
                    self.pictures.append((here, suffix))
                    self.files.append(Path(folder, name))
                    texts.update(f"{here}{ending}" for ending in (".txt", ".json") if f"{stem}{ending}" in stems)
        self.total = len(self.pictures)
        if not texts:
            first = "".join(self.pictures[0]) if self.pictures else "none"
            raise UserError(
                f"{path} has {len(self.pictures)} pictures and no captions: none has a text of its name beside it; write the "
                f"caption of {first} into {os.path.splitext(first)[0]}.txt, or give a table of pictures and captions"
            )
        self.texts = texts
        self.keys, self.columns = self._keys()
        self._check_source()

    def rows(self) -> Iterator[PairRow]:
        for here, suffix in self.pictures:
            place = str(self.path / f"{here}{suffix}")
            captions, source, problem = self._captions(here)
            if self.wanted.source == FOLDER_COLUMN and source is None:
                source = here.split(os.sep)[0] if os.sep in here else None
            yield PairRow(place, captions, f"{here}{suffix}", 0, source, refused=problem)

    def _captions(self, here: str) -> tuple[list[Any], Any, str]:
        """(captions, source, why they cannot be read) of one picture."""
        fields: dict[str, Any] = {}
        text, table = f"{here}.txt", f"{here}.json"
        if table in self.texts and (self.keys or self.wanted.source is not None):
            try:
                found = json.loads(Path(self.path, table).read_bytes())
            except (OSError, ValueError, RecursionError):
                return [], None, "no JSON object"
            fields = found if isinstance(found, dict) else {}
        source = fields.get(self.wanted.source) if self.wanted.source is not None else None
        if self.keys:
            return [fields.get(key) for key in self.keys], source, ""
        if text not in self.texts:
            return [], source, "no text of its name"
        try:
            content = Path(self.path, text).read_bytes().removeprefix(b"\xef\xbb\xbf")
        except OSError:
            return [], source, "text cannot be read"
        return list(content.splitlines()), source, ""

    def _keys(self) -> tuple[tuple[str, ...], str]:
        """The keys of captions in the JSON files; none where captions are texts. And what is said of it."""
        tables = sorted(name for name in self.texts if name.endswith(".json"))
        # Columns are named for other inputs, a table's perhaps, where there is no JSON that could have them.
        if not tables or (len(tables) < len(self.texts) and self.wanted.captions is None):
            return (), "captions in .txt, one a line"
        names: dict[str, None] = {}
        for table in tables[:_LOOKED_AT]:
            try:
                found = json.loads(Path(self.path, table).read_bytes())
            except (OSError, ValueError, RecursionError):
                continue
            names.update(dict.fromkeys(found if isinstance(found, dict) else ()))
        where = f"the JSON files of {self.path}"
        if self.wanted.captions is not None:
            keys = tuple(find(where, list(names), key, "--caption-column") for key in self.wanted.captions)
            return keys, f"caption {listed(keys)} of the .json files"
        keys = guess_captions(list(names))
        if not keys:
            raise UserError(
                f"no key of {where} is called as one with captions is (caption, title, text ...); their keys are "
                f"{listed(list(names))}: name the one with --caption-column"
            )
        return keys, f"caption {listed(keys)} of the .json files (guessed; name another with --caption-column)"

    def _check_source(self) -> None:
        wanted = self.wanted.source
        if wanted is not None and wanted != FOLDER_COLUMN and not any(name.endswith(".json") for name in self.texts):
            raise UserError(
                f"{self.path} is a folder of pictures and texts and has no column {wanted!r}: give --source-column "
                f"{FOLDER_COLUMN}, which makes each folder below it a source"
            )


def walk(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(folder, its files) of a folder and those below it, in order; hidden ones are left out."""
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield folder, sorted(name for name in names if not name.startswith("."))
