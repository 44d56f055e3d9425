"""Tar files as sequences of samples: the one rule by which members form samples, and how shards are opened.

Counting (`data/sources`), the index (`tar/index`) and reading (`data/reading`) all go through `group`, so that sample number i
of a shard is the same sample for all three: the one rule that exactly-once and exact resume stand on.

Members that share a key (the path up to the file name's first dot) and lie one after the other are a sample. A sample also
ends where a suffix repeats, so that two samples with the same key stay two; webdataset raises there. A sample in the
middle of which the tar is torn does not count.
"""

from __future__ import annotations

import errno
import lzma
import os
import re
import select
import tarfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, BinaryIO, TypeVar, cast

from webdataset.gopen import Pipe, gopen, gopen_schemes
from webdataset.tariterators import base_plus_ext

from open_clip_zerovl.errors import UserError

IMAGE_MEMBERS = ("jpg", "png", "jpeg", "webp")
TEXT_MEMBER = "txt"
WANTED = frozenset((*IMAGE_MEMBERS, TEXT_MEMBER))
META = re.compile(r"__[^/]*__($|/)")  # members that webdataset skips
REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # pipe:, s3://, https:// ...: no path of this machine

# What reading rotten bytes raises in tarfile and in the decompressors below it.
_READ_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError)

Content = TypeVar("Content")
Extent = tuple[int, int]  # offset and size in bytes of a member's content in a plain tar


