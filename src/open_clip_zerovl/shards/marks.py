"""Marks of files, by which stored rows and labels notice that a file is not the one of which they were made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import user_cache, write_atomically
from open_clip_zerovl.core.identity import digest_of, sha256_of
from open_clip_zerovl.shards.urls import local_path

_EDGE_BYTES = 1 << 16

Mark = list[Any]
#: (name, size in bytes, modification time in ns) -> digest of the whole file.
Digests = Mapping[tuple[Any, ...], str]


def file_mark(file: str, known: Digests | None = None) -> Mark:
    """[name, size in bytes, modification time in ns, digest]; [name] of a remote or lost file.

    Args:
        known: None for a digest of the first and last 64 KiB: the time is compared, too. Else the digest is of the whole file,
            so that a copy with another time is the same file and an edit in its middle is not; it is computed if `known` does
            not have it.
    """
    path, name = local_path(file), os.path.basename(file)
    try:
        if path is None:
            return [name]
        status = os.stat(path)
        about = [name, status.st_size, status.st_mtime_ns]
        if known is None:
            return [*about, _digest_of_edges(path, status.st_size)]
        digest = known.get(tuple(about)) or _cached_digest(
            os.path.abspath(path), about[1:], partial(sha256_of, path)
        )
        return [*about, digest]
    except OSError:  # a lost shard has been reported when the sources were opened
        return [name]


def file_marks(files: Iterable[str], known: Digests | None, about: str) -> dict[str, Mark]:
    """`file_mark` of several files, each once; a bar with the words `about` if it takes more than two seconds."""
    each = list(dict.fromkeys(files))
    with ThreadPoolExecutor(max_workers=8) as pool:
        new_marks = pool.map(lambda file: file_mark(file, known), each)
        return dict(zip(each, tqdm(new_marks, about, len(each), delay=2, leave=False), strict=True))


def digests_of(earlier_marks: Iterable[Mark]) -> Digests:
    """The digests of earlier marks, for `file_mark`: those of files that name, size and time tell apart."""
    digests_by_stamp: dict[tuple[Any, ...], set[str]] = {}
    for mark in earlier_marks:
        if isinstance(mark, list) and len(mark) > 3:
            # of a damaged file no part may be hashable
            about = tuple(part if isinstance(part, int) else str(part) for part in mark[:3])
            digests_by_stamp.setdefault(about, set()).add(str(mark[3]))
    return {about: min(digests) for about, digests in digests_by_stamp.items() if len(digests) == 1}


def content_of(mark: Mark) -> tuple[str, ...]:
    """A mark without the time: the same for a file and its copies."""
    return tuple(map(str, (*mark[:2], *mark[3:])))


def is_same(stored: Mark, current: Mark) -> bool:
    """True if two marks are of one content."""
    return len(stored) > 1 and content_of(stored) == content_of(current)


def _digest_of_edges(path: str, size: int) -> str:
    with open(path, "rb") as content:
        begin = content.read(_EDGE_BYTES)
        content.seek(max(0, size - _EDGE_BYTES))
        return digest_of(begin, content.read(_EDGE_BYTES))[:16]


def _cached_digest(paths: str | list[str], stamps: list[Any], read: Callable[[], str]) -> str:
    """The digest that `read` gives. The user's cache keeps it while the stamps of the paths are the same."""
    cache_file = user_cache("open_clip_zerovl") / "digests" / f"{digest_of(paths)[:24]}.json"
    with suppress(OSError, ValueError, TypeError):
        *known_stamps, stored = json.loads(cache_file.read_text(encoding="utf-8"))
        if known_stamps == stamps:
            return str(stored)
    digest = read()
    with suppress(UserError):  # a cache that cannot be written
        write_atomically(cache_file, json.dumps([*stamps, digest]))
    return digest
