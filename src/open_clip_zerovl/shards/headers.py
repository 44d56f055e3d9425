"""The members of a tar from its headers alone: names, offsets and sizes, as fast as the disk gives them.

Everything that reads a tar by its headers walks it here: counting, the index, checks, retrieval and probe sets. Headers of
plain files, which nearly all members of a shard are, are parsed here. `tarfile` reads the other members: long names, large
sizes, pax, links. It takes several times as long, since it makes an object of twenty attributes for each member.

A hard or symbolic link gives the bytes of the earlier member that it leads to; a link without one, and a sparse file, none. A
tar ends at its end mark only if nothing but zeros follows: behind the mark of `cat a.tar b.tar` lie the samples of b.

`members.group` puts members together to samples.
"""

from __future__ import annotations

import logging
import posixpath
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple, cast

BLOCK = 512
_ZEROS = bytes(BLOCK)
_REGULAR = b"0\0"  # type flags of a regular file; very old tars have NUL
# of a long name or of pax fields; a header that claims more is corrupt
_LARGEST_HEADER_BYTES = 1 << 24
_READ_BYTES = 1 << 20  # behind an end mark, at a time
_WARNED: set[str] = set()  # kinds of members without bytes
# Errors of tarfile on corrupt headers.
_CORRUPT = (
    tarfile.TarError,
    ValueError,
    LookupError,
    OverflowError,
    RecursionError,
    AttributeError,
    TypeError,
)

#: `read_at(offset, size)` -> the bytes there; fewer at the end of the file.
ReadAt = Callable[[int, int], bytes | bytearray]


class BrokenTar(tarfile.ReadError):
    """The file is cut off or not a tar; the message names the place."""


class BytesBehind(BrokenTar):
    """A tar's end mark is followed by more than zeros."""


class Member(NamedTuple):
    """A regular file in a tar: its name, and where its bytes lie in the tar."""

    name: str
    offset: int
    size: int


