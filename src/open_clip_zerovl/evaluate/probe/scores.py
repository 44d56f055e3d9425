"""Scores of a linear probe: accuracy, accuracy by class, the pairs of classes most often confused.

Legend: `N` images, `F` width of the features, `C` classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@torch.no_grad()
def head_scores(head: nn.Module, features: Tensor, *, chunk_size: int = 8192) -> Tensor:
    """Scores (N, C) on the CPU of a head (left in eval mode) for features (N, F)."""
    head.eval()
    device = next(head.parameters()).device
    return torch.cat([head(chunk.to(device)).cpu() for chunk in features.split(chunk_size)])


def classification_metrics(scores: Tensor, targets: Tensor) -> tuple[dict[str, float], np.ndarray]:
    """Accuracies as shares, and the confusion matrix.

    Args:
        scores: (N, C).
        targets: (N,) class indices.

    Returns:
        `top1`, `top5` (with more than 5 classes), `mean_per_class` (over the classes that occur); and counts (C, C), row the
        class, column the guess.
    """
    num_classes = scores.shape[1]
    guesses = scores.argmax(dim=1)
    counts = torch.bincount(targets * num_classes + guesses, minlength=num_classes**2).reshape(num_classes, num_classes)
    there = counts.sum(1) > 0
    metrics = {"top1": (guesses == targets).double().mean().item()}
    if num_classes > 5:
        metrics["top5"] = (scores.topk(5, dim=1).indices == targets[:, None]).any(1).double().mean().item()
    metrics["mean_per_class"] = (counts.diagonal()[there] / counts.sum(1)[there]).mean().item()
    return metrics, counts.numpy()


def most_confused(counts: np.ndarray, names: Sequence[str], limit: int = 20) -> list[dict[str, Any]]:
    """The most frequent errors in counts (C, C): `class`, `guess`, `count`, and `of` how many images of the class."""
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:limit]
    rows, columns = np.unravel_index(order, counts.shape)
    return [
        {"class": names[r], "guess": names[c], "count": int(wrong[r, c]), "of": int(counts[r].sum())}
        for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
        if wrong[r, c] > 0
    ]
