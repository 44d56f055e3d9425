"""Building a model with open_clip, and refusing what open_clip 3.3 would build differently without a message.

For a name that is not registered open_clip gives CLIP's BPE tokenizer instead of BERT's: `check_model` refuses it. It also
overwrites a config's `hf_model_pretrained` with its argument `pretrained_text`, true by default: `create_model_and_transforms`
honours the config.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import open_clip
from open_clip.factory import get_model_config, parse_model_name

from open_clip_zerovl.core.errors import UserError, nearest
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.configs import (
    DEFAULT_CONTEXT_LENGTH,
    TEXT_WEIGHTS,
    check_local_dir,
    check_text_tower,
    loadable,
    no_code_from_data,
)

log = logging.getLogger(__name__)


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
    """Return a model's name as open_clip.create_model reads it."""
    return name.replace("/", "-")


def registered_config(name: str) -> dict[str, Any]:
    """Return the config of a model that open_clip has registered.

    Returns:
        Empty for an unknown name and for one with a schema.
    """
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
    schema, identifier = parse_model_name(name)
    if schema is not None:
        if text_model is not None:
            raise UserError(f"{name} has its own text tower; leave the text model {text_model} out")
        if schema == "local-dir":
            check_local_dir(Path(identifier))
        return
    registered = registered_name(name)
    config = get_model_config(registered)
    if config is None:
        close = nearest(registered, open_clip.list_models(), cutoff=0.5)
        hint = f"did you mean {close}?" if close else "see open_clip.list_models()"
        raise UserError(f"open_clip knows no model {name!r}; {hint}")
    # open_clip 4 has models of sounds, too
    text_cfg = config.get("text_cfg", {})
    vision_cfg = config.get("vision_cfg", {})
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


def _text_folder(source: str | os.PathLike[str]) -> Path | None:
    """Return the folder that `source` names.

    A name that can only be a path is returned even if it is absent.

    Returns:
        None for a hub id.
    """
    text, path = os.fspath(source), Path(source).expanduser()
    looks_like_path = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    return path if path.is_dir() or looks_like_path else None


def _holds_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TEXT_WEIGHTS)


def _check_text_source(source: str, context_length: int, made_by: str) -> None:
    folder = _text_folder(source)
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(
            f"the text tower's folder {source} does not exist (seen from {Path.cwd()}){made_by}"
        )
    check_text_tower(folder, context_length)


def pretrained_text_of(name: str) -> bool:
    """Return the config's `hf_model_pretrained`, as the value of create_model's argument `pretrained_text`, which overwrites
    it.

    True, open_clip's default, for a model without HF tower or with a schema.
    """
    return registered_config(name).get("text_cfg", {}).get("hf_model_pretrained", True)


@no_code_from_data()
def create_model_and_transforms(
    model_name: str, pretrained: str | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    """Call open_clip's function of this name and honour the config's `hf_model_pretrained`.

    Args:
        model_name, pretrained, options: as for `open_clip.create_model_and_transforms`.

    Returns:
        model, training transform, evaluation transform.

    Raises:
        UserError: a file that does not load; see `loadable` and `no_code_from_data`. Other errors are the libraries' own.
    """
    options.setdefault("pretrained_text", pretrained_text_of(model_name))
    file = pretrained if pretrained and os.path.isfile(pretrained) else None
    with (
        loadable(model_name) as loadable_name,
        reading(file, "give a file of its weights") if file else nullcontext(),
    ):
        created = open_clip.create_model_and_transforms(loadable_name, pretrained, **options)
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
