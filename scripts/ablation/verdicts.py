"""When a difference between two conditions counts: the rule of docs/results.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from open_clip_zerovl.bias.resampling import interval_over_seeds
from scripts.ablation.protocol import CONFIDENCE

Claim = Literal["higher", "lower", "same", "different"]

REPRODUCED, CONTRADICTED, NO_DIFFERENCE, UNDECIDED = "reproduced", "contradicted", "no difference", "undecided"
BETTER, WORSE = "better", "worse"  # the first two of what the paper does not claim
TOO_FEW, NOT_RUN = "too few seeds", "not run"
LEAST_SEEDS = 5


@dataclass(frozen=True)
class Verdict:
    """What came of a comparison.

    Attributes:
        verdict: one of the words above.
        seeds: pairs of runs.
        run, against: means.
        difference, low, high: mean difference over pairs (run - against), and its interval; infinite with one pair.
    """

    verdict: str
    seeds: int = 0
    run: float = math.nan
    against: float = math.nan
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan


def interval(differences: list[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Mean, low and high end of Student's interval of the mean."""
    low, high = interval_over_seeds(differences, confidence) or (-math.inf, math.inf)
    return sum(differences) / len(differences), low, high


def judge(claim: Claim, run: Mapping[int, float], against: Mapping[int, float], margin: float) -> Verdict:
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
    """
    seeds = sorted(run.keys() & against.keys())
    if not seeds:
        return Verdict(NOT_RUN)
    mean, low, high = interval([run[seed] - against[seed] for seed in seeds])
    ours, theirs = (sum(values[seed] for seed in seeds) / len(seeds) for values in (run, against))
    return Verdict(_word(claim, low, high, margin, len(seeds)), len(seeds), ours, theirs, mean, low, high)


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
