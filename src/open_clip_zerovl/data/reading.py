"""Shards to raw samples: still encoded, in the order of the shard, bad ones marked.

    part of a shard --> members of its samples --> RawSample (image bytes, caption)

Sample number i of a shard is the same in whichever way the shard is read, and the seed determines the sample that replaces a
lost one. An epoch can therefore be entered at any step (invariant 4).

    a plain tar, from its beginning                   its headers, one after the other
    the same, from sample number `start` on            its index
    a sample for each caption                          its index
    members that no index has (other fields)           its headers
    a compressed tar                                   streamed from its first byte

A remote shard is a local file first (`shards/fetch`).

    a bad sample (such as no caption)                 is yielded with its `Fault`; `sample_stream` shows a neighbour instead
    a shard that gives fewer samples than counted     raises ShardError; `sample_stream` takes as many samples of other slices
    (missing, torn, miscounted)                       of the source and marks them with a `DroppedSample`
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.captions import DrawnCaptions, captions_of, member_of
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.stats import DroppedSample, Fault
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache, Unreachable, is_shard
from open_clip_zerovl.shards.foreign import BadFile, read_foreign
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
    words_of,
)
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS, PICTURE_WORDS
from open_clip_zerovl.shards.texts import BadCaption, caption_lines, caption_of
from open_clip_zerovl.shards.urls import local_path

# key, captions, picture
EncodedPair = tuple[str, list[bytes] | Fault | None, bytes | None]

_GONE_SHARDS = 8  # after this many failures of remote shards in a row, their host counts as down


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in a shard: encoded bytes, and where it came from.

    Attributes:
        image: encoded bytes; empty for a sample without one.
        caption: the one that the step shows; empty for a sample that cannot be shown.
        source: index of its source.
        position: number in the source's endless cycle; unique over epochs and passes.
        key, shard: name of the sample, and path or URL of its shard.
        captions: all captions, "" for one that cannot be shown; empty without `Reading.every_caption`.
        fault: the reason why it cannot be shown; None for a good sample.
        stands_for: the loss that it replaces; None for a sample at its own place.
    """

    image: bytes
    caption: str
    source: int
    position: int
    key: str
    shard: str
    fault: Fault | None = None
    stands_for: DroppedSample | None = None
    captions: tuple[str, ...] = ()

    @property
    def place(self) -> int:
        """The position that the schedule asks for: the sample's own, or that of the sample that it replaces."""
        return self.position if self.stands_for is None else self.stands_for.position


