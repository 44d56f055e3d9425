"""How sources make batches (section 3.1, figure 2, A.4): pure functions of (seed, epoch, sizes, weights).

Every rank and every loader worker computes the same schedule by itself, so that nothing is communicated, and any step can
be reached by arithmetic.

    B  micro-batch per rank        K  micro-batches of a step (DGA steps)      W  ranks        V  loader workers per rank
    N = B*K*W  effective batch     S  sources                                  T  steps of an epoch

Three layers:

1. `source_schedule`: how many samples each source gives to an epoch, and which source(s) each step draws from.
   - random:     every micro-batch mixes the sources as one shuffled deck would (without replacement);
   - debiased:   every step, over all ranks and micro-batches, draws from one source; sources come in shuffled order and in
                 exact proportion to their size (draw="exact"), or each step draws its source anew (draw="iid", as the
                 paper's released code does);
   - sequential: as debiased, one source after the other (A.4).
2. `owed`: what each (rank, worker) must deliver, counted from the schedule.
3. `cut`: which stretch of a source's shards each (rank, worker) reads to deliver it.

An epoch takes the next `taken[s]` samples of source s's endless cycle over its shards, starting at `begin[s]`, which is what
all epochs before took.
With weight 1 that is every sample at most once an epoch, and the remainder that does not fill an effective batch is the
first of the next epoch; weight w is w passes, a fraction is a share that rotates (invariant 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from open_clip_zerovl.data.names import DRAWS, STRATEGIES
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.randomness import Purpose, stream

MIXED = -1  # in Schedule.source_of_step: the step mixes all sources


@dataclass(frozen=True)
class Batching:
    """How an effective batch is divided: B samples a micro-batch, K micro-batches a step, W ranks, V workers a rank."""

    micro_batch: int
    dga_steps: int = 1
    world_size: int = 1
    workers: int = 1

    @property
    def effective_batch(self) -> int:
        return self.micro_batch * self.dga_steps * self.world_size


@dataclass(frozen=True)
class Schedule:
    """What one epoch draws from each source.

    Attributes:
        strategy: one of STRATEGIES.
        seed, epoch: what it was made from.
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
    draw: str = "exact",
    source_order: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Schedule:
    """The schedule of one epoch: steps, their sources, and how much of each source is taken.

    Args:
        sizes: (S,) samples in each source.
        effective_batch: N, over all ranks and micro-batches.
        strategy: of STRATEGIES.
        weights: (S,) passes over each source in an epoch, default 1.
        epoch_samples: length of an epoch in samples (`--train-num-samples`); the weights then only give proportions.
        draw: of DRAWS, for debiased sampling.
        source_order: (S,) the order of the sources in sequential sampling, default as given.
        names: of the sources, for messages.

    Raises:
        UserError: unknown strategy or draw; an epoch without a single step; with sequential or exactly debiased sampling, a
            source that does not fill one effective batch in an epoch (it would silently never be seen).
    """
    if strategy not in STRATEGIES:
        raise UserError(f"unknown sampling strategy {strategy!r}; use one of {', '.join(STRATEGIES)}")
    if draw not in DRAWS:
        raise UserError(f"unknown draw {draw!r} of debiased sampling; use one of {', '.join(DRAWS)}")
    names = list(names) if names is not None else [f"#{index}" for index in range(len(sizes))]
    share = np.asarray(sizes, dtype=np.float64) * np.asarray(weights if weights is not None else np.ones(len(sizes)))
    if epoch_samples is not None:
        share *= epoch_samples / share.sum()
    # 1e-9 keeps a share such as 0.1 * 640 = 64.00000000000001 from being rounded to the wrong side of a whole batch.
    total_steps = int(share.sum() / effective_batch + 1e-9)
    if total_steps == 0:
        raise UserError(
            f"an epoch of {int(share.sum())} samples has zero steps of the effective batch of {effective_batch}; "
            "lower --batch-size or --dga-steps"
        )
    if strategy == "random":
        taken = _apportion(share, total_steps * effective_batch)
        mixed = np.full(total_steps, MIXED, dtype=np.int16)
        return Schedule(strategy, seed, epoch, effective_batch, epoch * taken, taken, mixed)
    if strategy == "debiased" and draw == "iid":
        order, begin = _iid_order(share, total_steps, seed, epoch)
        taken = np.bincount(order, minlength=len(share)) * effective_batch
        return Schedule(strategy, seed, epoch, effective_batch, begin * effective_batch, taken, order)
    steps = np.floor(share / effective_batch + 1e-9).astype(np.int64)
    if epoch_samples is not None:
        steps = _apportion(share, total_steps)
    for name, wanted, count in zip(names, share, steps, strict=True):
        if count == 0:
            raise UserError(
                f"source {name!r} gives {int(wanted)} samples an epoch, less than one effective batch of "
                f"{effective_batch}; lower --batch-size or --dga-steps, raise the source's weight, or leave it out"
            )
    taken = steps * effective_batch
    if strategy == "sequential":
        sequence = np.asarray(source_order if source_order is not None else range(len(share)), dtype=np.int16)
        if sorted(sequence.tolist()) != list(range(len(share))):
            raise UserError(f"the source order {sequence.tolist()} must name each of the {len(share)} sources once")
        order = np.repeat(sequence, steps[sequence])
    else:
        rng = stream(seed, Purpose.SCHEDULE, epoch)
        order = rng.permutation(np.repeat(np.arange(len(share), dtype=np.int16), steps))
    return Schedule(strategy, seed, epoch, effective_batch, epoch * taken, taken, order)


