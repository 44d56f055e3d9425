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
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.data.reader import (
    SURPLUS,
    ShardReader,
    draw,
    picture_of,
    sample_sentence,
    texts_of,
)
from open_clip_zerovl.sampling.assignment import LocalOrder
from open_clip_zerovl.sampling.schedule import ShardSlice
from open_clip_zerovl.shards.tar import Sample, ShardError
from open_clip_zerovl.shards.texts import Fault, caption_of

MARGIN_SAMPLES = (
    64  # largest distance of a replacement; encoded samples of this many places are kept
)

Item = TypeVar("Item")
Image = TypeVar("Image")


@dataclass(frozen=True)
class DroppedSample:
    """One sample that was replaced.

    Attributes:
        source: index of its source.
        reason: a few words to count by.
        key, shard: where it lies; the key is empty where the shard is lost.
        detail: the exact fault.
        position: number of the lost sample in its source's cycle.
    """

    source: int
    reason: str
    key: str
    shard: str
    detail: str
    position: int


@dataclass
class BatchReport:
    """A worker's report on a batch.

    Attributes:
        delivered: source -> samples in the batch, replaced ones included.
        dropped: one entry for each replaced sample.
        notes: sentences about odd things through which no sample is lost.
        full: source -> samples whose caption fills the text tower's context.
    """

    delivered: dict[int, int] = field(default_factory=dict)
    dropped: list[DroppedSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    full: dict[int, int] = field(default_factory=dict)


class Placed(NamedTuple):
    """A sample in the source's endless cycle.

    Attributes:
        position: its own number there; unique over epochs and passes.
        loss: the loss that it replaces; None for a sample at its own place.
    """

    sample: Sample
    position: int
    loss: DroppedSample | None = None

    @property
    def place(self) -> int:
        """Return the position that the schedule asks for: the sample's own, or that of the sample that it replaces."""
        return self.position if self.loss is None else self.loss.position


class Shown(NamedTuple):
    """A placed sample with its decoded picture and its caption."""

    placed: Placed
    image: object
    caption: str


@dataclass
class SliceReader:
    """Reads slices of a source.

    Args:
        reader: of the source.
        slices: the slices of this reader, in order.
        epoch_slices: all slices of the source in the epoch; samples of them replace lost ones.
        index: number of the source in the mixture.
        seed: the seed of the run.
        fail: raise UserError for a bad sample or shard, instead of replacing it.
        ahead: called with the path or URL of the shard that is read next.
    """

    reader: ShardReader
    slices: Sequence[ShardSlice]
    epoch_slices: Sequence[ShardSlice]
    index: int = 0
    seed: int = 0
    fail: bool = False
    ahead: Callable[[str], None] = lambda _: None
    # shards known to be torn -> whole samples
    _readable: dict[int, int] = field(default_factory=dict, init=False)

    def samples(self, begin: int = 0) -> Generator[Placed, None, None]:
        """Yield the samples of all slices, from sample number `begin` on.

        Raises:
            UserError: with `fail`, anything wrong with a shard; without, no readable sample to replace a lost one.
        """
        for number, part in enumerate(self.slices, start=1):
            if begin >= len(part):
                begin -= len(part)
                continue
            if number < len(self.slices):
                self.ahead(self.reader.source.shards[self.slices[number].shard])
            yield from self._of_slice(part, part.start + begin)
            begin = 0

    def _of_slice(self, part: ShardSlice, start: int) -> Iterator[Placed]:
        reader, positions = self.reader, part.position - part.start
        with closing(reader.samples(part.shard, start)) as samples:
            number, sample = start, next(samples, None)
            while number < part.stop and isinstance(sample, Sample):
                last, number = sample, number + 1
                at_end = number == part.stop < reader.source.sizes[part.shard]
                sample = None if at_end else next(samples, None)
                # of a torn shard the last sample may lack a file, which is not its own fault
                if not (self.fail and isinstance(sample, ShardError)):
                    yield Placed(last, positions + number - 1)
        if not isinstance(sample, ShardError):
            return
        sentence = reader.sentence(part.shard, sample)
        if self.fail:
            raise UserError(sentence) from sample
        if sample.reason == SURPLUS:
            reader.notes(f"{sentence}. The samples beyond this number are not read")
        for lost in range(number, part.stop):
            shard, position = reader.source.shards[part.shard], positions + lost
            loss = DroppedSample(self.index, sample.reason, "", shard, sample.detail, position)
            replacement = self.substitute(part, lost, sample.readable)
            yield replacement._replace(loss=loss)

    def substitute(
        self, part: ShardSlice, offset: int, readable: int, *, attempt: int = 0
    ) -> Placed:
        """Return the sample that replaces sample `offset` of a part.

        The epoch's slices are tried in an order that the seed draws. Sample i of a lost slice is replaced by sample i, modulo
        its length, of the first slice that can be read; if none can, by a readable sample of its own shard.

        Args:
            readable: number of readable samples of the part's own shard.
            attempt: 0 for the first choice, 1 for the second ...

        Raises:
            UserError: nothing of the source can be read.
        """
        rng = stream(self.seed, Purpose.SUBSTITUTES, self.index, part.position)
        for number in rng.permutation(len(self.epoch_slices)).tolist()[attempt:]:
            other = self.epoch_slices[number]
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
        source = self.reader.source
        raise UserError(
            f"none of the {len(source.shards)} shards of source {source.name!r} can be read, so that nothing replaces the lost "
            "samples; check that they are there and whole"
        )

    def _read(self, part: ShardSlice, offset: int) -> Placed | None:
        """Read sample `offset` of a part's shard, None if it cannot be read."""
        if offset >= self._readable.get(part.shard, offset + 1):
            return None
        with closing(self.reader.samples(part.shard, offset)) as samples:
            sample = next(samples)
        if isinstance(sample, ShardError):
            self._readable[part.shard] = sample.readable
            return None
        return Placed(sample, part.position + offset - part.start)


def reordered(
    order: Iterable[np.ndarray],
    stream: Iterator[Item],
    arrived: int = 0,
    passed: AbstractSet[int] = frozenset(),
) -> Iterator[Item]:
    """Yield the items of a stream in another order, reading no further ahead than the order needs.

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
    """One reader's samples of a source in an epoch, as the module's text describes them.

    Args:
        slices: reads the stream.
        order: order of the n items of the stream.
        begin: the first place that `take` delivers.
    """

    slices: SliceReader
    order: LocalOrder
    begin: int = 0
    _past: deque[Placed] = field(init=False, repr=False)
    _ahead: deque[Placed] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._past, self._ahead = deque(maxlen=MARGIN_SAMPLES), deque()

    @cached_property
    def _raw(self) -> Iterator[Placed]:
        """Open the raw samples place by place, from `begin` on. Those of the margin before it go into `_past`."""
        if self.begin >= len(self.order):
            return iter(())
        margin = max(0, self.begin - MARGIN_SAMPLES)
        first = self.order.lowest(margin)
        passed = self.order.passed(margin, first)
        places = reordered(self.order.chunks(margin), self.slices.samples(first), first, passed)
        for _ in range(self.begin - margin):
            self._past.append(next(places))
        return places

    def take(self, decode: Callable[[bytes], Image]) -> Shown:
        """Return the sample of the next place as it is shown.

        Args:
            decode: encoded picture -> decoded one; raises Fault for a bad one.

        Raises:
            UserError: a bad sample that may not be replaced, or that no other sample can replace.
        """
        placed = self._ahead.popleft() if self._ahead else next(self._raw)
        shown = self._attempt(placed, decode)
        if isinstance(shown, Fault):
            shown = self._replacement(placed, shown, decode)
        self._past.append(placed)
        return shown

    def _attempt(self, placed: Placed, decode: Callable[[bytes], Image]) -> Shown | Fault:
        """Decode a sample and draw its caption, or return why it cannot be shown."""
        sample, reading = placed.sample, self.slices
        source = reading.reader.source
        try:
            picture = picture_of(sample)
            texts, shares = texts_of(sample.files, source.captions)
            text = draw(
                texts,
                shares,
                seed=reading.seed,
                source=reading.index,
                position=placed.position,
                samples=source.num_samples,
            )
            caption = caption_of(text)
            return Shown(placed, decode(picture), caption)
        except Fault as fault:
            return fault

    def _replacement(self, bad: Placed, fault: Fault, decode: Callable[[bytes], Image]) -> Shown:
        sample, reading = bad.sample, self.slices
        sentence = sample_sentence(reading.reader.source, sample, fault)
        if reading.fail:
            raise UserError(sentence)
        # One sample is missing at this place, so one loss is counted. Where its shard was lost and the sample that replaces
        # it is bad too, that is the loss of the shard.
        loss = bad.loss or DroppedSample(
            reading.index, fault.reason, sample.key, sample.shard, fault.detail, bad.position
        )
        for candidate in self._neighbours(bad):
            shown = self._attempt(candidate, decode)
            if isinstance(shown, Shown):
                return shown._replace(placed=candidate._replace(loss=loss))
        raise UserError(
            f"{sentence}; none of the {2 * MARGIN_SAMPLES} samples around it can be shown either"
        )

    def _neighbours(self, bad: Placed) -> Iterator[Placed]:
        """Yield samples that may replace a bad one, nearest place first."""
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
            yield self.slices.substitute(alone, bad.place, 0, attempt=attempt)

    def finish(self) -> None:
        """Let the reader see, after the last place, whether its last shard ends where it should."""
        next(self._raw, None)
