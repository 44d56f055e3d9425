"""Tar files as sequences of samples: the one rule by which members form samples, and how shards are opened.

Everything that reads shards uses `group`: training, its counting and its index, retrieval and probe sets, the bias
report, and `zerovl data`. Sample number i of a shard is therefore the same sample for all of them, which exactly-once and exact
resume depend on.

Members with the same key (the path up to the file name's first dot) that lie one after the other are a sample. A sample also
ends where a suffix repeats, so that two samples with one key stay two; webdataset raises an error there:

    a.jpg a.txt b.jpg a.txt           a {jpg, txt}, b {jpg}, a {txt}
    a.jpg a.txt a.jpg a.txt           a {jpg, txt}, a {jpg, txt}

Members whose file name begins with a dot are no samples: macOS writes `._a.jpg` beside `a.jpg`. A sample that the end of a torn
tar cuts off does not count.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import itertools
import json
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any, BinaryIO, TypeVar, cast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.headers import (
    BytesBehind,
    is_file,
    require_ended,
    tell_of_lack,
    walk_tar,
)
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS
from open_clip_zerovl.shards.texts import BadCaption, caption_lines, caption_of

#: The order in which CLIP_benchmark looks for the picture. Retrieval sets keep it on purpose: both programs score the same.
CLIP_BENCHMARK_ORDER = tuple(dict.fromkeys(("webp", "png", "jpg", "jpeg", *IMAGE_EXTENSIONS)))
TEXT_EXTENSION = "txt"
WANTED = frozenset((*IMAGE_EXTENSIONS, TEXT_EXTENSION))
META = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
# webdataset's rule, also for line breaks
_KEY_AND_SUFFIX = re.compile(r"(?P<key>(?:.*/)?[^.]+)\.(?P<suffix>[^/]*)")

# Errors of tarfile and the decompressors below it on corrupt bytes.
_READ_ERRORS = (
    tarfile.TarError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
    zlib.error,
    lzma.LZMAError,
)

BYTES_BEHIND = "bytes behind the end mark"  # a reason of a ShardError
_LARGEST_MEMBER_BYTES = 1 << 36  # what claims more is rot
# First bytes of a compressed file -> its reader. tarfile's own readers of streams stop at the end of the first of several
# compressed parts, of which bgzip and cat make one file.
_COMPRESSED: Mapping[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}

Content = TypeVar("Content")
Extent = tuple[int, int]  # offset and size in bytes of a member's content in a plain tar


class ShardError(Exception):
    """A shard cannot be read, or only up to some sample.

    Attributes:
        reason: a few words to count by ("truncated shard").
        readable: number of whole samples before that.
    """

    def __init__(self, reason: str, detail: str, readable: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.readable = readable


@dataclass(frozen=True)
class Sample:
    """One sample of a shard: its key, and its files' contents by extension (`{"png": ..., "txt": ...}`)."""

    key: str
    files: Mapping[str, bytes]

    @property
    def image(self) -> bytes | None:
        """The encoded picture; None without one."""
        return image_of(self.files)

    @property
    def captions(self) -> list[str]:
        """The captions of its text that can be shown."""
        captions = []
        for line in caption_lines(self.files.get(TEXT_EXTENSION, b"")):
            with suppress(BadCaption):
                captions.append(caption_of(line))
        return captions

    @property
    def about(self) -> dict[str, Any]:
        """The object in its json; {} without one."""
        return object_of(self.files.get("json", b"")) or {}


def object_of(content: bytes) -> dict[str, Any] | None:
    """The object of a JSON file; None if the file holds another value, or brackets thousands deep."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def image_of(
    sample: Mapping[str, Content], order: Sequence[str] = IMAGE_EXTENSIONS
) -> Content | None:
    """The picture among a sample's members, {suffix: content}; None if it has none."""
    return next((sample[extension] for extension in order if extension in sample), None)


def group(members: Iterable[tuple[str, Content]]) -> Iterator[tuple[str, dict[str, Content]]]:
    """Samples from (name, content) members in the order of the tar: (key, {suffix: content}), suffixes in lower case."""
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
    """The path up to the file name's first dot, and the rest; (None, None) for a name without one of them."""
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    if dot == begin:
        return None, None
    if dot > begin and "\n" not in name:
        return name[:dot], name[dot + 1 :]
    odd = _KEY_AND_SUFFIX.fullmatch(name)  # several times as slow
    return (odd["key"], odd["suffix"]) if odd else (None, None)


