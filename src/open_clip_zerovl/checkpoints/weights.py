"""State dicts read from files: of a whole model, with low-rank adapters merged into its weights, and of one tower.

No code in a file is run. Of a pickle tensors, plain containers and NumPy's numbers are loaded: open_clip before 3 wrote an
epoch or a loss as one. A tower's file is a raw timm or BERT state dict; open_clip 3.3 itself loads nothing from a file with
other names than its own, without a message.

A run with --lora keeps a layer's weight as LAYER.base_layer.weight and its adapter as LAYER.lora_A.default.weight (R, in) and
LAYER.lora_B.default.weight (out, R). Merged, LAYER.weight is W + (alpha / R) B A. peft is not needed for it.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.configs import TEXT_WEIGHTS

ENTRY = "lora"  # of a checkpoint: rank and alpha
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.endswith((_A, _B))


def _merged(weights: Mapping[str, Tensor], entry: Any, origin: Path) -> dict[str, Tensor]:
    """Merge the adapters into the weights in double precision, under open_clip's own names.

    Args:
        entry: `ENTRY` of the checkpoint.

    Raises:
        UserError: adapters without a usable entry.
    """
    if not any(is_adapter(name) for name in weights):
        return dict(weights)
    with reading(origin, "give a checkpoint that training wrote"):
        alpha = float(entry["alpha"])  # the scale of adapters
    plain = {}
    for name, tensor in weights.items():
        if is_adapter(name):
            continue
        layer, last = name.rpartition(".")[::2]
        layer = layer.removesuffix(".base_layer")
        if last in ("weight", "in_proj_weight") and f"{layer}{_A}" in weights:
            down, up = weights[f"{layer}{_A}"].double(), weights[f"{layer}{_B}"].double()
            tensor = (tensor.double() + alpha / len(down) * up @ down).to(tensor.dtype)
        plain[name.replace(".base_layer", "")] = tensor
    return plain


WEIGHTS_FILE = "open_clip_model.safetensors"


def read_state_dict(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the weights of a checkpoint under open_clip's own names, without `module.` and `_orig_mod.`, adapters merged.

    Only tensors, plain containers and numbers are loaded (`load_pickled`). A pickle that wants to run code is refused.

    Raises:
        UserError: no such file, a file that does not load so, or one without weights.
    """
    path = Path(checkpoint)
    content = _read_content(path)
    weights = content.get("state_dict", content) if isinstance(content, dict) else {}
    if not (isinstance(weights, dict) and weights) or not all(
        isinstance(value, Tensor) for value in weights.values()
    ):
        raise UserError(f"{checkpoint} holds no tensors; give a checkpoint that training wrote")
    plain: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key.replace("_orig_mod.", "").removeprefix("module.")
        plain[name] = tensor
    return _merged(plain, content.get(ENTRY), path)


def require_finite_weights(
    weights: Mapping[str, Tensor], parameters: Collection[str], checkpoint: str | os.PathLike[str]
) -> None:
    """Refuse weights from which no training can go on.

    Args:
        parameters: names of the tensors that are trained. Others may hold infinite numbers, as masks do.

    Raises:
        UserError: a parameter is NaN or infinite, or another tensor NaN.
    """
    for name, tensor in weights.items():
        bad = ~tensor.isfinite() if name in parameters else tensor.isnan()
        if bool(bad.any()):
            raise UserError(
                f"{name} of {checkpoint} holds {int(bad.sum())} numbers that are not finite: its training has diverged; give "
                "an earlier checkpoint"
            )


def read_epoch(checkpoint: str | os.PathLike[str]) -> int | None:
    """Read the epoch after which open_clip saved a checkpoint.

    Returns:
        None if it is not recorded.

    Raises:
        UserError: as `read_state_dict`.
    """
    epoch = read_entry(checkpoint, "epoch")
    return int(epoch) if isinstance(epoch, Integral) else None


def read_entry(checkpoint: str | os.PathLike[str], name: str) -> Any:
    """Read an entry of a checkpoint besides its weights.

    Returns:
        None if there is none.

    Raises:
        UserError: as `read_state_dict`.
    """
    content = _read_content(Path(checkpoint))
    return content.get(name) if isinstance(content, dict) else None


def _read_content(checkpoint: Path) -> Any:
    with reading(checkpoint, "give a checkpoint that training wrote"):
        # Memory-mapped, so that the optimizer's state (two thirds of the file) is not read; only the zip format can be.
        mapped = zipfile.is_zipfile(checkpoint)
        return load_pickled(checkpoint, map_location="cpu", mmap=mapped)


@contextmanager
def no_alarm() -> Iterator[None]:
    """Suppress open_clip's warning of random weights while a model is built that gets its weights right after."""
    root = logging.getLogger()  # open_clip logs there

    def keep(record: logging.LogRecord) -> bool:
        return not any(
            words in record.getMessage()
            for words in ("initialized randomly", "no CLIP weights found")
        )

    root.addFilter(keep)
    try:
        yield
    finally:
        root.removeFilter(keep)


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
    return {
        key.replace(".LayerNorm.gamma", ".LayerNorm.weight").replace(
            ".LayerNorm.beta", ".LayerNorm.bias"
        ): value
        for key, value in weights.items()
    }
