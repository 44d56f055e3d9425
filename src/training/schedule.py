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

    `warmup_share` of `steps` takes the place of `warmup_length` where it is given.

    Linear over `warmup_length` steps up to `base_lr`, then half a cosine that reaches `lr_min` at `steps`. With
    `lr_min=0` it is open_clip's own schedule.
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
