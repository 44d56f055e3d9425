"""What each micro-batch holds of each source, by arithmetic: any reader, any step, in logarithmic time and no memory.

A reader is a (rank, worker). A torch DataLoader takes batch i from worker i % V, so micro-batch j of a rank belongs to worker
j % V; `Deal` answers for one reader what it delivers, what all readers before it deliver, and what it has delivered before a
step. Nothing here is as long as the data: an epoch of 12.8 billion samples costs what one of a thousand costs.

`--sampling random` is one shuffled deck of all samples' labels, dealt into micro-batches. Which micro-batch lies where in the
deck is of no matter, since all its orders are as likely, so that it lies reader by reader:

    deck    | reader 0: its micro-batches in time | reader 1 | ...        G micro-batches of B samples, as leaves of a tree
    halves  |        first half        |        second half       |      how many of each source: multivariate hypergeometric
    ...                                                                  and so on, each node with a stream of its own
    leaf    | some micro-batches |                                       a small deck of labels, shuffled

The numbers at any place follow from the nodes on the way down to it: about 20 for a billion samples.

    B  micro-batch   K  micro-batches of a step   W  ranks   V  workers a rank   S  sources   T  steps of an epoch
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from open_clip_zerovl.data.schedule import Batching, Schedule
from open_clip_zerovl.randomness import Purpose, stream

LEAF_SAMPLES = 65_536  # of a deck that is shuffled as an array: 0.5 ms
_STEPS_AT_ONCE = 1_000_000  # counted in one array
_EXACT_BELOW = 10**9  # numpy's hypergeometric draw refuses larger populations


@dataclass(frozen=True)
class Deal:
    """Who delivers what in an epoch."""

    schedule: Schedule
    batching: Batching

    @property
    def micro_batches(self) -> int:
        """Of one rank: T*K."""
        return self.schedule.steps * self.batching.dga_steps

    def of_reader(self, worker: int, end: int | None = None) -> int:
        """How many of a rank's first `end` micro-batches (default all) worker `worker` delivers."""
        return max(0, -(-((self.micro_batches if end is None else end) - worker) // self.batching.workers))

    def before(self, rank: int, worker: int) -> np.ndarray:
        """(S,) samples that all readers before this one deliver in the epoch."""
        raise NotImplementedError

    def quota(self, rank: int, worker: int, step: int | None = None) -> np.ndarray:
        """(S,) samples that a reader delivers in the epoch, or before optimizer step `step`."""
        raise NotImplementedError

    def counts(self, rank: int, worker: int, step: int = 0) -> Iterator[np.ndarray]:
        """(S,) samples of each source in every micro-batch of a reader, from optimizer step `step` on."""
        raise NotImplementedError


def deal(schedule: Schedule, batching: Batching) -> Deal:
    """The deal of a schedule."""
    return Shuffled(schedule, batching) if schedule.strategy == "random" else Pure(schedule, batching)


@dataclass(frozen=True)
class Pure(Deal):
    """Every step is of one source, as `Schedule.source_of_step` says; all ranks deliver the same counts."""

    def before(self, rank: int, worker: int) -> np.ndarray:
        of_workers = self._owed(self.schedule.steps)
        return rank * of_workers.sum(axis=0) + of_workers[:worker].sum(axis=0)

    def quota(self, rank: int, worker: int, step: int | None = None) -> np.ndarray:
        return self._owed(self.schedule.steps if step is None else step)[worker]

    def _owed(self, steps: int) -> np.ndarray:
        """(V, S) samples that a rank's workers deliver in the first steps.

        Step t's micro-batches are numbers t*K .. t*K + K - 1, so that which workers they fall to repeats every
        V / gcd(K, V) steps: it is enough to count the steps of each source by their place in this period.
        """
        k, v = self.batching.dga_steps, self.batching.workers
        period = v // math.gcd(k, v)
        sources = len(self.schedule.taken)
        times = np.zeros((sources, period), dtype=np.int64)
        for begin in range(0, steps, _STEPS_AT_ONCE):
            order = self.schedule.source_of_step[begin : min(begin + _STEPS_AT_ONCE, steps)].astype(np.int64)
            places = np.arange(begin, begin + len(order)) % period
            times += np.bincount(order * period + places, minlength=sources * period).reshape(sources, period)
        share = np.stack([np.bincount((place * k + np.arange(k)) % v, minlength=v) for place in range(period)])
        return (times @ share).T * self.batching.micro_batch

    def counts(self, rank: int, worker: int, step: int = 0) -> Iterator[np.ndarray]:
        k, v = self.batching.dga_steps, self.batching.workers
        first = step * k
        for number in range(first + (worker - first) % v, self.micro_batches, v):
            row = np.zeros(len(self.schedule.taken), dtype=np.int64)
            row[self.schedule.source_of_step[number // k]] = self.batching.micro_batch
            yield row


@dataclass(frozen=True)
class Shuffled(Deal):
    """One deck of all samples, shuffled and dealt; see the module's text.

    Args:
        leaf_samples: of the decks at the tree's leaves.
    """

    leaf_samples: int = LEAF_SAMPLES
    _leaves: dict[int, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def before(self, rank: int, worker: int) -> np.ndarray:
        return self._up_to(self._place(rank, worker))

    def quota(self, rank: int, worker: int, step: int | None = None) -> np.ndarray:
        end = None if step is None else step * self.batching.dga_steps
        start = self._place(rank, worker)
        return self._up_to(start + self.of_reader(worker, end)) - self._up_to(start)

    def counts(self, rank: int, worker: int, step: int = 0) -> Iterator[np.ndarray]:
        start = self._place(rank, worker)
        for place in range(
            start + self.of_reader(worker, step * self.batching.dga_steps), start + self.of_reader(worker)
        ):
            number, row = divmod(place, self._leaf_length)
            yield self._leaf(number)[1][row]

    def _place(self, rank: int, worker: int) -> int:
        """The number in the deck of a reader's first micro-batch."""
        return rank * self.micro_batches + sum(self.of_reader(earlier) for earlier in range(worker))

    @property
    def _length(self) -> int:
        return self.micro_batches * self.batching.world_size

    @property
    def _leaf_length(self) -> int:
        """Micro-batches of a leaf."""
        return max(1, self.leaf_samples // self.batching.micro_batch)

    def _up_to(self, place: int) -> np.ndarray:
        """(S,) samples of each source in the deck's first `place` micro-batches."""
        if place == self._length:
            return self.schedule.taken.astype(np.int64)
        number, rows = divmod(place, self._leaf_length)
        before, counts = self._leaf(number)
        return before + counts[:rows].sum(axis=0)

    def _leaf(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Leaf `number`: (S,) what lies before it, and (micro-batches, S) what it holds."""
        if number not in self._leaves:
            if len(self._leaves) > 4:  # a reader goes on from leaf to leaf; the ends of its stretch are asked for first
                self._leaves.clear()
            self._leaves[number] = self._descend(number)
        return self._leaves[number]

    def _descend(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        length, size = self._leaf_length, self.batching.micro_batch
        low, high = 0, -(-self._length // length)  # leaves
        held = self.schedule.taken.astype(np.int64)
        before = np.zeros_like(held)
        while high - low > 1:
            middle = (low + high) // 2
            left = draw_without_replacement(self._stream(low, high), held, (middle - low) * length * size)
            if number < middle:
                high, held = middle, left
            else:
                low, held, before = middle, held - left, before + left
        deck = np.repeat(np.arange(len(held)), held)
        self._stream(low, high).shuffle(deck)
        rows = len(deck) // size
        labels = deck + np.repeat(np.arange(rows), size) * len(held)
        return before, np.bincount(labels, minlength=rows * len(held)).reshape(rows, len(held))

    def _stream(self, low: int, high: int) -> np.random.Generator:
        """Of the node that holds leaves low .. high - 1."""
        return stream(self.schedule.seed, Purpose.DEAL, self.schedule.epoch, low, high)


def draw_without_replacement(rng: np.random.Generator, counts: np.ndarray, draws: int) -> np.ndarray:
    """How many of each kind are among `draws` things drawn from `counts` of each: multivariate hypergeometric, any size.

    Args:
        counts: (S,) things of each kind.

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
    """How many of `draws` things drawn from `good` and `bad` ones are good.

    Where numpy's draw ends, at a billion things, the distribution function is inverted: probabilities are products of the
    ratios of neighbours, from the mode outwards, as far as twelve standard deviations (the rest is below 1e-30).
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
