"""Tars as sequences of samples, from their headers alone: names, offsets and sizes, as fast as the disk gives them.

Everything that reads shards uses `locate_samples`: training, its counting and its index, retrieval and probe sets, and
`zerovl data`. Sample number i of a shard is therefore the same sample for all of them, which exactly-once and exact resume
depend on. A compressed tar is unpacked once, into the cache of fetched shards (`fetch`).

Members with the same key (the path up to the file name's first dot) that lie one after the other are a sample. A sample also
ends where a suffix repeats, so that two samples with one key stay two; webdataset raises an error there:

    a.jpg a.txt b.jpg a.txt           a {jpg, txt}, b {jpg}, a {txt}
    a.jpg a.txt a.jpg a.txt           a {jpg, txt}, a {jpg, txt}

Members whose file name begins with a dot are no samples: macOS writes `._a.jpg` beside `a.jpg`. A sample that the end of a torn
tar cuts off does not count.

Headers of plain files, which nearly all members of a shard are, are parsed here. `tarfile` reads the other members: long
names, large sizes, pax, links. It takes several times as long, since it makes an object of twenty attributes for each member. A
hard or symbolic link gives the bytes of the earlier member that it leads to; a link without one, and a sparse file, none. A tar
ends at its end mark only if nothing but zeros follows: behind the mark of `cat a.tar b.tar` lie the samples of b.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, TypeVar, cast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS, PICTURE_WORDS
from open_clip_zerovl.shards.texts import (
    BadCaption,
    Fault,
    caption_lines,
    caption_of,
    check_open_files,
)

#: The order in which CLIP_benchmark looks for the picture. Retrieval sets keep it on purpose: both programs score the same.
CLIP_BENCHMARK_ORDER = tuple(dict.fromkeys(("webp", "png", "jpg", "jpeg", *IMAGE_EXTENSIONS)))
TEXT_EXTENSION = "txt"
WANTED = frozenset((*IMAGE_EXTENSIONS, TEXT_EXTENSION))
META = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
# webdataset's rule, also for line breaks
_KEY_AND_SUFFIX = re.compile(r"(?P<key>(?:.*/)?[^.]+)\.(?P<suffix>[^/]*)")

BYTES_BEHIND = "bytes behind the end mark"  # a reason of a ShardError
BLOCK = 512
_ZEROS = bytes(BLOCK)
_REGULAR = b"0\0"  # type flags of a regular file; very old tars have NUL
# of a long name or of pax fields; a header that claims more is corrupt
_LARGEST_HEADER_BYTES = 1 << 24
_READ_BYTES = 1 << 20  # behind an end mark, at a time
_WARNED: list[str] = []  # the first member without bytes
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

Content = TypeVar("Content")
#: `read_at(offset, size)` -> the bytes there; fewer at the end of the file.
ReadAt = Callable[[int, int], bytes | bytearray]


class BrokenTar(tarfile.ReadError):
    """The error of a file that is cut off or not a tar, which names the place."""


class BytesBehind(BrokenTar):
    """A tar's end mark is followed by more than zeros."""


class ShardError(Fault):
    """A shard cannot be read, or only up to some sample.

    Attributes:
        readable: number of whole samples before that.
    """

    def __init__(self, reason: str, detail: str, readable: int = 0) -> None:
        super().__init__(reason, detail)
        self.readable = readable


# ---------------------------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A regular file in a tar.

    Attributes:
        offset, size: where its bytes lie.
        header: where its headers begin.
        descriptor: of the tar, while it is read.
    """

    name: str
    offset: int
    size: int
    header: int
    descriptor: int = -1

    def content(self) -> bytes:
        """Read its bytes."""
        return os.pread(self.descriptor, self.size, self.offset)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a shard.

    Attributes:
        key: the path of its files up to the name's first dot.
        files: contents by extension (`{"png": ..., "txt": ...}`).
        shard: path or URL of its shard; "" if it is in none yet.
    """

    key: str
    files: Mapping[str, bytes]
    shard: str = ""

    @property
    def image(self) -> bytes | None:
        """Return the encoded picture, None without one."""
        return image_of(self.files)

    @property
    def captions(self) -> list[str]:
        """List the captions of its text that can be shown."""
        captions = []
        for line in caption_lines(self.files.get(TEXT_EXTENSION, b"")):
            with suppress(BadCaption):
                captions.append(caption_of(line))
        return captions

    @property
    def about(self) -> dict[str, Any]:
        """Parse the object in its json, {} without one."""
        return object_of(self.files.get("json", b"")) or {}


