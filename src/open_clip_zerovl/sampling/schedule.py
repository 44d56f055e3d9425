"""Schedules of sources and batches (section 3.1, figure 2, A.4): pure functions of (seed, epoch, sizes, weights).

Every rank and every loader worker computes the same schedule by itself. Nothing is communicated, and any step is reached by
arithmetic.

    B  micro-batch per rank        K  micro-batches of a step (DGA steps)      W  ranks        V  loader workers per rank
    N = B*K*W  effective batch     S  sources                                  T  steps of an epoch

`source_schedule` gives the number of samples of each source in an epoch, and the source or sources of each step:

    random         every micro-batch mixes the sources, as dealt from one shuffled deck of all samples
    proportional   every micro-batch holds each source's share, to within two samples
    debiased       every step, over all ranks and micro-batches, draws from one source. The order of the steps is shuffled,
                   their numbers are in exact proportion to the sources' sizes
    sequential     as debiased, one source after the other (A.4)

A source is an endless cycle over its shards. An epoch takes the next `taken[s]` samples of source s, from `begin[s]` on, which
is how many all epochs before took (invariant 3):

    weight 1      each sample at most once an epoch; the next epoch begins with the remainder that filled no effective batch
    weight 2      two passes an epoch
    weight 0.5    half of the samples in one epoch, the other half in the next

`epoch_slices` gives the slices of shards that this is, and `slice_range` the stretch of them that one reader reads.
`assignment` counts the samples of each reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.sampling import STRATEGIES

MIXED = -1  # in Schedule.source_of_step: the step mixes all sources
FEW_STEPS = 20  # of a source in an epoch; Visual Genome, the paper's smallest, fills 30 of 16,384


@dataclass(frozen=True)
class Batching:
    """Division of an effective batch: B samples per micro-batch, K micro-batches per step, W ranks, V workers per rank.

    Attributes:
        micro_batch: B.
        dga_steps: K.
        world_size: W.
        workers: V; 1 for a loader without worker processes.
    """

    micro_batch: int
    dga_steps: int = 1
    world_size: int = 1
    workers: int = 1

    @property
    def rank_batch(self) -> int:
        """Return B*K, the samples of a step on one rank."""
        return self.micro_batch * self.dga_steps

    @property
    def effective_batch(self) -> int:
        """Return N = B*K*W."""
        return self.rank_batch * self.world_size


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a run: arguments of `source_schedule` and `epoch_slices`.

    Attributes:
        strategy: of STRATEGIES.
        source_order: names of the sources in the order of sequential sampling; None for the order given.
        epoch_samples: length of an epoch in samples; None for all samples of the sources.
        resampled: draw shards with replacement.
    """

    strategy: str = "debiased"
    source_order: tuple[str, ...] | None = None
    epoch_samples: int | None = None
    resampled: bool = False


@dataclass(frozen=True)
class Schedule:
    """The samples of one epoch: their number from each source, and the source of each step.

    Attributes:
        strategy: one of STRATEGIES.
        seed, epoch: those of `source_schedule`.
        effective_batch: N.
        begin: (S,) samples of each source that the epochs before used.
        taken: (S,) samples of each source used in this epoch; their sum is T*N.
        source_of_step: (T,) index of the source of each step, MIXED (-1) where a step mixes all sources.
    """

    strategy: str
    seed: int
    epoch: int
    effective_batch: int
    begin: np.ndarray
    taken: np.ndarray
    source_of_step: np.ndarray

    @property
    def steps(self) -> int:
        """Return T, the optimizer steps of the epoch."""
        return len(self.source_of_step)


