"""Captions as MS-COCO publishes them: one JSON object with `images` (id, file_name) and `annotations` (image_id, caption)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.columns import choose, listed
from open_clip_zerovl.prepare.pack.paths import Places
from open_clip_zerovl.prepare.pack.rows import Columns, PairRow, Reader
from open_clip_zerovl.prepare.pack.table import opened_table
from open_clip_zerovl.shards.archives import json_array

_LISTS = re.compile(rb'"(images|annotations)"\s*:\s*\[')
_BEGINNING_BYTES = 1 << 20
_LOOKED_AT = 100


def is_coco(path: Path) -> bool:
    """Whether a JSON file begins as such annotations do."""
    with opened_table(path) as file:
        beginning = file.read(_BEGINNING_BYTES)
    return beginning.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{") and _LISTS.search(beginning) is not None


class CocoReader(Reader):
    """One row an annotation. The file names of all images are in memory."""

    form = "json"

    def __init__(self, path: Path, wanted: Columns) -> None:
        self.path, self.files, self.wanted = path, [path], wanted
        self.places = Places(path, wanted.pictures_in)
        with opened_table(path) as file:
            self.images = {
                one["id"]: one
                for one in json_array(file, str(path), key="images")
                if isinstance(one, dict) and isinstance(one.get("id"), int | str)
            }
        names: dict[str, None] = {}
        for entry in islice(self._annotations(), _LOOKED_AT):
            names.update(dict.fromkeys(entry if isinstance(entry, dict) else ()))
        if "caption" not in names and wanted.captions is None:
            raise UserError(
                f"the annotations of {path} hold no captions (their keys are {listed(list(names))}): give the captions, as "
                "captions_train2017.json"
            )
        wanted = Columns("file_name", wanted.captions or ("caption",), wanted.source)
        fields = {name: None for image in islice(self.images.values(), _LOOKED_AT) for name in image}
        self.chosen = choose(str(path), list({**fields, **names}), wanted)
        self.columns = f"annotations as MS-COCO's, caption {listed(self.chosen.captions)}"

    def rows(self) -> Iterator[PairRow]:
        return self.places.checked(self._rows())

    def _rows(self) -> Iterator[PairRow]:
        for number, entry in enumerate(self._annotations(), start=1):
            found: dict[str, Any] = entry if isinstance(entry, dict) else {}
            wanted = found.get("image_id")
            image = self.images.get(wanted, {}) if isinstance(wanted, int | str) else {}
            fields = {**image, **found}
            name = image.get("file_name")
            if not isinstance(name, str):
                yield PairRow("", (), self.path.name, number, refused="no picture named")
                continue
            source = fields.get(self.chosen.source) if self.chosen.source is not None else None
            captions = [fields.get(key) for key in self.chosen.captions]
            yield PairRow(self.places.place(name), captions, self.path.name, number, source)

    def _annotations(self) -> Iterator[Any]:
        with opened_table(self.path) as file:
            yield from json_array(file, str(self.path), key="annotations")