def object_of(content: bytes) -> dict[str, Any] | None:
    """Parse the object of a JSON file.

    Returns:
        None if the file holds another value, or brackets thousands deep.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def image_of(
    sample: Mapping[str, Content], order: Sequence[str] = IMAGE_EXTENSIONS
) -> Content | None:
    """Return the picture among a sample's files, {suffix: content}, None if it has none."""
    return next((sample[extension] for extension in order if extension in sample), None)


def group(members: Iterable[tuple[str, Content]]) -> Iterator[tuple[str, dict[str, Content]]]:
    """Group (name, content) members in the order of the tar into samples (key, {suffix: content}), suffixes in lower case."""
    key: str = ""
    sample: dict[str, Content] = {}
    behind: BytesBehind | None = None
    try:
        for name, content in members:
            base, suffix = (None, None) if META.match(name) else _key_and_suffix(name)
            if base is None or suffix is None:
                continue
            suffix = suffix.lower()
            if base != key or suffix in sample:
                if sample:
                    yield key, sample
                key, sample = base, {}
            sample[suffix] = content
    except BytesBehind as error:  # the sample before an end mark is whole
        behind = error
    if sample:
        yield key, sample
    if behind is not None:
        raise behind


def _key_and_suffix(name: str) -> tuple[str | None, str | None]:
    """Split a name into the path up to the file name's first dot and the rest, (None, None) if it lacks one of them."""
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    if dot == begin:
        return None, None
    if dot > begin and "\n" not in name:
        return name[:dot], name[dot + 1 :]
    odd = _KEY_AND_SUFFIX.fullmatch(name)  # several times as slow
    return (odd["key"], odd["suffix"]) if odd else (None, None)


def locate_samples(
    path: str | os.PathLike[str], *, begin: int = 0, whole: bool = False
) -> Generator[tuple[str, dict[str, Member]], None, None]:
    """Yield the samples of a plain local tar as (key, {suffix: member}), from the headers alone.

    The members can be read until the next sample.

    Args:
        begin: where the headers of the first sample begin (`files.TarIndex`).
        whole: a tar without its end mark is torn, too: it may have been cut off between two samples.

    Raises:
        ShardError: the tar is unreadable or torn; `readable` samples were yielded before.
        UserError: see `unreadable`.
    """
    count = 0
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(error) from error
    try:
        members = walk_tar(
            lambda offset, size: os.pread(descriptor, size, offset),
            os.fstat(descriptor).st_size,
            begin=begin,
            whole=whole,
            descriptor=descriptor,
        )
        for sample in group((member.name, member) for member in members):
            yield sample
            count += 1
    except (BrokenTar, OSError) as error:
        if isinstance(error, OSError) and not count:
            raise unreadable(error) from error
        reason = "truncated shard" if count or begin else "unreadable shard"
        if isinstance(error, BytesBehind):
            reason = BYTES_BEHIND
        raise ShardError(reason, words_of(error), count) from error
    finally:
        os.close(descriptor)


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yield the samples of a plain local tar with all their files, in the order of training.

    Raises:
        UserError: the shard cannot be read to its end.
    """
    try:
        for key, members in locate_samples(path, whole=True):
            yield Sample(key, {name: member.content() for name, member in members.items()})
    except (ShardError, OSError) as error:
        raise UserError(
            f"shard {path} cannot be read ({error}): fetch or write it again"
        ) from error


def why_no_pairs(path: str | os.PathLike[str]) -> str:
    """Say why the members of a plain local tar make no pairs of a picture and a caption, "" if they make some."""
    names: list[str] = []
    try:
        for key, files in locate_samples(path):
            pictured = not set(IMAGE_EXTENSIONS).isdisjoint(files)
            if pictured and not {TEXT_EXTENSION, "json"}.isdisjoint(files):
                return ""
            names += [f"{key}.{suffix}" for suffix in files]
    except ShardError as error:
        return f"it cannot be read as a tar to its end ({error})"
    return (
        f"a picture ({PICTURE_WORDS}) and its .txt or .json lie together and have one key, the path up to the first dot of the "
        f"file's name; its members begin with {', '.join(names[:4]) or 'none'} (tar --sort=name puts one name together)"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def words_of(error: BaseException) -> str:
    """Return the message of an error, or its type's name."""
    message = error.args[-1] if isinstance(error, OSError) and error.args else error
    return str(message) or type(error).__name__


def unreadable(error: OSError) -> ShardError:
    """Make the ShardError of a shard that cannot be opened. UserError as `texts.check_open_files`."""
    check_open_files(error)
    return ShardError("unreadable shard", words_of(error))


def lacks_end(path: str | os.PathLike[str]) -> bool:
    """Return whether a tar or parquet file lacks its end, as a server leaves it that announced no length and broke off."""
    with open(path, "rb") as file:
        if file.read(4) == b"PAR1":
            file.seek(-4, os.SEEK_END)
            return file.read() != b"PAR1"
    try:
        return any(False for _ in locate_samples(path, whole=True))
    except ShardError:
        return True


