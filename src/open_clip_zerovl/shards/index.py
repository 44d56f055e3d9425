"""Where each sample of a local shard begins: an index built once from the tar's headers, by which a tar is entered anywhere.

A reader that begins in the middle of a shard (few shards, resume) reads only the samples that it needs. The index of
`/d/sbu/00000.tar` is `/d/sbu/.zerovl-index/00000.tar.npz`; where that cannot be written, it lies in the user's cache folder.
It is valid for one size and modification time of its tar. Several processes may build the same index: each writes a file of its
own and renames it.

    n  whole samples of the shard
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import atomic_file, read_arrays, user_cache
from open_clip_zerovl.shards.tar import (
    TEXT_EXTENSION,
    ShardError,
    content_of,
    locate_samples,
    opened,
    unreadable,
)
from open_clip_zerovl.shards.texts import caption_lines

_OPEN_INDEXES = 64  # kept in memory, 0.1 MB for a shard of 10,000 samples
FOLDER = ".zerovl-index"
VERSION = 3


@dataclass(frozen=True)
class TarIndex:
    """Arrays over the whole samples of one shard.

    Attributes:
        headers: (n,) where the headers of each sample begin.
        captions: (n,) number of captions, one a line; 1 for a sample without a caption, which then is a bad sample.
        torn: (2,) reason and detail of the tear that ends the shard; two empty strings for a whole shard.
        stamp: (3,) VERSION, and size in bytes and modification time in ns of the tar.
    """

    headers: np.ndarray
    captions: np.ndarray
    torn: np.ndarray
    stamp: np.ndarray

    def __len__(self) -> int:
        return len(self.headers)


def open_index(path: str) -> TarIndex:
    """Return the index of a plain local tar: from memory, from disk, or built now and stored.

    Raises:
        ShardError: the tar cannot be opened, is no tar, or is torn before its first sample.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable(error) from error
    return _open(os.path.abspath(path), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def _open(path: str, size: int, mtime_ns: int) -> TarIndex:
    stamp = np.array([VERSION, size, mtime_ns], dtype=np.int64)
    for file in _places(path):
        index = _load(file)
        if index is not None and np.array_equal(index.stamp, stamp):
            return index
    index = build_index(path, stamp)
    _store(index, path)
    return index


def build_index(path: str, stamp: np.ndarray) -> TarIndex:
    """Build the index of a plain local tar from its headers and captions.

    Args:
        stamp: see `TarIndex`.

    Raises:
        As `open_index`.
    """
    headers, captions = [], []
    torn = ("", "")
    try:
        with opened(path) as descriptor:
            for _, members in locate_samples(path):
                headers.append(next(iter(members.values())).header)
                text = members.get(TEXT_EXTENSION)
                lines = [] if text is None else caption_lines(content_of(descriptor, text))
                captions.append(max(1, len(lines)))
    except ShardError as error:
        if error.readable == 0:
            raise
        torn = (error.reason, str(error))
    return TarIndex(
        np.array(headers, dtype=np.int64),
        np.array(captions, dtype=np.int32),
        np.array(torn),
        stamp,
    )


def _places(path: str) -> Iterator[Path]:
    """Yield the paths where the index of a shard may lie, best first."""
    folder, name = os.path.split(path)
    yield Path(folder, FOLDER, f"{name}.npz")
    yield (
        user_cache("open_clip_zerovl")
        / "index"
        / f"{hashlib.sha256(path.encode()).hexdigest()[:24]}.npz"
    )


def _load(file: Path) -> TarIndex | None:
    try:
        arrays = read_arrays(file)
        index = TarIndex(**{field.name: arrays[field.name] for field in fields(TarIndex)})
        _require_consistent(index)
        return index
    except FileNotFoundError:
        return None
    except (KeyError, ValueError) as error:  # KeyError: an array is missing
        logging.warning(f"The index {file} cannot be read ({error}) and is built again.")
        return None


def _require_consistent(index: TarIndex) -> None:
    """Check that arrays make an index, as those of a damaged or foreign file do not.

    Raises:
        ValueError: they do not.
    """
    n = index.captions.size
    shapes = {"headers": (n,), "captions": (n,), "torn": (2,), "stamp": (3,)}
    for name, shape in shapes.items():
        array = getattr(index, name)
        if array.shape != shape or array.dtype.kind not in ("U" if name == "torn" else "iu"):
            raise ValueError(f"its {name} has the shape {array.shape} and the type {array.dtype}")
    inside = (index.headers >= 0).all() and (index.headers < index.stamp[1]).all()
    if not inside or (np.diff(index.headers) <= 0).any() or (index.captions < 1).any():
        raise ValueError("its numbers do not add up")


def _store(index: TarIndex, path: str) -> None:
    arrays = {field.name: getattr(index, field.name) for field in fields(TarIndex)}
    for place in _places(path):
        # a folder that cannot be written: try the next
        with contextlib.suppress(UserError), atomic_file(place) as file:
            np.savez(file, **arrays)
            return
    logging.warning(
        f"The index of {path} could not be stored anywhere; every process builds its own."
    )
