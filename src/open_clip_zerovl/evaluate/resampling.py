"""Intervals of measures by resampling queries (the bootstrap).

A unit is drawn as a whole: all queries of one concept, in all pools, since they are not independent. Only queries are drawn;
the candidates that a query is ranked against do not change. All models are measured on the same draws, so that
the interval of a difference leaves out the difficulty of a test set that all of them share. (`scipy.stats.bootstrap` draws
for each statistic anew, and one at a time.)

Legend: `U` units, `R` draws, `T` terms of a measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.report.verdicts import CONFIDENCE

_DRAWS_AT_ONCE_BYTES = 1 << 26

Interval = tuple[float, float]


@dataclass(frozen=True)
class Measure:
    """A number that is a weighted sum of means over queries: sum_t c_t * mean_t.

    Attributes:
        sums: (T, U) of the queries' values in each unit.
        counts: (T, U) queries in each unit.
        factors: (T,) the c_t.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]
    factors: NDArray[np.float64]

    @property
    def value(self) -> float:
        """Return the number itself."""
        return float(self.weighted(np.ones((1, self.sums.shape[1])))[0])

    def weighted(self, weights: NDArray) -> NDArray[np.float64]:
        """Compute the number (R,) where unit u counts `weights[r, u]` times.

        Weights (R, U). NaN where a mean has no query.
        """
        with np.errstate(invalid="ignore"):
            return (weights @ self.sums.T / (weights @ self.counts.T)) @ self.factors


def mean_over(terms: Sequence[tuple[Tensor, Tensor]], units: int, factor: float = 1.0) -> Measure:
    """Make a measure of `factor` times the sum of some means.

    Args:
        terms: for each mean (unit (Q,) of each query, values (Q,), or (2, Q) of sums and counts).
        units: U.
    """
    per_unit = torch.zeros(len(terms), 2, units, dtype=torch.float64)
    for term, (unit, values) in zip(per_unit, terms, strict=True):
        values = values.double()
        term.index_add_(
            1, unit, torch.stack([values, torch.ones_like(values)]) if values.ndim == 1 else values
        )
    return Measure(per_unit[:, 0].numpy(), per_unit[:, 1].numpy(), np.full(len(terms), factor))


def resampled(
    measures: Mapping[str, Measure], draws: int, seed: int
) -> dict[str, NDArray[np.float64]]:
    """Compute each measure (R,) on R draws of U units with replacement.

    All measures are on the same draws.
    """
    units = next(iter(measures.values())).sums.shape[1]
    rng = stream(seed, Purpose.BOOTSTRAP)
    at_once = max(1, _DRAWS_AT_ONCE_BYTES // (8 * units))
    parts: dict[str, list[NDArray]] = {name: [] for name in measures}
    for begin in range(0, draws, at_once):
        weights = rng.multinomial(
            units, np.full(units, 1 / units), size=min(at_once, draws - begin)
        ).astype(np.float64)
        for name, measure in measures.items():
            parts[name].append(measure.weighted(weights))
    return {name: np.concatenate(part) for name, part in parts.items()}


def interval(values: NDArray) -> Interval:
    """Compute the central CONFIDENCE of the values (R,), NaN left out."""
    low, high = np.nanquantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
