"""Several samples of one picture, shuffled so that they lie far from each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shuffled_apart(counts: Sequence[int], *, seed: int) -> list[tuple[int, int]]:
    """An order of all (picture, text) pairs in which the texts of one picture are far apart.

    Pass p holds the p-th text of every picture that has one. Pictures are divided into two halves once. Each pass is the first
    half in a new shuffled order, then the second half in a new shuffled order, so that at least half of the pictures lie
    between two texts of one picture. A picture has other neighbours in each pass: readers that interleave shards do not bring
    the same pictures together again.

        4 pictures of 2 texts, halves {0, 3} and {1, 2}:    3a 0a | 1a 2a | 0b 3b | 2b 1b

    Args:
        counts: number of texts of each picture.
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
