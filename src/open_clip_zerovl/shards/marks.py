"""Marks of files, by which stored rows and labels notice that a file is not the one of which they were made."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

from open_clip_zerovl.shards.urls import local_path

_EDGE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20

Mark = list[Any]


def file_mark(file: str, known: Iterable[Mark] | None = None) -> Mark:
    """[name, size in bytes, modification time in ns, digest]; [name] of a remote or lost file.

    Args:
        known: None for a digest of the first and last 64 KiB: the time is compared, too. Else the digest is of the whole file,
            so that a copy with another time is the same file and an edit in its middle is not; it is taken from the mark in
            `known` with this name, size and time, or computed.
    """
    path, name = local_path(file), os.path.basename(file)
    try:
        if path is None:
            return [name]
        with open(path, "rb") as content:
            status = os.fstat(content.fileno())
            about = [name, status.st_size, status.st_mtime_ns]
            digest = hashlib.blake2b(digest_size=8)
            if known is None:
                digest.update(content.read(_EDGE_BYTES))
                content.seek(max(0, status.st_size - _EDGE_BYTES))
                digest.update(content.read(_EDGE_BYTES))
            elif (same := next((mark for mark in known if mark[:3] == about), None)) is not None:
                return same[:4]
            else:
                while block := content.read(_BLOCK_BYTES):
                    digest.update(block)
        return [*about, digest.hexdigest()]
    except OSError:  # a lost shard has been reported when the sources were opened
        return [name]


def content_of(mark: Mark) -> tuple[Any, ...]:
    """A mark without the time: the same for a file and its copies."""
    return tuple(map(str, (*mark[:2], *mark[3:])))  # of a damaged file no part may be hashable
