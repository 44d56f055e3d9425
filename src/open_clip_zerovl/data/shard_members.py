"""The members of a shard's samples: captions, picture, and others that are asked for, by the fastest way that the shard allows.

    a plain local tar, from its beginning              its headers, one after the other
    the same, from sample number `start` on            its index
    a cluster's samples, or one for each caption       its index
    members that no index has (other fields, teachers) its headers
    a compressed or remote tar                         streamed from its first byte

Each way yields the same samples in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from open_clip_zerovl.data.fields import captions_of, member_of
from open_clip_zerovl.data.health import Fault
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.cache import ShardCache
from open_clip_zerovl.shards.index import caption_lines, open_index
from open_clip_zerovl.shards.members import (
    TEXT_EXTENSION,
    WANTED,
    Extent,
    ShardError,
    image_of,
    locate_samples,
    opened,
    stream_samples,
    unreadable,
)
from open_clip_zerovl.shards.remote import Patience
from open_clip_zerovl.shards.transfers import Unreachable
from open_clip_zerovl.shards.urls import local_path

_READAHEAD_SAMPLES = 16  # scattered samples that the system is asked to fetch before they are read

# key, captions, picture, and the members by suffix where more than these are read
Member = tuple[str, list[bytes] | Fault | None, bytes | None, Mapping[str, bytes | None]]


@dataclass(frozen=True)
class ShardMembers:
    """How the shards of one source are read.

    Attributes:
        source: whose shards.
        others: suffixes of members beside picture and captions.
        patience: how long to wait for remote shards.
        cache: keeps remote shards on a local disk; None reads them from their server.
        notes: called with a sentence about something odd through which no sample is lost.
    """

    source: Source
    others: tuple[str, ...]
    patience: Patience
    cache: ShardCache | None
    notes: Callable[[str], None]

    def of(self, shard: int, start: int) -> Generator[Member, None, None]:
        """(key, captions, image, further members) of each sample from number `start` on; ShardError where there are too few."""
        url = self.source.shards[shard]
        path = local_path(url)
        if path is None and self.cache is not None:
            return self._cached(self.cache, url, shard, start)
        return self._of_file(path, url, shard, start)

    def _cached(self, cache: ShardCache, url: str, shard: int, start: int):
        """`of` of a remote shard, through the cache."""
        with contextlib.ExitStack() as stack:
            try:
                path = stack.enter_context(cache.borrowed(url, self.patience, self.notes))
            except Unreachable as error:
                raise unreadable(error) from error
            yield from self._of_file(path, url, shard, start)

    def _of_file(self, path: str | None, url: str, shard: int, start: int):
        size = self.source.sizes[shard]
        if path is not None and self._wanted != WANTED:
            with contextlib.suppress(tarfile.ReadError):
                return self._located(path, shard, start, size)
        if self.source.picked is not None:
            return self._picked(path or url, shard, start)
        if path is not None:
            try:
                if self.source.captions == "all":
                    return self._each_caption(path, start, size)
                return self._indexed(path, start, size) if start > 0 else self._local(path, size)
            except tarfile.ReadError:
                pass  # compressed, or no tar; streaming reads it or says why not
        return self._streamed(url, start, size)

    def _streamed(self, url: str, start: int, size: int):
        """`of` of any tar, read from its first byte on."""
        number = -1
        with closing(stream_samples(url, patience=self.patience, wanted=self._wanted)) as samples:
            for number, (key, members) in enumerate(samples):
                if number >= start:
                    yield self._member(key, members)
        _require(number + 1, size)

    def _local(self, path: str, size: int):
        """`of` of a plain local tar from its beginning. tarfile.ReadError for another one, before anything is read."""
        # The first header is read here and not in the generator below, whose error would come too late.
        samples = locate_samples(path)
        first = next(samples, None)

        def read():
            count = 0
            with closing(samples), opened(path) as descriptor:
                for key, members in itertools.chain([first] if first is not None else [], samples):
                    text = _content(descriptor, members.get(TEXT_EXTENSION))
                    yield key, self._captions(text), _content(descriptor, image_of(members)), {}
                    count += 1
            _require(count, size)

        return read()

    def _located(self, path: str, shard: int, start: int, size: int):
        """`of` of a plain local tar by its headers, where members are wanted that the index does not have.

        tarfile.ReadError for another tar, before anything is read.
        """
        samples, picked, wanted = locate_samples(path), self.source.picked, self._wanted
        numbers = None if picked is None else picked[self.source.starts[shard] : self.source.starts[shard + 1]].tolist()
        first = next(samples, None)

        def read():
            seen = 0  # of the source's own samples
            try:
                with closing(samples), opened(path) as descriptor:
                    for number, (key, members) in enumerate(
                        itertools.chain([first] if first is not None else [], samples)
                    ):
                        if numbers is not None and (seen == len(numbers) or number != numbers[seen]):
                            continue
                        seen += 1
                        if seen > start:
                            yield self._member(
                                key, {name: _content(descriptor, at) for name, at in members.items() if name in wanted}
                            )
            except ShardError as error:
                raise ShardError(error.reason, str(error), seen) from error
            _require(seen, size)

        return read()

    def _member(self, key: str, members: Mapping[str, bytes | None]) -> Member:
        """What `of` yields of a sample."""
        if self._fields:
            return key, captions_of(members, self.source.captions), image_of(members), members
        return key, self._captions(members.get(TEXT_EXTENSION)), image_of(members), members

    @property
    def _fields(self) -> tuple[str, ...]:
        """The fields that `--captions` names; () for none."""
        return field_names(self.source.captions)

    @property
    def _wanted(self) -> frozenset[str]:
        """Suffixes of the members that are read of a sample."""
        return WANTED | {member_of(field) for field in self._fields} | frozenset(self.others)

    def _indexed(self, path: str, start: int, size: int):
        """`of` of a plain local tar, by its index."""
        index = open_index(path)

        def read():
            with opened(path) as descriptor:
                for number in range(start, len(index)):
                    text = _content(descriptor, _extent(index.text, number))
                    image = _content(descriptor, _extent(index.image, number))
                    yield index.key(number), self._captions(text), image, {}
            index.raise_if_torn()
            _require(len(index), size)

        return read()

    def _picked(self, path: str, shard: int, start: int):
        """`of` of the samples that the source picks out of a plain local tar, by its index."""
        source = self.source
        assert source.picked is not None
        numbers = source.picked[source.starts[shard] : source.starts[shard + 1]]
        try:
            index = open_index(path)
        except tarfile.ReadError as error:
            raise ShardError("unreadable shard", str(error)) from error
        readable = int(np.searchsorted(numbers, len(index)))
        rows = [
            (index.key(number), _extent(index.text, number), _extent(index.image, number))
            for number in numbers[start:readable].tolist()
        ]
        torn = (str(index.torn[0]), str(index.torn[1]))

        def read():
            with opened(path) as descriptor:
                for key, text, image in _read_ahead(descriptor, rows):
                    yield key, self._captions(_content(descriptor, text)), _content(descriptor, image), {}
            if readable < len(numbers) and torn[0]:
                raise ShardError(*torn, readable)
            _require(readable, len(numbers))

        return read()

    def _each_caption(self, path: str, start: int, size: int):
        """`of` of a plain local tar where each caption of an image is a sample of its own."""
        index = open_index(path)

        def read():
            ends = np.cumsum(index.captions)
            first = int(np.searchsorted(ends, start, side="right"))
            with opened(path) as descriptor:
                for number in range(first, len(index)):
                    text = _content(descriptor, _extent(index.text, number))
                    image = _content(descriptor, _extent(index.image, number))
                    lines = caption_lines(text) or [b""] if text is not None else [None]
                    begin = start - int(ends[number] - index.captions[number]) if number == first else 0
                    for line in lines[begin:]:
                        yield index.key(number), None if line is None else [line], image, {}
            if index.torn[0]:
                raise ShardError(str(index.torn[0]), str(index.torn[1]), int(ends[-1]))
            _require(int(ends[-1]) if len(index) else 0, size)

        return read()

    def _captions(self, text: bytes | None) -> list[bytes] | None:
        """The captions in a `txt` member: the whole text, or one a line where the source has several an image."""
        if text is None:
            return None
        return [text] if self.source.captions is None else caption_lines(text)


def _require(count: int, size: int) -> None:
    """ShardError where a shard gave fewer samples than were counted."""
    if count < size:
        raise ShardError("short shard", f"it holds {count} of {size} samples", count)


def _read_ahead(descriptor: int, rows: Sequence[tuple[str, Extent, Extent]]) -> Iterator[tuple[str, Extent, Extent]]:
    """The rows (key, text, image) of scattered samples, whose bytes the system is asked to fetch a little ahead.

    The system then fetches several samples at a time. Its own read-ahead is switched off: it would fetch what lies between
    them.
    """
    advise = getattr(os, "posix_fadvise", None)  # Linux
    if advise is None:
        yield from rows
        return
    advise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    asked = 0
    for number, row in enumerate(rows):
        for _, *extents in rows[asked : number + _READAHEAD_SAMPLES]:
            for offset, size in extents:
                if size > 0:  # 0 would mean the rest of the file
                    advise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        asked = number + _READAHEAD_SAMPLES
        yield row


def _extent(extents: np.ndarray, number: int) -> Extent:
    offset, size = extents[number].tolist()
    return offset, size


def _content(descriptor: int, extent: Extent | None) -> bytes | None:
    """The bytes of a member, None where there is none."""
    if extent is None or extent[0] < 0:
        return None
    return os.pread(descriptor, extent[1], extent[0])