class Surplus(Exception):
    """A shard holds more samples than were counted."""


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Reading:
    """Settings for reading one source in an epoch.

    Attributes:
        source, index: the source and its index in the mixture.
        seed: the seed of the run.
        fail: raise UserError for a bad sample or shard, instead of replacing it.
        policy: waits and retries of its remote shards.
        cache: the folder of fetched shards.
        ahead: called with the URL of a remote shard that will be read soon.
        every_caption: give samples all their captions, besides the one to show.
        opens: called with the number of every shard that is opened.
        notes: called with a sentence about something odd through which no sample is lost.
    """

    source: Source
    index: int
    seed: int = 0
    fail: bool = True
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    cache: ShardCache = field(default_factory=ShardCache)
    ahead: Callable[[str], None] = _ignore
    every_caption: bool = False
    opens: Callable[[int], None] = _ignore
    notes: Callable[[str], None] = _ignore

    def announce(self, shard: int) -> None:
        """Fetch a remote shard in advance, because it will be read soon."""
        if local_path(self.source.shards[shard]) is None:
            self.ahead(self.source.shards[shard])

    def samples(self, shard: int, start: int, position: int) -> Generator[RawSample, None, None]:
        """Iterate over the samples of a shard from number `start` on; the first one has this position.

        Raises:
            ShardError: the shard cannot be read, or holds fewer samples than were counted.
            Surplus: it has more samples than were counted.
            UserError: several remote shards in a row do not come, or a shard's URL cannot be opened.
        """
        self.opens(shard)
        url, size, number = self.source.shards[shard], self.source.sizes[shard], start
        try:
            with self._opened(shard, start) as members:
                for key, texts, image in members:
                    if number == size:
                        raise Surplus
                    yield self._raw(image, texts, key, url, position + number - start)
                    number += 1
        except ShardError as error:
            self._raise_if_gone(error)
            raise
        except OSError as error:
            unreadable(error)  # UserError for too many open files, which is not the disk's fault
            words = f"sample {number}: {words_of(error)}"
            raise ShardError("truncated shard", words, number) from error

    @contextmanager
    def _opened(self, shard: int, start: int) -> Iterator[Iterator[EncodedPair]]:
        """Open a shard for its members from sample number `start` on, in the fastest way that it allows."""
        url, size = self.source.shards[shard], self.source.sizes[shard]
        with ExitStack() as stack:
            try:
                borrowed = self.cache.borrowed(url, self.policy, self.notes, check=is_shard)
                path = stack.enter_context(borrowed)
            except Unreachable as error:
                raise unreadable(error) from error
            by_headers = self._wanted != WANTED or (start == 0 and self.source.captions != "all")
            read = self._by_headers if by_headers else self._by_index
            members = stack.enter_context(closing(read(path, start, size)))
            try:
                first = [*islice(members, 1)]
            except tarfile.ReadError:  # compressed, or not a tar; streaming reads it or raises
                first, members = [], stack.enter_context(closing(self._streamed(path, start, size)))
            yield chain(first, members)

    def _raise_if_gone(self, error: ShardError) -> None:
        """UserError if the host of the remote shards seems down: no other shard could replace a lost one."""
        failed = self.policy.failed
        if len(failed) >= min(_GONE_SHARDS, len(self.source.shards)):
            shard, why = next(iter(failed.items()))
            others = (
                f", nor could {len(failed) - 1} shards that were requested after it"
                if len(failed) > 1
                else ""
            )
            raise UserError(
                f"source {self.source.name!r} is unreachable: shard {shard} could not be fetched ({why}){others}; check its "
                "host, and go on with --resume latest"
            ) from error

    def _streamed(self, path: str, start: int, size: int) -> Generator[EncodedPair, None, None]:
        """Iterate over the members of any tar, read from its first byte on."""
        seen = 0
        with closing(stream_samples(path, wanted=self._wanted)) as samples:
            for key, members in samples:
                seen += 1
                if seen > start:
                    yield self._member(key, members)
        _require(seen, size)

    def _by_headers(self, path: str, start: int, size: int) -> Generator[EncodedPair, None, None]:
        """Iterate over the members of a plain tar by its headers.

        Raises:
            tarfile.ReadError: another file, before anything is yielded.
        """
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

    def _by_index(self, path: str, start: int, size: int) -> Generator[EncodedPair, None, None]:
        """Iterate over the members of a plain tar by its index; with `--captions all` each caption is a sample of its own.

        Raises:
            tarfile.ReadError: another file, before anything is yielded.
        """
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

    def _raw(
        self,
        image: bytes | None,
        texts: list[bytes] | Fault | None,
        key: str,
        shard: str,
        position: int,
    ) -> RawSample:
        """The sample, with its fault if it has no image or no usable caption."""
        fault: Fault | None = None
        shown = ""
        if image is None:
            named = f"{PICTURE_WORDS} after the first dot of a file's name, where its key ends"
            fault = Fault("no image", f"has no image ({named})")
        elif texts is None:
            fault = Fault(
                "no caption",
                f"has no caption ({', '.join(field_names(self.source.captions)) or 'txt'})",
            )
        elif isinstance(texts, Fault):
            fault = texts
        else:
            caption = _caption(texts[self._choose(texts, position)] if texts else b"")
            if isinstance(caption, Fault):
                fault = caption
            else:
                shown = caption
        every: tuple[str, ...] = ()
        if self.every_caption and not isinstance(texts, Fault):
            every = tuple(
                "" if isinstance(caption, Fault) else caption
                for caption in map(_caption, texts or ())
            )
        return RawSample(
            image or b"", shown, self.index, position, key, shard, fault, captions=every
        )

    def _choose(self, texts: list[bytes], position: int) -> int:
        """Return the number of this pass's caption.

        Passes take an image's captions in turn, and the seed draws which is the first. Where captions come from several fields,
        each pass draws a field by its probability.
        """
        if isinstance(texts, DrawnCaptions):
            return texts.at(
                stream_seed(self.seed, Purpose.CAPTION_FIELD, self.index, position) / 2**64
            )
        if len(texts) <= 1:
            return 0
        lap, sample = divmod(position, self.source.num_samples)
        return (stream_seed(self.seed, Purpose.CAPTION, self.index, sample) + lap) % len(texts)


def _caption(text: bytes) -> str | Fault:
    """Return a caption as it is shown, or why it cannot be shown."""
    try:
        return caption_of(text)
    except BadCaption as error:
        return Fault(error.reason, error.detail)


def picture_file(path: str) -> bytes | None:
    """The bytes of a picture's file; None if it cannot be read. UserError as `foreign.read_foreign`."""
    try:
        return read_foreign(path)
    except BadFile:
        return None


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


def wrong_size(source: Source, shard: int, count: int | str) -> str:
    """The sentence for a shard whose number of samples differs from the count."""
    return (
        f"shard {source.shards[shard]} of source {source.name!r} was counted with {source.sizes[shard]} samples and holds "
        f"{count}; correct its entry in sizes.json, or remove the entry to have the shard counted"
    )


def shard_sentence(source: Source, shard: int, error: ShardError) -> str:
    """The sentence for a shard that cannot be read to its end."""
    if error.reason == "short shard":
        return wrong_size(source, shard, error.readable)
    return f"shard {source.shards[shard]} of source {source.name!r} cannot be read ({error}); fetch or write it again"


def sample_sentence(source: Source, sample: RawSample, fault: Fault) -> str:
    """The sentence for a sample that cannot be shown."""
    return (
        f"sample {sample.key!r} in {sample.shard} (source {source.name!r}) {fault.detail}; remove the sample or write the "
        "shard again"
    )
