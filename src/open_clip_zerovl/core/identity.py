"""Identities: digests of values and of files. What a file holds decides, not its path or time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import regular_file, user_cache, write_atomically

# A file that was written later than this before its digest may be written again without another time.
_SETTLED_NS = 2 * 10**9


def digest_of(*parts: Any) -> str:
    """A hash of bytes (or arrays of numbers) and of values of JSON, as 32 hexadecimal digits."""
    return digest_of_all(parts)


def digest_of_all(parts: Iterable[Any]) -> str:
    """`digest_of` of any number of parts, which are read one by one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, bytes | bytearray | memoryview) or hasattr(part, "tobytes"):
            plain = isinstance(part, bytes | bytearray | memoryview)
            content = memoryview(part if plain else part.tobytes())
        else:
            content = memoryview(json.dumps(part, sort_keys=True).encode())
        digest.update(f"{len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def number_of(digest: str) -> int:
    """The first 64 bits of a digest as a signed number that is not 0."""
    number = int(digest[:16], 16)
    return number - (number >> 63 << 64) or 1


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Digest a file by SHA-256, read in pieces.

    Raises:
        OSError: as `regular_file`.
    """
    digest = hashlib.sha256()
    with regular_file(path) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def file_digests(files: Iterable[str | os.PathLike[str]]) -> dict[str, str | None]:
    """Digest the bytes of each file, and read a file again only after it has changed.

    The user's cache has the digests of each folder's files with their sizes, times of change and inodes. Without a cache that
    can be written each call reads all files.

    Returns:
        File -> SHA-256; None for a file that cannot be read.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for file in dict.fromkeys(os.fspath(file) for file in files):
        by_folder[os.path.dirname(os.path.abspath(file))].append(file)
    digests: dict[str, str | None] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for folder, in_folder in by_folder.items():
            digests.update(_digests_in(folder, in_folder, pool))
    return digests


def _digests_in(folder: str, files: list[str], pool: ThreadPoolExecutor) -> dict[str, str | None]:
    """Digest files of one folder."""
    cache_file = user_cache("open_clip_zerovl") / "digests" / f"{digest_of(folder)}.json"
    known: dict[str, list[Any]] = {}
    with suppress(OSError, ValueError):  # no cache, or a damaged one
        known = json.loads(cache_file.read_text(encoding="utf-8"))
    stamps = {file: _stamp(file) for file in files}
    digests: dict[str, str | None] = {}
    for file, stamp in stamps.items():
        *known_stamp, digest = known.get(os.path.basename(file), [None])
        if stamp and known_stamp == stamp:
            digests[file] = digest
    changed = [file for file in files if file not in digests]
    if not changed:
        return digests
    settled = time.time_ns() - _SETTLED_NS
    read = pool.map(_digest_or_none, changed)
    words = f"checking {len(changed):,} files of {folder}"
    for file, new in zip(
        changed, tqdm(read, words, len(changed), delay=2, leave=False), strict=True
    ):
        digests[file] = new
        stamp = stamps[file]
        if new is not None and stamp is not None and max(stamp[1:3]) < settled:
            known[os.path.basename(file)] = [*stamp, new]
    with suppress(UserError):  # a cache that cannot be written
        write_atomically(cache_file, json.dumps(known))
    return digests


def _stamp(file: str) -> list[int] | None:
    """Return size, times of modification and of change in ns, and inode; None for a file that is not there."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    # rsync and cp -p keep the modification time, and no program the time of change.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digest_or_none(file: str) -> str | None:
    try:
        return sha256_of(file)
    except (OSError, ValueError):
        return None
