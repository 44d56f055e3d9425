"""The pictures that are searched: a folder of them with all below it, shards, or the pictures of a table.

A collection is a list of files with their sizes and times of change, by which a cache finds new ones. The files are the
pictures of a folder or a table, or the tars of shards. A file holds pictures by key: a picture alone one, a tar one per sample.

    /photos            a/1.jpg b/2.png             Picture("a/1.jpg"), Picture("b/2.png")
    /data/sbu          00000.tar: 000.jpg, 001.jpg Picture("00000.tar/000"), Picture("00000.tar/001")
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.components import kind_of, packed_folders
from open_clip_zerovl.data.names import SPLITS
from open_clip_zerovl.data.reading import picture_file
from open_clip_zerovl.data.samples import origin_of, samples_of
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.table import EXTENSIONS
from open_clip_zerovl.shards.members import Sample, ShardError, image_of
from open_clip_zerovl.shards.pictures import PICTURE_SUFFIXES, picture_files


@dataclass(frozen=True)
class File:
    """A file with pictures: its full path, the name that is shown, its size in bytes and time of change in ns."""

    path: str
    shown: str
    size: int
    changed_ns: int


@dataclass(frozen=True)
class Collection:
    """Files with pictures, in order.

    Attributes:
        name: the folder or source, as given.
        files: in the order in which they are read.
        shards: the source and the number of each file's shard; None if each file is a picture.
        lost: pictures whose files could not be examined.
    """

    name: str
    files: tuple[File, ...]
    shards: tuple[tuple[Source, int], ...] | None = None
    lost: int = 0

    def pictures(self, number: int) -> Iterator[tuple[str, bytes | None]]:
        """The pictures of file `number`: key ("" if the file is one) and encoded bytes, None for one that is not there.

        Raises:
            UserError: a shard that cannot be read.
        """
        if self.shards is None:
            yield "", picture_file(self.files[number].path)
            return
        try:
            for sample in samples_of(*self.shards[number]):
                content = image_of(sample.files)
                yield sample.key, None if content is None else bytes(content)
        except ShardError as error:
            raise UserError(
                f"{self.files[number].path} cannot be read ({error}); mend it or take it away"
            ) from error

    def shown(self, number: int, sample: Sample | None = None) -> str:
        """The name of a picture in lists: its path, or its key in a shard and the file or URL that its json names."""
        name = self.files[number].shown
        if sample is None:
            return name
        origin = origin_of(sample)
        return f"{name}/{sample.key}" + (f" ({origin})" if origin else "")


def open_collection(data: str) -> Collection:
    """The pictures of a folder, of shards (a folder of tars, a pattern, `name=...::name=...`) or of a table (CSV, TSV).

    Raises:
        UserError: nothing there, no picture in it, or a source that cannot be read.
    """
    folder = Path(data).expanduser()
    if folder.is_dir() and kind_of(data).kind not in ("shards", "packed"):
        return _folder(data, folder)
    if folder.is_file() and folder.suffix.lower() not in (".tar", *EXTENSIONS):
        raise UserError(
            f"{data} is a file: give a folder of pictures, shards (.tar) or a table (.csv, .tsv)"
        )
    if not folder.exists() and not any(mark in data for mark in "={*:"):
        raise UserError(f"{data} does not exist; give a folder of pictures, shards or a table")
    sources = parse_sources(_every_split(data), evaluation=True)
    if any(source.picked is not None for source in sources):
        raise UserError(f"{data} is a clustering: give the shards or the table that it divides")
    tables = [source for source in sources if source.table is not None]
    if tables and len(tables) < len(sources):
        raise UserError(f"{data} has both shards and tables: search them one after the other")
    files: list[File] = []
    lost = 0
    for source in tables:
        assert source.table is not None
        names = {
            source.table.image_path(sample.image): sample.image for sample in source.table.samples()
        }
        found, absent = _files(names, source.name)
        files += found
        lost += absent
    shards = (
        []
        if tables
        else [(source, number) for source in sources for number in range(len(source.shards))]
    )
    for source, number in shards:
        path = source.shards[number]
        files.append(_file(path, f"{source.name}/{Path(path).name}", data))
    return _checked(Collection(data, tuple(files), tuple(shards) or None, lost))


def _every_split(data: str) -> str:
    """The shards of all splits, of an output of `zerovl data pack`; other data as it is."""
    if kind_of(data).kind != "packed":
        return data
    parts = [
        f"{'-'.join(filter(None, (source, split.name)))}={split}"
        for source, folder in packed_folders(data).items()
        for split in map(folder.__truediv__, SPLITS)
        if split.is_dir()
    ]
    return "::".join(parts)


def _folder(data: str, folder: Path) -> Collection:
    names = {str(path.absolute()): str(path.relative_to(folder)) for path in picture_files(folder)}
    files, lost = _files(names, data)
    return _checked(Collection(data, tuple(files), lost=lost))


def _files(names: Mapping[str, str], data: str) -> tuple[list[File], int]:
    """The pictures, path -> name that is shown, and the number of those that are not there (a dangling link is one)."""
    found = []
    for path, shown in names.items():
        with contextlib.suppress(OSError, ValueError):
            found.append(_file(path, shown, data))
    return found, len(names) - len(found)


def _file(path: str, shown: str, data: str) -> File:
    seen = os.stat(path)
    return File(path, shown, seen.st_size, seen.st_mtime_ns)


def _checked(collection: Collection) -> Collection:
    if not collection.files:
        raise UserError(
            f"{collection.name} holds no pictures ({', '.join(sorted(PICTURE_SUFFIXES))})"
        )
    return collection
