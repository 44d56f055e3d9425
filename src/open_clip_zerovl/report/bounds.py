"""Sentences on a score beside chance and the best possible one (`evaluate.retrieval.metrics.recall_bounds`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECALL_KS = (1, 5, 10)
LOW_BEST = 400.0  # of 600: below, captions that pictures share decide the score


def bounds_remarks(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each set whose score is not above chance, and for each set on which no model can score high.

    Args:
        results: set -> `rsum`, and `rsum_chance`, `rsum_chance_upper`, `rsum_best` if they are known.
    """
    found = []
    for name, metrics in results.items():
        if not_above_chance(metrics):
            found.append(
                f"{name}: RSUM {metrics['rsum']:.1f} is not above chance (a random order has {metrics['rsum_chance']:.1f}, "
                f"and reaches {metrics['rsum_chance_upper']:.1f})."
            )
        if metrics.get("rsum_best", 600.0) < LOW_BEST:
            found.append(f"{name}: {best_sentence(metrics['rsum_best'])}")
    return found


def not_above_chance(metrics: Mapping[str, Any]) -> bool:
    """True if random orders reach this RSUM; False if their bounds are not known."""
    return {"rsum_chance", "rsum_chance_upper"} <= metrics.keys() and metrics["rsum"] <= metrics[
        "rsum_chance_upper"
    ]


def best_sentence(best: float) -> str:
    """A sentence on data where few captions serve many pictures."""
    return (
        f"few captions serve many pictures, so that RSUM can reach {best:.0f} of 600 at best; in training without --positives "
        "caption, pairs of one caption are each other's negatives."
    )
