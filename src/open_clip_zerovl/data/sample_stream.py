"""The samples of a source that one reader delivers in an epoch, from any place: shuffled within a window, bad ones replaced.

    slices of shards --SliceReader--> n raw samples --LocalOrder, reordered--> n places --SampleStream.take--> n good samples

`SliceReader` yields the full number of samples, whatever a shard has lost; samples of other slices replace the lost ones:

    slice (shard 7, samples 100..199), shard 7 torn after sample 149  ->  samples 100..149, then 50 of other slices

Place p shows item `order[p]` of the raw samples. Where that item is bad, the nearest good one of the places p+1, p-1, p+2, p-2
... replaces it, up to MARGIN_SAMPLES away. The order is shuffled, so that bad samples that lie together in a shard have good
neighbours. A stream that is entered at place p reads from place p - MARGIN_SAMPLES on, and so finds the same replacements. All
replacements follow from the seed and the lost sample's position, wherever reading began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.data.reading import (
    RawSample,
    Reading,
    Surplus,
    sample_sentence,
    shard_sentence,
    wrong_size,
)
from open_clip_zerovl.data.stats import DroppedSample, Fault
from open_clip_zerovl.sampling.order import LocalOrder
from open_clip_zerovl.sampling.slices import ShardSlice
from open_clip_zerovl.shards.members import ShardError
from open_clip_zerovl.shards.pictures import BadPicture

MARGIN_SAMPLES = (
    64  # largest distance of a replacement; encoded samples of this many places are kept
)

Item = TypeVar("Item")
Image = TypeVar("Image")


@dataclass
class SliceReader:
    """Reads slices of a source.

    Args:
        reading: settings of the source.
        slices: the slices of this reader, in order.
        epoch_slices: all slices of the source in the epoch; samples of them replace lost ones.
    """

    reading: Reading
    slices: Sequence[ShardSlice]
    epoch_slices: Sequence[ShardSlice]
    substitutes: Substitutes = field(init=False)

    def __post_init__(self) -> None:
        self.substitutes = Substitutes(self.reading, self.epoch_slices)

    def samples(self, begin: int = 0) -> Generator[RawSample, None, None]:
        """Iterate over the samples of all slices, from sample number `begin` on.

        Raises:
            UserError: with `reading.fail`, anything wrong with a shard; without, no readable sample to replace a lost one.
        """
        reading, source = self.reading, self.reading.source
        for number, part in enumerate(self.slices, start=1):
            if begin >= len(part):
                begin -= len(part)
                continue
            if number < len(self.slices):
                reading.announce(self.slices[number].shard)
            offset = part.start + begin
            position = part.position + begin
            begin = 0
            try:
                with closing(reading.samples(part.shard, offset, position)) as samples:
                    while offset < part.stop:
                        sample = next(samples)
                        if reading.fail and sample.fault is not None:
                            # a shard that ends here is torn, and its last sample not bad
                            with suppress(Surplus):
                                next(samples, None)
                            raise UserError(sample_sentence(source, sample, sample.fault))
                        yield sample
                        offset += 1
                    if part.stop == source.sizes[part.shard]:
                        next(samples, None)  # raises where the shard does not end here
            except Surplus:
                message = wrong_size(source, part.shard, "more")
                if reading.fail:
                    raise UserError(message) from None
                reading.notes(f"{message}. The samples beyond this number are not read")
            except ShardError as error:
                if reading.fail:
                    raise UserError(shard_sentence(source, part.shard, error)) from error
                for lost in range(offset, part.stop):
                    yield self._substitute(part, lost, error)

    def _substitute(self, part: ShardSlice, lost: int, error: ShardError) -> RawSample:
        """Return the sample that stands for sample `lost` of a shard that cannot be read."""
        shard, position = self.reading.source.shards[part.shard], part.position + lost - part.start
        loss = DroppedSample(self.reading.index, error.reason, "", shard, str(error), position)
        return replace(self.substitutes.get(part, lost, error.readable), stands_for=loss)


@dataclass
class Substitutes:
    """Samples of the epoch's other slices that replace lost ones.

    Slices are tried in an order that the seed draws. Sample i of a lost slice is replaced by sample i, modulo its length, of
    the first slice that can be read; if none can, by a readable sample of its own shard.
    """

    reading: Reading
    slices: Sequence[ShardSlice]
    # shards known to be torn -> whole samples
    _readable: dict[int, int] = field(default_factory=dict, init=False)
    _open: tuple[int, int, Generator[RawSample, None, None]] | None = field(
        default=None, init=False
    )
    _drawn: tuple[int, list[int]] = field(default=(-1, []), init=False)

    def get(self, part: ShardSlice, offset: int, readable: int, *, attempt: int = 0) -> RawSample:
        """The sample that replaces sample `offset` of a part.

        Args:
            readable: number of readable samples of the part's own shard.
            attempt: 0 for the first choice, 1 for the second ...

        Raises:
            UserError: nothing of the source can be read.
        """
        for number in self._order(part.position)[attempt:]:
            other = self.slices[number]
            if other.shard == part.shard:
                continue
            replacement = self._read(other, other.start + (offset - part.start) % len(other))
            if replacement is not None:
                return replacement
        if readable > 0:
            same_shard = ShardSlice(part.shard, 0, readable, part.position - part.start)
            replacement = self._read(same_shard, (offset + attempt) % readable)
            if replacement is not None:
                return replacement
        source = self.reading.source
        raise UserError(
            f"none of the {len(source.shards)} shards of source {source.name!r} can be read, so that nothing replaces the lost "
            "samples; check that they are there and whole"
        )

    def _order(self, position: int) -> list[int]:
        """Numbers of all slices, in the order in which they are tried for the lost part at this position."""
        if self._drawn[0] != position:
            rng = stream(self.reading.seed, Purpose.SUBSTITUTES, self.reading.index, position)
            self._drawn = position, rng.permutation(len(self.slices)).tolist()
        return self._drawn[1]

    def _read(self, part: ShardSlice, offset: int) -> RawSample | None:
        """Sample `offset` of a part's shard, None if it cannot be read. The shard stays open for the next sample."""
        if offset >= self._readable.get(part.shard, offset + 1):
            return None
        position = part.position + offset - part.start
        try:
            if self._open is None or self._open[:2] != (part.shard, position):
                self.close()
                samples = self.reading.samples(part.shard, offset, position)
            else:
                samples = self._open[2]
            sample = next(samples)
        except ShardError as error:
            self._readable[part.shard] = error.readable
            self._open = None
            return None
        self._open = part.shard, position + 1, samples
        return sample

    def close(self) -> None:
        """Close the shard that is open."""
        if self._open is not None:
            self._open[2].close()
            self._open = None


