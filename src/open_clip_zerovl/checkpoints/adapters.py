"""Low-rank adapters in a checkpoint: merged into the weights that they adapt, or written alone in peft's layout.

A run with --lora keeps a layer's weight as LAYER.base_layer.weight and its adapter as LAYER.lora_A.default.weight (R, in) and
LAYER.lora_B.default.weight (out, R). Merged, LAYER.weight is W + (alpha / R) B A. peft is not needed for either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from open_clip_zerovl.core.files import reading

ENTRY = "lora"  # of a checkpoint: rank, alpha, and the names of the other trained parameters
FOLDER = "lora"  # of an export: the adapters alone
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.endswith((_A, _B))


def merged(weights: Mapping[str, Tensor], entry: Any, origin: Path) -> dict[str, Tensor]:
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


def adapter_files(
    weights: Mapping[str, Tensor], entry: Mapping[str, Any]
) -> dict[str, bytes | str]:
    """Write adapters and other trained parameters as files for peft, name -> content.

    `PeftModel.from_pretrained(OPEN_CLIP_MODEL, FOLDER)` loads them.

    With adapters of packed attention the config is left out, without which peft refuses the folder: peft 0.21.2 adds the
    adapter of nn.MultiheadAttention's output projection twice.
    """
    layers = sorted(name.removesuffix(_A) for name in weights if name.endswith(_A))
    trained = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.clone().contiguous()
        for name, tensor in weights.items()
        if is_adapter(name) or name in entry["trained"]
    }
    files: dict[str, bytes | str] = {
        f"{FOLDER}/adapter_model.safetensors": save(trained, metadata={"format": "pt"})
    }
    if not any(layer.endswith(".base_layer.out_proj") for layer in layers):
        config = {
            "peft_type": "LORA",
            "r": entry["rank"],
            "lora_alpha": entry["alpha"],
            "bias": "none",
        }
        config["target_modules"] = "|".join(map(re.escape, layers))
        files[f"{FOLDER}/adapter_config.json"] = json.dumps(config, indent=2) + "\n"
    return files
