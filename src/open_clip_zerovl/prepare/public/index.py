"""Existing shards: count their samples into `sizes.json`, and check them.

`index_shards` reads tar headers only, on a local disk or in a store that fsspec opens (`s3://...`). `check_shards` reads every
byte once, in order, and checks the samples on the way; pictures are decoded only on request.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.prepare.public.manifest import read_manifest
from open_clip_zerovl.shards.faults import (
    PICTURE_MARKS,
    FolderCheck,
    ShardCheck,
    caption_fault,
    mark_fault,
    picture_fault,
)
from open_clip_zerovl.shards.headers import BrokenTar, Member, end_of, plain_run, walk_tar
from open_clip_zerovl.shards.members import TEXT_EXTENSION, group, image_of
from open_clip_zerovl.shards.writing import SIZES_FILE, read_sizes

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_WINDOW_BYTES = 4 << 20


# ---------------------------------------------------------------------------------------------------------------------
# Index
# ---------------------------------------------------------------------------------------------------------------------


def index_shards(folder: str, *, threads: int = 8, progress: bool = True) -> dict[str, int]:
    """Count the samples of every `*.tar` of a folder, from the headers; writes `sizes.json` beside them.

    Args:
        folder: a local one, or a URL that fsspec opens, such as `s3://bucket/cc12m`.
        threads: shards counted at the same time.

    Returns:
        File name -> samples, as in `sizes.json`.

    Raises:
        UserError: no such folder, no shards in it, a broken shard, or no package that opens such URLs.
    """
    open_shard: Callable[[str], Any]
    if _REMOTE.match(folder):
        file_system, root = _file_system(folder)
        names = sorted(path.rpartition("/")[2] for path in file_system.glob(f"{root}/*.tar"))

        def open_shard(name: str) -> Any:
            # Headers lie far apart; with small blocks the pictures between them are not transferred.
            return file_system.open(f"{root}/{name}", "rb", block_size=1 << 14, cache_type="bytes")

    else:
        names = sorted(path.name for path in _local(folder).glob("*.tar"))

        def open_shard(name: str) -> Any:
            return open(Path(folder, name), "rb", buffering=0)

    if not names:
        raise UserError(f"{folder} holds no *.tar shards: give a source's own folder.")

    def count(name: str) -> int:
        try:
            with open_shard(name) as file:
                total = file.seek(0, os.SEEK_END)

                def read_at(offset: int, size: int) -> bytes:
                    file.seek(offset)
                    return file.read(size)

                return sum(1 for _ in group((member.name, None) for member in walk_tar(read_at, total)))
        except BrokenTar as error:
            raise UserError(f"{folder.rstrip('/')}/{name} is broken: {error}. Fetch or write it again.") from error

    with ThreadPoolExecutor(threads) as pool:
        counts = list(tqdm(pool.map(count, names), total=len(names), unit="shard", disable=not progress))
    sizes = dict(zip(names, counts, strict=True))
    text = json.dumps(sizes, indent=1) + "\n"
    if _REMOTE.match(folder):
        with file_system.open(f"{root}/{SIZES_FILE}", "wb") as file:
            file.write(text.encode())
    else:
        write_atomically(Path(folder, SIZES_FILE), text)
    if progress:
        print(f"{folder}: {sum(counts):,} samples in {len(names):,} shards, written to {SIZES_FILE}.")
    return sizes


def _local(folder: str | Path) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"{folder} is no folder: give the folder that holds the shards.")
    return path


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise UserError(f"{url} needs the package fsspec: `pip install fsspec s3fs`.") from error
    try:
        file_system, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a protocol whose package is missing, or that is unknown
        raise UserError(f"{url} cannot be opened ({error}).") from error
    return file_system, root.rstrip("/")


# ---------------------------------------------------------------------------------------------------------------------
# Check
# ---------------------------------------------------------------------------------------------------------------------


def check_shards(
    folder: str | Path, *, threads: int = 4, hashes: bool = False, decode: bool = False, progress: bool = True
) -> FolderCheck:
    """Check every sample of every shard of a local folder.

    Faults that are found:

    - shards that are cut off or are no tars, and keys that come twice in a shard
    - samples without picture or caption, captions that are empty or not UTF-8
    - pictures that do not begin or end as their format does
    - shards that `sizes.json` or the manifest lists and that are missing
    - shards that `sizes.json` does not list, or lists with another number of samples

    Args:
        threads: shards read at the same time.
        hashes: also compare each shard's SHA-256 with the manifest's.
        decode: also decode every picture; slow, since it is limited by the processor and not by the disk.

    Raises:
        UserError: no such folder, no shards in it, or `hashes` without a manifest that has them.
    """
    path = _local(folder)
    manifest = read_manifest(path) or {}
    sizes = read_sizes(path)
    expected_hashes = {name: entry["sha256"] for name, entry in manifest.get("shards", {}).items()}
    if hashes and not expected_hashes:
        raise UserError(f"{folder} has no manifest.json with hashes: check it without --hash.")
    names = sorted({p.name for p in path.glob("*.tar")} | set(sizes or {}) | set(expected_hashes))
    if not names:
        raise UserError(f"{folder} holds no *.tar shards: give a source's own folder.")

    def check(name: str) -> ShardCheck:
        found = ShardCheck(name)
        if not (path / name).is_file():
            found.fault("shard missing")
            return found
        digest = hashlib.sha256() if hashes else None
        _check_shard(path / name, found, decode, digest)
        if digest is not None and digest.hexdigest() != expected_hashes.get(name):
            found.fault("hash differs from the manifest's")
        if sizes is not None and name not in sizes:
            found.fault("not in sizes.json")
        elif sizes is not None and sizes[name] != found.samples:
            found.fault(f"holds {found.samples} samples, sizes.json says {sizes[name]}")
        return found

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool, tqdm(total=len(names), unit="shard", disable=not progress) as bar:
        shards = []
        for found in pool.map(check, names):
            shards.append(found)
            bar.update()
    return FolderCheck(shards, time.perf_counter() - begin)


class _Window:
    """A file that is read once, from beginning to end, through a buffer. `window(offset, size)` -> bytes; offsets ascend.

    The buffer is so large that threads seldom wait for each other (they read without Python's lock, and check members with it),
    and so small that it stays in the processor's cache while its members are checked.
    """

    def __init__(self, file: Any, digest: Any) -> None:
        self._file, self._digest = file, digest
        self._bytes = bytearray(_WINDOW_BYTES)
        self._start = self._length = 0

    def __call__(self, offset: int, size: int) -> bytearray:
        begin = offset - self._start
        if begin + size <= self._length:
            return self._bytes[begin : begin + size]
        found = bytearray()
        while True:
            part = self._bytes[begin : min(begin + size, self._length)]
            found += part
            size -= len(part)
            begin = max(0, begin - self._length)
            if not size or not self.advance():
                return found

    def frame(self, offset: int, size: int, first: bytes, last: bytes) -> tuple[bool, bool]:
        """Whether the bytes begin with `first`, and whether they end with `last` after that."""
        begin = offset - self._start
        if begin + size <= self._length:
            held, end = self._bytes, begin + size
            return held.startswith(first, begin, end), held.endswith(last, begin + len(first), end)
        begins = self(offset, min(size, len(first))) == first
        rest = max(len(first), size - len(last))
        return begins, rest <= size and self(offset + rest, size - rest).endswith(last)

    def plain_run(self, position: int) -> list[Member]:
        """`headers.plain_run` of the buffer, from the header at `position` on."""
        if position < self._start:
            return []
        return plain_run(self._bytes, position - self._start, self._length, self._start)

    def advance(self) -> bool:
        """Read the next bytes into the buffer; False at the end of the file."""
        self._start += self._length
        self._length = self._file.readinto(self._bytes)
        if self._digest is not None:
            self._digest.update(memoryview(self._bytes)[: self._length])
        return self._length > 0


def _check_shard(path: Path, found: ShardCheck, decode: bool, digest: Any) -> None:
    """Check one shard into `found`, and its bytes into `digest`."""
    found.size_bytes = path.stat().st_size
    seen: set[str] = set()
    with open(path, "rb", buffering=0) as file:
        window = _Window(file, digest)
        try:
            for key, faults in group(_faults(file.fileno(), window, found.size_bytes, decode)):
                found.samples += 1
                if key in seen:
                    found.fault("key comes twice", key)
                seen.add(key)
                if TEXT_EXTENSION not in faults:
                    found.fault("no caption", key)
                if image_of(faults) is None:
                    found.fault("no picture", key)
                for fault in faults.values():
                    if fault:
                        found.fault(fault, key)
        except BrokenTar as error:
            found.fault(f"broken: {error}")
        while window.advance():  # bytes after the end mark belong to the hash
            pass


def _faults(descriptor: int, window: _Window, total: int, decode: bool) -> Iterator[tuple[str, str]]:
    """(name, fault) of each member of a tar; "" for no fault."""

    def read_at(offset: int, size: int) -> bytes:
        return os.pread(descriptor, size, offset)

    position, walk = 0, None
    while True:
        for member in window.plain_run(position):
            yield member.name, _fault(window, member, decode)
            position, walk = end_of(member.offset, member.size), None
        # A member that is not plain, or not whole in the buffer.
        walk = walk or walk_tar(read_at, total, position)
        following = next(walk, None)
        if following is None:
            return
        position = end_of(following.offset, following.size)
        if position <= total:  # else the walk raises there
            yield following.name, _fault(window, following, decode)


def _fault(window: _Window, member: Member, decode: bool) -> str:
    """What is wrong with a caption or a picture; "" for nothing, and for other members."""
    name, offset, size = member
    extension = name[name.find(".", name.rfind("/") + 1) + 1 :].lower()
    if extension == TEXT_EXTENSION:
        return caption_fault(bytes(window(offset, size)))
    if extension not in PICTURE_MARKS:
        return ""
    if decode:
        return picture_fault(bytes(window(offset, size)), extension, decode=True)
    return mark_fault(*window.frame(offset, size, *PICTURE_MARKS[extension]), extension)
