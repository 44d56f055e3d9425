"""Recalls of several models side by side, as Markdown that is aligned for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from open_clip_zerovl.evaluate.retrieval.metrics import DIRECTIONS, RECALL_KS

SHORT = {"image_to_text": "I2T", "text_to_image": "T2I"}
ROWS = {f"{way}_R@{k}": f"{SHORT[way]} R@{k}" for way in DIRECTIONS for k in RECALL_KS} | {"rsum": "RSUM"}


def in_percent(metrics: Mapping[str, float]) -> dict[str, float]:
    """A result of `run_retrieval` with its recalls in percent; RSUM and counts are as they were."""
    return {key: value if key in ("images", "captions", "rsum") else 100 * value for key, value in metrics.items()}


def recall_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """A table of recalls and RSUM.

    Args:
        columns: head -> metrics by the names of ROWS, in percent; a metric that a column lacks leaves its cell empty.
    """
    widths = {name: max(7, len(name) + 1) for name in columns}
    lines = ["|          |" + "|".join(f"{name:>{width}} " for name, width in widths.items()) + "|"]
    lines.append("|----------|" + "|".join("-" * width + ":" for width in widths.values()) + "|")
    for key, label in ROWS.items():
        cells = (
            f"{columns[name][key]:{width}.1f} " if key in columns[name] else " " * (width + 1)
            for name, width in widths.items()
        )
        lines.append(f"| {label:9}|{'|'.join(cells)}|")
    return "\n".join(lines)
