"""Weights in files: pickles, loaded without running their code, and the state dict of one tower under open_clip's names.

Of a pickle tensors, plain containers and NumPy's numbers are loaded: open_clip before 3 wrote an epoch or a loss as one. A
tower's file is a raw timm or BERT state dict; open_clip 3.3 itself loads nothing from a file with other names than its own,
without a message.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.configs import TEXT_WEIGHTS

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


@dataclass(frozen=True)
class LoadedTower:
    """Result of `load_pretrained_tower`: number of tensors loaded, and the file's tensors that have no place in the tower."""

    loaded: int
    unused: tuple[str, ...]


def load_pretrained_tower(
    model: nn.Module, tower: Literal["image", "text"], path: str | os.PathLike[str]
) -> LoadedTower:
    """Load a tower, without its projection, from a raw timm or HF state dict or from a whole open_clip checkpoint.

    open_clip's `pretrained_image_path` / `pretrained_text_path` expect `trunk.*` / `transformer.*` keys and load nothing from a
    file as timm or HF write it, without a message. Here every tensor of the tower must be found, under one of the usual
    prefixes. Other tensors of the file (a classifier, BERT's pooler and MLM head) are reported and not loaded.

    Args:
        model: an open_clip model with a timm image tower or an HF text tower, changed in place.
        path: a `.safetensors` or torch file, or a folder with `model.safetensors` / `pytorch_model.bin`.

    Raises:
        UserError: no such file, a tower of another kind, a missing tensor or one of another shape.
    """
    inner, kind = ("trunk", "timm") if tower == "image" else ("transformer", "HF")
    parent = getattr(model, "visual" if tower == "image" else "text", None)
    body = getattr(parent, inner, None)
    if not isinstance(body, nn.Module) or (tower == "text" and not hasattr(body, "config")):
        raise UserError(
            f"the {tower} tower of this model is not a {kind} model, so raw {kind} weights do not fit it; --init-from starts "
            "from towers of an open_clip checkpoint"
        )

    weights = _read_tower_file(Path(path))
    expected = body.state_dict()
    outer = "visual.trunk." if tower == "image" else "text.transformer."
    prefixes = ("", f"{inner}.", outer, f"module.{outer}", "bert.", "model.")
    # the first of equals: ""
    prefix = max(prefixes, key=lambda p: sum(f"{p}{key}" in weights for key in expected))
    placed = {key: weights[f"{prefix}{key}"] for key in expected if f"{prefix}{key}" in weights}
    with reading(path, f"give weights of the {tower} tower; --init-from takes a checkpoint"):
        body.load_state_dict(placed)
    used = {f"{prefix}{key}" for key in expected}
    return LoadedTower(len(expected), tuple(key for key in weights if key not in used))


def _read_tower_file(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        path = next((path / name for name in TEXT_WEIGHTS[:2] if (path / name).is_file()), path)
    with reading(path):
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = load_pickled(path, map_location="cpu")
        content = content.get("state_dict", content)
    weights = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    # BERT's first releases name the two parameters of a LayerNorm gamma and beta.
    renamed = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
    return {
        re.sub(r"\.LayerNorm\.(gamma|beta)$", lambda m: renamed[m[0]], key): v
        for key, v in weights.items()
    }
