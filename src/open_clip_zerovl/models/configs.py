"""The model configs of sections 2.2 and A.9, and one's own in a JSON file (`--model-config FILE`), registered with open_clip.

`model_configs/*.json` pair a timm ViT (class token, the ImageNet-21k weights `augreg_in21k`, which timm gives for the name in
the paper's released code) with an HF BERT (raw [CLS]). Both are projected to 512 without bias. The temperature starts at 0.02
(`logit_scale` holds the logarithm of 50).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import open_clip
from open_clip.factory import get_model_config

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import read_json
from open_clip_zerovl.models.text_towers import register_text_towers

#: An `open_clip.CLIP` or `CustomTextCLIP`: modules whose towers' types open_clip does not give.
ClipModel = Any

CONFIG_FOLDER = Path(__file__).parent / "model_configs"
INITIAL_TEMPERATURE = 0.02
DEFAULT_CONTEXT_LENGTH = 77  # open_clip's, where a config names none

# The 14M recipe's normalisation (released code), for open_clip's --image-mean and --image-std; 100M uses 0.5 for both.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

TEXT_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)


def logit_scale_of(temperature: float) -> float:
    """Convert a softmax temperature to open_clip's `logit_scale` parameter: ln(1 / temperature)."""
    return -math.log(temperature)


def describes_model(config: Any) -> bool:
    """Return whether a config of open_clip holds the width of the embeddings and both towers."""
    parts = {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}
    return isinstance(config, dict) and all(
        isinstance(config.get(name), kind) for name, kind in parts.items()
    )


def register_model_configs() -> list[str]:
    """Register this package's models, and the text towers that they need, with open_clip.

    Calling it again changes nothing.

    Returns:
        The registered names, sorted.
    """
    register_text_towers()
    configs = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(CONFIG_FOLDER.glob("*.json"))
    }
    if any(get_model_config(name) != config for name, config in configs.items()):
        open_clip.add_model_config(CONFIG_FOLDER)
    return list(configs)


def register_model_file(path: str | os.PathLike[str], *, rename: bool = False) -> str:
    """Register a model config with open_clip and return its name, the file's without `.json`.

    A second call changes nothing.

    Args:
        rename: append a mark of the content to the name if this process has another model of that name.

    Raises:
        UserError: no JSON, a key that is missing, or the name of another model.
        OSError: no such file.
    """
    file = Path(path).expanduser()
    config = read_json(file, "mend it")
    name = file.stem
    if not describes_model(config):  # open_clip would pass over it in silence
        raise UserError(
            f"--model-config {path} is no model's: it needs embed_dim, vision_cfg and text_cfg"
        )
    if get_model_config(name) not in (None, config):
        if not rename:
            raise UserError(
                f"--model-config {path}: there is another model called {name}; give the file another name"
            )
        name += f"-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    if get_model_config(name) is None:
        with tempfile.TemporaryDirectory() as folder:
            open_clip.add_model_config(shutil.copy(file, Path(folder, f"{name}.json")))
    return name
