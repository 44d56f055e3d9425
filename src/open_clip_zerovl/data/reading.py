"""Shards to raw samples: still encoded, in the order of the shard, bad ones marked.

    part of a shard --> members of its samples --> RawSample (image bytes, caption)

Sample number i of a shard is the same whether the shard is streamed from its first byte or entered through its index. The seed
determines the sample that replaces a lost one. An epoch can therefore be entered at any step (invariant 4).

    a bad sample (such as no caption)                 is yielded with its `Fault`; `sample_stream` shows a neighbour instead
    a shard that gives fewer samples than counted     raises ShardError; `sample_stream` takes as many samples of other slices
    (missing, torn, miscounted)                       of the source and marks them with a `DroppedSample`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.captions import DrawnCaptions
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.shard_reader import ShardReader
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.stats import DroppedSample, Fault
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache
from open_clip_zerovl.shards.foreign import BadFile, read_foreign
from open_clip_zerovl.shards.members import ShardError, unreadable, words_of
from open_clip_zerovl.shards.pictures import PICTURE_WORDS
from open_clip_zerovl.shards.texts import BadCaption, caption_of
from open_clip_zerovl.shards.urls import local_path

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

    @functools.cached_property
    def _shards(self) -> ShardReader:
        return ShardReader(self.source, self.policy, self.cache, self.notes)

    def announce(self, shard: int) -> None:
        """Fetch a remote shard in advance, because it will be read soon."""
        if local_path(self.source.shards[shard]) is None:
            self.ahead(self.source.shards[shard])

    def samples(self, shard: int, start: int, position: int) -> Generator[RawSample, None, None]:
        """The samples of a shard from number `start` on; the first one has this position.

        Raises:
            ShardError: the shard cannot be read, or holds fewer samples than were counted.
            Surplus: it has more samples than were counted.
            UserError: several remote shards in a row do not come, or a shard's URL cannot be opened.
        """
        self.opens(shard)
        try:
            with closing(_from_disk(self._open(shard, start, position), start)) as samples:
                yield from samples
        except ShardError as error:
            self._raise_if_gone(error)
            raise

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

    def _open(self, shard: int, start: int, position: int) -> Generator[RawSample, None, None]:
        source, size = self.source, self.source.sizes[shard]
        with closing(self._shards.members(shard, start)) as members:
            for offset, (key, texts, image) in enumerate(members, start):
                if offset == size:
                    raise Surplus
                place = position + offset - start
                yield self._raw(image, texts, key, source.shards[shard], place)

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


def _from_disk(
    samples: Generator[RawSample, None, None], start: int
) -> Generator[RawSample, None, None]:
    """The samples from number `start` on; ShardError if the disk fails while the bytes of one are read."""
    count = start
    with closing(samples):
        try:
            for sample in samples:
                yield sample
                count += 1
        except OSError as error:
            unreadable(error)  # UserError for too many open files, which is not the disk's fault
            raise ShardError(
                "truncated shard", f"sample {count}: {words_of(error)}", count
            ) from error


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
