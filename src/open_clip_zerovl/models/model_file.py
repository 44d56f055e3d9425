"""One's own model config, as a JSON file: `--model-config FILE`. Its name is the file's."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import open_clip
from open_clip.factory import get_model_config
from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from open_clip_zerovl.core.errors import UserError, nearest
from open_clip_zerovl.core.files import read_json
from open_clip_zerovl.models.configs import describes_model

# Of open_clip's model classes, besides the two towers.
_TOP = {
    "embed_dim",
    "vision_cfg",
    "text_cfg",
    "quick_gelu",
    "custom_text",
    "init_logit_scale",
    "init_logit_bias",
}
_TOP |= {"nonscalar_logit_scale", "multimodal_cfg", "output_dict", "cast_dtype"}


def register_model_file(path: str | os.PathLike[str], *, rename: bool = False) -> str:
    """Register a model config with open_clip and return its name, the file's without `.json`; again changes nothing.

    Args:
        rename: append a mark of the content to the name if this process has another model of that name.

    Raises:
        UserError: no such file, no JSON, a key that is missing or that open_clip does not know, or the name of another model.
    """
    file = Path(path).expanduser()
    config = read_json(file, "mend it")
    name = file.stem
    _check(config, path)
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


def _check(config: Any, path: str | os.PathLike[str]) -> None:
    """UserError for a config that open_clip would pass over in silence, or fail on late."""
    if not describes_model(config):
        raise UserError(
            f"--model-config {path} is no model's: it needs embed_dim, vision_cfg and text_cfg"
        )
    given = set(config)
    known = set(_TOP)
    if "multimodal_cfg" not in config:
        for part, kind in (("vision_cfg", CLIPVisionCfg), ("text_cfg", CLIPTextCfg)):
            given |= {f"{part}.{key}" for key in config[part]}
            settings = ("hf_tokenizer_name", *kind.__dataclass_fields__)
            known |= {f"{part}.{name}" for name in settings}
    for key in sorted(given - known):
        close = nearest(key, known, cutoff=0.75)
        advice = f"did you mean {close!r}?" if close else "take it out"
        raise UserError(
            f"--model-config {path} has {key!r}, which open_clip does not know; {advice}"
        )
