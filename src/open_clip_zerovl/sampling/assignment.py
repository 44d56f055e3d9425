"""The samples that each reader delivers in each micro-batch, and their order, by arithmetic for any reader and any step.

A rank has V readers, one a loader worker. A torch DataLoader takes batch i from worker i % V, so that micro-batch j of a rank
belongs to its reader j % V. `Assignment` counts the samples of one reader, those of all readers before it, and those that a
reader has delivered before a step. Readers are ordered by rank, then by number. `LocalOrder` shuffles the samples of a reader.
No array is as long as the data.

`--sampling random` is one shuffled deck of the source labels of all samples, dealt into micro-batches. All orders of the deck
are equally likely, so the micro-batches of a reader may lie next to each other in it. The deck is never stored. It is halved
again and again, and a draw gives the number of labels of each source in the first half:

    deck    | reader 0: its micro-batches in time | reader 1 | ...       T*K*W micro-batches of B samples
    halves  |        first half        |        second half       |      multivariate hypergeometric draw
    ...                                                                  each node of this tree has a stream of its own
    leaf    | some micro-batches |                                       a small deck of labels, shuffled as an array

The numbers at any place follow from the nodes on the way down to its leaf: about 20 for a billion samples.

`--sampling proportional` deals the labels of each source at equal distances instead.

    B  micro-batch   K  micro-batches of a step   W  ranks   V  readers a rank   S  sources   T  steps of an epoch
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.sampling.schedule import MIXED, Batching, Schedule

LEAF_SAMPLES = 65_536  # labels of a leaf, whose shuffle takes 0.5 ms
_STEPS_AT_ONCE = 1_000_000  # steps that are counted in one array
_EXACT_BELOW = 10**9  # numpy's hypergeometric draw takes no larger populations


@dataclass(frozen=True)
class _Deck:
    """A shuffled deck of source labels, dealt into micro-batches as the module's text describes.

    Args:
        held: (S,) labels of each source.
        length: micro-batches.
        size: B, labels of a micro-batch.
        key: seed and epoch of its streams.
        leaf_samples: labels of a leaf.
    """

    held: np.ndarray
    length: int
    size: int
    key: tuple[int, int]
    leaf_samples: int
    _leaves: dict[int, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def _leaf_length(self) -> int:
        """Count the micro-batches of a leaf."""
        return max(1, self.leaf_samples // self.size)

    def up_to(self, place: int) -> np.ndarray:
        """Count the samples (S,) of each source in the deck's first `place` micro-batches."""
        if place == self.length:
            return self.held.astype(np.int64)
        number, rows = divmod(place, self._leaf_length)
        before, counts = self._leaf(number)
        return before + counts[:rows].sum(axis=0)

    def row(self, place: int) -> np.ndarray:
        """Count the samples (S,) of each source in micro-batch `place`."""
        number, row = divmod(place, self._leaf_length)
        return self._leaf(number)[1][row]

    def _leaf(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Count the samples (S,) in the deck before leaf `number`, and (micro-batches, S) in each of its micro-batches."""
        if number not in self._leaves:
            # a reader needs both ends of its stretch at first, then one leaf after the other
            if len(self._leaves) > 4:
                self._leaves.clear()
            self._leaves[number] = self._descend(number)
        return self._leaves[number]

    def _descend(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw `_leaf` from the root of the tree down."""
        length = self._leaf_length
        low, high = 0, -(-self.length // length)  # the node holds the leaves low .. high - 1
        held = self.held.astype(np.int64)
        before = np.zeros_like(held)
        while high - low > 1:
            middle = (low + high) // 2
            left = draw_without_replacement(
                self._stream(low, high), held, (middle - low) * length * self.size
            )
            if number < middle:
                high, held = middle, left
            else:
                low = middle
                held = held - left
                before = before + left
        deck = np.repeat(np.arange(len(held)), held)
        self._stream(low, high).shuffle(deck)
        rows = len(deck) // self.size
        labels = deck + np.repeat(np.arange(rows), self.size) * len(held)
        return before, np.bincount(labels, minlength=rows * len(held)).reshape(rows, len(held))

    def _stream(self, low: int, high: int) -> np.random.Generator:
        """Return the stream of the node that holds the leaves low .. high - 1."""
        return stream(self.key[0], Purpose.ASSIGNMENT, self.key[1], low, high)


@dataclass(frozen=True)
class _EvenDeck:
    """A deck in which the labels of each source lie at equal distances, dealt into micro-batches.

    Label j of a source with n labels lies at (j + 1/2) / n of the deck, and equal places follow the order of the sources: any
    stretch of the deck holds each source's share, up to rounding.

    Args:
        held: (S,) labels of each source.
        length: micro-batches.
        size: B, labels of a micro-batch.
    """

    held: np.ndarray
    length: int
    size: int

    def up_to(self, place: int) -> np.ndarray:
        """Count the samples of each source (S,) in the deck's first `place` micro-batches."""
        held = self.held.astype(np.int64)
        total, wanted, sources = self.length * self.size, place * self.size, len(held)
        # Rounding moves the border by fewer than S labels: those before `low` lie before it, those from `high` on behind it.
        low = np.clip(held * (wanted - sources) // total - 1, 0, held)
        high = np.clip(held * (wanted + sources) // total + 2, 0, held)
        of = np.repeat(np.arange(sources), high - low)
        labels = np.concatenate([np.arange(*each) for each in zip(low, high, strict=True)])
        following = np.argsort((labels + 0.5) / held[of], kind="stable")
        nearest = of[following[: wanted - int(low.sum())]]
        return low + np.bincount(nearest, minlength=sources)

    def row(self, place: int) -> np.ndarray:
        """Count the samples of each source (S,) in micro-batch `place`."""
        return self.up_to(place + 1) - self.up_to(place)


@dataclass(frozen=True)
class Assignment:
    """The samples that each reader delivers in an epoch.

    Steps of one source hold equal numbers on all ranks. Micro-batches of random sampling are dealt from one deck, in the
    order of the readers: all micro-batches of rank 0's first reader in time, then those of the next reader.

    Args:
        schedule: the schedule of the epoch.
        batching: B, K, W, and V readers a rank.
        leaf_samples: labels of a leaf of the deck.
    """

    schedule: Schedule
    batching: Batching
    leaf_samples: int = LEAF_SAMPLES

    @property
    def micro_batches(self) -> int:
        """Count the micro-batches of one rank: T*K."""
        return self.schedule.steps * self.batching.dga_steps

    def of_reader(self, reader: int, end: int | None = None) -> int:
        """Count the micro-batches of a reader among the first `end` ones of its rank (None: among all)."""
        return max(
            0, -(-((self.micro_batches if end is None else end) - reader) // self.batching.workers)
        )

    def before(self, rank: int, reader: int) -> np.ndarray:
        """Count the samples (S,) that all readers before this one deliver in the epoch."""
        if self._mixed:
            return self._deck.up_to(self._place(rank, reader))
        of_readers = self._delivered(self.schedule.steps)
        return rank * of_readers.sum(axis=0) + of_readers[:reader].sum(axis=0)

    def quota(self, rank: int, reader: int, step: int | None = None) -> np.ndarray:
        """Count the samples (S,) that a reader delivers in the epoch, or before optimizer step `step`."""
        steps = self.schedule.steps if step is None else step
        if not self._mixed:
            return self._delivered(steps)[reader]
        start = self._place(rank, reader)
        end = start + self.of_reader(reader, steps * self.batching.dga_steps)
        return self._deck.up_to(end) - self._deck.up_to(start)

    def counts(self, rank: int, reader: int, step: int = 0) -> Iterator[np.ndarray]:
        """Yield the samples (S,) of each source for each micro-batch of a reader from optimizer step `step` on."""
        k, v = self.batching.dga_steps, self.batching.workers
        first = step * k
        numbers = range(first + (reader - first) % v, self.micro_batches, v)
        if self._mixed:
            place = self._place(rank, reader) + self.of_reader(reader, first)
            yield from map(self._deck.row, range(place, place + len(numbers)))
            return
        for number in numbers:
            row = np.zeros(len(self.schedule.taken), dtype=np.int64)
            row[self.schedule.source_of_step[number // k]] = self.batching.micro_batch
            yield row

    @cached_property
    def _mixed(self) -> bool:
        """Return whether the steps mix all sources."""
        return bool((self.schedule.source_of_step == MIXED).any())

    def _delivered(self, steps: int) -> np.ndarray:
        """Count the samples (V, S) that each of a rank's readers delivers in the first `steps` steps, each of one source.

        Step t has the micro-batches t*K .. t*K + K - 1. The readers that deliver them repeat every V / gcd(K, V) steps, so it
        is enough to count the steps of each source by their place in this period:

            K = 2, V = 4   step 0: readers 0, 1   step 1: readers 2, 3   step 2: readers 0, 1 ...     a period of 2 steps
        """
        k, v = self.batching.dga_steps, self.batching.workers
        period = v // math.gcd(k, v)
        sources = len(self.schedule.taken)
        times = np.zeros((sources, period), dtype=np.int64)
        for begin in range(0, steps, _STEPS_AT_ONCE):
            order = self.schedule.source_of_step[begin : min(begin + _STEPS_AT_ONCE, steps)].astype(
                np.int64
            )
            places = np.arange(begin, begin + len(order)) % period
            times += np.bincount(order * period + places, minlength=sources * period).reshape(
                sources, period
            )
        share = np.stack(
            [np.bincount((place * k + np.arange(k)) % v, minlength=v) for place in range(period)]
        )
        return (times @ share).T * self.batching.micro_batch

    def _place(self, rank: int, reader: int) -> int:
        """Find the place of a reader's first micro-batch in the deck, counted in micro-batches."""
        return rank * self.micro_batches + sum(map(self.of_reader, range(reader)))

    @cached_property
    def _deck(self) -> _Deck | _EvenDeck:
        """Make the deck of the epoch's samples."""
        length = self.micro_batches * self.batching.world_size
        if self.schedule.strategy == "proportional":
            return _EvenDeck(self.schedule.taken, length, self.batching.micro_batch)
        return _Deck(
            self.schedule.taken,
            length,
            self.batching.micro_batch,
            (self.schedule.seed, self.schedule.epoch),
            self.leaf_samples,
        )


def draw_without_replacement(
    rng: np.random.Generator, counts: np.ndarray, draws: int
) -> np.ndarray:
    """Draw items without replacement and count each kind: multivariate hypergeometric, of any size.

    Args:
        counts: (S,) items of each kind to draw from.
        draws: at most the sum of `counts`.

    Returns:
        (S,) integers that sum to `draws`.
    """
    drawn = np.zeros_like(counts)
    rest = int(counts.sum())
    for kind, count in enumerate(counts.tolist()):
        if draws == 0:
            break
        rest -= count
        drawn[kind] = hypergeometric(rng, count, rest, draws)
        draws -= int(drawn[kind])
    return drawn


def hypergeometric(rng: np.random.Generator, good: int, bad: int, draws: int) -> int:
    """Draw without replacement from `good` and `bad` items and count the good ones among `draws`.

    From a billion items on, which numpy's draw does not take, the distribution function is inverted. Probabilities are summed
    from the mode outwards, each from its neighbour by the ratio p(k + 1) / p(k), as far as twelve standard deviations; beyond
    lies less than 1e-30.
    """
    total = good + bad
    if good == 0 or bad == 0 or draws in (0, total):
        return 0 if good == 0 else draws if bad == 0 else min(draws, good)
    if total < _EXACT_BELOW:
        return int(rng.hypergeometric(good, bad, draws))
    mode = (draws + 1) * (good + 1) // (total + 2)
    deviation = math.sqrt(draws * (good / total) * (bad / total) * ((total - draws) / (total - 1)))
    reach = int(12 * deviation) + 30
    low, high = max(0, draws - bad, mode - reach), min(draws, good, mode + reach)
    up = np.arange(mode, high, dtype=np.float64)  # p(k + 1) / p(k)
    down = np.arange(mode, low, -1, dtype=np.float64)  # p(k - 1) / p(k)
    above = np.cumprod((good - up) / (up + 1) * ((draws - up) / (bad - draws + up + 1)))
    below = np.cumprod(down / (good - down + 1) * ((bad - draws + down) / (draws - down + 1)))
    cumulative = np.cumsum(np.concatenate([below[::-1], [1.0], above]))
    return low + int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))


# ---------------------------------------------------------------------------------------------------------------------
# The order of a reader
# ---------------------------------------------------------------------------------------------------------------------

_CHUNK = 4096  # items whose keys come from one stream


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
        """Yield the items from place `begin` on, in the shuffled order, as arrays of several."""
        if self.count <= self.window:
            yield self.stream(0).permutation(self.count)[begin:]
            return
        # keys are at least their items: no more places than that lie before
        interval = begin // self._interval
        before = self._below(interval * self._interval)
        while before < self.count:
            items = self._of_interval(interval)
            if begin < before + len(items):
                yield items[max(0, begin - before) :]
            before += len(items)
            interval += 1

    def passed(self, begin: int, first: int) -> set[int]:
        """Return the items from number `first` on that come before place `begin`."""
        places = max(0, begin - 2 * self._interval)  # places further back have items below `first`
        passed: set[int] = set()
        for items in self.chunks(places):
            passed.update(item for item in items[: begin - places].tolist() if item >= first)
            places += len(items)
            if places >= begin:
                break
        return passed

    def lowest(self, begin: int) -> int:
        """Find the lowest item that comes at place `begin` or later."""
        return min(
            int(items.min()) for items in itertools.islice(self.chunks(begin), 2) if len(items)
        )

    @property
    def _interval(self) -> int:
        """Return the length of the interval of keys that is sorted at a time."""
        return max(self.window, _CHUNK)

    def _keys(self, low: int, high: int) -> np.ndarray:
        """Draw the keys (high - low,) of items low .. high - 1."""
        low, high = max(0, low), min(self.count, high)
        if low >= high:
            return np.zeros(0)
        first, last = low // _CHUNK, -(-high // _CHUNK)
        drawn = np.concatenate([self.stream(block).random(_CHUNK) for block in range(first, last)])
        return (
            np.arange(low, high) + drawn[low - first * _CHUNK : high - first * _CHUNK] * self.window
        )

    def _below(self, key: int) -> int:
        """Count the items with a key below `key`."""
        # items below this one have keys below `key`
        certain = max(0, min(key - self.window, self.count))
        return certain + int((self._keys(certain, key) < key).sum())

    def _of_interval(self, number: int) -> np.ndarray:
        """Return the items whose keys lie in interval `number`, in the order of their keys."""
        low, high = number * self._interval, (number + 1) * self._interval
        first = max(0, low - self.window)
        keys = self._keys(first, high)
        inside = np.flatnonzero((keys >= low) & (keys < high))
        return first + inside[np.argsort(keys[inside], kind="stable")]
