"""Student's interval of paired differences over seeds, and the one rule by which it becomes a verdict: two facts.

Two arms are trained with the same seeds; the difference of each seed is one value (for one training, that of each picture). The
sign: an interval on one side of zero is "higher" or "lower". The size, with a margin that was written down before the runs: an
interval within the margin is "below the margin", one outside of it "above the margin". What the interval leaves open is "open";
neither fact hides the other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

CONFIDENCE = 0.95
HIGHER, LOWER, OPEN = "higher", "lower", "open"
BELOW, ABOVE = "below the margin", "above the margin"
MARGIN = 1.0  # percentage points: the smallest difference that matters, where nobody gives another
MOST_SEEDS = 100  # beyond it `seeds_to_decide` gives no number


class Estimate(NamedTuple):
    """A mean difference with its interval, which is infinite (and p NaN) if one value alone gives none.

    Attributes:
        p: two-sided, of a mean of zero, by the t distribution of the interval.
    """

    mean: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    p: float = math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return (low, high).

        Returns:
            None where they are infinite.
        """
        return (self.low, self.high) if math.isfinite(self.low) else None


def estimate_by_t(
    mean: float, error: float, freedom: int, confidence: float = CONFIDENCE
) -> Estimate:
    """Estimate from a mean and its standard error, by Student's t with these degrees of freedom."""
    from scipy import stats  # half a second, which `zerovl --help` should not wait for

    reach = error * float(stats.t.ppf((1 + confidence) / 2, freedom))
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Estimate(mean, mean - reach, mean + reach, p)


def student(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Compute Student's interval of the mean of paired differences.

    No mean where a value is infinite (a score never reached).
    """
    if not values or not all(map(math.isfinite, values)):
        return Estimate()
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return estimate_by_t(mean, error, len(values) - 1, confidence)


class Verdict(NamedTuple):
    """The two facts of a difference.

    Attributes:
        sign: HIGHER, LOWER or OPEN.
        size: BELOW, ABOVE or OPEN.
    """

    sign: str
    size: str

    def __str__(self) -> str:
        """Describe the facts in words, "open" if both are."""
        if self.sign == self.size:
            return OPEN
        size = "size open" if self.size == OPEN else self.size
        return f"{'sign open' if self.sign == OPEN else self.sign}, {size}"


def verdict(estimate: Estimate, margin: float) -> Verdict:
    """Decide sign and size of a difference from its interval.

    Args:
        margin: the smallest difference that matters, fixed beforehand.
    """
    _, low, high, _ = estimate
    sign = HIGHER if low > 0 else LOWER if high < 0 else OPEN
    if -margin <= low and high <= margin:
        return Verdict(sign, BELOW)
    return Verdict(sign, ABOVE if low > margin or high < -margin else OPEN)


def sentence(estimate: Estimate, margin: float, *, of: str, measure: str, over: str) -> str:
    """Describe sign and size of a difference with its numbers.

    Args:
        of: the two that are compared, "dga over plain".
        over: what the interval is over, "5 seeds".
    """
    words = str(verdict(estimate, margin)).replace("the margin", f"the margin of {margin:g}")
    between = f"{estimate.low:+.2f} to {estimate.high:+.2f} over "
    return f"{of}: {words}. {measure} {estimate.mean:+.2f} ({between if estimate.interval else ''}{over})."


def seeds_to_decide(
    values: Sequence[float], margin: float, confidence: float = CONFIDENCE
) -> int | None:
    """Count the seeds that would decide sign or size, if mean and scatter stayed as they are.

    Args:
        values: paired differences of two seeds or more.

    Returns:
        None beyond `MOST_SEEDS`.
    """
    mean, scatter = statistics.mean(values), statistics.stdev(values)
    for seeds in range(len(values), MOST_SEEDS + 1):
        expected = estimate_by_t(mean, scatter / math.sqrt(seeds), seeds - 1, confidence)
        if verdict(expected, margin) != (OPEN, OPEN):
            return seeds
    return None


# ---------------------------------------------------------------------------------------------------------------------
# A score beside chance and the best possible one (`evaluate.metrics.recall_bounds`)
# ---------------------------------------------------------------------------------------------------------------------

RECALL_KS = (1, 5, 10)
LOW_BEST = 400.0  # of 600: below, captions that pictures share decide the score
SHARED_CAPTIONS = (
    "in training without --positives caption, pairs of one caption are each other's negatives"
)


def bounds_remarks(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write a sentence on the sets with a score not above chance, and one on those on which no model can score high.

    Args:
        results: set -> `rsum`, and `rsum_chance`, `rsum_chance_upper`, `rsum_best` if they are known.
    """
    at_chance = [
        f"{name} (RSUM {metrics['rsum']:.1f}; a random order has {metrics['rsum_chance']:.1f}, "
        f"and reaches {metrics['rsum_chance_upper']:.1f})"
        for name, metrics in results.items()
        if not_above_chance(metrics)
    ]
    sentences = [f"Not above chance: {', '.join(at_chance)}."] if at_chance else []
    low = [
        f"{name} {metrics['rsum_best']:.0f}"
        for name, metrics in results.items()
        if metrics.get("rsum_best", 600.0) < LOW_BEST
    ]
    if low:
        sentences.append(
            f"Few captions serve many pictures, so that of 600 RSUM can reach at most: {', '.join(low)}."
        )
    return sentences


def not_above_chance(metrics: Mapping[str, Any]) -> bool:
    """Return whether random orders reach this RSUM.

    Returns:
        False if their bounds are not known.
    """
    return {"rsum_chance", "rsum_chance_upper"} <= metrics.keys() and metrics["rsum"] <= metrics[
        "rsum_chance_upper"
    ]
