"""State dicts read from files, with low-rank adapters merged into their weights.

No code in a file is run; a file that cannot be read is refused with a sentence. A run with --lora keeps a layer's weight as
LAYER.base_layer.weight and its adapter as LAYER.lora_A.default.weight (R, in) and LAYER.lora_B.default.weight (out, R). Merged,
LAYER.weight is W + (alpha / R) B A. peft is not needed for it.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.tower_weights import load_pickled

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

    Only tensors, plain containers and numbers are loaded (`load_pickled`); a pickle that wants to run code is refused.

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
