"""Identities: digests of values and of files, and the claim of a folder for the request for which it was begun.

What a file holds decides, not its path or time. A later call with the same request goes on; another one is refused.

OUT/pack.json, OUT/request.json ...      the request, as JSON

An input stands in a request by its path and by a digest of its content, `--data` and "content of --data". The content decides:
a copy at another path is the same request, and other content at the same path is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import read_json, regular_file, user_cache, write_atomically

CONTENT = "content of "  # begins the names of entries that are digests, which nobody can read
ADVICE = "repeat the earlier call to continue it, or give a new folder"
# A file that was written later than this before its digest may be written again without another time.
_SETTLED_NS = 2 * 10**9


def digest_of(*parts: Any) -> str:
    """Hash bytes (or arrays of numbers) and values of JSON to 32 hexadecimal digits."""
    return digest_of_all(parts)


def digest_of_all(parts: Iterable[Any]) -> str:
    """Hash as `digest_of` does, with parts that are read one by one."""
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
    """Convert the first 64 bits of a digest to a signed number that is not 0."""
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
    """Return size, times of modification and of change in ns, and inode, or None for a file that is not there."""
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


def claim(
    file: Path,
    request: Mapping[str, Any],
    *,
    restart: Callable[[dict[str, Any]], bool] = lambda stored: False,
) -> dict[str, Any] | None:
    """Claim a file's folder for a request.

    Args:
        file: holds the request; the folder has no others before it.
        restart: True if the stored request may be replaced, since nothing of worth was done for it.

    Returns:
        The request of the earlier call that has claimed it; None for a folder that is claimed now.

    Raises:
        UserError: a folder of other files, or begun for another request.
    """
    request = json.loads(json.dumps(request))
    stored = read_claim(file)
    if stored is None:
        # Beside the lock of this process and the leavings of a killed one.
        entries = file.parent.iterdir() if file.parent.is_dir() else ()
        others = [
            entry.name for entry in entries if entry.name != "lock" and entry.suffix != ".part"
        ]
        if others:
            raise UserError(
                f"{file.parent} holds {others[0]} and no {file.name}, so this program did not begin it; give a new folder"
            )
    elif difference(stored, request) is None:
        return stored
    elif not restart(stored):
        raise UserError(f"{file.parent} {difference(stored, request)}; {ADVICE}")
    write_atomically(file, json.dumps(request, indent=1) + "\n")
    return None


def read_claim(file: Path) -> dict[str, Any] | None:
    """Read the request in a file.

    Returns:
        None without the file.

    Raises:
        UserError: the file cannot be read.
    """
    if not file.exists():
        return None
    content = read_json(file, "remove it, or give a new folder")
    if not isinstance(content, dict):
        raise UserError(f"{file} was not written by this program; give a new folder")
    return content


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Word the first entry that differs as the rest of a sentence about what was begun.

    "was begun with --seed 1, and this call has --seed 0", "was begun before the content of --from changed"

    Returns:
        None for the same request.
    """
    for name in {**wanted, **stored}:
        old, new = stored.get(name), wanted.get(name)
        content = wanted.get(f"{CONTENT}{name}")
        copied = content is not None and content == stored.get(f"{CONTENT}{name}")
        if old == new or copied:
            continue
        if name.startswith(CONTENT):
            return f"was begun before the {name} changed"
        if isinstance(old, list) and isinstance(new, list):
            pairs = zip_longest(old, new)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
        return f"was begun with {_shown(name, old)}, and this call has {_shown(name, new)}"
    return None


def _shown(name: str, value: Any) -> str:
    """Word an entry with its value, "no NAME" without one."""
    if value is None:
        return f"no {name}"
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{name}{'=' if name.startswith('--set ') else ' '}{text}"
