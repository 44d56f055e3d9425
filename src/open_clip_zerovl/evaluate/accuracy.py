"""Accuracy of classifiers, zero-shot and linear: with intervals, by class, and the pairs of classes most often confused.

Legend: `N` pictures, `C` classes.

Ties count by expectation, as in retrieval: a model that gives all classes one score is right with probability 1/C.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.report.verdicts import Estimate, estimate_by_t


def class_indices(labels: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Find the index in `classes` of each label, (N,)."""
    index_of = {label: i for i, label in enumerate(classes)}
    return torch.tensor([index_of[label] for label in labels])


def distinct_names(named: Mapping[str, str]) -> list[str]:
    """Name each class, from label -> name.

    With the label where classes share a name, as in CLIP's names of ImageNet.
    """
    times = Counter(named.values())
    return [name if times[name] == 1 else f"{name} ({label})" for label, name in named.items()]


def accuracies(scores: Tensor, targets: Tensor) -> dict[str, Any]:
    """Compute accuracies from scores (N, C) and class indices (N,), as shares.

    Returns:
        `images`; `top1`; `top1_interval` (95 %, over pictures); `top5` with more than five classes; `mean_per_class`, over the
        classes that occur; `chance`, 1/C; `commonest`, the share of the commonest class, the top-1 of always naming it;
        `per_class`: class index -> `images`, `top1`, `top1_interval`.

    Raises:
        UserError: scores that are not finite.
    """
    right = in_top(1, scores, targets)
    rows = {int(index): right[targets == index] for index in targets.unique()}
    return {
        "images": len(targets),
        **_share(right),
        **({"top5": float(in_top(5, scores, targets).mean())} if scores.shape[1] > 5 else {}),
        "mean_per_class": float(
            torch.stack([class_rows.mean() for class_rows in rows.values()]).mean()
        ),
        "chance": 1 / scores.shape[1],
        "commonest": max(map(len, rows.values())) / len(targets),
        "per_class": {
            index: {"images": len(class_rows), **_share(class_rows)}
            for index, class_rows in rows.items()
        },
    }


def in_top(k: int, scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the probability (N,) that the class is among the first k, where ties have a random order.

    Arguments as for `accuracies`.

    Raises:
        UserError: scores that are not finite. A class of NaN would be above none and tie with none: always right.
    """
    finite = scores.isfinite()
    if not bool(finite.all()):
        classes = (~finite).any(dim=0).nonzero()[:, 0]
        raise UserError(
            f"the scores of {len(classes)} of {scores.shape[1]} classes (first: number {int(classes[0])}) are NaN or infinite: "
            "the model has diverged, or its weights are bad; give an earlier checkpoint"
        )
    target_scores = scores.gather(1, targets[:, None])  # (N, 1)
    above, tied = (scores > target_scores).sum(dim=1), (scores == target_scores).sum(dim=1)
    return ((k - above) / tied).clamp(0, 1).double()


def _share(right: Tensor) -> dict[str, Any]:
    share = float(right.mean())
    return {"top1": share, "top1_interval": wilson(share, len(right))}


def is_above_chance(metrics: Mapping[str, Any]) -> bool:
    """Return whether the metrics of `accuracies` are above chance, by their interval and by the mean per class.

    A model that guesses one class for all pictures has a mean per class of exactly 1/C, whatever the classes' sizes.
    """
    return min(metrics["top1_interval"][0], metrics["mean_per_class"] - 1e-6) > metrics["chance"]


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share of `count` pictures."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = (
        z
        / (1 + z * z / count)
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    )
    return max(0.0, middle - reach), min(1.0, middle + reach)


def difference_of_shares(first: float, second: float, count: int) -> Estimate:
    """Estimate second - first, two shares of `count` pictures, in percentage points, as if the pictures were not the same.

    The interval is wider than that of pairs, of which the shares alone say nothing.
    """
    error = math.sqrt((first * (1 - first) + second * (1 - second)) / count)
    return estimate_by_t(100 * (second - first), 100 * error, count - 1)


def in_percent(metrics: Mapping[str, Any]) -> str:
    """Write top-1 of `accuracies` with its interval: `52.0 [45.1 to 58.8]`."""
    low, high = metrics["top1_interval"]
    return f"{100 * metrics['top1']:.1f} [{100 * low:.1f} to {100 * high:.1f}]"


def confusion_counts(scores: Tensor, targets: Tensor) -> np.ndarray:
    """Count the confusion matrix (C, C) of scores (N, C) and class indices (N,): row the class, column the guess."""
    classes = scores.shape[1]
    return (
        torch.bincount(targets * classes + scores.argmax(dim=1), minlength=classes**2)
        .reshape(classes, classes)
        .numpy()
    )


def most_confused(counts: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """List the 20 most frequent errors in counts (C, C): `class`, `guess`, `count`, and `of` how many images of the class."""
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:20]
    rows, columns = np.unravel_index(order, counts.shape)
    return [
        {
            "class": names[r],
            "guess": names[c],
            "count": int(wrong[r, c]),
            "of": int(counts[r].sum()),
        }
        for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
        if wrong[r, c] > 0
    ]
