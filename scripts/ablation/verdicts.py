"""When a difference between two conditions counts: the rule of docs/results.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy import stats

from scripts.ablation.protocol import CONFIDENCE, LEAST_SEEDS, Claim

Key = TypeVar("Key", bound=Hashable)

REPRODUCED, CONTRADICTED, NO_DIFFERENCE, UNDECIDED = "reproduced", "contradicted", "no difference", "undecided"
BETTER, WORSE = "better", "worse"  # the first two of what the paper does not claim
NEAR_CHANCE = "undecided, near chance"
TOO_FEW, NOT_RUN = "too few seeds", "not run"


@dataclass(frozen=True)
class Estimate:
    """A mean difference.

    Attributes:
        low, high: its interval; infinite with one pair of runs.
        p: two-sided, of a mean difference of zero, by the interval's t distribution; NaN with one pair.
        by_source: whether these are over the unseen sources.
    """

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    by_source: bool = False

    @classmethod
    def student(cls, mean: float, error: float, freedom: int, by_source: bool = False) -> Estimate:
        """Of a mean with a standard error, by Student's t with these degrees of freedom."""
        if freedom < 1:
            return cls(mean, -math.inf, math.inf)
        reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
        p = 2 * float(stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
        return cls(mean, mean - reach, mean + reach, p, by_source)


@dataclass(frozen=True)
class Verdict(Estimate):
    """The result of a comparison: its estimate of run - against, and more.

    Attributes:
        verdict: one of the words above.
        by_seeds: the verdict by Student's interval over the seeds, where `by_source`; else `verdict`.
        seeds: pairs of runs.
        run, against: means.
    """

    verdict: str = NOT_RUN
    by_seeds: str = NOT_RUN
    seeds: int = 0
    run: float = math.nan
    against: float = math.nan


def over_seeds(differences: Sequence[float]) -> Estimate:
    """Student's interval of the mean."""
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return Estimate.student(sum(differences) / len(differences), error, len(differences) - 1)


def grouped(differences: Mapping[int, float], sources: Mapping[int, str]) -> dict[str, list[float]]:
    """Unseen source -> the differences of its seeds."""
    found: dict[str, list[float]] = {}
    for seed, difference in differences.items():
        found.setdefault(sources[seed], []).append(difference)
    return found


def estimate(differences: Mapping[int, float], sources: Mapping[int, str] | None = None) -> Estimate:
    """The mean of differences by seed: over the unseen sources where each has two seeds, else over the seeds.

    Over sources, each counts once, and the interval comes from the spread between seeds of the same source: Student's t with
    (seeds - sources) degrees of freedom. It speaks of these sources: that they differ from each other does not make it wider.

    Args:
        differences: by seed.
        sources: the unseen source of each seed, if there is one.
    """
    groups = list(grouped(differences, sources).values()) if sources else []
    if len(groups) < 2 or any(len(group) < 2 for group in groups):
        return over_seeds([*differences.values()])
    means = [sum(group) / len(group) for group in groups]
    freedom = len(differences) - len(groups)
    squares = sum((value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group)
    error = math.sqrt(sum(squares / freedom / len(group) for group in groups)) / len(groups)
    return Estimate.student(sum(means) / len(means), error, freedom, by_source=True)


def holm(p_values: Mapping[Key, float], level: float = 1 - CONFIDENCE) -> set[Key]:
    """The keys that stay below `level` by Holm's correction: the k-th smallest of n times (n - k + 1), and all before it."""
    kept: set[Key] = set()
    for tests_left, key in zip(range(len(p_values), 0, -1), sorted(p_values, key=p_values.__getitem__), strict=True):
        if p_values[key] * tests_left >= level:
            break
        kept.add(key)
    return kept


def judge(
    claim: Claim,
    run: Mapping[int, float],
    against: Mapping[int, float],
    margin: float,
    sources: Mapping[int, str] | None = None,
    floor: float = -math.inf,
) -> Verdict:
    """Whether two conditions bear the paper's claim out, from their values by seed.

        the interval of run - against ...        higher         lower          same            different
        lies within -margin to margin            no difference  no difference  reproduced      no difference
        else, lies above 0                       reproduced     contradicted   contradicted *  reproduced
        else, lies below 0                       contradicted   reproduced     contradicted *  reproduced
        else (holds 0, or is too wide)           undecided      undecided      undecided       undecided

        * only where it lies beyond the margin as a whole; else undecided

    Args:
        claim: the paper's.
        run, against: values by seed; only seeds that both have are compared.
        margin: fixed beforehand; what lies within it counts as no difference.
        sources: the unseen source of each seed, for `estimate`.
        floor: where no mean is above it, a difference within the margin is `NEAR_CHANCE`: there is little to differ in.
    """
    differences = {seed: run[seed] - against[seed] for seed in sorted(run.keys() & against.keys())}
    if not differences:
        return Verdict()
    found = estimate(differences, sources)
    theirs = sum(against[seed] for seed in differences) / len(differences)
    ours = theirs + found.mean

    def word(of: Estimate) -> str:
        if len(differences) < LEAST_SEEDS:
            return TOO_FEW
        if -margin <= of.low and of.high <= margin:
            if max(ours, theirs) < floor:
                return NEAR_CHANCE
            return REPRODUCED if claim == "same" else NO_DIFFERENCE
        if claim == "same":
            return CONTRADICTED if of.low > margin or of.high < -margin else UNDECIDED
        if of.low <= 0 <= of.high:
            return UNDECIDED
        return CONTRADICTED if claim == ("lower" if of.low > 0 else "higher") else REPRODUCED

    by_seeds = word(over_seeds([*differences.values()]))
    return Verdict(
        **vars(found), verdict=word(found), by_seeds=by_seeds, seeds=len(differences), run=ours, against=theirs
    )
