"""The `cosine_lr` seam: open_clip's warm-up and cosine with a floor (section 2.2: 1e-4 down to 1e-5)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from open_clip_train.scheduler import assign_learning_rate


def cosine_lr(
    optimizer: torch.optim.Optimizer,
    base_lr: float,
    warmup_length: int,
    steps: int,
    *,
    lr_min: float,
    warmup_share: float | None = None,
) -> Callable[[int], float]:
    """A function that sets and returns the learning rate of a step.

    The rate rises linearly over `warmup_length` steps to `base_lr`, then falls along half a cosine to `lr_min` at `steps`. With
    `lr_min=0` this is open_clip's own schedule.

    Args:
        warmup_share: if given, the warm-up takes this share of `steps` instead of `warmup_length`.
    """

    if warmup_share is not None:
        warmup_length = round(warmup_share * steps)

    def adjust(step: int) -> float:
        if step < warmup_length:
            lr = base_lr * (step + 1) / warmup_length
        else:
            progress = (step - warmup_length) / max(1, steps - warmup_length)
            lr = lr_min + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (base_lr - lr_min)
        assign_learning_rate(optimizer, lr)
        return lr

    return adjust
