"""When a difference between two conditions counts: the one rule of docs/results.md.

Student's paired interval over the seeds decides, for every row alike. The intervals over the unseen sources answer other
questions (the same four sources again; other sources) and carry no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from scipy import stats

from scripts.ablation.protocol import CONFIDENCE, LEAST_SEEDS, Claim

Key = TypeVar("Key", bound=Hashable)

HIGHER, LOWER, NO_DIFFERENCE, UNDECIDED = "higher", "lower", "no difference", "undecided"
NEAR_CHANCE = "undecided, near chance"
TOO_FEW, NOT_RUN = "too few seeds", "not run"
REPRODUCED, CONTRADICTED = "reproduced", "contradicted"


class Estimate(NamedTuple):
    """A mean difference with its interval; infinite, and p NaN, where one value alone gives none.

    Attributes:
        p: two-sided, of a mean of zero, by the t distribution of the interval.
    """

    mean: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    p: float = math.nan


def _by_t(mean: float, error: float, freedom: int) -> Estimate:
    """The estimate from a mean and its standard error, by Student's t with these degrees of freedom."""
    reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Estimate(mean, mean - reach, mean + reach, p)


def student(values: Sequence[float]) -> Estimate:
    """Student's interval of the mean of paired differences; no mean where a value is infinite (a score never reached)."""
    if not values or not all(map(math.isfinite, values)):
        return Estimate()
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean)
    return _by_t(mean, statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1)


def other_sources(by_source: Mapping[str, Sequence[float]]) -> Estimate:
    """The four unseen sources as a sample of sources: Student's interval of the means of each."""
    return student([sum(values) / len(values) for values in by_source.values()] if len(by_source) == 4 else [])


def same_sources(by_source: Mapping[str, Sequence[float]]) -> Estimate:
    """The same unseen sources again: from the spread between seeds of the same source, where each has two or more.

    Each source counts once. That sources differ from each other does not make the interval wider.
    """
    groups = list(by_source.values())
    if len(groups) < 2 or min(map(len, groups)) < 2:
        return Estimate()
    freedom = sum(map(len, groups)) - len(groups)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)
    error = math.sqrt(sum(squares / freedom / len(group) for group in groups)) / len(groups)
    return _by_t(statistics.mean(map(statistics.mean, groups)), error, freedom)


def holm(p_values: Mapping[Key, float], level: float = 1 - CONFIDENCE) -> set[Key]:
    """The keys that stay below `level` by Holm's correction: the k-th smallest of n times (n - k + 1), and all before it."""
    kept: set[Key] = set()
    for tests_left, key in zip(range(len(p_values), 0, -1), sorted(p_values, key=p_values.__getitem__), strict=True):
        if p_values[key] * tests_left >= level:
            break
        kept.add(key)
    return kept


def verdict(found: Estimate, seeds: int, margin: float, *, near_chance: bool = False) -> str:
    """The word for a difference, from its interval over the seeds.

    Args:
        seeds: pairs of runs.
        margin: fixed beforehand; an interval within it counts as no difference.
        near_chance: neither score is clearly above a random order, so that an interval within the margin decides nothing.
    """
    if not seeds:
        return NOT_RUN
    if seeds < LEAST_SEEDS:
        return TOO_FEW
    if -margin <= found.low and found.high <= margin:
        return NEAR_CHANCE if near_chance else NO_DIFFERENCE
    return HIGHER if found.low > 0 else LOWER if found.high < 0 else UNDECIDED


def beside_paper(word: str, claim: Claim, found: Estimate, margin: float) -> str:
    """Whether a decided row bears out a number of the paper: `REPRODUCED`, `CONTRADICTED`, or "" where it says neither."""
    if claim == "same":
        beyond = found.low > margin or found.high < -margin
        return REPRODUCED if word == NO_DIFFERENCE else CONTRADICTED if beyond and word in (HIGHER, LOWER) else ""
    return "" if word not in (HIGHER, LOWER) else REPRODUCED if word == claim else CONTRADICTED
