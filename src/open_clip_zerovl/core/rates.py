"""The learning rate of a step, for every training of this package."""

from __future__ import annotations

import math


def warmup_cosine(step: int, steps: int, peak: float, warmup: int, floor: float = 0.0) -> float:
    """The learning rate of a step: a linear rise to `peak` over `warmup` steps, then half a cosine to `floor` at `steps`.

    Steps count from 0. With `floor=0` this is open_clip's schedule.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - floor)
