"""The members of a tar from its headers alone, as fast as the disk gives them; and of a whole tar in memory.

`tarfile` makes an object of some twenty attributes a member; here a member is a name, an offset and a size. Read are the
formats that webdataset shards come in: ustar, GNU (long names, large sizes) and pax (path and size). What makes a sample of
members is not decided here but in `members.group`, as for training.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.tar.members import group
from open_clip_zerovl.tar.shards import Sample

BLOCK = 512
_ZEROS = bytes(BLOCK)
_REGULAR = b"0\0"  # type flags of a file; NUL in very old tars
_LONG_NAME, _PAX = b"Lx"
_ABOUT_THE_NEXT = b"Lxg"  # a long name, fields of the next member, fields of all that follow
_OCTAL_PLACES = 8 ** np.arange(5, -1, -1, dtype=np.uint32)

#: `read_at(offset, size)` gives the bytes there, fewer at the end.
ReadAt = Callable[[int, int], bytes | bytearray]


class BrokenTar(ValueError):
    """The tar is cut off or is none; the message says where."""


class Member(NamedTuple):
    """A regular file in a tar: its bytes lie at `offset`."""

    name: str
    offset: int
    size: int


def walk_tar(read_at: ReadAt, total: int, position: int = 0) -> Iterator[Member]:
    """Regular files of a tar of `total` bytes, in order, from the header at `position` on; one or two reads a member.

    Raises:
        BrokenTar: a header whose checksum is wrong, or a tar that ends within a file or without its end mark.
    """
    long_name: str | None = None
    long_size: int | None = None
    while True:
        header = read_at(position, BLOCK)
        if len(header) < BLOCK:
            raise BrokenTar(f"it is cut off after {total} bytes: no end mark")
        if header == _ZEROS:
            return
        try:
            size = _number(header[124:136])
            checksum = _number(header[148:156])
        except ValueError as error:
            raise BrokenTar(f"no tar header at byte {position}") from error
        if size < 0:
            raise BrokenTar(f"a negative size at byte {position}")
        # The checksum is the sum of the header's bytes, with its own field as spaces. Adler-32's lower half is one plus
        # the sum of all bytes modulo 65521, and takes a fiftieth of the time of a sum in Python.
        if (checksum + sum(header[148:156]) - 256 + 1) % 65521 != zlib.adler32(header) & 0xFFFF:
            raise BrokenTar(f"no tar header at byte {position}")
        flag = header[156]
        begin = position + BLOCK
        if flag in _ABOUT_THE_NEXT:
            content = bytes(read_at(begin, size))
            if flag == _LONG_NAME:
                long_name = content.rstrip(b"\0").decode("utf-8", errors="surrogateescape")
            elif flag == _PAX:
                fields = _pax(content)
                long_name = fields.get("path", long_name)
                long_size = int(fields["size"]) if "size" in fields else long_size
        else:
            if long_size is not None:
                size = long_size
            if begin + size > total:
                raise BrokenTar(
                    f"it is cut off after {total} bytes, within a file of {size} bytes that begins at {begin}"
                )
            if flag in _REGULAR:
                yield Member(long_name if long_name is not None else _name(header), begin, size)
            long_name = long_size = None
        position = end_of(begin, size)


def end_of(begin: int, size: int) -> int:
    """Where the next header lies, after a file's bytes."""
    return begin + -(-size // BLOCK) * BLOCK


def plain_run(buffer: bytearray, begin: int, end: int, start: int = 0) -> list[Member]:
    """The members from the header at `begin` on for as long as they are plain and whole before `end`: `walk_tar`, in bulk.

    `buffer` holds the tar's bytes from number `start` on; `begin` and `end` count from there.

    Plain is a regular file with a name of at most 100 bytes and a size in octal digits, as in nearly all shards. All headers
    of a buffer are parsed by a few array operations, in about half the time. What is not plain, the end of the tar and
    whatever is broken end the run, for `walk_tar` to tell.
    """
    heads, sizes = [], []
    at = begin
    while at + BLOCK <= end and buffer[at + 156] in _REGULAR:
        try:
            size = int(buffer[at + 124 : at + 135], 8)
        except ValueError:
            break
        after = end_of(at + BLOCK, size)
        if size < 0 or after > end:
            break
        heads.append(at)
        sizes.append(size)
        at = after
    if not heads:
        return []
    first = begin % BLOCK
    blocks = np.frombuffer(buffer, np.uint8, (end - first) // BLOCK * BLOCK, first).reshape(-1, BLOCK)
    places = np.array(heads)
    headers = blocks[(places - first) // BLOCK]  # (m, 512), a copy
    digits = headers[:, 148:154] - np.uint8(ord("0"))
    sums = headers.sum(axis=1, dtype=np.uint32) - headers[:, 148:156].sum(axis=1, dtype=np.uint32) + 8 * ord(" ")
    plain = (sums == digits @ _OCTAL_PLACES) & (digits < 8).all(axis=1)
    plain &= ((headers[:, 135] == 0) | (headers[:, 135] == ord(" "))) & (headers[:, 345] == 0)
    count = len(plain) if plain.all() else int(plain.argmin())
    fields = np.ascontiguousarray(headers[:count, :100]).view("S100").ravel().tolist()
    names = [field.partition(b"\0")[0].decode("utf-8", errors="surrogateescape") for field in fields]
    return list(map(Member._make, zip(names, (places + (start + BLOCK)).tolist(), sizes, strict=False)))


def grouped(members: Iterator[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """(key, members by extension) of each sample, as training groups them."""
    return group((member.name, member) for member in members)


def read_samples(path: str | Path) -> Iterator[Sample]:
    """The samples of a local shard with all their files, in order: sample number i is number i of its training index.

    Raises:
        UserError: the shard cannot be read to its end.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            descriptor = file.fileno()

            def read_at(offset: int, size: int) -> bytes:
                return os.pread(descriptor, size, offset)

            for key, members in grouped(walk_tar(read_at, os.fstat(descriptor).st_size)):
                yield Sample(key, {extension: read_at(m.offset, m.size) for extension, m in members.items()})
    except (BrokenTar, OSError) as error:
        raise UserError(f"shard {path} cannot be read ({error}): fetch or write it again.") from error


def _name(header: bytes | bytearray) -> str:
    name = header[:100].split(b"\0", 1)[0]
    # GNU's old format keeps times where ustar has the front of a long path.
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", errors="surrogateescape")


def _number(field: bytes | bytearray) -> int:
    if field[0] & 0x80:  # base 256, for files beyond 8 GB
        return int.from_bytes(field[1:], "big")
    return int(field.rstrip(b"\0 ") or b"0", 8)


def _pax(content: bytes) -> dict[str, str]:
    fields = {}
    while content:
        length, _, rest = content.partition(b" ")
        if not length.isdigit():
            break
        line = rest[: int(length) - len(length) - 1].rstrip(b"\n")
        key, _, value = line.partition(b"=")
        fields[key.decode("utf-8", errors="replace")] = value.decode("utf-8", errors="surrogateescape")
        content = content[int(length) :]
    return fields
