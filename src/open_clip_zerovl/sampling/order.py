"""The order of a reader's samples: shuffled within a window, entered at any place without the places before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

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
