"""A checkpoint to its model, evaluation transform and tokenizer.

A training checkpoint (`logs/NAME/checkpoints/epoch_N.pt`) holds weights; the run's `params.txt` names their model, which
`read_model_spec` describes. `load_model` takes every kind of checkpoint. `assemble` builds the model of a `ModelSpec` with
open_clip's own constructor and checks every tensor.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import get_model_config, parse_model_name
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict
from torch import Tensor

from open_clip_zerovl.checkpoints.weights import (
    WEIGHTS_FILE,
    no_alarm,
    read_entry,
    read_state_dict,
)
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.models.build import check_model
from open_clip_zerovl.models.configs import (
    CONFIG_FILE,
    DEFAULT_CONTEXT_LENGTH,
    LOCAL_DIR,
    ClipModel,
    check_local_dir,
    config_here,
    hub_or_cache,
    loadable,
    no_code_from_data,
    register_model_file,
)

# Entries of a model's config about file paths and training, on which its function does not depend.
NOT_OF_FUNCTION = frozenset({
    "hf_model_name", "hf_tokenizer_name", "hf_model_pretrained", "timm_model_pretrained",
    "patch_dropout", "timm_drop", "timm_drop_path", "init_logit_scale", "init_logit_bias",
})  # fmt: skip
OF_PROJECTION = frozenset({"timm_proj", "timm_proj_bias", "hf_proj_type"})
# transformers
OF_FILES = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
)
_TOWERS = {
    "image": ("vision_cfg", asdict(CLIPVisionCfg())),
    "text": ("text_cfg", asdict(CLIPTextCfg())),
}

#: Entry of a checkpoint: open_clip's config of its model. With --model-config no other place is sure.
MODEL_ENTRY = "model_config"


@dataclass(frozen=True)
class ModelSpec:
    """The configs from which stock open_clip rebuilds a model without its weights."""

    name: str
    model_cfg: dict[str, Any]
    preprocess_cfg: dict[str, Any]

    @property
    def text_source(self) -> str | None:
        """Return the folder or hub name of the Hugging Face text tower.

        Returns:
            None for open_clip's own.
        """
        return self.model_cfg["text_cfg"].get("hf_model_name") or None

    @property
    def tokenizer_source(self) -> str | None:
        """Return the folder or hub name of the Hugging Face tokenizer.

        Returns:
            None for CLIP's BPE.
        """
        return self.model_cfg["text_cfg"].get("hf_tokenizer_name") or None


def read_params(checkpoint: Path) -> dict[str, Any]:
    """Read the arguments of the checkpoint's run (`params.txt` beside `checkpoints/` or beside the file).

    Values are read as Python literals, else as plain text, and never evaluated. UserError for a file that is not text.

    Returns:
        {} without the file.
    """
    for folder in (checkpoint.parent.parent, checkpoint.parent):
        file = folder / "params.txt"
        if file.is_file():
            with reading(file, "mend it, or move it away and name the model"):
                lines = file.read_text(encoding="utf-8").splitlines()
            return {
                name: _literal(value)
                for name, colon, value in (line.partition(": ") for line in lines)
                if colon
            }
    return {}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (
        ValueError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ):  # a plain string: params.txt writes them without quotes
        return text


def read_model_spec(
    checkpoint: str | os.PathLike[str], *, model: str | None = None, text_model: str | None = None
) -> ModelSpec:
    """Read the complete model and preprocessing configs of a training checkpoint.

    Honours the run's arguments that change either: `--model`, `--text-model`, `--siglip`, `--force-image-size`,
    `--force-context-length`, `--force-custom-text`, `--force-quick-gelu`, the `--image-*` preprocessing and the
    preprocessing of a `--pretrained` tag. `--force-patch-dropout` is a setting of the training and is left behind.

    Args:
        model: open_clip's name of the model; by default the run's.
        text_model: folder (or hub name) of the Hugging Face text tower; by default the run's, else the config's.

    Raises:
        UserError: no model name to be found, or one that open_clip does not know.
    """
    checkpoint = Path(checkpoint)
    params = read_params(checkpoint)
    own_config = str(params.get("model_config") or "")
    name = model or params.get("model")
    if not name:
        raise UserError(f"no params.txt beside {checkpoint} names its model: give the model's name")
    if own_config and model in (None, params.get("model"), Path(own_config).stem):
        name = _register_own(own_config, checkpoint)
    return spec_of_run(str(name), params, text_model or params.get("text_model"))


def _register_own(file: str, checkpoint: Path) -> str:
    """Register a run's own model config from the checkpoint, and return its name."""
    config = read_entry(checkpoint, MODEL_ENTRY)
    if isinstance(config, dict):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, Path(file).name)
            copy.write_text(json.dumps(config), encoding="utf-8")
            return register_model_file(copy, rename=True)
    return Path(file).stem


