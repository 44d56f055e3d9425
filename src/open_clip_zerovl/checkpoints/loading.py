"""Loading a checkpoint: its model, its evaluation transform, its tokenizer.

`load_model` takes every kind of checkpoint. `assemble` builds the model of a `ModelSpec` with open_clip's own constructor and
checks every tensor.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import get_model_config
from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor

from open_clip_zerovl.checkpoints.encoder_flags import EncoderFlags
from open_clip_zerovl.checkpoints.spec import (
    ModelSpec,
    named_model_spec,
    read_model_spec,
    write_config,
)
from open_clip_zerovl.checkpoints.weights import (
    WEIGHTS_FILE,
    no_alarm,
    read_state_dict,
)
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import did_you_mean, reading
from open_clip_zerovl.models.configs import DEFAULT_CONTEXT_LENGTH, ClipModel
from open_clip_zerovl.models.local_dir import (
    CONFIG_FILE,
    LOCAL_DIR,
    check_local_dir,
    hub_or_cache,
    loadable,
    no_code_from_data,
)

Preprocess = Callable[[Any], Tensor]
Tokenizer = Callable[[list[str]], Tensor]


def choose_device(name: str | torch.device = "auto", *, local_rank: int = 0) -> torch.device:
    """Choose a device of this machine: `auto` takes GPU `local_rank` if there are GPUs, else the CPU.

    Raises:
        UserError: a device that torch does not know, or that is not here.
    """
    if name == "auto":
        name = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"the device '{name}' cannot be used ({first_line(error)}); give another one, such as cpu"
        ) from error
    return device


def _skeleton(spec: ModelSpec) -> ClipModel:
    """Build the model without its weights by open_clip from the config that an export would hold."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), spec.model_cfg, spec.preprocess_cfg)
        with no_alarm():
            return open_clip.create_model(
                LOCAL_DIR + folder, load_weights=False, pretrained_text=False
            )


def tokenizer_of(spec: ModelSpec) -> HFTokenizer | SimpleTokenizer:
    """Return the model's tokenizer.

    Raises:
        UserError: open_clip would silently give another one.
    """
    text_cfg = spec.model_cfg["text_cfg"]
    source = spec.tokenizer_source
    if source is None:
        # a model of our own making, with CLIP's text tower
        if ":" not in spec.name and get_model_config(spec.name) is None:
            return SimpleTokenizer(
                context_length=text_cfg.get("context_length", DEFAULT_CONTEXT_LENGTH)
            )
        tokenizer = open_clip.get_tokenizer(
            spec.name, context_length=text_cfg.get("context_length")
        )
        if not isinstance(tokenizer, SimpleTokenizer):
            raise UserError(
                f"the tokenizer of {spec.name} ({type(tokenizer).__name__}) has no files to export"
            )
        return tokenizer
    return HFTokenizer(
        source,
        context_length=text_cfg.get("context_length", DEFAULT_CONTEXT_LENGTH),
        tokenizer_mode=text_cfg.get("tokenizer_mode"),
        **(text_cfg.get("tokenizer_kwargs") or {}),
    )


@no_code_from_data()
def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    model_name: str | None = None,
    text_model: str | None = None,
    device: str | torch.device = "cpu",
) -> tuple[ClipModel, Preprocess, Tokenizer]:
    """Load a model for evaluation, in float32 and eval mode, with its own evaluation transform and tokenizer.

    Args:
        name_or_path: `local-dir:/folder` or a folder with open_clip_config.json; a training checkpoint `epoch_N.pt`; or
            open_clip's `NAME/pretrained` (a tag) or `hf-hub:org/name`, which may download.
        model_name, text_model: for a checkpoint without `params.txt` beside it, or whose text tower has moved.

    Raises:
        UserError: something cannot be found, does not fit, or would leave the model at random weights.
    """
    kind, text, path = _kind_of(name_or_path)
    if kind == "checkpoint":
        weights = read_state_dict(path)
        model, tokenizer = assemble(
            path, read_model_spec(path, model=model_name, text_model=text_model), weights
        )
        return model.to(device).eval(), evaluation_transform(model), tokenizer
    name, tag = _name_and_tag(text) if kind == "name" else (text, None)
    if model_name or text_model:
        raise UserError(
            f"a model name or a text tower is given for a training checkpoint only, and '{text}' is not one; leave it out"
        )
    if kind == "folder":
        # Without weights open_clip would go on with random ones.
        if not any(any(path.glob(f"*{ending}")) for ending in (".safetensors", ".bin", ".pth")):
            raise UserError(f"{path} holds no weights: {WEIGHTS_FILE} is missing")
        name = LOCAL_DIR + str(path)
    # A folder's config may ask for a model that torch cannot build.
    source = (
        reading(path, "give a folder that open_clip loads") if kind == "folder" else hub_or_cache()
    )
    with source, loadable(name) as loadable_name:
        model, _, preprocess = open_clip.create_model_and_transforms(
            loadable_name, pretrained=tag, device=device
        )
    return model.eval(), preprocess, open_clip.get_tokenizer(name)


