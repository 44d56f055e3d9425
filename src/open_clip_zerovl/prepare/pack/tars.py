"""Webdataset shards as inputs, of img2dataset or of any other program: samples of a picture with its `txt` or `json`."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.columns import find, guess_captions, listed
from open_clip_zerovl.prepare.pack.rows import Columns, PairRow, Reader
from open_clip_zerovl.prepare.public.pictures import Failure
from open_clip_zerovl.shards.members import (
    IMAGE_EXTENSIONS,
    TEXT_EXTENSION,
    Extent,
    ShardError,
    locate_samples,
    opened,
    stream_samples,
)

_TABLE_EXTENSION = "json"
_LOOKED_AT = 20


class TarReader(Reader):
    """Local shards. Of a plain tar a picture is found again by its offset; of a compressed one it comes with its row."""

    form = "webdataset"

    def __init__(self, path: Path, files: list[Path], wanted: Columns) -> None:
        self.path, self.files, self.wanted = path, files, wanted
        self.keys, self.columns = self._keys()

    def rows(self) -> Iterator[PairRow]:
        for file in self.files:
            try:
                try:
                    yield from self._plain(file)
                except tarfile.ReadError:  # compressed, or no tar
                    yield from self._streamed(file)
            except ShardError as error:
                yield PairRow("", (), file.name, refused=error.reason)

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

    def _plain(self, file: Path) -> Iterator[PairRow]:
        with opened(file) as descriptor:
            for number, (key, members) in enumerate(locate_samples(file, whole=True), start=1):
                texts = {
                    name: os.pread(descriptor, size, offset)
                    for name, (offset, size) in members.items()
                    if name in (TEXT_EXTENSION, _TABLE_EXTENSION)
                }
                yield self._row(file, number, key, members, texts)

    def _streamed(self, file: Path) -> Iterator[PairRow]:
        for number, (key, members) in enumerate(stream_samples(f"file:{file}", wanted=None), start=1):
            texts = {name: members[name] or b"" for name in (TEXT_EXTENSION, _TABLE_EXTENSION) if name in members}
            row = self._row(file, number, key, dict.fromkeys(members, (0, 0)), texts)
            picture = next((members[name] for name in IMAGE_EXTENSIONS if name in members), None)
            yield row._replace(place=f"{file}#{number}", content=picture) if picture else row

    def _row(
        self, file: Path, number: int, key: str, members: Mapping[str, Extent], texts: Mapping[str, bytes]
    ) -> PairRow:
        where = f"{file.name} {key}"
        picture = next((members[name] for name in IMAGE_EXTENSIONS if name in members), None)
        if picture is None:
            return PairRow("", (), where, refused="no picture")
        fields = _fields(texts.get(_TABLE_EXTENSION)) if self.keys or self.wanted.source is not None else {}
        captions: list[Any] = [fields.get(name) for name in self.keys]
        if not self.keys:
            captions = list(texts.get(TEXT_EXTENSION, b"").splitlines())
        source = fields.get(self.wanted.source) if self.wanted.source is not None else None
        return PairRow(f"{file}#{picture[0]}+{picture[1]}", captions, where, 0, source)

    def _keys(self) -> tuple[tuple[str, ...], str]:
        """The keys of captions in the `json` members; none where captions are `txt`. And what is said of it."""
        names: dict[str, None] = {}
        has_text = has_picture = False
        seen: set[str] = set()
        for members in self._first_samples():
            seen.update(members)
            has_text = has_text or TEXT_EXTENSION in members
            has_picture = has_picture or any(name in members for name in IMAGE_EXTENSIONS)
            names.update(dict.fromkeys(_fields(members.get(_TABLE_EXTENSION))))
        if not seen:
            raise UserError(f"{self.files[0]} cannot be read as a tar, or holds no samples: fetch or write it again")
        if not has_picture:
            raise UserError(
                f"the first samples of {self.files[0]} hold no picture (jpg, png, jpeg, webp) but {listed(sorted(seen))}: give "
                "shards of pictures with captions"
            )
        where = f"the json members of {self.files[0]}"
        if self.wanted.source is not None:
            find(where, list(names), self.wanted.source, "--source-column")
        if self.wanted.captions is not None:
            keys = tuple(find(where, list(names), key, "--caption-column") for key in self.wanted.captions)
            return keys, f"caption {listed(keys)} of the json members"
        if has_text:
            return (), "captions in txt, one a line"
        keys = guess_captions(list(names))
        if not names:
            raise UserError(
                f"the first samples of {self.files[0]} hold no captions, neither txt nor json but {listed(sorted(seen))}: give "
                "shards of pictures with captions"
            )
        if not keys:
            raise UserError(
                f"the first samples of {self.files[0]} have no txt, and no key of their json is called as one with captions is "
                f"(caption, title, text ...); its keys are {listed(list(names))}: name the one with --caption-column"
            )
        return keys, f"caption {listed(keys)} of the json members (guessed; name another with --caption-column)"

    def _first_samples(self) -> Iterator[Mapping[str, bytes | None]]:
        """Members of the first samples that can be read."""
        for file in self.files:
            count = 0
            try:
                for count, (_, members) in enumerate(stream_samples(f"file:{file}", wanted=None), start=1):
                    yield members
                    if count == _LOOKED_AT:
                        return
            except ShardError:
                continue
            if count:
                return


def _fields(content: bytes | None) -> dict[str, Any]:
    """The object of a `json` member; none where it is none."""
    if content is None:
        return {}
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