def locate_samples(
    path: str | os.PathLike[str], *, whole: bool = False
) -> Generator[tuple[str, dict[str, Extent]], None, None]:
    """The samples of a plain local tar as (key, {suffix: (offset, size)}), from the headers alone.

    Args:
        whole: a tar without its end mark is torn, too: it may have been cut off between two samples.

    Raises:
        ShardError: the tar is unreadable or torn; `readable` samples were yielded before.
        tarfile.ReadError: it is compressed or no tar; nothing was yielded.
    """
    with opened(path) as descriptor:

        def read_at(offset: int, size: int) -> bytes:
            return os.pread(descriptor, size, offset)

        members = walk_tar(read_at, os.fstat(descriptor).st_size, whole=whole)
        try:
            first = next(members, None)
        except OSError as error:
            raise unreadable(error) from error
        every = itertools.chain([first] if first is not None else [], members)
        yield from _counted(group((member.name, (member.offset, member.size)) for member in every))


def why_no_pairs(path: str | os.PathLike[str]) -> str:
    """Say why the members of a local tar make no pairs of a picture and a caption; "" if they make some."""
    try:
        try:
            samples = [(key, set(files)) for key, files in locate_samples(path)]
        except tarfile.ReadError:  # compressed, or no tar
            samples = [(key, set(files)) for key, files in stream_samples(path, wanted=())]
    except ShardError as error:
        return f"it cannot be read as a tar to its end ({error})"
    members: dict[str, set[str]] = {}
    for key, suffixes in samples:
        if _is_pair(suffixes):
            return ""
        members[key] = members.get(key, set()) | suffixes
    apart = next((key for key, suffixes in members.items() if _is_pair(suffixes)), None)
    if apart is not None:
        return (
            f"picture and caption of {apart!r} are not next to each other: write the tar in the order of its names, as with "
            "tar --sort=name"
        )
    for key, suffixes in members.items():
        for suffix in sorted(suffixes):
            _, dot, ending = suffix.rpartition(".")
            if dot and ending in WANTED:
                return (
                    f"a key ends at the first dot of a file's name, and {key}.{suffix} is {suffix!r} of the sample {key!r}: "
                    "rename the members, or unpack the tar and pack its folder"
                )
    if not members:
        return "it has no members with a name and an ending"
    endings = sorted(set().union(*members.values()))
    pictured = not set(IMAGE_EXTENSIONS).isdisjoint(endings)
    lacking = "caption (.txt)" if pictured else "picture"
    return (
        f"no member is a {lacking}, its members are {', '.join(f'.{each}' for each in endings[:8])}"
    )


def _is_pair(suffixes: Collection[str]) -> bool:
    return not {TEXT_EXTENSION, "json"}.isdisjoint(suffixes) and not set(
        IMAGE_EXTENSIONS
    ).isdisjoint(suffixes)


