"""Configs of models: this package's (sections 2.2 and A.9), one's own (`--model-config FILE`), and those of folders and hubs.

`model_configs/*.json` pair a timm ViT (class token, the ImageNet-21k weights `augreg_in21k`, which timm gives for the name in
the paper's released code) with an HF BERT (raw [CLS]). Both are projected to 512 without bias. The temperature starts at 0.02
(`logit_scale` holds the logarithm of 50).

A folder is checked before open_clip opens it as `local-dir:FOLDER`. None of its code is run.

    open_clip_config.json         model_cfg and preprocess_cfg
    open_clip_model.safetensors   the weights (or another file that open_clip loads)
    config.json, tokenizer ...    of a Hugging Face text tower, if the model has one
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import open_clip
from open_clip.factory import get_model_config

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import read_json, reading, write_atomically
from open_clip_zerovl.models.text_towers import register_text_towers

#: An `open_clip.CLIP` or `CustomTextCLIP`: modules whose towers' types open_clip does not give.
ClipModel = Any

CONFIG_FOLDER = Path(__file__).parent / "model_configs"
DEFAULT_CONTEXT_LENGTH = 77  # open_clip's, where a config names none

TEXT_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)


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


CONFIG_FILE = "open_clip_config.json"
LOCAL_DIR = "local-dir:"
TOWER_FILE = "config.json"  # of a Hugging Face text tower
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)


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
    """Refuse a text tower that is neither in the folder nor at the path in its config, or has another's tokenizer.

    Raises:
        UserError: also as from `read_config` and `check_text_tower`.
    """
    text_cfg = read_config(folder)["model_cfg"]["text_cfg"]
    source = tower_of(folder, text_cfg)
    if source is None or not os.path.isabs(source):
        return
    if not os.path.isdir(source):
        raise UserError(
            f"{folder} has no {TOWER_FILE} of its text tower, which is not in {source} either: copy it into the folder, or "
            "export again"
        )
    check_text_tower(Path(source), text_cfg.get("context_length", DEFAULT_CONTEXT_LENGTH))


def check_text_tower(folder: Path, context_length: int) -> None:
    """Refuse a text tower that open_clip cannot build, and a tokenizer that does not fit it.

    Raises:
        UserError: another type of model, tokens without embeddings or positions, padding that would be read as text.
    """
    file = folder / TOWER_FILE
    config = read_json(file)
    with reading(file, "give the config of an HF text tower"):
        _check_text_config(folder, config, context_length)


def _check_text_config(folder: Path, config: Mapping[str, Any], context_length: int) -> None:
    from open_clip.hf_configs import arch_dict

    from open_clip_zerovl.models.text_towers import DECODERS

    kind = config.get("model_type")
    if kind not in arch_dict:  # of another model open_clip says nothing but its type
        known = ", ".join(sorted(arch_dict))
        raise UserError(f"{folder} holds a model of type {kind!r}; open_clip takes {known}")
    if kind in DECODERS and config.get("pad_token_id") in (None, config.get("eos_token_id")):
        raise UserError(
            f"{folder} holds a decoder without a padding token of its own, by which open_clip finds the end of a text; align "
            "heads on it with `zerovl align --text hf:...`, which adds one, and train that model"
        )
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        # transformers would make one of five special tokens
        raise UserError(f"{folder} holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])})")
    _check_tokenizer(folder, config.get("vocab_size"))
    positions = config.get("max_position_embeddings")
    if positions and kind in ("roberta", "xlm-roberta"):
        # They count positions from the padding token's number on.
        positions -= 1 + (1 if config.get("pad_token_id") is None else config["pad_token_id"])
    if positions and context_length > positions:
        raise UserError(
            f"the tower in {folder} has {positions} positions, fewer than the {context_length} tokens of a text; give "
            f"--force-context-length {positions} or less, or set context_length in the model's config"
        )


def _check_tokenizer(folder: Path, embeddings: int | None) -> None:
    """Refuse tokens without embeddings, and padding that the tower would read as text: it masks the number of its config.

    Raises:
        UserError: more tokens, another number, or padding before the text, where a pooled first token is one.
    """
    from transformers import AutoConfig, AutoTokenizer

    with no_code_from_data():
        number = AutoConfig.from_pretrained(folder).pad_token_id
        tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if embeddings and tokens > embeddings:
        raise UserError(
            f"the tokenizer in {folder} has {tokens} tokens, the tower only {embeddings}: they do not match"
        )
    advice = "give its own tokenizer, or align heads on it with `zerovl align --text hf:...`, which mends it"
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != number:
        raise UserError(
            f"the tokenizer in {folder} pads with the number {tokenizer.pad_token_id}, and the tower takes {number} for "
            f"padding; {advice}"
        )
    if tokenizer.padding_side != "right":
        raise UserError(f"the tokenizer in {folder} pads before the text; {advice}")


@contextmanager
def no_code_from_data() -> Iterator[None]:
    """Keep transformers from running Python files that came with a model, within the block or the decorated function.

    A config may name such a file (`auto_map`) and set `trust_remote_code` itself, so that transformers would import the
    file, or ask on the terminal whether it may.

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


ANSWER_SECONDS = 5.0


@contextmanager
def hub_or_cache(asked: bool = True) -> Iterator[None]:
    """Take models of the hub from its cache within the block if it does not answer.

    It is not `asked` for local files.

    huggingface_hub repeats each request that fails for half a minute, and a model that is not cached takes several.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offline = constants.HF_HUB_OFFLINE
    try:
        if asked and not offline:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except Exception as error:  # of one of three HTTP libraries, by the hub's release
        logging.warning(
            "%s cannot be reached (%s): only its cache is searched",
            constants.ENDPOINT,
            first_line(error),
        )
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
