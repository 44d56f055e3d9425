"""Checks of a folder before open_clip opens it as `local-dir:FOLDER`; none of its code is run.

open_clip_config.json         model_cfg and preprocess_cfg
open_clip_model.safetensors   the weights (or another file that open_clip loads)
config.json, tokenizer ...    of a Hugging Face text tower, if the model has one
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import read_json, reading, write_atomically
from open_clip_zerovl.models.configs import describes_model

CONFIG_FILE = "open_clip_config.json"
LOCAL_DIR = "local-dir:"
TRAINED_ON = "trained_on.npy"  # the pictures on which the model was trained (`data.held_out`)
TOWER_FILE = "config.json"  # of a Hugging Face text tower


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's `open_clip_config.json`, whose `model_cfg` describes both towers.

    Raises:
        UserError: no JSON, or a config without `model_cfg`, towers or embedding width.
        OSError: there is no such file.
    """
    file = folder / CONFIG_FILE
    config = read_json(file)
    if not isinstance(config, dict) or not describes_model(config.get("model_cfg")):
        raise UserError(f"{file} is not a config of open_clip; give a folder that it loads")
    with reading(file, "give mean and std of three numbers each"):
        preprocess_cfg = config.get("preprocess_cfg", {})
        for name in ("mean", "std"):
            if preprocess_cfg.get(name) is not None:
                _, _, _ = preprocess_cfg[name]
    return config


def tower_of(folder: Path, text_cfg: Mapping[str, Any]) -> str | None:
    """Return the path or hub name of a folder's Hugging Face text tower.

    A folder that was moved or copied holds the tower's config, but `text_cfg` has the path at which it was written.

    Returns:
        None for open_clip's own.
    """
    source = text_cfg.get("hf_model_name")
    if isinstance(source, str) and os.path.isabs(source) and (folder / TOWER_FILE).is_file():
        return os.path.abspath(folder)
    return source or None


def config_here(folder: Path) -> dict[str, Any]:
    """Read the config with the folder's present path in place of the one at which it was written."""
    config = read_config(folder)
    text_cfg = config["model_cfg"]["text_cfg"]
    tower = tower_of(folder, text_cfg)
    if tower is not None and tower != text_cfg["hf_model_name"]:
        text_cfg["hf_model_name"] = tower
        if text_cfg.get("hf_tokenizer_name"):
            text_cfg["hf_tokenizer_name"] = tower
    return config


def write_paths_here(folder: Path) -> bool:
    """Write the folder's present path into its config, at which stock open_clip looks for the text tower.

    Returns:
        False if nothing had to be changed.

    Raises:
        UserError: see `read_config`; a file that cannot be written.
    """
    here = config_here(folder)
    changed = here != read_config(folder)
    if changed:
        write_atomically(folder / CONFIG_FILE, json.dumps(here, indent=2) + "\n")
    return changed


@contextmanager
def loadable(name: str) -> Iterator[str]:
    """Yield a model's name under which open_clip finds all files within the block: another folder replaces one that was moved.

    Args:
        name: a name of open_clip's, with or without a schema.

    Raises:
        UserError: as `read_config`, or a text tower that is neither in the folder nor at the path in its config.
    """
    if not name.startswith(LOCAL_DIR):
        yield name
        return
    folder = Path(name.removeprefix(LOCAL_DIR))
    check_local_dir(folder)
    here = config_here(folder)
    if here == read_config(folder):
        yield name
        return
    with TemporaryDirectory() as place:
        for file in folder.absolute().iterdir():
            Path(place, file.name).symlink_to(file)
        Path(place, CONFIG_FILE).unlink()
        Path(place, CONFIG_FILE).write_text(json.dumps(here), encoding="utf-8")
        yield LOCAL_DIR + place


def check_local_dir(folder: Path) -> None:
    """Refuse a text tower that is neither in the folder nor at the path in its config.

    Raises:
        UserError: also as from `read_config`.
    """
    source = tower_of(folder, read_config(folder)["model_cfg"]["text_cfg"])
    if source is not None and os.path.isabs(source) and not os.path.isdir(source):
        raise UserError(
            f"{folder} has no {TOWER_FILE} of its text tower, which is not in {source} either: copy it into the folder, or "
            "export again"
        )


@contextmanager
def no_code_from_data() -> Iterator[None]:
    """Keep transformers from running Python files that came with a model, within the block or the decorated function.

    A config may name such a file (`auto_map`) and set `trust_remote_code` itself; transformers would then import the file, or
    ask on the terminal whether it may.

    Raises:
        UserError: a model that cannot be loaded without its own code.
    """
    from transformers import dynamic_module_utils as dynamic

    def refuse(*arguments: Any, **_: Any) -> NoReturn:
        where = (
            f" ({arguments[1]} of {arguments[0]})"
            if len(arguments) > 1 and all(arguments[:2])
            else ""
        )
        raise UserError(
            f"the model wants to run Python code that came with it{where}, and code that comes with data is never run: take a "
            "tower that transformers itself can build"
        )

    # All such code is loaded through the first two. The third is called when a question on the terminal gets no answer.
    names = ("get_cached_module_file", "get_class_in_module", "_raise_timeout_error")
    originals = {name: getattr(dynamic, name) for name in names}
    seconds = dynamic.TIME_OUT_REMOTE_CODE
    for name in names:
        setattr(dynamic, name, refuse)
    dynamic.TIME_OUT_REMOTE_CODE = 0  # no question on the terminal
    try:
        yield
    finally:
        dynamic.TIME_OUT_REMOTE_CODE = seconds
        for name, original in originals.items():
            setattr(dynamic, name, original)