def source_schedule(
    sizes: Sequence[int],
    effective_batch: int,
    *,
    strategy: str,
    seed: int,
    epoch: int,
    weights: Sequence[float] | None = None,
    epoch_samples: int | None = None,
    source_order: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Schedule:
    """Schedule one epoch: its steps, their sources, and the number of samples from each source.

    Args:
        sizes: (S,) samples in each source.
        effective_batch: N, over all ranks and micro-batches.
        strategy: of STRATEGIES.
        weights: (S,) passes over each source in an epoch, default 1.
        epoch_samples: length of an epoch in samples (`--train-num-samples`); sizes and weights then give proportions only.
        source_order: (S,) the order of the sources in sequential sampling, default as given.
        names: the names of the sources, for messages.

    Raises:
        UserError: unknown strategy; an epoch without a single step; a source order that does not name each source
            once; with sequential or debiased sampling, a source that does not fill one effective batch in an epoch
            (it would never be seen).
    """
    if strategy not in STRATEGIES:
        raise UserError(
            f"unknown sampling strategy {strategy!r}; use one of {', '.join(STRATEGIES)}"
        )
    share = np.asarray(sizes, dtype=np.float64) * np.asarray(
        weights if weights is not None else np.ones(len(sizes))
    )
    if epoch_samples is not None:
        share *= epoch_samples / share.sum()
    # 1e-9 keeps a share such as 0.1 * 640 = 64.00000000000001 from being rounded to the wrong side of a whole batch.
    total_steps = int(share.sum() / effective_batch + 1e-9)
    if total_steps == 0:
        raise UserError(
            f"an epoch has {int(share.sum())} samples, fewer than one effective batch of {effective_batch}; "
            "lower --batch-size or --dga-steps"
        )
    if strategy in ("random", "proportional"):
        taken = apportion(share, total_steps * effective_batch)
        mixed = np.full(total_steps, MIXED, dtype=np.int16)
        return Schedule(strategy, seed, epoch, effective_batch, epoch * taken, taken, mixed)
    steps = (
        apportion(share, total_steps)
        if epoch_samples is not None
        else _whole_steps(share, effective_batch)
    )
    _refuse_unseen(share, steps, effective_batch, names)
    sequential = strategy == "sequential"
    order = (
        _sequential_order(source_order, steps)
        if sequential
        else _shuffled_order(steps, seed, epoch)
    )
    taken = steps * effective_batch
    return Schedule(strategy, seed, epoch, effective_batch, epoch * taken, taken, order)


def _whole_steps(share: np.ndarray, effective_batch: int) -> np.ndarray:
    """Count the effective batches (S,) that each source fills with its samples of an epoch (S,)."""
    return np.floor(share / effective_batch + 1e-9).astype(np.int64)


def _refuse_unseen(
    share: np.ndarray, steps: np.ndarray, effective_batch: int, names: Sequence[str] | None
) -> None:
    """Refuse a source without a step (or a sample)."""
    for index, (wanted, count) in enumerate(zip(share, steps, strict=True)):
        if count == 0:
            name = names[index] if names is not None else f"#{index}"
            raise UserError(
                f"source {name!r} gives {int(wanted)} samples an epoch, less than one effective batch of "
                f"{effective_batch}; lower --batch-size or --dga-steps, raise the source's weight, or leave it out"
            )


def _sequential_order(source_order: Sequence[int] | None, steps: np.ndarray) -> np.ndarray:
    """Order the steps (T,) by their sources: all steps (S,) of one source, then all of the next."""
    sequence = np.asarray(
        source_order if source_order is not None else range(len(steps)), dtype=np.int16
    )
    if sorted(sequence.tolist()) != list(range(len(steps))):
        raise UserError(
            f"the source order {sequence.tolist()} must name each of the {len(steps)} sources once"
        )
    return np.repeat(sequence, steps[sequence])


def _shuffled_order(steps: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Shuffle the steps (S,) of all sources to the source of each step, (T,)."""
    rng = stream(seed, Purpose.SCHEDULE, epoch)
    return rng.permutation(np.repeat(np.arange(len(steps), dtype=np.int16), steps))


def apportion(share: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` in proportion to `share` (S,) into whole numbers (S,), by largest remainders."""
    exact = share * (total / share.sum())
    whole = np.floor(exact + 1e-9).astype(np.int64)
    short = int(total - whole.sum())
    if short > 0:  # a stable sort breaks ties alike on all machines
        whole[np.argsort(-(exact - whole), kind="stable")[:short]] += 1
    return whole


def few_steps(schedule: Schedule, names: Sequence[str]) -> str | None:
    """Write a sentence if a source fills few steps of its own in an epoch.

    Each of its steps then holds a large part of the source, again and again with the same samples, and a rest that does
    not fill a step waits for the next epoch.

    Returns:
        None without such a source, or where steps are mixed.
    """
    if len(names) < 2 or (schedule.source_of_step == MIXED).any():
        return None
    steps = np.bincount(schedule.source_of_step, minlength=len(names))
    few = [
        (int(steps[index]), name) for index, name in enumerate(names) if steps[index] < FEW_STEPS
    ]
    if not few:
        return None
    shown = ", ".join(f"{name} ({count})" for count, name in sorted(few)[:3]) + (
        " ..." if len(few) > 3 else ""
    )
    return (
        f"{len(few)} of {len(names)} sources fill fewer than {FEW_STEPS} steps of {schedule.effective_batch} an epoch: "
        f"{shown}. Debiased sampling may then cost more within a source than it gains: compare it with a smaller effective "
        "batch, a larger weight of the source (--train-data-upsampling-factors), or --sampling random"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The slices of shards
# ---------------------------------------------------------------------------------------------------------------------


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
