"""Building a model with open_clip, and refusing what open_clip 3.3 would build differently without a message.

For a name that is not registered open_clip gives CLIP's BPE tokenizer instead of BERT's: `check_model` refuses it. It also
overwrites a config's `hf_model_pretrained` with its argument `pretrained_text`, true by default: `create_model_and_transforms`
honours the config.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import pickle
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import get_model_config, parse_model_name
from open_clip.hf_configs import arch_dict
from safetensors import SafetensorError

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import did_you_mean
from open_clip_zerovl.models.configs import DEFAULT_CONTEXT_LENGTH, TEXT_WEIGHTS
from open_clip_zerovl.models.local_dir import check_local_dir, loadable, no_code_from_data
from open_clip_zerovl.models.text_towers import DECODERS

log = logging.getLogger(__name__)
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)


def with_text_model(name: str, text_model: str | os.PathLike[str]) -> str:
    """Register the model `name` with another text tower and return the new name, the same for the same arguments.

    Args:
        name: a registered model with an HF text tower.
        text_model: a folder (kept as an absolute path) or a hub id, with the tower's config, tokenizer and weights. For a
            folder without weights the tower starts at random, with a warning.

    Raises:
        UserError: as `check_model`.
    """
    check_model(name, text_model=text_model)
    config = get_model_config(registered_name(name))
    folder = _text_folder(text_model)
    source = str(folder.resolve()) if folder else str(text_model)
    has_weights = folder is None or _holds_weights(folder)
    if not has_weights and config["text_cfg"].get("hf_model_pretrained", True):
        log.warning(
            "%s holds no weights (%s): its text tower starts at random.",
            folder,
            " or ".join(TEXT_WEIGHTS[:2]),
        )
    config["text_cfg"].update(
        hf_model_name=source, hf_tokenizer_name=source, hf_model_pretrained=has_weights
    )

    label = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(Path(source).parts[-2:])).strip("-")
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    derived = f"{registered_name(name)}--{label}-{digest}"
    if derived not in open_clip.list_models():
        # open_clip registers from files only; add_model_config reads the file before it returns.
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / f"{derived}.json"
            file.write_text(json.dumps(config), encoding="utf-8")
            open_clip.add_model_config(file)
    return derived


def registered_name(name: str) -> str:
    """A model's name as open_clip.create_model reads it."""
    return name.replace("/", "-")


def registered_config(name: str) -> dict[str, Any]:
    """The config of a model that open_clip has registered; empty for an unknown name and for one with a schema."""
    config = get_model_config(registered_name(name)) if parse_model_name(name)[0] is None else None
    return config or {}


def check_model(
    name: str,
    *,
    text_model: str | os.PathLike[str] | None = None,
    pretrained_image: bool = False,
    context_length: int | None = None,
) -> None:
    """Refuse a model with which open_clip would fail late, or which it would build differently without a message.

    `local-dir:` and `hf-hub:` names have their own config: a folder's is read, a hub's is not. Nothing is downloaded.

    Args:
        text_model: see `with_text_model`.
        pretrained_image: whether weights of the image tower are asked for (open_clip's `--pretrained-image`).
        context_length: tokens of a text, in place of the config's (open_clip's `--force-context-length`).

    Raises:
        UserError: an unknown name (the sentence has similar names); a local-dir without a complete config; a missing or
            incomplete folder of the text tower; CLIP's BPE tokenizer for an HF tower; more tokens than the tower has
            embeddings or positions for; `pretrained_image` for a tower that is not timm's (open_clip ignores it).
    """
    schema, identifier = _parsed(name)
    if schema is not None:
        if text_model is not None:
            raise UserError(f"{name} has its own text tower; leave the text model {text_model} out")
        if schema == "local-dir":
            check_local_dir(Path(identifier))
        return
    registered = registered_name(name)
    config = get_model_config(registered)
    if config is None:
        close = difflib.get_close_matches(registered, open_clip.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "see open_clip.list_models()"
        raise UserError(f"open_clip knows no model {name!r}; {hint}")
    text_cfg, vision_cfg = (
        config.get("text_cfg", {}),
        config.get("vision_cfg", {}),
    )  # open_clip 4 has models of sounds, too
    if registered != name and (text_cfg.get("hf_tokenizer_name") or "siglip" in name.lower()):
        raise UserError(
            f"write {registered} instead of {name}: with '/' open_clip would take CLIP's BPE tokenizer"
        )
    if pretrained_image and "timm_model_name" not in vision_cfg:
        raise UserError(
            f"{name} has open_clip's own image tower, for which there are no ImageNet weights to load"
        )

    tower = text_cfg.get("hf_model_name")
    if not tower:
        if text_model is not None:
            raise UserError(
                f"{name} has open_clip's own text tower; a text model ({text_model}) needs an HF tower"
            )
        return
    if text_model is None and not text_cfg.get("hf_tokenizer_name"):
        raise UserError(
            f"the config of {name} has an HF text tower ({tower}) but no hf_tokenizer_name, so open_clip would take CLIP's "
            "BPE tokenizer; name the tokenizer in the config"
        )
    sources = {text_model} if text_model is not None else {tower, text_cfg["hf_tokenizer_name"]}
    by_default = text_model is None and registered.startswith("zerovl-emoji")
    made_by = "; `python -m scripts.drawn emoji --out data/emoji` writes it" if by_default else ""
    length = context_length or text_cfg.get("context_length", DEFAULT_CONTEXT_LENGTH)
    for source in sorted(map(str, sources)):
        _check_text_source(source, length, made_by)


def _parsed(name: str) -> tuple[str | None, str]:
    """Schema and rest of a model's name: "local-dir:/a" is ("local-dir", "/a"). UserError for an empty path."""
    try:
        return parse_model_name(name)
    except ValueError as error:
        raise UserError(f"{name!r} names no model: {error}") from error


def _text_folder(source: str | os.PathLike[str]) -> Path | None:
    """The folder that `source` names, or None for a hub id. A name that can only be a path is returned even if it is absent."""
    text, path = os.fspath(source), Path(source).expanduser()
    looks_like_path = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    return path if path.is_dir() or looks_like_path else None


def _hub_text_tower(name: str) -> str | None:
    """The hub id of a registered model's text tower; None for a folder, and for a tower of open_clip's."""
    source = (registered_config(name).get("text_cfg") or {}).get("hf_model_name")
    return source if source and _text_folder(source) is None else None


def _holds_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TEXT_WEIGHTS)


