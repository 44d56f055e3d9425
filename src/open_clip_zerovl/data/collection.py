"""The pictures that are searched: a folder of them with all below it, shards, or the pictures of a table.

The files of a collection are the pictures of a folder, or the tars of shards. A picture is a file of its own,
or a sample of a tar.

    /photos            a/1.jpg b/2.png             Picture("a/1.jpg"), Picture("b/2.png")
    /data/sbu          00000.tar: 000.jpg, 001.jpg Picture("00000.tar/000"), Picture("00000.tar/001")
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.components import kind_of, packed_folders
from open_clip_zerovl.data.names import NAME
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.splits import SPLITS
from open_clip_zerovl.shards.pictures import PICTURE_WORDS, BadFile, picture_files, read_foreign
from open_clip_zerovl.shards.tar import Sample

# keys of a json; img2dataset writes `url`
_ORIGINS = ("file", "filename", "file_name", "filepath", "image", "url")


@dataclass(frozen=True)
class Collection:
    """Files with pictures, in order.

    Attributes:
        name: the folder or source, as given.
        files: full paths, in the order in which they are read.
        shards: the source and the number of each file's shard; None if each file is a picture.
        lost: pictures whose files could not be examined.
    """

    name: str
    files: tuple[str, ...]
    shards: tuple[tuple[Source, int], ...] | None = None
    lost: int = 0

    @cached_property
    def sizes(self) -> list[int]:
        """Count the pictures of each file."""
        if self.shards is None:
            return [1] * len(self.files)
        return [source.sizes[shard] for source, shard in self.shards]

    def place(self, picture: int) -> tuple[int, int]:
        """Return the file's number and the picture's number in it, from that among all pictures."""
        ends = np.cumsum(self.sizes)
        file = int(np.searchsorted(ends, picture, side="right"))
        return file, picture - int(ends[file]) + self.sizes[file]

    def pictures(self, number: int) -> Iterator[tuple[str, bytes | None]]:
        """Yield the pictures of file `number`: key ("" if the file is one) and encoded bytes, None for one that is not there.

        Raises:
            UserError: a shard that cannot be read.
        """
        if self.shards is None:
            yield "", picture_file(self.files[number])
            return
        for sample in samples_of(*self.shards[number]):
            yield sample.key, sample.image

    def shown(self, number: int, sample: Sample | None = None) -> str:
        """Name a picture in lists: by its path, or by its key in a shard and the file or URL that its json names."""
        if self.shards is None or sample is None:
            return os.path.relpath(self.files[number], Path(self.name).expanduser())
        source, shard = self.shards[number]
        origin = origin_of(sample)
        name = f"{source.name}/{Path(source.shards[shard]).name}/{sample.key}"
        return name + (f" ({origin})" if origin else "")


def open_collection(data: str) -> Collection:
    """Collect the pictures of a folder or of shards (a folder of tars, a pattern, `name=...::name=...`).

    Raises:
        UserError: nothing there, no picture in it, or a source that cannot be read.
    """
    folder = Path(data).expanduser()
    lost, shards = 0, None
    if folder.is_dir() and kind_of(data).kind not in ("shards", "packed"):
        listed = list(picture_files(folder))
        pictures = [path for path in listed if path.exists()]
        lost = len(listed) - len(pictures)
        files = [str(path.absolute()) for path in pictures]
    else:
        sources = parse_sources("::".join(map(_every_split, data.split("::"))), evaluation=True)
        shards = tuple((source, n) for source in sources for n in range(len(source.shards)))
        files = [path for source in sources for path in source.shards]
    if not files:
        raise UserError(f"{data} holds no pictures ({PICTURE_WORDS})")
    return Collection(data, tuple(files), shards, lost)


def picture_file(path: str) -> bytes | None:
    """Read the bytes of a picture's file, None if it cannot be read. UserError as `pictures.read_foreign`."""
    try:
        return read_foreign(path)
    except BadFile:
        return None


def origin_of(sample: Sample) -> str:
    """Return the file or URL of a sample's picture before it was packed, as its json names it, "" if it names none."""
    values = map(sample.about.get, _ORIGINS)
    return next((value for value in values if isinstance(value, str) and value), "")


def _every_split(component: str) -> str:
    """Name all splits of an output of `zerovl data pack`, and return another component as it was."""
    match = NAME.fullmatch(component)
    name, place = (match["name"], match["shards"]) if match else ("", component)
    if kind_of(place).kind != "packed":
        return component
    parts = [
        f"{'-'.join(filter(None, (name, source, split.name)))}={split}"
        for source, folder in packed_folders(place).items()
        for split in map(folder.__truediv__, SPLITS)
        if split.is_dir()
    ]
    return "::".join(parts)