class ShardError(Exception):
    """A shard gives nothing from some sample on.

    Attributes:
        reason: a few words, the same for all losses of this kind.
        readable: how many whole samples it gave from its beginning.
    """

    def __init__(self, reason: str, detail: str, readable: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.readable = readable


class StalledShard(Exception):
    """A pipe gave nothing for too long."""


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
    """webdataset's `base_plus_ext`, without its regular expression for all names but odd ones."""
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    if dot > begin and "\n" not in name:
        return name[:dot], name[dot + 1 :]
    return base_plus_ext(name)


def local_path(url: str) -> str | None:
    """The path of a shard on this machine, or None for a remote one."""
    if url.startswith("file:"):
        return re.sub(r"^file:(//(localhost)?)?", "", url)
    return None if REMOTE.match(url) else url


def locate_samples(path: str | os.PathLike[str]) -> Generator[tuple[str, dict[str, Extent]], None, None]:
    """The samples of a plain local tar as (key, {suffix: (offset, size)}), from the headers alone.

    Raises:
        ShardError: the tar is unreadable or torn; `readable` samples were yielded before.
        tarfile.ReadError: it is no plain tar (compressed, or no tar at all), before anything is yielded.
    """
    with ExitStack() as stack:
        try:  # a small buffer: headers lie far apart, and a large one would read what is skipped
            file = stack.enter_context(open(path, "rb", buffering=4096))
        except OSError as error:
            raise unreadable(error) from error
        yield from _counted(group(_extents(stack.enter_context(tarfile.open(fileobj=file, mode="r:")))))


def stream_samples(url: str, *, stall_seconds: float = 0) -> Generator[tuple[str, dict[str, bytes | None]], None, None]:
    """The samples of any tar, read from beginning to end: (key, {suffix: content}), None for members nobody wants.

    Args:
        stall_seconds: give up on a pipe that delivers nothing for so long; 0 waits forever.

    Raises:
        ShardError: the tar is unreadable or torn; `readable` samples were yielded before.
        UserError: nothing installed opens such a URL.
        StalledShard: see `stall_seconds`.
    """
    with closing(_counted(group(_contents(url, stall_seconds)))) as samples:
        yield from samples


def check_openable(url: str) -> None:
    """Make sure that something installed opens URLs of this kind.

    Raises:
        UserError: nothing does.
    """
    scheme = url.split(":", 1)[0] if REMOTE.match(url) else "file"
    if scheme != "file" and scheme not in _pipe_schemes(scheme):
        _fsspec(url)


@contextmanager
def open_url(url: str, stall_seconds: float = 0) -> Iterator[BinaryIO]:
    """The bytes of a shard: a local file, webdataset's gopen (pipe:, http: ...), or fsspec (s3:, gs:, hdfs: ...)."""
    path = local_path(url)
    if path is not None:
        with open(path, "rb") as file:
            yield file
        return
    scheme = url.split(":", 1)[0]
    if scheme not in _pipe_schemes(scheme):
        with _fsspec(url).open() as file:
            yield file
        return
    stream = gopen(url)
    try:
        # Past Pipe.read: it raises on the command's exit status although all bytes came, or not, as the race falls.
        raw = stream.stream if isinstance(stream, Pipe) else stream
        yield cast(BinaryIO, _Patient(raw, stall_seconds) if stall_seconds else raw)
    finally:
        if isinstance(stream, Pipe):
            stream.stream.close()
            stream.proc.kill()  # Pipe.close would wait two hours for a command that ignores a closed pipe
            stream.proc.wait()
        else:
            stream.close()


class _Patient:
    """A pipe's reading end that gives up when nothing comes."""

    def __init__(self, stream: Any, seconds: float) -> None:
        self.stream, self.seconds = stream, seconds

    def read(self, size: int) -> bytes:
        parts, missing = [], size
        while missing > 0:
            if not select.select([self.stream], [], [], self.seconds)[0]:
                raise StalledShard(f"nothing came for {self.seconds:g} s")
            part = self.stream.read1(missing)
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def _pipe_schemes(scheme: str) -> tuple[str, ...]:
    return () if scheme == "gs" else tuple(gopen_schemes)  # gs: goes through fsspec like the other stores


def _fsspec(url: str) -> Any:
    try:
        import fsspec

        return fsspec.open(url, "rb")
    except (ImportError, ValueError) as error:  # ValueError: a protocol that fsspec does not know
        scheme = url.split(":", 1)[0]
        command = {"s3": f"aws s3 cp {url} -", "gs": f"gcloud storage cat {url}", "hdfs": f"hdfs dfs -cat {url}"}
        raise UserError(
            f"shard {url} cannot be opened ({_words(error)}); install what fsspec asks for, or write it as "
            f"'pipe:{command.get(scheme, f'COMMAND {url}')}'"
        ) from error


def _extents(tar: tarfile.TarFile) -> Iterator[tuple[str, Extent]]:
    for member in _regular(tar):
        yield member.name, (member.offset_data, member.size)


def _contents(url: str, stall_seconds: float) -> Iterator[tuple[str, bytes | None]]:
    # tarfile asks for 10 KiB at a time by default and joins them; pictures are larger.
    with open_url(url, stall_seconds) as stream, tarfile.open(fileobj=stream, mode="r|*", bufsize=1 << 17) as tar:
        for member in _regular(tar):
            wanted = member.name.rpartition("/")[2].partition(".")[2].lower() in WANTED
            yield member.name, cast(Any, tar.extractfile(member)).read() if wanted else None


def _regular(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    last = -1
    for member in tar:
        if member.offset <= last or member.size < 0:  # a rotten header may send tarfile backwards, in a circle
            raise tarfile.ReadError(f"a header at byte {member.offset} points backwards")
        last = member.offset
        if member.isreg() and not member.issparse():
            yield member
        tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header otherwise


def unreadable(error: OSError) -> ShardError:
    """The ShardError of a shard that cannot be opened.

    Raises:
        UserError: the shard is not to blame, the process has as many files open as it may.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise UserError(
            "a process has as many files open as it may, and a loader process keeps one or two open for each source; raise the "
            "limit (ulimit -n), or take fewer sources"
        ) from error
    return ShardError("unreadable shard", _words(error))


def _counted(samples: Iterator[tuple[str, Content]]) -> Generator[tuple[str, Content], None, None]:
    """Samples as they come; what reading raises becomes a ShardError that knows how many came."""
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
        raise ShardError("truncated shard" if count else "unreadable shard", _words(error), count) from error


def _words(error: BaseException) -> str:
    return str(error.args[-1] if isinstance(error, OSError) and error.args else error) or type(error).__name__
