"""When a difference between two conditions counts: the rule of docs/results.md."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from scipy import stats

from open_clip_zerovl.evaluate.bias.resampling import interval_over_seeds
from scripts.ablation.protocol import CONFIDENCE

Key = TypeVar("Key", bound=Hashable)

Claim = Literal["higher", "lower", "same", "different"]

REPRODUCED, CONTRADICTED, NO_DIFFERENCE, UNDECIDED = "reproduced", "contradicted", "no difference", "undecided"
BETTER, WORSE = "better", "worse"  # the first two of what the paper does not claim
NEAR_CHANCE = "undecided, near chance"
TOO_FEW, NOT_RUN = "too few seeds", "not run"
LEAST_SEEDS = 5


@dataclass(frozen=True)
class Verdict:
    """What came of a comparison.

    Attributes:
        verdict: one of the words above.
        seeds: pairs of runs.
        run, against: means.
        difference, low, high: mean difference (run - against), and its interval; infinite with one pair.
        by_source: whether these are over the unseen sources, see `interval_over_sources`.
        p: two-sided, of a mean difference of zero, by the t distribution of the interval; NaN with one pair.
        by_seeds: the verdict by Student's interval over the seeds, where `by_source`; else `verdict`.
    """

    verdict: str
    seeds: int = 0
    run: float = math.nan
    against: float = math.nan
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    by_source: bool = False
    p: float = math.nan
    by_seeds: str = ""


@dataclass(frozen=True)
class Estimate:
    """A mean difference: its interval and p as in `Verdict`."""

    mean: float
    low: float
    high: float
    p: float
    by_source: bool


def interval(differences: list[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Mean, low and high end of Student's interval of the mean."""
    low, high = interval_over_seeds(differences, confidence) or (-math.inf, math.inf)
    return sum(differences) / len(differences), low, high


def interval_over_sources(
    differences: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE
) -> tuple[float, float, float] | None:
    """The mean over unseen sources, each counted once, and its interval from the spread between seeds of the same source.

    It speaks of these sources: that they differ from each other does not make it wider. Student's t with (seeds - sources)
    degrees of freedom.

    Args:
        differences: by unseen source, one for each seed.

    Returns:
        Mean, low and high end; None where a source has fewer than two seeds.
    """
    if len(differences) < 2 or any(len(values) < 2 for values in differences.values()):
        return None
    means = {source: sum(values) / len(values) for source, values in differences.items()}
    freedom = sum(map(len, differences.values())) - len(differences)
    within = sum((value - means[source]) ** 2 for source, values in differences.items() for value in values) / freedom
    error = math.sqrt(sum(within / len(values) for values in differences.values())) / len(differences)
    reach = float(stats.t.ppf((1 + confidence) / 2, freedom)) * error
    mean = sum(means.values()) / len(means)
    return mean, mean - reach, mean + reach


def grouped(differences: Mapping[int, float], sources: Mapping[int, str]) -> dict[str, list[float]]:
    """Unseen source -> the differences of its seeds."""
    found: dict[str, list[float]] = {}
    for seed, difference in differences.items():
        found.setdefault(sources[seed], []).append(difference)
    return found


def estimate(
    differences: Mapping[int, float], sources: Mapping[int, str] | None = None, confidence: float = CONFIDENCE
) -> Estimate:
    """The mean of differences by seed: over the unseen sources where each has two seeds, else over the seeds.

    Args:
        differences: by seed.
        sources: the unseen source of each seed, if there is one.
    """
    by_source = grouped(differences, sources or dict.fromkeys(differences, ""))
    found = interval_over_sources(by_source, confidence)
    mean, low, high = found or interval([*differences.values()], confidence)
    freedom = len(differences) - (len(by_source) if found else 1)
    return Estimate(mean, low, high, _p_value(mean, (high - low) / 2, freedom, confidence), found is not None)


def _p_value(mean: float, reach: float, freedom: int, confidence: float) -> float:
    if freedom < 1:
        return math.nan
    if reach == 0:
        return float(mean == 0)
    return float(2 * stats.t.sf(abs(mean) / reach * stats.t.ppf((1 + confidence) / 2, freedom), freedom))


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
    seeds = sorted(run.keys() & against.keys())
    if not seeds:
        return Verdict(NOT_RUN)
    differences = {seed: run[seed] - against[seed] for seed in seeds}
    found = estimate(differences, sources)
    theirs = sum(against[seed] for seed in seeds) / len(seeds)

    def word(low: float, high: float) -> str:
        by_rule = _word(claim, low, high, margin, len(seeds))
        chance = -margin <= low and high <= margin and max(theirs, theirs + found.mean) < floor and by_rule != TOO_FEW
        return NEAR_CHANCE if chance else by_rule

    by_seeds = word(*interval([*differences.values()])[1:])
    return Verdict(
        word(found.low, found.high), len(seeds), theirs + found.mean, theirs, found.mean, found.low, found.high,
        found.by_source, found.p, by_seeds,
    )  # fmt: skip


def _word(claim: Claim, low: float, high: float, margin: float, seeds: int) -> str:
    if seeds < LEAST_SEEDS:
        return TOO_FEW
    if -margin <= low and high <= margin:
        return REPRODUCED if claim == "same" else NO_DIFFERENCE
    if claim == "same":
        return CONTRADICTED if low > margin or high < -margin else UNDECIDED
    if low > 0:
        return CONTRADICTED if claim == "lower" else REPRODUCED
    if high < 0:
        return CONTRADICTED if claim == "higher" else REPRODUCED
    return UNDECIDED