def reordered(
    order: Iterable[np.ndarray],
    stream: Iterator[Item],
    arrived: int = 0,
    passed: AbstractSet[int] = frozenset(),
) -> Iterator[Item]:
    """The items of a stream in another order, reading no further ahead than the order needs.

        reordered([array([1, 0, 2])], iter("abc"))  ->  b, a, c; "b" comes after two were read, "c" after three

    Args:
        order: numbers of items, each at most once, in arrays.
        arrived: number of the stream's first item; above 0 where the stream was entered in the middle.
        passed: items that the order does not ask for any more; they are dropped as they come.
    """
    waiting: dict[int, Item] = {}
    for items in order:
        for wanted in items.tolist():
            while arrived <= wanted:
                item = next(stream)
                if arrived not in passed:
                    waiting[arrived] = item
                arrived += 1
            yield waiting.pop(wanted)
    next(stream, None)  # the reader then sees whether its last shard ends where it should


@dataclass
class SampleStream:
    """One reader's samples of a source in an epoch; see the module's text.

    Args:
        slices: reads the stream.
        order: order of the n items of the stream.
        begin: the first place that `take` delivers.
    """

    slices: SliceReader
    order: LocalOrder
    begin: int = 0
    _past: deque[RawSample] = field(init=False, repr=False)
    _ahead: deque[RawSample] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._past, self._ahead = deque(maxlen=MARGIN_SAMPLES), deque()

    @cached_property
    def _raw(self) -> Iterator[RawSample]:
        """Open the raw samples place by place, from `begin` on; those of the margin before it go into `_past`."""
        if self.begin >= len(self.order):
            return iter(())
        margin = max(0, self.begin - MARGIN_SAMPLES)
        first = self.order.lowest(margin)
        passed = self.order.passed(margin, first)
        places = reordered(self.order.chunks(margin), self.slices.samples(first), first, passed)
        for _ in range(self.begin - margin):
            self._past.append(next(places))
        return places

    def take(
        self, decode: Callable[[RawSample], Image]
    ) -> tuple[RawSample, Image, DroppedSample | None]:
        """The sample of the next place, the result of `decode`, and the lost sample if this one replaces it.

        Args:
            decode: sample -> image; raises BadPicture for a bad one.

        Raises:
            UserError: a bad sample that may not be replaced, or that no other sample can replace.
        """
        sample = self._ahead.popleft() if self._ahead else next(self._raw)
        loss = sample.stands_for
        shown = _attempt(sample, decode)
        if isinstance(shown, Fault):
            reading = self.slices.reading
            if reading.fail:
                raise UserError(sample_sentence(reading.source, sample, shown))
            # One sample is missing at this place, so one loss is counted. Where its shard was lost and the sample that replaces
            # it is bad too, that is the loss of the shard.
            loss = loss or DroppedSample(
                sample.source, shown.reason, sample.key, sample.shard, shown.detail, sample.position
            )
            replacement = self._replacement(sample, decode)
            if replacement is None:
                raise UserError(
                    f"{sample_sentence(reading.source, sample, shown)}; none of the {2 * MARGIN_SAMPLES} samples around "
                    "it can be shown either"
                )
            self._past.append(sample)
            return replace(replacement[0], stands_for=loss), replacement[1], loss
        self._past.append(sample)
        return sample, shown, loss

    def _replacement(
        self, bad: RawSample, decode: Callable[[RawSample], Image]
    ) -> tuple[RawSample, Image] | None:
        for candidate in self._neighbours(bad):
            shown = _attempt(candidate, decode)
            if not isinstance(shown, Fault):
                return candidate, shown
        return None

    def _neighbours(self, bad: RawSample) -> Iterator[RawSample]:
        """Samples that may replace a bad one, nearest place first."""
        for distance in range(1, MARGIN_SAMPLES + 1):
            while len(self._ahead) < distance:
                following = next(self._raw, None)
                if following is None:
                    break
                self._ahead.append(following)
            if len(self._ahead) >= distance:
                yield self._ahead[distance - 1]
            if len(self._past) >= distance:
                yield self._past[-distance]
        # A small share may hold no good sample; samples of the epoch's other slices follow.
        alone = ShardSlice(-1, 0, 1, bad.place)
        for attempt in range(min(MARGIN_SAMPLES, len(self.slices.epoch_slices))):
            yield self.slices.substitutes.get(alone, bad.place, 0, attempt=attempt)

    def finish(self) -> None:
        """After the last place: let the reader see whether its last shard ends where it should."""
        next(self._raw, None)


def _attempt(sample: RawSample, decode: Callable[[RawSample], Image]) -> Image | Fault:
    """The sample's image, or why it has none."""
    if sample.fault is not None:
        return sample.fault
    try:
        return decode(sample)
    except BadPicture as error:
        return Fault(error.reason, error.detail)
