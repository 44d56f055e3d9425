"""A source on disk: webdataset shards and a `sizes.json`; and a test set in CLIP_benchmark's retrieval layout.

A shard is a tar of samples; a sample is a group of files with one key (`key.png`, `key.txt`, `key.json`), see `tar`. Shards
are written under another name and renamed when whole. They hold no times or owners, so that the same samples give the same
bytes.

    source/train-00000.tar ...         training shards
    source/sizes.json                  {"train-00000.tar": number of samples, ...}, which open_clip reads too
    set/dataset_type.txt               "retrieval"
    set/test/nshards.txt, 0.tar ...    a retrieval set, as CLIP_benchmark's `wds/` datasets are laid out
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import atomic_file, reading, write_atomically
from open_clip_zerovl.shards.tar import Sample

SIZES_FILE = "sizes.json"
RETRIEVAL_MARK = "dataset_type.txt"  # in a retrieval set's folder
SHARD_COUNT = "nshards.txt"  # in the folder of each of its splits
MOST_SAMPLES = 1 << 40  # of a shard; a larger number in a sizes.json is a mistake


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
    folder: str | Path, samples: Sequence[Sample], *, shard_size: int, prefix: str = "train"
) -> dict[str, int]:
    """Write samples, in the order given, as shards of nearly equal size, with their `sizes.json`.

    Args:
        folder: the source's folder.
        samples: in their order on disk; shuffle them before.
        shard_size: samples per shard at most.
        prefix: shards are called `<prefix>-00000.tar` and so on.

    Returns:
        Samples per shard by file name, as in `sizes.json`.
    """
    folder = Path(folder)
    shard_count = -(-len(samples) // shard_size)
    # Sizes differ by at most one sample, so that no shard is much smaller than the other shards.
    bounds = [k * len(samples) // shard_count for k in range(shard_count + 1)]
    sizes = {}
    for k in range(shard_count):
        name = f"{prefix}-{k:05d}.tar"
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
    """Call when all shards of a split are written: only a folder with these files is scored, never an incomplete one."""
    write_atomically(Path(folder, split, SHARD_COUNT), f"{shards}\n")
    write_atomically(Path(folder, RETRIEVAL_MARK), "retrieval\n")


def parse_sizes(text: str | bytes, where: str | Path) -> dict[str, int]:
    """Shard name -> samples, from the text of a `sizes.json`.

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
