"""One reader's share of a source in an epoch: shuffled within a window, every bad sample replaced, entered at any place.

    pieces --PieceReader--> stream of n raw samples --LocalOrder, reordered--> n places --Share.take--> n good samples

Place p shows item `order[p]` of the stream. Where that item is bad, the nearest good one of the places p+1, p-1, p+2, p-2 ...
replaces it, up to MARGIN_SAMPLES away. The order is shuffled, so that bad samples that lie together in a shard have good
neighbours. A share that is entered at place p reads from place p - MARGIN_SAMPLES on, and so finds the same replacements.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.health import Fault, Loss
from open_clip_zerovl.data.images import BadImage
from open_clip_zerovl.data.pieces import PieceReader
from open_clip_zerovl.data.reading import RawSample, sample_sentence
from open_clip_zerovl.data.schedule import Piece

MARGIN_SAMPLES = 64  # how far a replacement may be; the encoded samples of so many places are kept
_CHUNK = 4096  # items whose keys come from one stream

Item = TypeVar("Item")
Image = TypeVar("Image")


@dataclass(frozen=True)
class LocalOrder:
    """A shuffled order of `count` items that can be read from a stream with `window` of them in memory.

    Item i comes at most `window` places from place i, so that a reader that begins in the middle looks back no further. Where
    all items fit into the window, the order is a random permutation. Otherwise item i has the key i + u(i) * window, u uniform
    in 0..1, and items come in the order of their keys:

        window 3, keys 0 + 2.1, 1 + 0.3, 2 + 2.7, 3 + 0.6  ->  items 1, 0, 3, 2

    Keys are drawn for a block of items at a time and sorted an interval at a time. No array is as long as the share, and any
    place is reached without the places before.

    Args:
        count: items.
        window: items in memory.
        stream: number of a block -> generator of its items' draws.
    """

    count: int
    window: int
    stream: Callable[[int], np.random.Generator]

    def __len__(self) -> int:
        return self.count

    def chunks(self, begin: int = 0) -> Iterator[np.ndarray]:
        """The items from place `begin` on, in the shuffled order, as arrays of several."""
        if self.count <= self.window:
            yield self.stream(0).permutation(self.count)[begin:]
            return
        interval = begin // self._interval  # keys are at least their items: no more places than that lie before
        before = self._below(interval * self._interval)
        while before < self.count:
            items = self._of_interval(interval)
            if begin < before + len(items):
                yield items[max(0, begin - before) :]
            before += len(items)
            interval += 1

    def passed(self, begin: int, first: int) -> set[int]:
        """The items from number `first` on that come before place `begin`."""
        places = max(0, begin - 2 * self._interval)  # places further back have items below `first`
        passed: set[int] = set()
        for items in self.chunks(places):
            passed.update(item for item in items[: begin - places].tolist() if item >= first)
            places += len(items)
            if places >= begin:
                break
        return passed

    def lowest(self, begin: int) -> int:
        """The lowest item that comes at place `begin` or later."""
        return min(int(items.min()) for items in itertools.islice(self.chunks(begin), 2) if len(items))

    @property
    def _interval(self) -> int:
        """Length of the interval of keys that is sorted at a time."""
        return max(self.window, _CHUNK)

    def _keys(self, low: int, high: int) -> np.ndarray:
        """(high - low,) keys of items low .. high - 1."""
        low, high = max(0, low), min(self.count, high)
        if low >= high:
            return np.zeros(0)
        first, last = low // _CHUNK, -(-high // _CHUNK)
        drawn = np.concatenate([self.stream(block).random(_CHUNK) for block in range(first, last)])
        return np.arange(low, high) + drawn[low - first * _CHUNK : high - first * _CHUNK] * self.window

    def _below(self, key: int) -> int:
        """How many items have a key below `key`."""
        certain = max(0, min(key - self.window, self.count))  # items below this one have keys below `key`
        return certain + int((self._keys(certain, key) < key).sum())

    def _of_interval(self, number: int) -> np.ndarray:
        """The items whose keys lie in interval `number`, in the order of their keys."""
        low, high = number * self._interval, (number + 1) * self._interval
        first = max(0, low - self.window)
        keys = self._keys(first, high)
        inside = np.flatnonzero((keys >= low) & (keys < high))
        return first + inside[np.argsort(keys[inside], kind="stable")]


def reordered(
    order: Iterable[np.ndarray], stream: Iterator[Item], arrived: int = 0, passed: AbstractSet[int] = frozenset()
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
class Share:
    """What one reader delivers of a source in an epoch; see the module's text.

    Args:
        pieces: reads the stream.
        order: order of the n items of the stream.
        begin: the first place that `take` delivers.
    """

    pieces: PieceReader
    order: LocalOrder
    begin: int = 0
    _raw: Iterator[RawSample] = field(init=False, repr=False)
    _past: deque[RawSample] = field(init=False, repr=False)
    _ahead: deque[RawSample] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._raw = self._places()
        self._past, self._ahead = deque(maxlen=MARGIN_SAMPLES), deque()

    def _places(self) -> Iterator[RawSample]:
        """Raw samples place by place, from `begin` on; those of the margin before it go into `_past`."""
        if self.begin >= len(self.order):
            return
        margin = max(0, self.begin - MARGIN_SAMPLES)
        first = self.order.lowest(margin)
        passed = self.order.passed(margin, first)
        places = reordered(self.order.chunks(margin), self.pieces.samples(first), first, passed)
        for _ in range(self.begin - margin):
            self._past.append(next(places))
        yield from places

    def take(self, decode: Callable[[RawSample], Image]) -> tuple[RawSample, Image, Loss | None]:
        """The sample of the next place, what `decode` makes of it, and the loss where it replaces another sample.

        Args:
            decode: sample -> image; raises BadImage for a bad one.

        Raises:
            UserError: a bad sample that may not be replaced, or that no other sample can replace.
        """
        sample = self._ahead.popleft() if self._ahead else next(self._raw)
        loss = sample.stands_for
        shown = _attempt(sample, decode)
        if isinstance(shown, Fault):
            reading = self.pieces.reading
            if reading.fail:
                raise UserError(sample_sentence(reading.source, sample, shown))
            # One sample is missing at this place, so one loss is counted. Where its shard was lost and the sample that replaces
            # it is bad too, that is the loss of the shard.
            loss = loss or Loss(sample.source, shown.reason, sample.key, sample.shard, shown.detail, sample.position)
            found = self._replacement(sample, decode)
            if found is None:
                raise UserError(
                    f"{sample_sentence(reading.source, sample, shown)}; none of the {2 * MARGIN_SAMPLES} samples around "
                    "it can be shown either"
                )
            self._past.append(sample)
            return replace(found[0], stands_for=loss), found[1], loss
        self._past.append(sample)
        return sample, shown, loss

    def _replacement(self, bad: RawSample, decode: Callable[[RawSample], Image]) -> tuple[RawSample, Image] | None:
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
        # A small share may hold no good sample; samples of the epoch's other pieces follow.
        alone = Piece(-1, 0, 1, bad.place)
        for attempt in range(min(MARGIN_SAMPLES, len(self.pieces.epoch_pieces))):
            yield self.pieces.substitutes.get(alone, bad.place, 0, attempt=attempt)

    def finish(self) -> None:
        """After the last place: let the reader see whether its last shard ends where it should."""
        next(self._raw, None)


def _attempt(sample: RawSample, decode: Callable[[RawSample], Image]) -> Image | Fault:
    """The sample's image, or why it has none."""
    if sample.fault is not None:
        return sample.fault
    try:
        return decode(sample)
    except BadImage as error:
        return error.fault