def lacks_end(path: str | os.PathLike[str]) -> bool:
    """True for a tar or a parquet file without its last bytes, as a server leaves it that announced no length and broke off."""
    with open(path, "rb") as file:
        if file.read(4) == b"PAR1":
            file.seek(-4, os.SEEK_END)
            return file.read() != b"PAR1"
    try:
        return any(False for _ in locate_samples(path, whole=True))
    except ShardError:
        return True
    except tarfile.ReadError:  # compressed
        return False


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of a local shard with all their files, in order; sample number i is number i in training.

    Raises:
        UserError: the shard cannot be read to its end.
    """
    try:
        try:
            with opened(path) as descriptor:
                for key, members in locate_samples(path, whole=True):
                    yield Sample(
                        key,
                        {
                            name: os.pread(descriptor, size, at)
                            for name, (at, size) in members.items()
                        },
                    )
        except tarfile.ReadError:  # compressed, or no tar
            for key, files in stream_samples(path, wanted=None):
                yield Sample(key, cast(dict[str, bytes], files))
    except (ShardError, OSError) as error:
        raise UserError(
            f"shard {path} cannot be read ({error}): fetch or write it again"
        ) from error


def stream_samples(
    path: str | os.PathLike[str], *, wanted: Collection[str] | None = WANTED
) -> Generator[tuple[str, dict[str, bytes | None]], None, None]:
    """Yield (key, {suffix: content}) of the samples of any local tar, read from beginning to end; content None if not wanted.

    Args:
        wanted: suffixes whose content is read; None for all.

    Raises:
        ShardError: the tar is unreadable or torn; `readable` samples were yielded before.
    """
    with closing(_counted(group(_contents(path, wanted)))) as samples:
        yield from samples


def _contents(
    path: str | os.PathLike[str], wanted: Collection[str] | None
) -> Iterator[tuple[str, bytes | None]]:
    # By default tarfile reads 10 KiB at a time and joins the parts; pictures are larger.
    with (
        open(path, "rb") as stream,
        tarfile.open(fileobj=_decompressed(stream), mode="r|*", bufsize=1 << 17) as tar,
    ):
        for member in _files(tar):
            suffix = member.name.rpartition("/")[2].partition(".")[2].lower()
            content: bytes | None = None
            if (
                not member.isreg() or member.issparse()
            ):  # a stream does not go back to a link's bytes
                tell_of_lack(member)
                content = b""
            elif wanted is None or suffix in wanted:
                content = cast(Any, tar.extractfile(member)).read()
            yield member.name, content
        with suppress(OSError, EOFError, zlib.error, lzma.LZMAError):
            require_ended(cast(Any, tar.fileobj).read, tar.offset)


class _Begun:
    """A stream of which the first bytes were read, from its beginning."""

    def __init__(self, beginning: bytes, stream: BinaryIO) -> None:
        self._beginning, self._stream = beginning, stream

    def read(self, size: int) -> bytes:
        part, self._beginning = self._beginning[:size], self._beginning[size:]
        return part or self._stream.read(size)


def _decompressed(stream: BinaryIO) -> IO[bytes]:
    """Return the plain bytes of a file that may be compressed."""
    beginning = stream.read(max(map(len, _COMPRESSED)))
    reader = next(
        (_COMPRESSED[magic] for magic in _COMPRESSED if beginning.startswith(magic)), None
    )
    whole = cast(IO[bytes], _Begun(beginning, stream))
    if reader is None:
        return whole
    # read1 gives what comes before the place where the file is cut off
    return cast(IO[bytes], SimpleNamespace(read=reader(whole).read1))


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the files of a streamed tar."""
    last = -1
    for member in tar:
        if member.offset <= last or member.size < 0:  # a corrupt header could make tarfile loop
            raise tarfile.ReadError(f"a header at byte {member.offset} points backwards")
        # to the next header
        claimed = tar.offset - member.offset
        # past the end of a stream tarfile would read on, a block at a time
        if claimed > _LARGEST_MEMBER_BYTES:
            raise tarfile.ReadError(f"a header at byte {member.offset} claims {claimed} bytes")
        last = member.offset
        if is_file(member):
            yield member
        tar.members = []  # type: ignore[attr-defined]  # else tarfile would keep every header


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """A local shard's file descriptor, for reading.

    Raises:
        ShardError: the shard cannot be opened.
        UserError: see `unreadable`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(error) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def words_of(error: BaseException) -> str:
    """Return the message of an error, or its type's name."""
    message = error.args[-1] if isinstance(error, OSError) and error.args else error
    return str(message) or type(error).__name__


def unreadable(error: OSError) -> ShardError:
    """The ShardError of a shard that cannot be opened.

    Raises:
        UserError: the process has as many files open as it may, which is not the shard's fault.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise UserError(
            "this process has as many files open as it may, and a loader process keeps one or two open for each source; raise "
            "the limit (ulimit -n), or take fewer sources"
        ) from error
    return ShardError("unreadable shard", words_of(error))


def _counted(samples: Iterator[tuple[str, Content]]) -> Generator[tuple[str, Content], None, None]:
    """The samples; an error of reading becomes a ShardError with the number of samples before it."""
    count = 0
    try:
        for sample in samples:
            yield sample
            count += 1
    except _READ_ERRORS as error:
        if isinstance(error, UserError):
            raise
        if isinstance(error, OSError) and not count:
            raise unreadable(error) from error
        reason = "truncated shard" if count else "unreadable shard"
        if isinstance(error, BytesBehind):
            reason = BYTES_BEHIND
        raise ShardError(reason, words_of(error), count) from error
