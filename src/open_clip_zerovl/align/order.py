"""The pairs of each step as a pure function of (seed, epoch): `data.schedule` on numbers of samples in place of shards.

`N` pairs a step, `T` steps of an epoch, `S` sources, `m` samples of all sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.sampling.schedule import MIXED, source_schedule


def epoch_order(
    sizes: Sequence[int],
    batch_size: int,
    *,
    sampling: str,
    seed: int,
    epoch: int,
    names: Sequence[str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The samples of an epoch's steps, (T, N) numbers among all m, and (T,) the source of each step, MIXED for several.

    A source's samples are an endless cycle, of which an epoch takes the next stretch, in an order of its own: each sample at
    most once an epoch.

    Args:
        sizes: (S,) samples of each source, which lie one source after another.
        sampling: "random" or "debiased".

    Raises:
        UserError: as `source_schedule`: an epoch without a step, a source that fills none.
    """
    schedule = source_schedule(
        sizes, batch_size, strategy=sampling, seed=seed, epoch=epoch, names=names
    )
    begins = np.cumsum([0, *sizes])[:-1]
    taken = []
    for source, (size, begin, count) in enumerate(
        zip(sizes, schedule.begin, schedule.taken, strict=True)
    ):
        stretch = (begin + np.arange(count)) % size
        taken.append(
            begins[source] + stream(seed, Purpose.ALIGN_ORDER, epoch, source).permutation(stretch)
        )
    of_step = schedule.source_of_step
    if (of_step == MIXED).all():
        mixed = stream(seed, Purpose.ALIGN_ORDER, epoch, -1).permutation(np.concatenate(taken))
        return mixed.reshape(schedule.steps, batch_size), of_step
    order = np.empty((schedule.steps, batch_size), dtype=np.int64)
    for source, samples in enumerate(taken):
        order[of_step == source] = samples.reshape(-1, batch_size)
    return order, of_step


def epoch_captions(first: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """(m,) which caption each sample shows in an epoch: all of them in turn, from a place of its own on.

    Args:
        first: (m + 1,) where each sample's captions begin.
    """
    counts = np.diff(first)
    shift = stream(seed, Purpose.ALIGN_CAPTION).integers(0, 1 << 30, size=len(counts))
    return first[:-1] + (shift + epoch) % counts
