"""The pairs of each step as a pure function of (seed, epoch): `data.schedule` on numbers of samples in place of shards.

`N` pairs a step, `T` steps of an epoch, `S` sources, `m` samples of all sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.sampling.schedule import source_schedule


def epoch_order(
    sizes: Sequence[int],
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    names: Sequence[str] | None = None,
) -> np.ndarray:
    """The samples of an epoch's steps, (T, N) numbers among all m; each step mixes the sources.

    A source's samples are an endless cycle, of which an epoch takes the next stretch, in an order of its own: each sample at
    most once an epoch.

    Args:
        sizes: (S,) samples of each source, which lie one source after another.

    Raises:
        UserError: as `source_schedule`: an epoch without a step.
    """
    schedule = source_schedule(
        sizes, batch_size, strategy="random", seed=seed, epoch=epoch, names=names
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
    mixed = stream(seed, Purpose.ALIGN_ORDER, epoch, -1).permutation(np.concatenate(taken))
    return mixed.reshape(schedule.steps, batch_size)


def epoch_captions(first: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """(m,) which caption each sample shows in an epoch: all of them in turn, from a place of its own on.

    Args:
        first: (m + 1,) where each sample's captions begin.
    """
    counts = np.diff(first)
    shift = stream(seed, Purpose.ALIGN_CAPTION).integers(0, 1 << 30, size=len(counts))
    return first[:-1] + (shift + epoch) % counts
