"""Several samples of one picture, shuffled so that they lie far from each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shuffled_apart(counts: Sequence[int], *, seed: int) -> list[tuple[int, int]]:
    """An order of all (picture, text) pairs in which the texts of one picture are far apart.

    Pass p holds the p-th text of every picture that has one. Pictures are split into two halves for good, and each pass
    is the first half shuffled, then the second half shuffled anew: between two samples of a picture lies at least the
    other half. A picture's neighbours differ from pass to pass, so that readers that interleave shards do not bring the same
    pictures together again and again.

    Args:
        counts: texts of each picture.
        seed: of the shuffles.

    Returns:
        (picture, text) index pairs, `sum(counts)` of them. A pure function of the arguments.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(counts))
    halves = order[: len(counts) // 2], order[len(counts) // 2 :]
    pairs: list[tuple[int, int]] = []
    for text in range(max(counts, default=0)):
        for half in halves:
            pairs += [(int(picture), text) for picture in rng.permutation(half) if counts[picture] > text]
    return pairs