# ---------------------------------------------------------------------------------------------------------------------
# Headers
# ---------------------------------------------------------------------------------------------------------------------


def walk_tar(
    read_at: ReadAt, total: int, *, begin: int = 0, whole: bool = True, descriptor: int = -1
) -> Iterator[Member]:
    """Yield the regular files of a tar of `total` bytes, in order. Mostly one read a member.

    Args:
        begin: where the headers of the first one begin.
        whole: the tar must have its end mark. Otherwise it also ends behind a whole file.
        descriptor: of the members.

    Raises:
        BrokenTar: a tar that ends within a file (which has been yielded), an impossible header, bytes behind the end mark, or,
            with `whole`, a tar without an end mark.
    """
    tar: tarfile.TarFile | None = None  # reads headers that are not plain
    members: dict[str, Member] = {}
    position = begin
    while True:
        header = read_at(position, BLOCK)
        # the end mark; Python 3.10's tarfile seeks in front of a tar that begins with it
        if header == _ZEROS:
            _require_ended(_Headers(read_at, total, position).read, position)
            return
        member = (
            None
            if tar is not None and tar.pax_headers
            else _plain_member(header, position, descriptor)
        )
        if member is not None:
            tar = None
            after = member.offset + -(-member.size // BLOCK) * BLOCK
            members[member.name] = member
            yield member
        else:
            tar, info = _next_member(tar, read_at, total, position)
            if info is None:
                if whole or (len(header) < BLOCK and header.strip(b"\0")):
                    raise BrokenTar(
                        f"no tar header at byte {position}"
                        if len(header) == BLOCK
                        else f"it is cut off after {total} bytes: no end mark"
                    )
                return
            after = tar.offset
            if after <= position or info.size < 0:
                raise BrokenTar(f"a negative size at byte {position}")
            is_link = info.islnk() or info.issym()
            if info.isreg() or (is_link and "." in posixpath.basename(info.name)[1:]):
                if begin and not info.isreg():  # it may lead to a member before
                    walked = walk_tar(read_at, total)
                    before = itertools.takewhile(lambda each: each.header < begin, walked)
                    members = {each.name: each for each in before} | members
                member = Member(info.name, *_extent(info, members), position, descriptor)
                members[member.name] = member
                yield member
        if after > total:
            raise BrokenTar(
                f"it is cut off after {total} bytes, within the file whose header is at byte {position}"
            )
        position = after


def _require_ended(read: Callable[[int], bytes], position: int) -> None:
    """Read behind the end mark of a tar, to the end of the file.

    Raises:
        BytesBehind: not all of the bytes are zeros.
    """
    while content := read(_READ_BYTES):
        if content.strip(b"\0"):
            raise BytesBehind(
                f"its end mark at byte {position} is followed by more bytes, as in tars that were joined with cat: unpack all "
                "of it with tar --ignore-zeros, and write it as one tar"
            )


def _extent(info: tarfile.TarInfo, members: dict[str, Member]) -> tuple[int, int]:
    """Return offset and size of a member's bytes, size 0 with a warning once a process if they cannot be read."""
    if info.isreg() and not info.issparse():
        return info.offset_data, info.size
    path = info.linkname
    if info.issym():
        path = posixpath.normpath(posixpath.join(posixpath.dirname(info.name), path))
    target = members.get(path) or members.get(f"./{path}")
    if target is None or info.issparse():
        _warn(info.name)
        return info.offset_data, 0
    return target.offset, target.size


def _warn(name: str) -> None:
    if not _WARNED:
        _WARNED.append(name)
        logging.warning(
            f"A tar holds a link or a sparse file whose bytes cannot be read, as if it were empty ({name}): write the tar with "
            "--dereference --hard-dereference, without --sparse."
        )


def _plain_member(header: bytes | bytearray, position: int, descriptor: int) -> Member | None:
    """Parse a plain header.

    A plain member is a regular file with a name of at most 100 bytes and a size in octal digits; nearly all members of shards
    are plain.

    Returns:
        None for any other block.
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
        if name.endswith("/"):
            return None
        return Member(name, position + BLOCK, int(size, 8), position, descriptor)
    except ValueError:  # an 8 or a 9
        return None


def _next_member(
    tar: tarfile.TarFile | None, read_at: ReadAt, total: int, position: int
) -> tuple[tarfile.TarFile, tarfile.TarInfo | None]:
    """Read the member at a header by `tarfile`, None at the end of the tar, and return it with the reader for the next one."""
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
    """A tar's bytes as a file for `tarfile`, which may read no more from it at once than a header holds."""

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
