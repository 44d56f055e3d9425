"""One's own model config, as a JSON file: `--model-config FILE`. Its name is the file's."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import open_clip
from open_clip.factory import get_model_config

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import read_json
from open_clip_zerovl.models.configs import describes_model


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