def spec_of_run(name: str, params: Mapping[str, Any], text_model: str | None = None) -> ModelSpec:
    """Read the configs of a model by name, with the changes that the arguments of a run make.

    Raises:
        UserError: an unknown name.
    """
    name, model_cfg, base_preprocess = _registered(name, params.get("pretrained"), text_model)

    vision_cfg = model_cfg["vision_cfg"]
    text_cfg = model_cfg["text_cfg"]
    if (size := params.get("force_image_size")) is not None:
        # [224], as open_clip's main reads the flag, is 224.
        one = isinstance(size, list | tuple) and len(size) == 1
        vision_cfg["image_size"] = size[0] if one else size
    if params.get("force_context_length"):
        text_cfg["context_length"] = params["force_context_length"]
    for switch in ("quick_gelu", "custom_text"):
        if params.get(f"force_{switch}"):
            model_cfg[switch] = True
    if params.get("siglip"):
        # open_clip's main passes these two to the constructor; the bias decides whether the parameter exists.
        model_cfg.update(init_logit_scale=2.302585092994046, init_logit_bias=-10)

    if "timm_model_name" in vision_cfg:
        vision_cfg["timm_model_pretrained"] = False
    if text_model:
        place = Path(text_model).expanduser()
        source = str(place.absolute() if place.is_dir() else text_model)
        text_cfg["hf_model_name"] = text_cfg["hf_tokenizer_name"] = source
    if "hf_model_name" in text_cfg:
        text_cfg["hf_model_pretrained"] = False
        text_cfg["hf_tokenizer_name"] = (
            text_cfg.get("hf_tokenizer_name") or text_cfg["hf_model_name"]
        )

    forced = {
        key: params.get(f"image_{key}") for key in ("mean", "std", "interpolation", "resize_mode")
    }
    preprocess_cfg = merge_preprocess_dict(
        merge_preprocess_dict(PreprocessCfg(), base_preprocess), forced
    )
    return ModelSpec(name, model_cfg, preprocess_cfg)


