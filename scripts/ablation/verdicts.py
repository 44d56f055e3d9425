"""When a difference between two conditions counts: the rule of docs/results.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from open_clip_zerovl.bias.resampling import interval_over_seeds
from scripts.ablation.protocol import CONFIDENCE

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
    """

    verdict: str
    seeds: int = 0
    run: float = math.nan
    against: float = math.nan
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    by_source: bool = False


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
        sources: the unseen source of each seed. Where each has two seeds the interval is `interval_over_sources`, else
            Student's over all seeds, which is wider because sources differ.
        floor: where no mean is above it, a difference within the margin is `NEAR_CHANCE`: there is little to differ in.
    """
    seeds = sorted(run.keys() & against.keys())
    if not seeds:
        return Verdict(NOT_RUN)
    by_source: dict[str, list[float]] = {}
    for seed in seeds:
        by_source.setdefault((sources or {}).get(seed, ""), []).append(run[seed] - against[seed])
    found = interval_over_sources(by_source)
    mean, low, high = found or interval([run[seed] - against[seed] for seed in seeds])
    theirs = sum(against[seed] for seed in seeds) / len(seeds)
    word = _word(claim, low, high, margin, len(seeds))
    if -margin <= low and high <= margin and max(theirs, theirs + mean) < floor and word != TOO_FEW:
        word = NEAR_CHANCE
    return Verdict(word, len(seeds), theirs + mean, theirs, mean, low, high, found is not None)


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