def walk_tar(read_at: ReadAt, total: int, *, whole: bool = True) -> Iterator[Member]:
    """The regular files of a tar of `total` bytes, in order. Mostly one read a member.

    Args:
        whole: the tar must have its end mark. Otherwise it ends at a file without a following header.

    Raises:
        BrokenTar: a tar that ends within a file (which has been yielded), an impossible header, bytes behind the end mark, or,
            with `whole`, a tar without an end mark.
    """
    tar: tarfile.TarFile | None = None  # reads headers that are not plain
    members: dict[str, Member] = {}
    position = 0
    while True:
        header = read_at(position, BLOCK)
        # the end mark; Python 3.10's tarfile seeks in front of a tar that begins with it
        if header == _ZEROS:
            require_ended(_Headers(read_at, total, position).read, position)
            return
        member = None if tar is not None and tar.pax_headers else _plain_member(header, position)
        if member is not None:
            tar = None
            after = member.offset + -(-member.size // BLOCK) * BLOCK
            members[member.name] = member
            yield member
        else:
            tar, info = _next_member(tar, read_at, total, position)
            if info is None:
                if whole:
                    raise BrokenTar(_no_end(header, position, total))
                return
            after = tar.offset
            if after <= position or info.size < 0:
                raise BrokenTar(f"a negative size at byte {position}")
            if is_file(info):
                member = Member(info.name, *_extent(info, members))
                members[member.name] = member
                yield member
        if after > total:
            raise BrokenTar(
                f"it is cut off after {total} bytes, within the file whose header is at byte {position}"
            )
        position = after


def require_ended(read: Callable[[int], bytes], position: int) -> None:
    """Read behind the end mark of a tar, to the end of the file.

    Args:
        read: number of bytes -> the next bytes; none at the end.
        position: of the end mark, for the message.

    Raises:
        BytesBehind: not all of the bytes are zeros.
    """
    while content := read(_READ_BYTES):
        if content.strip(b"\0"):
            raise BytesBehind(
                f"its end mark at byte {position} is followed by more bytes, as in tars that were joined with cat: unpack all "
                "of it with tar --ignore-zeros, and write it as one tar"
            )


def is_file(info: tarfile.TarInfo) -> bool:
    """Return whether a header is of a file, or of a link that stands for one."""
    return info.isreg() or (
        (info.islnk() or info.issym()) and "." in posixpath.basename(info.name)[1:]
    )


def tell_of_lack(info: tarfile.TarInfo) -> None:
    """Warn of a member without bytes that can be read; once a process for each kind."""
    if info.issparse():
        _warn("a sparse file", f"{info.name}: write the tar without --sparse")
    elif info.islnk():
        _warn("a hard link", f"{info.name} to {info.linkname}: write it with --hard-dereference")
    else:
        _warn("a symbolic link", f"{info.name} to {info.linkname}: write it with --dereference")


def _warn(kind: str, words: str) -> None:
    if kind not in _WARNED:
        _WARNED.add(kind)
        logging.warning(
            f"A tar holds {kind} whose bytes cannot be read, as if it were empty ({words})."
        )


def _extent(info: tarfile.TarInfo, members: dict[str, Member]) -> tuple[int, int]:
    """Return offset and size of a member's bytes; size 0, with a warning, if they cannot be read."""
    if info.isreg() and not info.issparse():
        return info.offset_data, info.size
    path = info.linkname
    if info.issym():
        path = posixpath.normpath(posixpath.join(posixpath.dirname(info.name), path))
    target = members.get(path) or members.get(f"./{path}")
    if target is not None and not info.issparse():
        return target.offset, target.size
    tell_of_lack(info)
    return info.offset_data, 0


def _plain_member(header: bytes | bytearray, position: int) -> Member | None:
    """The member of a plain header, None for any other block.

    A plain member is a regular file with a name of at most 100 bytes and a size in octal digits; nearly all members of shards
    are plain.
    """
    if (
        len(header) < BLOCK
        or header[156] not in _REGULAR
        or header[345]
        or header[135] not in b"\0 "
    ):
        return None
    size = header[124:135]
    checksum = header[148:154]
    behind = header[154:156]
    if not size.isdigit() or not checksum.isdigit() or (behind[0] and behind.strip(b"\0 ")):
        return None
    # The checksum is the sum of the header's bytes, with its own field as spaces. The lower half of Adler-32 is one plus the
    # sum of all bytes modulo 65521, and takes a fiftieth of the time of a sum in Python.
    try:
        expected = int(checksum, 8) + sum(header[148:156]) - 256 + 1
        if expected % 65521 != zlib.adler32(header) & 0xFFFF:
            return None
        name = header[:100].split(b"\0", 1)[0].decode("utf-8", errors="surrogateescape")
        return Member(name, position + BLOCK, int(size, 8)) if not name.endswith("/") else None
    except ValueError:  # an 8 or a 9
        return None


def _next_member(
    tar: tarfile.TarFile | None, read_at: ReadAt, total: int, position: int
) -> tuple[tarfile.TarFile, tarfile.TarInfo | None]:
    """The member at a header, read by `tarfile`, None at the end of the tar; and the reader, for the next member."""
    try:
        if tar is None:
            view = cast(IO[bytes], _Headers(read_at, total, position))
            tar = tarfile.TarFile(fileobj=view, encoding="utf-8", errors="surrogateescape")
        info = tar.next()
        tar.members = []  # type: ignore[attr-defined]  # it would keep every header
        return tar, info
    except BrokenTar:
        raise
    except _CORRUPT as error:
        raise BrokenTar(
            f"no tar header at byte {position} ({error or type(error).__name__})"
        ) from error


class _Headers:
    """A tar's bytes as a file for `tarfile`, which reads headers from it; a read of more than a header may hold is refused."""

    def __init__(self, read_at: ReadAt, total: int, position: int) -> None:
        self._read_at = read_at
        self._total = total
        self._position = position

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if position < 0:
            raise BrokenTar("a negative size in a header")
        self._position = position
        return position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LARGEST_HEADER_BYTES:
            raise BrokenTar(f"a header of {size} bytes at byte {self._position}")
        content = bytes(
            self._read_at(self._position, max(0, min(size, self._total - self._position)))
        )
        self._position += len(content)
        return content


def _no_end(header: bytes | bytearray, position: int, total: int) -> str:
    """The fault of a block that is neither a header nor the end mark."""
    if len(header) < BLOCK:
        return f"it is cut off after {total} bytes: no end mark"
    if header[124] == 0xFF or ord("-") in header[124:136]:
        return f"a negative size at byte {position}"
    return f"no tar header at byte {position}"