_SIZES = (
    "vocab_size",
    "max_position_embeddings",
    "pad_token_id",
)  # of a text tower's config, as far as given


def _check_text_source(source: str, context_length: int, made_by: str) -> None:
    folder = _text_folder(source)
    if folder is None:
        from huggingface_hub import constants, try_to_load_from_cache

        if constants.HF_HUB_OFFLINE and not isinstance(
            try_to_load_from_cache(source, "config.json"), str
        ):
            raise UserError(
                f"the text tower {source} is neither a folder nor in the Hugging Face cache, and HF_HUB_OFFLINE "
                f"forbids the download; give its folder as the text model{made_by}"
            )
        return
    if not folder.is_dir():
        raise UserError(
            f"the text tower's folder {source} does not exist (seen from {Path.cwd()})"
            + (made_by or did_you_mean(source))
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"{folder} holds no config.json, so it is not the folder of an HF text tower"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is not valid JSON: {error}") from None
    odd = [
        name
        for name in _SIZES
        if not isinstance(config, dict) or not isinstance(config.get(name), int | None)
    ]
    if odd:
        raise UserError(
            f"{folder / 'config.json'} is not the config of a text tower: {odd[0]} must be a number"
        )
    if config.get("model_type") not in arch_dict:
        known = ", ".join(sorted(arch_dict))
        raise UserError(
            f"{folder} holds a model of type {config.get('model_type')!r}; open_clip takes {known}"
        )
    if config["model_type"] in DECODERS and config.get("pad_token_id") in (
        None,
        config.get("eos_token_id"),
    ):
        raise UserError(
            f"{folder} holds a decoder without a padding token of its own, by which open_clip finds the end of a text; align "
            "heads on it with `zerovl align --text hf:...`, which adds one, and train that model"
        )
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(f"{folder} holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])})")
    tokens, embeddings = _vocabulary_size(folder), config.get("vocab_size")
    if tokens and embeddings and tokens > embeddings:
        raise UserError(
            f"the tokenizer in {folder} has {tokens} tokens, the tower only {embeddings}: they do not match"
        )
    positions = config.get("max_position_embeddings")
    if positions and config["model_type"] in ("roberta", "xlm-roberta"):
        # They count positions from the padding token's number on.
        positions -= 1 + (1 if config.get("pad_token_id") is None else config["pad_token_id"])
    if positions and context_length > positions:
        raise UserError(
            f"the tower in {folder} has {positions} positions, fewer than the {context_length} tokens of a text; give "
            f"--force-context-length {positions} or less, or set context_length in the model's config"
        )


def _vocabulary_size(folder: Path) -> int:
    """The number of tokens of the folder's tokenizer; 0 if its format does not list them."""
    if (file := folder / "tokenizer.json").is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content.get("model", {}).get("vocab")
        if not isinstance(vocabulary, dict):
            return 0
        return 1 + max(
            [*vocabulary.values(), *(token["id"] for token in content.get("added_tokens", ()))],
            default=-1,
        )
    if (file := folder / "vocab.txt").is_file():
        return len(file.read_text(encoding="utf-8").splitlines())
    return 0


def pretrained_text_of(name: str) -> bool:
    """The config's `hf_model_pretrained`, as the value of create_model's argument `pretrained_text`, which overwrites it.

    True, open_clip's default, for a model without HF tower or with a schema.
    """
    return registered_config(name).get("text_cfg", {}).get("hf_model_pretrained", True)


def _other_weights(name: str, pretrained: str | None, error: str) -> str:
    """A sentence for torch's message about weights that do not fit, which lists all names."""
    lacks, more = (
        re.findall(r'"([^"]+)"', line)
        for line in re.findall(r"(?:Missing|Unexpected) key.*|$", error)[:2]
    )
    first = (
        f"it lacks {lacks[0]}"
        if lacks
        else f"it also has {more[0]}"
        if more
        else error.splitlines()[-1].strip()
    )
    return (
        f"--pretrained {pretrained} holds weights of another model than {name}: {first}; give the model of these weights, or "
        "load the towers that fit with --init-from"
    )


# torch's unpickler takes a text for instructions; torch's words of a cut archive, of another tar, and of another archive.
_OF_UNPICKLER = (
    LookupError,
    EOFError,
    AttributeError,
    AssertionError,
    struct.error,
    pickle.UnpicklingError,
)
_OF_OTHER_FILES = ("PytorchStreamReader", "legacy .tar", "file in archive")


@no_code_from_data()
def create_model_and_transforms(
    model_name: str, pretrained: str | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    """open_clip's function of this name, which honours the config's `hf_model_pretrained` and fails with a sentence.

    Args:
        model_name, pretrained, options: as for `open_clip.create_model_and_transforms`.

    Returns:
        model, training transform, evaluation transform.

    Raises:
        UserError: weights that cannot be loaded (hub out of reach and not in its cache, missing file) or do not fit; patch
            dropout for an image tower without patch tokens.
    """
    options.setdefault("pretrained_text", pretrained_text_of(model_name))
    try:
        with loadable(model_name) as found_name:
            created = open_clip.create_model_and_transforms(found_name, pretrained, **options)
    except (torch.OutOfMemoryError, UserError):
        raise
    except (*_OF_UNPICKLER, SafetensorError, OSError, RuntimeError, ValueError) as error:
        foreign = isinstance(error, (*_OF_UNPICKLER, SafetensorError)) or any(
            w in str(error) for w in _OF_OTHER_FILES
        )
        if foreign and pretrained and os.path.isfile(pretrained):
            raise UserError(
                f"--pretrained {pretrained} is not a file of weights, or is cut short; give a checkpoint that training wrote"
            ) from error
        if isinstance(error, _OF_UNPICKLER):
            raise
        if "loading state_dict" in str(error):
            raise UserError(_other_weights(model_name, pretrained, str(error))) from error
        # Missing files, an unreachable hub (OSError), unknown tags and weights that do not fit (RuntimeError), a text tower
        # of an unknown kind (ValueError).
        reason = " ".join(str(error).split())
        tower = _hub_text_tower(model_name) if isinstance(error, OSError) else None
        asked = (
            ""
            if tower is None
            else f"; {tower} is not a folder here, so the hub was asked for it{did_you_mean(tower)}"
        )
        raise UserError(
            f"{model_name} cannot be built with its weights: {reason[:300]}{'...' if len(reason) > 300 else ''} "
            f"(without internet, give local folders or files: a text model folder, pretrained weights{asked})"
        ) from error
    except TypeError as error:
        if "patch_drop_rate" not in str(error):
            raise
        raise UserError(
            f"the image tower of {model_name} has no tokens to drop (--token-drop, --force-patch-dropout "
            f"{options.get('force_patch_dropout')}); leave it out or choose a ViT"
        ) from error
    wants_weights = (
        registered_config(model_name).get("vision_cfg", {}).get("timm_model_pretrained", False)
    )
    given = pretrained or options.get("pretrained_image") or options.get("pretrained_image_path")
    if wants_weights and not given:
        log.warning(
            "%s: the image tower starts at random; the paper's starts from ImageNet-21k weights (--pretrained-image).",
            model_name,
        )
    return created
