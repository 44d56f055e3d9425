"""Identities: the hash of some values, of a file's content, and the stamp by which a file counts as unchanged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any


def digest_of(*parts: Any) -> str:
    """A hash of bytes (or arrays of numbers) and of values of JSON, as 32 hexadecimal digits."""
    return digest_of_all(parts)


def digest_of_all(parts: Iterable[Any]) -> str:
    """`digest_of` of any number of parts, which are read one by one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, bytes | bytearray | memoryview) or hasattr(part, "tobytes"):
            content = memoryview(part if isinstance(part, bytes | bytearray) else part.tobytes())
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
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def stamp_of(path: str | os.PathLike[str]) -> list[int] | None:
    """[size in bytes, modification time in ns] of a file; None if there is none, as behind a dangling link."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]
