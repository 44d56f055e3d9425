"""Slices of shards: the part of a source that an epoch takes, and the stretch of it that one reader reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.sampling.schedule import Schedule


@dataclass(frozen=True)
class ShardSlice:
    """Samples [start, stop) of a shard, whose first sample is number `position` in the source's endless cycle."""

    shard: int
    start: int
    stop: int
    position: int

    def __len__(self) -> int:
        return self.stop - self.start


class ShardSlices(Sequence[ShardSlice]):
    """ShardSlices of a source's shards, kept as arrays: those of a quarter of a million shards take 8 MiB.

    Attributes:
        rows: (slices, 4) shard, start, stop, position, as in `ShardSlice`.
        ends: (slices + 1,) samples before each part; the last entry is the samples of all slices.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.ends = np.concatenate([[0], np.cumsum(rows[:, 2] - rows[:, 1])])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ShardSlice: ...
    @overload
    def __getitem__(self, index: slice) -> ShardSlices: ...
    def __getitem__(self, index: int | slice) -> ShardSlice | ShardSlices:
        if isinstance(index, slice):
            return ShardSlices(self.rows[index])
        return ShardSlice(*self.rows[index].tolist())

    @property
    def samples(self) -> int:
        """Count the samples of all slices."""
        return int(self.ends[-1])


def epoch_slices(
    sizes: Sequence[int], schedule: Schedule, source: int, *, resampled: bool = False
) -> ShardSlices:
    """Choose the slices of shards that make up one source's epoch.

    Each pass over the source is shuffled for itself.

    Args:
        sizes: samples in each shard of the source.
        source: index of the source in the schedule.
        resampled: draw shards with replacement instead (`--dataset-resampled`), with probabilities in proportion to their
            sizes.
    """
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    total = int(starts[-1])
    rng = stream(schedule.seed, Purpose.SLICES, schedule.epoch, source)
    begin = int(schedule.begin[source])
    end = begin + int(schedule.taken[source])
    if resampled:
        return ShardSlices(_resampled_slices(starts, end - begin, rng, schedule.epoch))
    laps = [np.zeros((0, 4), dtype=np.int64)]
    for lap in range(begin // total, -(-end // total)):
        low, high = max(begin - lap * total, 0), min(end - lap * total, total)
        start, stop = np.maximum(starts[:-1], low), np.minimum(starts[1:], high)
        shard = np.flatnonzero(stop > start)
        start = start[shard]
        stop = stop[shard]
        offset = starts[shard]
        in_lap = np.stack([shard, start - offset, stop - offset, lap * total + start], axis=1)
        laps.append(in_lap[rng.permutation(len(in_lap))])
    return ShardSlices(np.concatenate(laps))


def _resampled_slices(
    starts: np.ndarray, taken: int, rng: np.random.Generator, epoch: int
) -> np.ndarray:
    total, missing = int(starts[-1]), taken
    rows: list[tuple[int, int, int, int]] = []
    while missing > 0:
        shard = int(np.searchsorted(starts, rng.integers(total), side="right")) - 1
        size = int(starts[shard + 1] - starts[shard])
        length = min(size, missing)
        start = int(rng.integers(size - length + 1))
        # Each draw is a pass of its own: its positions are the samples' (modulo total), and no augmentation repeats.
        lap = (epoch << 24) + len(rows)
        rows.append((shard, start, start + length, lap * total + int(starts[shard]) + start))
        missing -= length
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def slice_range(slices: ShardSlices, low: int, length: int) -> ShardSlices:
    """Cut samples low .. low + length - 1 of the sequence of slices.

    Readers get consecutive stretches (`Assignment.before` and `quota`). All shards of a stretch are whole but the first and
    the last; a shard on the boundary of two stretches is read by both readers, each its own part. All stretches together are
    the sequence, nothing twice:

        slices of 10, 10 and 10 samples, 3 readers of 8  ->  [0..7]; [8..9], [10..15]; [16..19], [20..23]

    Raises:
        ValueError: the stretch does not lie within the slices.
    """
    high = low + length
    if low < 0 or length < 0 or high > slices.samples:
        raise ValueError(
            f"samples {low} to {high} do not add up with the slices, which hold {slices.samples}"
        )
    first = int(np.searchsorted(slices.ends, low, side="right")) - 1
    last = int(np.searchsorted(slices.ends, high, side="left"))
    if length == 0:
        return slices[:0]
    rows = slices.rows[first:last].copy()
    rows[-1, 2] -= slices.ends[last] - high
    rows[0, [1, 3]] += low - slices.ends[first]
    return ShardSlices(rows)
