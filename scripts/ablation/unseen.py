"""The score of a run: RSUM in the source that it was not trained on.

Nothing of that source was in training, so that its training pairs count too: six to thirty times as many as its held-out test
pairs. They are compared in pools of `POOL` pairs, fixed and disjoint, whose RSUMs are averaged. A random order has an RSUM of
`CHANCE`. Validation pairs, by which settings are chosen, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.ablation.sources import pairs_of, rsum_of
from scripts.drawn.make import DrawnSample, drawn_sample
from scripts.emoji.runs import Encoder

POOL = 200
CHANCE = 2 * 100 * (1 + 5 + 10) / POOL


def unseen_pools(folder: Path, source: str, test: Sequence[DrawnSample]) -> list[list[DrawnSample]]:
    """The pools of a source, the same for every run; what does not fill the last one is left out.

    Args:
        folder: of the miniature.
        test: the source's samples of the test split.
    """
    samples = [sample for sample in test if sample.held_out]
    samples += [drawn_sample(pair, source, held_out=True) for pair in pairs_of(folder, source)]
    order = np.random.default_rng(0).permutation(len(samples))
    return [[samples[i] for i in order[start : start + POOL]] for start in range(0, len(samples) - POOL + 1, POOL)]


def unseen_rsum(encoder: Encoder, pools: Sequence[list[DrawnSample]]) -> float:
    """The mean RSUM of the pools."""
    return sum(rsum_of([encoder(pool)]) for pool in pools) / len(pools)
