"""Student's interval of paired differences over seeds, and the one rule by which it becomes a verdict.

Two arms are trained with the same seeds; the difference of each seed is one value. The rule, with a margin that was written
down before the runs: the interval within the margin is "no difference"; an interval on one side of zero is "higher" or
"lower"; all others are "undecided".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

CONFIDENCE = 0.95
HIGHER, LOWER, NO_DIFFERENCE, UNDECIDED = "higher", "lower", "no difference", "undecided"
NEAR_CHANCE = "undecided, near chance"
TOO_FEW, NOT_RUN = "too few seeds", "not run"
MOST_SEEDS = 100  # beyond it `seeds_to_decide` gives no number


class Estimate(NamedTuple):
    """A mean difference with its interval; infinite, and p NaN, if one value alone gives none.

    Attributes:
        p: two-sided, of a mean of zero, by the t distribution of the interval.
    """

    mean: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    p: float = math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """(low, high); None where they are infinite."""
        return (self.low, self.high) if math.isfinite(self.low) else None


def estimate_by_t(
    mean: float, error: float, freedom: int, confidence: float = CONFIDENCE
) -> Estimate:
    """The estimate from a mean and its standard error, by Student's t with these degrees of freedom."""
    from scipy import stats  # half a second, which `zerovl --help` should not wait for

    reach = error * float(stats.t.ppf((1 + confidence) / 2, freedom))
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Estimate(mean, mean - reach, mean + reach, p)


def student(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Student's interval of the mean of paired differences; no mean where a value is infinite (a score never reached)."""
    if not values or not all(map(math.isfinite, values)):
        return Estimate()
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return estimate_by_t(mean, error, len(values) - 1, confidence)


def holm(p_values: Mapping[Key, float], level: float = 1 - CONFIDENCE) -> set[Key]:
    """The keys that stay below `level` by Holm's correction: the k-th smallest of n times (n - k + 1), and all before it."""
    significant: set[Key] = set()
    ascending = sorted(p_values, key=p_values.__getitem__)
    for tests_left, key in zip(range(len(p_values), 0, -1), ascending, strict=True):
        if p_values[key] * tests_left >= level:
            break
        significant.add(key)
    return significant


def verdict(
    estimate: Estimate,
    seeds: int,
    margin: float,
    *,
    least_seeds: int = 2,
    near_chance: bool = False,
) -> str:
    """The word for a difference, from its interval over the seeds.

    Args:
        seeds: pairs of runs; fewer than `least_seeds` decide nothing.
        margin: fixed beforehand; an interval within it counts as no difference.
        near_chance: neither score is clearly above a random order, so that an interval within the margin decides nothing.
    """
    if not seeds:
        return NOT_RUN
    if seeds < least_seeds:
        return TOO_FEW
    if -margin <= estimate.low and estimate.high <= margin:
        return NEAR_CHANCE if near_chance else NO_DIFFERENCE
    if estimate.low > 0:
        return HIGHER
    return LOWER if estimate.high < 0 else UNDECIDED


def seeds_to_decide(
    values: Sequence[float], margin: float, confidence: float = CONFIDENCE
) -> int | None:
    """The number of seeds that would decide, if mean and scatter stayed as they are; None beyond `MOST_SEEDS`.

    Args:
        values: paired differences of two seeds or more.
    """
    mean, scatter = statistics.mean(values), statistics.stdev(values)
    for seeds in range(len(values), MOST_SEEDS + 1):
        expected = estimate_by_t(mean, scatter / math.sqrt(seeds), seeds - 1, confidence)
        if verdict(expected, seeds, margin) != UNDECIDED:
            return seeds
    return None
