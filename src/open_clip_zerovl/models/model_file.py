"""One's own model config, as a JSON file: `--model-config FILE`. Its name is the file's."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path

import open_clip
from open_clip.factory import get_model_config
from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from open_clip_zerovl.core.errors import UserError

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

_SIZES = {
    "embed_dim",
    "image_size",
    "patch_size",
    "width",
    "head_width",
    "layers",
    "heads",
    "vocab_size",
    "context_length",
}


def register_model_file(path: str | os.PathLike[str], *, rename: bool = False) -> str:
    """Register a model config with open_clip and return its name, the file's without `.json`; again changes nothing.

    Args:
        rename: append a mark of the content to the name if this process has another model of that name.

    Raises:
        UserError: no such file, no JSON, a key that is missing or that open_clip does not know, or the name of another model.
    """
    file = Path(path).expanduser()
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--model-config {path} cannot be read ({error.strerror}); correct the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--model-config {path} is not valid JSON ({error}); mend it") from error
    name = file.stem
    if file.suffix != ".json" or not name or any(mark in name for mark in "/:"):
        raise UserError(f"--model-config {path} must be called NAME.json: NAME is the model's")
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


def _check(config: object, path: str | os.PathLike[str]) -> None:
    """UserError for a config that open_clip would pass over in silence, or fail on late."""
    if not isinstance(config, dict):
        raise UserError(
            f"--model-config {path} holds no table of settings; take one of open_clip's model_configs to begin with"
        )
    for key, kind in (("embed_dim", int), ("vision_cfg", dict), ("text_cfg", dict)):
        if not isinstance(config.get(key), kind):
            raise UserError(
                f"--model-config {path} has no {key!r}: a model needs embed_dim, vision_cfg and text_cfg"
            )
    towers = (("vision_cfg", CLIPVisionCfg), ("text_cfg", CLIPTextCfg))
    parts = [("", config, _TOP)]
    if "multimodal_cfg" not in config:
        for part, kind in towers:
            parts.append(
                (
                    f"{part}.",
                    config[part],
                    {"hf_tokenizer_name", *(field.name for field in fields(kind))},
                )
            )
    for prefix, given, known in parts:
        for key, value in given.items():
            if key in _SIZES and isinstance(value, int) and value < 1:
                raise UserError(
                    f"--model-config {path} has {prefix + key!r} {value}; give a size of 1 or more"
                )
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
                advice = (
                    f"did you mean {prefix + near[0]!r}?" if near else "correct it or take it out"
                )
                raise UserError(
                    f"--model-config {path} has {prefix + key!r}, which open_clip does not know; {advice}"
                )
