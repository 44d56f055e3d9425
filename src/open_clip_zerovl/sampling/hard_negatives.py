"""Hard negatives: a share of each effective batch comes from one cluster of near samples (`zerovl cluster --same-above`).

    positions of an epoch --by cluster, copies last--> T runs of h near samples, the rest shuffled --> (T, N) --> readers

    n  samples of a source   K  clusters   N  effective batch   h = SHARE * N   T  steps of the source in the epoch

The order follows from (seed, epoch, source) alone. It is a permutation of the samples that the epoch takes: each comes once.
Each epoch shuffles the clusters and their samples anew; a run may end one cluster and begin the next. A copy is nearer to an
earlier sample of its cluster than the cap of the clustering, and would be its false negative: copies come in no run, but at
random places, like the samples that no run holds.

Readers take single samples by the indexes of their shards. A reader's arrays are as long as its source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.sampling.schedule import MIXED, Batching, Schedule
from open_clip_zerovl.sampling.slices import ShardSlices


@dataclass(frozen=True)
class Neighbours:
    """The near samples of a source.

    Attributes:
        labels: (n,) cluster of each sample.
        copies: (n,) whether a sample is a copy of an earlier one of its cluster.
    """

    labels: np.ndarray
    copies: np.ndarray

    @property
    def digest(self) -> str:
        """A short mark of the content."""
        content = self.labels.astype(np.int32).tobytes() + self.copies.astype(bool).tobytes()
        return hashlib.blake2b(content, digest_size=4).hexdigest()


def near_samples(share: float, effective_batch: int) -> int:
    """h, the near samples of each effective batch."""
    return round(share * effective_batch)


def check_neighbours(
    all_neighbours: Sequence[Neighbours | None],
    names: Sequence[str],
    schedule: Schedule,
    share: float,
) -> None:
    """UserError for a schedule whose steps cannot have this share of near samples, for sources with these neighbours."""
    batch = schedule.effective_batch
    near_count = near_samples(share, batch)
    if near_count < 2:
        raise UserError(
            f"--hard-negatives {share:g} of an effective batch of {batch} is {near_count} sample; give a share of at least "
            f"{2 / batch:.3g}"
        )
    if len(all_neighbours) > 1 and (schedule.source_of_step == MIXED).any():
        raise UserError(
            "--hard-negatives needs steps of one source; give --debiased-sampling, or one source"
        )
    for index, (neighbours, name) in enumerate(zip(all_neighbours, names, strict=True)):
        if neighbours is None:
            raise UserError(
                f"--hard-negatives needs the clusters of each source, and {name!r} is not a clustering; run `zerovl cluster "
                f"MODEL --data {name}=SHARDS --same-above 0.95 --out DIR` and give {name}=DIR"
            )
        size, taken = len(neighbours.labels), int(schedule.taken[index])
        if taken > size:
            raise UserError(
                f"an epoch takes {taken} of the {size} samples of source {name!r}, and --hard-negatives shows each at most "
                "once an epoch; lower its weight or --train-num-samples to at most one pass"
            )
        copies = int(neighbours.copies.sum())
        room = taken - taken // batch * near_count
        if copies > room:
            raise UserError(
                f"{copies} of the {size} samples of source {name!r} are copies, and --hard-negatives {share:g} leaves room for "
                f"{room} of them; give a smaller share, or cluster with a larger --same-above"
            )


def batches_of_epoch(
    neighbours: Neighbours, schedule: Schedule, source: int, share: float
) -> np.ndarray:
    """(T, N) positions in the source's cycle: the batches of the source's steps in an epoch."""
    batch, taken = schedule.effective_batch, int(schedule.taken[source])
    steps, near_count = taken // batch, near_samples(share, batch)
    rng = stream(schedule.seed, Purpose.NEIGHBOURS, schedule.epoch, source)
    positions = int(schedule.begin[source]) + rng.permutation(taken)
    samples = positions % len(neighbours.labels)
    clusters = int(neighbours.labels.max()) + 1
    # of each sample's cluster in this epoch
    place = rng.permutation(clusters)[neighbours.labels[samples]]
    place[neighbours.copies[samples]] = clusters
    positions = positions[np.argsort(place, kind="stable")]
    runs = positions[: steps * near_count].reshape(steps, near_count)[rng.permutation(steps)]
    rest = rng.permutation(positions[steps * near_count :]).reshape(steps, batch - near_count)
    return rng.permuted(np.concatenate([runs, rest], axis=1), axis=1)


def slices_of_reader(
    batches: np.ndarray,
    starts: np.ndarray,
    schedule: Schedule,
    source: int,
    batching: Batching,
    rank: int,
    reader: int,
) -> ShardSlices:
    """The samples that a reader delivers in an epoch, in this order, as slices of one sample.

    Args:
        batches: (T, N) of `batches_of_epoch`.
        starts: (shards + 1,) samples of the source before each shard.
        reader: number of the reader of this rank.
    """
    steps = np.flatnonzero((schedule.source_of_step == source) | (schedule.source_of_step == MIXED))
    # (T, K) numbers in this rank
    micro_batches = steps[:, None] * batching.dga_steps + np.arange(batching.dga_steps)
    of_rank = batches.reshape(
        len(steps), batching.world_size, batching.dga_steps, batching.micro_batch
    )[:, rank]
    positions = of_rank[micro_batches % batching.workers == reader].reshape(-1)
    samples = positions % starts[-1]
    shards = np.searchsorted(starts, samples, side="right") - 1
    first = samples - starts[shards]
    return ShardSlices(np.stack([shards, first, first + 1, positions], axis=1))
