"""Pickled checkpoints, loaded without running their code.

Tensors, plain containers and NumPy's numbers are loaded: open_clip before 3 wrote an epoch or a loss as one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_KINDS = (
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.float16,
    np.float32,
    np.float64,
)


def load_pickled(file: Any, **options: Any) -> Any:
    """Load a checkpoint with `torch.load(weights_only=True)`, which has these errors and further arguments."""
    make = np.int64(0).__reduce__()[
        0
    ]  # NumPy's maker of numbers; 1 and 2 know it under other names
    allowed: list[Any] = [(make, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    allowed += [np.dtype, *{type(np.dtype(kind)) for kind in _KINDS}]
    with torch.serialization.safe_globals(allowed):
        return torch.load(file, weights_only=True, **options)
