"""The members of a shard's samples (captions, picture), read in the fastest way that the shard allows.

    a plain local tar, from its beginning              its headers, one after the other
    the same, from sample number `start` on            its index
    a sample for each caption                           its index
    members that no index has (other fields)           its headers
    a compressed tar                                   streamed from its first byte

Each way yields the same samples in the same order. A remote shard is a local file first (`shards/fetch`).
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from open_clip_zerovl.data.captions import captions_of, member_of
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.stats import Fault
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache, Unreachable, is_shard
from open_clip_zerovl.shards.index import open_index
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
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS
from open_clip_zerovl.shards.texts import caption_lines

# key, captions, picture
EncodedPair = tuple[str, list[bytes] | Fault | None, bytes | None]


@dataclass(frozen=True)
class ShardReader:
    """Reads the shards of one source.

    Attributes:
        source: whose shards.
        policy: retries of remote shards.
        cache: the folder of fetched shards.
        notes: called with a sentence about something odd through which no sample is lost.
    """

    source: Source
    policy: RetryPolicy
    cache: ShardCache
    notes: Callable[[str], None]

    def members(self, shard: int, start: int) -> Generator[EncodedPair, None, None]:
        """(key, captions, image) of each sample from number `start` on; ShardError if there are too few."""
        url = self.source.shards[shard]
        with ExitStack() as stack:
            try:
                borrowed = self.cache.borrowed(url, self.policy, self.notes, check=is_shard)
                path = stack.enter_context(borrowed)
            except Unreachable as error:
                raise unreadable(error) from error
            try:
                yield from self._of_tar(path, shard, start)
            except tarfile.ReadError:  # compressed, or not a tar; streaming reads it or raises
                yield from self._streamed(path, shard, start)

    def _streamed(self, path: str, shard: int, start: int) -> Iterator[EncodedPair]:
        """`members` of any tar, read from its first byte on."""
        seen = 0
        with closing(stream_samples(path, wanted=self._wanted)) as samples:
            for key, members in samples:
                seen += 1
                if seen > start:
                    yield self._member(key, members)
        _require(seen, self.source.sizes[shard])

    def _of_tar(self, path: str, shard: int, start: int) -> Iterator[EncodedPair]:
        """`members` of a plain local tar. tarfile.ReadError for another one, before anything is yielded."""
        size = self.source.sizes[shard]
        if self._wanted != WANTED or (start == 0 and self.source.captions != "all"):
            return self._by_headers(path, start, size)
        return self._by_index(path, start, size)

    def _by_headers(self, path: str, start: int, size: int) -> Iterator[EncodedPair]:
        """`members` by the tar's headers."""
        wanted = self._wanted
        seen = 0
        try:
            with closing(locate_samples(path)) as samples, opened(path) as descriptor:
                for key, members in samples:
                    seen += 1
                    if seen > start:
                        yield self._member(
                            key,
                            {
                                name: _content(descriptor, at)
                                for name, at in members.items()
                                if name in wanted
                            },
                        )
        except ShardError as error:
            raise ShardError(error.reason, str(error), seen) from error
        _require(seen, size)

    def _by_index(self, path: str, start: int, size: int) -> Iterator[EncodedPair]:
        """`members` by the tar's index. With `--captions all` each caption of an image is a sample of its own."""
        index = open_index(path)
        first = start
        skipped = 0
        count = len(index)
        each = self.source.captions == "all"
        if each:
            ends = np.concatenate([[0], np.cumsum(index.captions)])
            first = int(np.searchsorted(ends, start, side="right")) - 1
            skipped, count = start - int(ends[first]), int(ends[-1])
        with opened(path) as descriptor:
            for number in range(first, len(index)):
                key = index.key(number)
                text = _content(descriptor, _extent(index.text, number))
                image = _content(descriptor, _extent(index.image, number))
                if not each:
                    yield self._member(key, {TEXT_EXTENSION: text, IMAGE_EXTENSIONS[0]: image})
                    continue
                lines = [None] if text is None else caption_lines(text) or [b""]
                for line in lines[skipped:]:
                    yield key, None if line is None else [line], image
                skipped = 0
        if index.torn[0]:
            raise ShardError(str(index.torn[0]), str(index.torn[1]), count)
        _require(count, size)

    def _member(self, key: str, members: Mapping[str, bytes | None]) -> EncodedPair:
        captions = self.source.captions
        text = members.get(TEXT_EXTENSION)
        texts: list[bytes] | Fault | None
        if field_names(captions):
            texts = captions_of(members, captions)
        elif text is None or captions in (None, "joined"):
            texts = None if text is None else [b" ".join(caption_lines(text))]
        else:
            texts = caption_lines(text)[: 1 if captions == "first" else None]
        return key, texts, image_of(members)

    @property
    def _wanted(self) -> frozenset[str]:
        """Suffixes of the members that are read of a sample."""
        fields = field_names(self.source.captions)
        return WANTED | {member_of(field) for field in fields}


def _require(count: int, size: int) -> None:
    """ShardError if a shard gave fewer samples than were counted."""
    if count < size:
        raise ShardError("short shard", f"it holds {count} of {size} samples", count)


def _extent(extents: np.ndarray, number: int) -> Extent:
    offset, size = extents[number].tolist()
    return offset, size


def _content(descriptor: int, extent: Extent | None) -> bytes | None:
    """The bytes of a member, or None."""
    if extent is None or extent[0] < 0:
        return None
    return os.pread(descriptor, extent[1], extent[0])
