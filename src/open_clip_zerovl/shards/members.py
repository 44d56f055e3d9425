"""Tar files as sequences of samples: the one rule by which members form samples, and how shards are opened.

Everything that reads shards uses `group`: training, its counting and its index, retrieval and probe sets, the bias
report, and `zerovl data`. Sample number i of a shard is therefore the same sample for all of them, which exactly-once and exact
resume depend on.

Members with the same key (the path up to the file name's first dot) that lie one after the other are a sample. A sample also
ends where a suffix repeats, so that two samples with one key stay two; webdataset raises an error there:

    a.jpg a.txt b.jpg a.txt           a {jpg, txt}, b {jpg}, a {txt}
    a.jpg a.txt a.jpg a.txt           a {jpg, txt}, a {jpg, txt}

A sample that the end of a torn tar cuts off does not count.
"""

from __future__ import annotations

import errno
import itertools
import json
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.headers import walk_tar
from open_clip_zerovl.shards.remote import RetryPolicy, open_url
from open_clip_zerovl.shards.transfers import words_of

#: Suffixes of pictures. A sample with several pictures gives the first in this order, as in open_clip's pipeline.
IMAGE_EXTENSIONS = ("jpg", "png", "jpeg", "webp")
#: The order in which CLIP_benchmark looks for the picture. Retrieval sets keep it on purpose: both programs score the same.
CLIP_BENCHMARK_ORDER = ("webp", "png", "jpg", "jpeg")
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

_LARGEST_MEMBER_BYTES = 1 << 36  # what claims more is rot

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
        """The lines of its text, bytes that are not UTF-8 replaced."""
        lines = caption_lines(self.files.get(TEXT_EXTENSION, b""))
        return [line.decode("utf-8", errors="replace") for line in lines]

    @property
    def about(self) -> dict[str, Any]:
        """The object in its json; {} without one."""
        return object_of(self.files.get("json", b"")) or {}


def caption_lines(text: bytes) -> list[bytes]:
    """The captions in a `txt` member, one a line, empty lines left out."""
    return [line for line in (line.strip() for line in text.split(b"\n")) if line]


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
    if sample:
        yield key, sample


def _key_and_suffix(name: str) -> tuple[str | None, str | None]:
    """The path up to the file name's first dot, and the rest; (None, None) for a name without one of them."""
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
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
            for key, files in stream_samples(f"file:{os.fspath(path)}", wanted=None):
                yield Sample(key, cast(dict[str, bytes], files))
    except (ShardError, OSError) as error:
        raise UserError(
            f"shard {path} cannot be read ({error}): fetch or write it again"
        ) from error


def stream_samples(
    url: str, *, policy: RetryPolicy | None = None, wanted: Collection[str] | None = WANTED
) -> Generator[tuple[str, dict[str, bytes | None]], None, None]:
    """The samples of any tar, read from beginning to end: (key, {suffix: content}); content None for suffixes not wanted.

    Args:
        policy: how long a remote shard is waited for.
        wanted: suffixes whose content is read; None for all.

    Raises:
        ShardError: the tar is unreadable or torn; `readable` samples were yielded before.
        UserError: no installed package opens such a URL.
        StalledShard: see `RetryPolicy.command_seconds`.
    """
    with closing(_counted(group(_contents(url, policy, wanted)))) as samples:
        yield from samples


def _contents(
    url: str, policy: RetryPolicy | None, wanted: Collection[str] | None
) -> Iterator[tuple[str, bytes | None]]:
    # By default tarfile reads 10 KiB at a time and joins the parts; pictures are larger.
    with (
        open_url(url, policy) as stream,
        tarfile.open(fileobj=stream, mode="r|*", bufsize=1 << 17) as tar,
    ):
        for member in _regular(tar):
            suffix = member.name.rpartition("/")[2].partition(".")[2].lower()
            read = wanted is None or suffix in wanted
            yield member.name, cast(Any, tar.extractfile(member)).read() if read else None


def _regular(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The regular files of a streamed tar."""
    last = -1
    for member in tar:
        if member.offset <= last or member.size < 0:  # a corrupt header could make tarfile loop
            raise tarfile.ReadError(f"a header at byte {member.offset} points backwards")
        # to the next header; a sparse member's size is another number
        claimed = tar.offset - member.offset
        # past the end of a stream tarfile would read on, a block at a time
        if claimed > _LARGEST_MEMBER_BYTES:
            raise tarfile.ReadError(f"a header at byte {member.offset} claims {claimed} bytes")
        last = member.offset
        if member.isreg() and not member.issparse():
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
        raise ShardError(
            "truncated shard" if count else "unreadable shard", words_of(error), count
        ) from error
