"""Sentences on a score beside chance and the best possible one (`evaluate.metrics.recall_bounds`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    ceilings = {name: metrics.get("rsum_best", 600.0) for name, metrics in results.items()}
    return sentences + ceiling_remarks(ceilings)


def ceiling_remarks(best: Mapping[str, float]) -> list[str]:
    """Write a sentence on the sets in which few captions serve many pictures.

    Args:
        best: set -> RSUM of the best possible model, which cannot tell pictures of one caption apart by it.

    Returns:
        [] if there are none.
    """
    low = [f"{name} {value:.0f}" for name, value in best.items() if value < LOW_BEST]
    if not low:
        return []
    return [
        f"Few captions serve many pictures, so that of 600 RSUM can reach at most: {', '.join(low)}."
    ]


def not_above_chance(metrics: Mapping[str, Any]) -> bool:
    """Return whether random orders reach this RSUM.

    Returns:
        False if their bounds are not known.
    """
    return {"rsum_chance", "rsum_chance_upper"} <= metrics.keys() and metrics["rsum"] <= metrics[
        "rsum_chance_upper"
    ]