def spec_of(
    name_or_path: str | os.PathLike[str],
    *,
    model_name: str | None = None,
    text_model: str | None = None,
) -> ModelSpec:
    """Describe the model that `load_model` loads, for `export.write_local_dir`.

    Raises:
        UserError: as `load_model`; a model of the hub, whose config lies there.
    """
    kind, text, path = _kind_of(name_or_path)
    if kind == "checkpoint":
        return read_model_spec(path, model=model_name, text_model=text_model)
    if kind == "folder":
        check_local_dir(path)
        return named_model_spec(LOCAL_DIR + str(path.absolute()))
    return named_model_spec(text) if kind == "hub" else named_model_spec(*_name_and_tag(text))


def _kind_of(name_or_path: str | os.PathLike[str]) -> tuple[str, str, Path]:
    """Find the kind of model that a name means ("checkpoint", "folder", "hub" or "name"), the name, and the name as a path.

    Raises:
        UserError: a folder without a config, such as that of pictures or of a whole run.
    """
    text = os.fspath(name_or_path)
    path = Path(text.removeprefix(LOCAL_DIR)).expanduser()
    if text.startswith(LOCAL_DIR) or path.is_dir():
        if path.is_dir() and not (path / CONFIG_FILE).is_file():
            models = [path / "model", *path.glob("checkpoints/epoch_*.pt")]
            models = [each for each in models if each.is_file() or (each / CONFIG_FILE).is_file()]
            newest = max(models, key=lambda each: each.stat().st_mtime, default=None)
            remedy = newest or "an exported folder, a training checkpoint, or open_clip's NAME/TAG"
            raise UserError(
                f"the folder {path} is not a model ({CONFIG_FILE} is missing); give {remedy}"
            )
        return "folder", text, path
    if path.is_file():
        return "checkpoint", text, path
    return "hub" if text.startswith("hf-hub:") else "name", text, path


@dataclass(frozen=True)
class Encoder(EncoderFlags):
    """A model that encodes pictures and captions, and the settings of its loader.

    Attributes:
        model: as for `load_model`: an exported folder, a checkpoint, `NAME/pretrained`.
    """

    model: str

    def load(self, *, local_rank: int = 0) -> tuple[ClipModel, Preprocess, Tokenizer, torch.device]:
        """Load the model on its device, and return both.

        Raises:
            UserError: as `load_model`.
        """
        device = choose_device(self.device, local_rank=local_rank)
        return *load_model(
            self.model, model_name=self.model_name, text_model=self.text_model, device=device
        ), device

    def check(self) -> None:
        """Refuse a model that cannot be found or described.

        No weights are read, so that this comes before long work.
        """
        if not self.model.startswith("hf-hub:"):
            self.spec()

    def spec(self) -> ModelSpec:
        """Return `spec_of` the model.

        Raises:
            UserError: as there.
        """
        return spec_of(self.model, model_name=self.model_name, text_model=self.text_model)


@no_code_from_data()
def assemble(
    checkpoint: Path, spec: ModelSpec, weights: dict[str, Tensor]
) -> tuple[ClipModel, HFTokenizer | SimpleTokenizer]:
    """Build the model of a spec with a checkpoint's weights, and its tokenizer.

    Raises:
        UserError: they do not fit.
    """
    model = _skeleton(spec)
    # Constants that the model itself does not store: a scripted model does, and transformers did before 4.31.
    unstored = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    for name in unstored & weights.keys():
        del weights[name]
    with reading(checkpoint, f"give the weights of {spec.name}"):
        model.load_state_dict(weights)
    return model, tokenizer_of(spec)


def evaluation_transform(model: ClipModel) -> Preprocess:
    """Make the transform that an open_clip model's own settings describe."""
    return image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)


def _name_and_tag(text: str) -> tuple[str, str]:
    """Split `ViT-B/32/laion2b_s34b_b79k` into ("ViT-B-32", "laion2b_s34b_b79k")."""
    known = open_clip.list_models()
    name, _, tag = text.rpartition("/")
    name = name.replace("/", "-")
    if not tag or name not in known:
        bare = text.replace("/", "-")
        tags = ", ".join(list_pretrained_tags_by_model(bare)) or "none"
        raise UserError(
            f"'{text}' names no weights: write {bare}/TAG, with a tag of open_clip's ({tags})"
            if bare in known
            else f"'{text}' is not a model; give a folder with {CONFIG_FILE}, a checkpoint file, or open_clip's NAME/TAG"
            + did_you_mean(text)
        )
    # open_clip only warns, and computes other embeddings than the weights were trained for.
    if (get_pretrained_cfg(name, tag) or {}).get("quick_gelu") and not (
        get_model_config(name) or {}
    ).get("quick_gelu"):
        raise UserError(
            f"the weights '{tag}' were trained with QuickGELU, which {name} lacks: write {name}-quickgelu/{tag}"
        )
    return name, tag
