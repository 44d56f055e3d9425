"""The members of a shard's samples (captions, picture), read in the fastest way that the shard allows.

    a plain local tar, from its beginning              its headers, one after the other
    the same, from sample number `start` on            its index
    a selection's samples, or one for each caption      its index
    members that no index has (other fields)           its headers
    a compressed tar                                   streamed from its first byte
    a parquet file                                     its rows

Each way yields the same samples in the same order. A remote shard is a local file first (`shards/fetch`).
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from open_clip_zerovl.data.captions import captions_of, member_of
from open_clip_zerovl.data.columns import Chosen
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.parquet import samples
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
from open_clip_zerovl.shards.urls import is_parquet

_READAHEAD_SAMPLES = 16  # scattered samples that the system is asked to fetch before they are read

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
            if is_parquet(url) and (columns := self.source.columns) is not None:
                yield from self._of_parquet(path, columns, shard, start)
                return
            try:
                yield from self._of_tar(path, shard, start)
            except tarfile.ReadError:  # compressed, or not a tar; streaming reads it or raises
                yield from self._streamed(path, shard, start)

    def _picked(self, shard: int) -> np.ndarray | None:
        """The numbers of the source's samples in a shard; None for all."""
        source = self.source
        if source.picked is None:
            return None
        return source.picked[source.starts[shard] : source.starts[shard + 1]]

    def _of_parquet(
        self, file: str, columns: Chosen, shard: int, start: int
    ) -> Iterator[EncodedPair]:
        """`members` of a parquet file."""
        numbers = self._picked(shard)
        size = self.source.sizes[shard]
        whole = "json" in self._wanted
        first, end = (start, size) if numbers is None else (0, 0)
        if numbers is not None and start < len(numbers):
            first, end = int(numbers[start]), int(numbers[-1]) + 1
        wanted = None if numbers is None else frozenset(numbers.tolist())
        with closing(samples(file, columns, first, end, whole=whole)) as rows:
            for number, (key, members) in enumerate(rows, start=first):
                if wanted is None or number in wanted:
                    yield self._member(key, members)

    def _streamed(self, path: str, shard: int, start: int) -> Iterator[EncodedPair]:
        """`members` of any tar, read from its first byte on."""
        numbers, seen = self._picked(shard), 0
        wanted = None if numbers is None else frozenset(numbers.tolist())
        with closing(stream_samples(path, wanted=self._wanted)) as samples:
            for number, (key, members) in enumerate(samples):
                if wanted is not None and number not in wanted:
                    continue
                seen += 1
                if seen > start:
                    yield self._member(key, members)
        _require(seen, self.source.sizes[shard])

    def _of_tar(self, path: str, shard: int, start: int) -> Iterator[EncodedPair]:
        """`members` of a plain local tar. tarfile.ReadError for another one, before anything is yielded."""
        source, size = self.source, self.source.sizes[shard]
        picked = self._picked(shard)
        if self._wanted != WANTED or (start == 0 and picked is None and source.captions != "all"):
            return self._by_headers(path, picked, start, size)
        return self._by_index(path, picked, start, size)

    def _by_headers(
        self, path: str, picked: np.ndarray | None, start: int, size: int
    ) -> Iterator[EncodedPair]:
        """`members` by the tar's headers.

        Args:
            picked: the numbers of the source's samples in the shard; None for all.
        """
        wanted = self._wanted
        numbers = None if picked is None else frozenset(picked.tolist())
        seen = 0
        try:
            with closing(locate_samples(path)) as samples, opened(path) as descriptor:
                for number, (key, members) in enumerate(samples):
                    if numbers is not None and number not in numbers:
                        continue
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

    def _by_index(
        self, path: str, picked: np.ndarray | None, start: int, size: int
    ) -> Iterator[EncodedPair]:
        """`members` by the tar's index. With `--captions all` each caption of an image is a sample of its own."""
        index = open_index(path)
        readable = len(index) if picked is None else int(np.searchsorted(picked, len(index)))
        first = start
        skipped = 0
        count = readable
        each = self.source.captions == "all"
        if each:
            ends = np.concatenate([[0], np.cumsum(index.captions)])
            first = int(np.searchsorted(ends, start, side="right")) - 1
            skipped, count = start - int(ends[first]), int(ends[-1])
        rows = (
            (index.key(number), _extent(index.text, number), _extent(index.image, number))
            for number in (
                range(first, readable) if picked is None else picked[first:readable].tolist()
            )
        )
        with opened(path) as descriptor:
            for key, *extents in rows if picked is None else _read_ahead(descriptor, list(rows)):
                text, image = (_content(descriptor, extent) for extent in extents)
                members = {TEXT_EXTENSION: text, IMAGE_EXTENSIONS[0]: image}
                if not each:
                    yield self._member(key, members)
                    continue
                lines = [None] if text is None else caption_lines(text) or [b""]
                for line in lines[skipped:]:
                    yield key, None if line is None else [line], image
                skipped = 0
        if index.torn[0] and (picked is None or readable < len(picked)):
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


def _read_ahead(
    descriptor: int, rows: Sequence[tuple[str, Extent, Extent]]
) -> Iterator[tuple[str, Extent, Extent]]:
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
    """The bytes of a member, or None."""
    if extent is None or extent[0] < 0:
        return None
    return os.pread(descriptor, extent[1], extent[0])
