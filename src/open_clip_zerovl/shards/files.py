"""The files of a source on disk: shards, a `sizes.json`, an index of each shard; and a test set in CLIP_benchmark's layout.

A shard is a tar of samples; a sample is a group of files with one key (`key.png`, `key.txt`, `key.json`), see `tar`. Shards
are written under another name and renamed when whole. They hold no times or owners, so that the same samples give the same
bytes.

    source/train-00000.tar ...                 training shards
    source/sizes.json                          {"train-00000.tar": number of samples, ...}, which open_clip reads too
    source/.zerovl-index/train-00000.tar.npz   where each sample begins
    set/dataset_type.txt                       "retrieval"
    set/test/nshards.txt, 0.tar ...            a retrieval set, as CLIP_benchmark's `wds/` datasets are laid out

A reader that begins in the middle of a shard (few shards, resume) enters it by the index, which is built once from the tar's
headers. Where the folder cannot be written, the index lies in the user's cache folder. It is valid for one size and
modification time of its tar. Several processes may build the same index: each writes a file of its own and renames it.

    n  whole samples of the shard
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import (
    atomic_file,
    read_arrays,
    reading,
    user_cache,
    write_atomically,
)
from open_clip_zerovl.shards.tar import (
    TEXT_EXTENSION,
    Sample,
    ShardError,
    locate_samples,
    unreadable,
)
from open_clip_zerovl.shards.texts import caption_lines

SIZES_FILE = "sizes.json"
MANIFEST_FILE = "manifest.json"  # beside the shards that `zerovl data pack` writes
RETRIEVAL_MARK = "dataset_type.txt"  # in a retrieval set's folder
SHARD_COUNT = "nshards.txt"  # in the folder of each of its splits
MOST_SAMPLES = 1 << 40  # of a shard; a larger number in a sizes.json is a mistake
_OPEN_INDEXES = 64  # kept in memory, 0.1 MB for a shard of 10,000 samples
FOLDER = ".zerovl-index"
VERSION = 3


def write_shard(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write one tar atomically, and return its number of samples. Nothing in it depends on the clock or the user.

    Raises:
        UserError: a key that is empty, holds a dot (webdataset ends a key at the first dot) or comes twice; a file that cannot
            be written.
    """
    keys = set()
    with (
        atomic_file(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for sample in samples:
            if not sample.key or "." in sample.key.rsplit("/", 1)[-1] or sample.key in keys:
                raise UserError(
                    f"The key {sample.key!r} in {path} is empty, holds a dot or comes twice: rename it."
                )
            keys.add(sample.key)
            for extension, content in sample.files.items():
                member = tarfile.TarInfo(f"{sample.key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return len(keys)


def write_source(
    folder: str | Path, samples: Sequence[Sample], *, shard_size: int
) -> dict[str, int]:
    """Write samples, in the order given, as shards of nearly equal size, with their `sizes.json`.

    Args:
        folder: the source's folder.
        samples: in their order on disk; shuffle them before.
        shard_size: samples per shard at most.

    Returns:
        Samples per shard by file name, as in `sizes.json`.
    """
    folder = Path(folder)
    shard_count = -(-len(samples) // shard_size)
    # Sizes differ by at most one sample, so that no shard is much smaller than the other shards.
    bounds = [k * len(samples) // shard_count for k in range(shard_count + 1)]
    sizes = {}
    for k in range(shard_count):
        name = f"train-{k:05d}.tar"
        sizes[name] = write_shard(folder / name, samples[bounds[k] : bounds[k + 1]])
    write_atomically(folder / SIZES_FILE, json.dumps(sizes, indent=1) + "\n")
    return sizes


def write_retrieval_set(folder: str | Path, samples: Sequence[Sample]) -> int:
    """Write a test set that `clip_benchmark eval --dataset wds/NAME --task zeroshot_retrieval` reads, and return its size.

    Each sample needs a picture (`png`, `jpg`, `jpeg` or `webp`) and a `txt` with one caption a line; further files
    (`json`) are carried along and ignored by CLIP_benchmark.
    """
    count = write_shard(Path(folder, "test", "0.tar"), samples)
    mark_retrieval_set(folder, "test", 1)
    return count


def mark_retrieval_set(folder: str | Path, split: str, shards: int) -> None:
    """Mark a split whose shards are all written: only a folder with these files is scored, never an incomplete one."""
    write_atomically(Path(folder, split, SHARD_COUNT), f"{shards}\n")
    write_atomically(Path(folder, RETRIEVAL_MARK), "retrieval\n")


def parse_sizes(text: str | bytes, where: str | Path) -> dict[str, int]:
    """Parse the text of a `sizes.json` to the samples of each shard by its name.

    Args:
        where: the file, for messages.

    Raises:
        UserError: text that is not JSON or not a table, or a size that is not a whole number.
    """
    with reading(where, "write it again, or remove it to have the shards counted"):
        return {name: _size(size) for name, size in json.loads(text).items()}


def _size(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return _size(int(value))  # open_clip accepts this too
    whole = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )
    if not whole or not 0 <= value < MOST_SAMPLES:
        raise ValueError(f"{str(value)[:80]} is not a number of samples")
    return int(value)


def read_sizes(folder: str | Path) -> dict[str, int] | None:
    """Read the `sizes.json` of a local folder by `parse_sizes`, None without this file."""
    file = Path(folder, SIZES_FILE)
    return parse_sizes(file.read_bytes(), file) if file.is_file() else None


# ---------------------------------------------------------------------------------------------------------------------
# Index
# ---------------------------------------------------------------------------------------------------------------------


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
        for _, members in locate_samples(path):
            headers.append(next(iter(members.values())).header)
            text = members.get(TEXT_EXTENSION)
            lines = [] if text is None else caption_lines(text.content())
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
        return TarIndex(**{field.name: arrays[field.name] for field in fields(TarIndex)})
    except FileNotFoundError:
        return None
    except (KeyError, OSError, ValueError) as error:  # KeyError: an array is missing
        logging.warning(f"The index {file} is built again: {first_line(error)}.")
        return None


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