def _registered(
    name: str, pretrained: str | None, text_model: str | os.PathLike[str] | None
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Read open_clip's config of a model name (with or without schema) and the preprocessing that comes with it."""
    schema, identifier = parse_model_name(name)
    # open_clip itself would hand out CLIP's BPE tokenizer for a name that it does not know.
    check_model(name, text_model=text_model)
    if schema is None:
        name = identifier.replace("/", "-")
        tag_cfg = (get_pretrained_cfg(name, pretrained) if pretrained else None) or {}
        return name, get_model_config(name), tag_cfg
    if schema == "local-dir":
        config = config_here(Path(identifier))
        # The folder would allow its own code to run (see no_code_from_data), and so would an export of it.
        (config["model_cfg"]["text_cfg"].get("tokenizer_kwargs") or {}).pop(
            "trust_remote_code", None
        )
        return name, config["model_cfg"], config.get("preprocess_cfg", {})
    raise UserError(
        f"the config of '{name}' cannot be read offline: give the name of a registered model or a local-dir"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Two models with the same tensors may compute two functions: other heads, another pooling, another activation
# ---------------------------------------------------------------------------------------------------------------------


def first_difference(
    first: Mapping[str, Any], second: Mapping[str, Any], ignored: frozenset[str]
) -> tuple[str, str, str] | None:
    """Find the first entry in which two nested configs differ: its dotted name and both values as text.

    Returns:
        None if in none.
    """
    for key in sorted((first.keys() | second.keys()) - ignored):
        a, b = (_as_read(config.get(key)) for config in (first, second))
        # an absent switch is one that is off, and an absent part one whose switches are
        if all(each is None or each is False or isinstance(each, Mapping) for each in (a, b)):
            inner = first_difference(a or {}, b or {}, ignored)
            if inner is not None:
                return f"{key}.{inner[0]}", *inner[1:]
        elif a != b:
            return key, _shown(a), _shown(b)
    return None


def _as_read(value: Any) -> Any:
    """Convert a tuple to the list that JSON makes of it."""
    return list(value) if isinstance(value, tuple) else value


def tower_difference(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    tower: str,
    ignored: frozenset[str] = NOT_OF_FUNCTION,
) -> tuple[str, str, str] | None:
    """Find the first setting by which a tower of two model configs computes another function, as `first_difference` does."""
    return first_difference(tower_config(first, tower), tower_config(second, tower), ignored)


def complete_config(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a model's config with open_clip's values for the settings of its towers that it leaves out."""
    return {
        **model_cfg,
        **{part: {**defaults, **model_cfg[part]} for part, defaults in _TOWERS.values()},
    }


def tower_config(model_cfg: Mapping[str, Any], tower: str) -> dict[str, Any]:
    """Select the entries of a model's config that decide the function of a tower, "image" or "text", with open_clip's defaults.

    Sizes of inputs are left out: shapes of tensors show those that matter.
    """
    part, defaults = _TOWERS[tower]
    config = {key: value for key, value in model_cfg[part].items() if value is not None}
    foreign = config.get("timm_model_name") or config.get("hf_model_name")
    if "timm_model_name" in config:  # the tag after the point names weights
        config["timm_model_name"] = config["timm_model_name"].partition(".")[0]
    settings = {**defaults, **config, "image_size": None, "context_length": None}
    return (
        {part: settings} if foreign else {part: settings, "quick_gelu": model_cfg.get("quick_gelu")}
    )


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value) or "empty"


def write_config(
    folder: Path, model_cfg: dict[str, Any], preprocess_cfg: Mapping[str, Any]
) -> None:
    config = {"model_cfg": model_cfg, "preprocess_cfg": dict(preprocess_cfg)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
        try:
            return read_model_spec(path, model=model_name, text_model=text_model)
        except UserError:
            read_state_dict(path)  # of a file that is no checkpoint, this says so
            raise
    if kind == "folder":
        check_local_dir(path)
        return spec_of_run(LOCAL_DIR + str(path.absolute()), {})
    name, tag = (text, None) if kind == "hub" else _name_and_tag(text)
    return spec_of_run(name, {"pretrained": tag})


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


@no_code_from_data()
def assemble(
    checkpoint: Path, spec: ModelSpec, weights: dict[str, Tensor]
) -> tuple[ClipModel, HFTokenizer | SimpleTokenizer]:
    """Build the model of a spec with a checkpoint's weights, and its tokenizer.

    Raises:
        UserError: they do not fit.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        no_alarm(),
    ):  # from the config that an export would hold
        write_config(Path(folder), spec.model_cfg, spec.preprocess_cfg)
        model: ClipModel = open_clip.create_model(
            LOCAL_DIR + folder, load_weights=False, pretrained_text=False
        )
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
        )
    # open_clip only warns, and computes other embeddings than the weights were trained for.
    if (get_pretrained_cfg(name, tag) or {}).get("quick_gelu") and not (
        get_model_config(name) or {}
    ).get("quick_gelu"):
        raise UserError(
            f"the weights '{tag}' were trained with QuickGELU, which {name} lacks: write {name}-quickgelu/{tag}"
        )
    return name, tag