def _iid_order(share: np.ndarray, steps: int, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Each step's source drawn in proportion to the shares: (T,) sources, (S,) steps that each had in earlier epochs."""

    def draw(of_epoch: int) -> np.ndarray:
        rng = stream(seed, Purpose.SCHEDULE, of_epoch)
        return rng.choice(len(share), size=steps, p=share / share.sum()).astype(np.int16)

    begin = np.zeros(len(share), dtype=np.int64)
    for earlier in range(epoch):
        begin += np.bincount(draw(earlier), minlength=len(share))
    return draw(epoch), begin


def micro_batch_counts(schedule: Schedule, batching: Batching) -> np.ndarray:
    """How many samples of each source every micro-batch holds.

    Returns:
        (T*K, W, S) integers that sum to B over S; index t*K + k is micro-batch k of step t.
    """
    steps, sources = schedule.steps, len(schedule.taken)
    shape = (steps * batching.dga_steps, batching.world_size, sources)
    if schedule.strategy != "random":
        counts = np.zeros((steps, sources), dtype=np.int32)
        counts[np.arange(steps), schedule.source_of_step] = batching.micro_batch
        return np.broadcast_to(np.repeat(counts, batching.dga_steps, axis=0)[:, None], shape)
    # One shuffled deck of source labels, dealt into micro-batches: exactly drawing without replacement.
    rng = stream(schedule.seed, Purpose.SCHEDULE, schedule.epoch)
    deck = np.repeat(np.arange(sources, dtype=np.uint8 if sources <= 256 else np.uint16), schedule.taken)
    rng.shuffle(deck)
    dealt = deck.reshape(-1, batching.micro_batch)
    counts = np.stack([(dealt == source).sum(axis=1, dtype=np.int32) for source in range(sources)], axis=1)
    return counts.reshape(shape)


def owed(counts: np.ndarray, workers: int) -> np.ndarray:
    """Samples that each (rank, worker) delivers in the epoch, from `micro_batch_counts`.

    A torch DataLoader takes batch i from worker i % V, so micro-batch j of a rank belongs to worker j % V.

    Returns:
        (W, V, S) integers.
    """
    return np.stack([counts[worker::workers].sum(axis=0, dtype=np.int64) for worker in range(workers)], axis=1)


@dataclass(frozen=True)
class Piece:
    """Samples [start, stop) of a shard, whose first sample is number `position` in the source's endless cycle."""

    shard: int
    start: int
    stop: int
    position: int

    def __len__(self) -> int:
        return self.stop - self.start


def epoch_pieces(sizes: Sequence[int], schedule: Schedule, source: int, *, resampled: bool = False) -> list[Piece]:
    """The pieces of shards that make up one source's epoch, shuffled pass by pass.

    Args:
        sizes: samples in each shard of the source.
        source: index of the source in the schedule.
        resampled: draw shards with replacement instead (`--dataset-resampled`), each as likely as it is large.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    rng = stream(schedule.seed, Purpose.PIECES, schedule.epoch, source)
    begin = int(schedule.begin[source])
    end = begin + int(schedule.taken[source])
    if resampled:
        return _resampled_pieces(starts, end - begin, rng, schedule.epoch)
    pieces: list[Piece] = []
    for lap in range(begin // total, -(-end // total)):
        low, high = max(begin - lap * total, 0), min(end - lap * total, total)
        first, last = np.searchsorted(starts, low, side="right") - 1, np.searchsorted(starts, high, side="left")
        in_lap = []
        for shard in range(int(first), int(last)):
            start, stop = max(low, int(starts[shard])), min(high, int(starts[shard + 1]))
            if stop > start:
                offset = int(starts[shard])
                in_lap.append(Piece(shard, start - offset, stop - offset, lap * total + start))
        pieces.extend(in_lap[index] for index in rng.permutation(len(in_lap)))
    return pieces


def _resampled_pieces(starts: np.ndarray, taken: int, rng: np.random.Generator, epoch: int) -> list[Piece]:
    total, missing = int(starts[-1]), taken
    pieces: list[Piece] = []
    while missing > 0:
        shard = int(np.searchsorted(starts, rng.integers(total), side="right")) - 1
        size = int(starts[shard + 1] - starts[shard])
        length = min(size, missing)
        start = int(rng.integers(size - length + 1))
        # A lap of its own for every draw: the position stays the sample's (modulo total) and no augmentation repeats.
        lap = (epoch << 24) + len(pieces)
        pieces.append(Piece(shard, start, start + length, lap * total + int(starts[shard]) + start))
        missing -= length
    return pieces


def cut(pieces: Sequence[Piece], quotas: Sequence[int], reader: int) -> list[Piece]:
    """The pieces that one reader gets when the sequence is cut at the readers' quotas.

    Readers get consecutive stretches: whole shards but for the first and the last, and a shard on a boundary is read by
    both neighbours, each taking its own part. All readers' cuts together are the sequence, nothing twice.

    Args:
        quotas: samples that each reader is owed, in the readers' order; their sum is the length of all pieces.
        reader: index into `quotas`.

    Raises:
        ValueError: the quotas do not add up to the pieces.
    """
    if sum(quotas) != sum(map(len, pieces)):
        raise ValueError(f"quotas add up to {sum(quotas)} samples, the pieces to {sum(map(len, pieces))}")
    low = sum(quotas[:reader])
    return list(_between(pieces, low, low + quotas[reader]))


def _between(pieces: Sequence[Piece], low: int, high: int) -> Iterator[Piece]:
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        if begin < high and end > low:
            skip, drop = max(low - begin, 0), max(end - high, 0)
            yield Piece(piece.shard, piece.start + skip, piece.stop - drop, piece.position + skip)
        begin = end


def _apportion(share: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to `share` that sum to `total` (largest remainders; no entry above its share + 1)."""
    exact = share * (total / share.sum())
    whole = np.floor(exact + 1e-9).astype(np.int64)
    short = int(total - whole.sum())
    if short > 0:  # stable order, so that ties are the same everywhere
        whole[np.argsort(-(exact - whole), kind="stable")[:short]] += 1
    return whole
