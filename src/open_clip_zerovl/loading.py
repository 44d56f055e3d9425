"""What opens a checkpoint: the model that its weights belong to, its evaluation transform, its tokenizer.

A training checkpoint (`logs/NAME/checkpoints/epoch_N.pt`) holds weights but not the model they belong to; the run's
`params.txt` does. `read_model_spec` puts the two back together, `assemble` builds the model of them through open_clip's
own constructor and checks every tensor, `load_model` is the front door for all kinds of checkpoint.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import get_model_config, parse_model_name
from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict
from torch import Tensor, nn

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.models import check_model

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
LOCAL_DIR = "local-dir:"

Preprocess = Callable[[Any], Tensor]
Tokenizer = Callable[[list[str]], Tensor]


@dataclass(frozen=True)
class ModelSpec:
    """What a training checkpoint leaves out: all that stock open_clip needs to rebuild the model."""

    name: str
    model_cfg: dict[str, Any]
    preprocess_cfg: dict[str, Any]
    force_image_size: Any = None  # kept only to explain a mismatch

    @property
    def text_source(self) -> str | None:
        """Folder or hub name of the Hugging Face text tower, None for open_clip's own."""
        return self.model_cfg["text_cfg"].get("hf_model_name") or None

    @property
    def tokenizer_source(self) -> str | None:
        """Folder or hub name of the Hugging Face tokenizer, None for CLIP's BPE."""
        return self.model_cfg["text_cfg"].get("hf_tokenizer_name") or None


# ---------------------------------------------------------------------------------------------------------------------
# Reading a run
# ---------------------------------------------------------------------------------------------------------------------


def read_params(checkpoint: Path) -> dict[str, Any]:
    """The arguments of the checkpoint's run (`params.txt` beside `checkpoints/` or beside the file), {} without one."""
    for folder in (checkpoint.parent.parent, checkpoint.parent):
        file = folder / "params.txt"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            return {name: _literal(value) for name, colon, value in (line.partition(": ") for line in lines) if colon}
    return {}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a plain string: params.txt writes them without quotes
        return text


def read_model_spec(
    checkpoint: str | os.PathLike[str], *, model: str | None = None, text_model: str | None = None
) -> ModelSpec:
    """The complete model and preprocessing configs of a training checkpoint.

    Honours the run's arguments that change either: `--model`, `--text-model`, `--siglip`, `--force-image-size`,
    `--force-context-length`, `--force-custom-text`, `--force-quick-gelu`, the `--image-*` preprocessing and what a
    `--pretrained` tag brings. `--force-patch-dropout` is a setting of the training and is left behind.

    Args:
        model: open_clip's name of the model; by default the run's.
        text_model: folder (or hub name) of the Hugging Face text tower; by default the run's, else the config's.

    Raises:
        UserError: no model name to be found, or one that open_clip does not know.
    """
    checkpoint = Path(checkpoint)
    params = read_params(checkpoint)
    name = model or params.get("model")
    if not name:
        raise UserError(f"{checkpoint} has no params.txt beside it that names its model: give the model's name")
    text_model = text_model or params.get("text_model")
    name, model_cfg, base_preprocess = _registered(str(name), params.get("pretrained"), text_model)

    vision_cfg, text_cfg = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    image_size = _unwrapped(params.get("force_image_size"))
    if image_size is not None:
        vision_cfg["image_size"] = image_size
    if params.get("force_context_length"):
        text_cfg["context_length"] = params["force_context_length"]
    if params.get("force_quick_gelu"):
        model_cfg["quick_gelu"] = True
    if params.get("force_custom_text"):
        model_cfg["custom_text"] = True
    if params.get("siglip"):
        # open_clip's main passes these two to the constructor; the bias decides whether the parameter exists.
        model_cfg.update(init_logit_scale=2.302585092994046, init_logit_bias=-10)

    if "timm_model_name" in vision_cfg:
        vision_cfg["timm_model_pretrained"] = False
    if text_model:
        source = str(Path(text_model).expanduser().absolute()) if Path(text_model).expanduser().is_dir() else text_model
        text_cfg["hf_model_name"] = text_cfg["hf_tokenizer_name"] = str(source)
    if "hf_model_name" in text_cfg:
        text_cfg["hf_model_pretrained"] = False
        text_cfg["hf_tokenizer_name"] = text_cfg.get("hf_tokenizer_name") or text_cfg["hf_model_name"]

    forced = {key: params.get(f"image_{key}") for key in ("mean", "std", "interpolation", "resize_mode")}
    preprocess_cfg = merge_preprocess_dict(merge_preprocess_dict(PreprocessCfg(), base_preprocess), forced)
    return ModelSpec(name, model_cfg, preprocess_cfg, force_image_size=image_size)


def _registered(
    name: str, pretrained: str | None, text_model: str | os.PathLike[str] | None
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """open_clip's config of a model name (with or without schema) and the preprocessing that comes with it."""
    schema, identifier = parse_model_name(name)
    # open_clip itself would hand out CLIP's BPE tokenizer for a name that it does not know.
    check_model(name, text_model=text_model)
    if schema is None:
        name = identifier.replace("/", "-")
        tag_cfg = (get_pretrained_cfg(name, pretrained) if pretrained else None) or {}
        return name, get_model_config(name), tag_cfg
    if schema == "local-dir":
        config = read_config(Path(identifier))
        return name, config["model_cfg"], config.get("preprocess_cfg", {})
    raise UserError(f"training from '{name}' cannot be traced back offline: export from a model name or a local-dir")


def _unwrapped(size: Any) -> Any:
    """`[224]` -> 224, as open_clip's main reads `--force-image-size`."""
    if isinstance(size, (list, tuple)):
        return size[0] if len(size) == 1 else list(size)
    return size


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{folder} is no local-dir folder: {CONFIG_FILE} is missing")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(config, dict) or "model_cfg" not in config:
        raise UserError(f"{file} has no 'model_cfg': it is not an open_clip config")
    return config


def write_config(folder: Path, model_cfg: dict[str, Any], preprocess_cfg: Mapping[str, Any]) -> None:
    config = {"model_cfg": model_cfg, "preprocess_cfg": dict(preprocess_cfg)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_state_dict(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights of a checkpoint under open_clip's own names: without `module.` (DDP) and `_orig_mod.` (compile).

    Only tensors and plain containers are loaded (`weights_only=True`); a pickle that wants to run code is refused.

    Raises:
        UserError: no such file, a file that does not load so, or one without weights.
    """
    checkpoint = Path(checkpoint)
    content = _read_content(checkpoint)
    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        raise UserError(f"{checkpoint} holds no 'state_dict' of tensors: give an open_clip training checkpoint")
    plain: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key.replace("_orig_mod.", "").removeprefix("module.")
        if name in plain:
            raise UserError(f"{checkpoint} holds '{name}' twice, with and without a wrapper's prefix")
        plain[name] = tensor
    return plain


def read_epoch(checkpoint: str | os.PathLike[str]) -> int | None:
    """The epoch after which open_clip saved a checkpoint, None where it does not say. Errors as `read_state_dict`."""
    content = _read_content(Path(checkpoint))
    epoch = content.get("epoch") if isinstance(content, dict) else None
    return epoch if isinstance(epoch, int) else None


# What torch's loader raises, beside its own refusal, on bytes that are no checkpoint or only the beginning of one.
UNREADABLE = (
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    AssertionError,
    AttributeError,
    TypeError,
    struct.error,
)


def _read_content(checkpoint: Path) -> Any:
    if checkpoint.is_dir():
        raise UserError(f"{checkpoint} is a folder; give a checkpoint file, such as RUN/checkpoints/epoch_N.pt")
    if not checkpoint.is_file():
        raise UserError(f"checkpoint {checkpoint} does not exist; correct the path")
    try:
        # Mapped, the optimizer's two thirds of the file are never read; only the zip format can be mapped.
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(checkpoint))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{checkpoint} is no plain checkpoint of tensors and was refused, since loading it could run code: "
            f"{unpickling_reason(error)}"
        ) from error
    except UNREADABLE as error:
        raise UserError(f"{checkpoint} cannot be loaded, it may be cut short: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says first, or its kind where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def unpickling_reason(error: pickle.UnpicklingError) -> str:
    """What torch found in the file, without its advice to load it unchecked, which comes first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = [line for line in lines[1:] if not line.startswith(("Please file", "Check the documentation"))]
    return (found or lines or [type(error).__name__])[0]


# ---------------------------------------------------------------------------------------------------------------------
# Building a model
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def _no_alarm() -> Iterator[None]:
    """Keeps back open_clip's warning of random weights where weights are loaded right after."""
    root = logging.getLogger()  # open_clip logs there

    def keep(record: logging.LogRecord) -> bool:
        return not any(words in record.getMessage() for words in ("initialized randomly", "no CLIP weights found"))

    root.addFilter(keep)
    try:
        yield
    finally:
        root.removeFilter(keep)


def _skeleton(spec: ModelSpec) -> nn.Module:
    """The model without its weights, built by open_clip from the very config that an export holds."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), spec.model_cfg, spec.preprocess_cfg)
        try:
            with _no_alarm():
                return open_clip.create_model(LOCAL_DIR + folder, load_weights=False, pretrained_text=False)
        # What open_clip, timm and transformers raise for a tower that is not there or a config that does not fit.
        except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"open_clip cannot build {spec.name}: {first_line(error)}; its text tower is looked for in "
                f"'{spec.text_source or 'open_clip'}': if that is missing, give the folder of the text model"
            ) from error


def _tokenizer(spec: ModelSpec) -> HFTokenizer | SimpleTokenizer:
    """The tokenizer that open_clip would give, or a sentence where it would quietly give another."""
    text_cfg = spec.model_cfg["text_cfg"]
    source = spec.tokenizer_source
    if source is None:
        tokenizer = open_clip.get_tokenizer(spec.name, context_length=text_cfg.get("context_length"))
        if not isinstance(tokenizer, SimpleTokenizer):
            raise UserError(f"the tokenizer of {spec.name} ({type(tokenizer).__name__}) has no files to export")
        return tokenizer
    try:
        tokenizer = HFTokenizer(
            source,
            context_length=text_cfg.get("context_length", 77),
            tokenizer_mode=text_cfg.get("tokenizer_mode"),
            **(text_cfg.get("tokenizer_kwargs") or {}),
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the tokenizer of {spec.name} cannot be loaded from '{source}' ({first_line(error)}): give the folder of "
            "the text tower that the run was trained with"
        ) from error
    return tokenizer


def _check_weights(weights: dict[str, Tensor], model: nn.Module, checkpoint: Path, spec: ModelSpec) -> None:
    """Every tensor of the checkpoint has its place, of its shape, in the model, and none stays empty."""
    expected = model.state_dict()
    # transformers stopped to store this constant at 4.31.
    position_ids = "text.transformer.embeddings.position_ids"
    if position_ids not in expected:
        weights.pop(position_ids, None)
    missing = sorted(expected.keys() - weights.keys())
    unexpected = sorted(weights.keys() - expected.keys())
    reshaped = sorted(k for k in expected.keys() & weights.keys() if expected[k].shape != weights[k].shape)
    if not (missing or unexpected or reshaped):
        return
    found = []
    if missing:
        found.append(f"{len(missing)} tensors are missing (first: {', '.join(missing[:3])})")
    if unexpected:
        found.append(f"{len(unexpected)} are unexpected (first: {', '.join(unexpected[:3])})")
    if reshaped:
        key = reshaped[0]
        found.append(
            f"{len(reshaped)} have another shape (first: {key} {tuple(weights[key].shape)} instead of "
            f"{tuple(expected[key].shape)})"
        )
    hint = ""
    if spec.force_image_size is not None and "timm_model_name" in spec.model_cfg["vision_cfg"]:
        hint = (
            f" (the run used --force-image-size {spec.force_image_size} with a timm tower, which stock open_clip cannot "
            "rebuild at another size than its own; zerovl convert --image-model writes it as open_clip's own ViT)"
        )
    raise UserError(f"{checkpoint} is a checkpoint of another model than {spec.name}: {'; '.join(found)}{hint}")


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    model_name: str | None = None,
    text_model: str | None = None,
    device: str | torch.device = "cpu",
) -> tuple[nn.Module, Preprocess, Tokenizer]:
    """A model ready for evaluation, in float32 and eval mode, with its own evaluation transform and tokenizer.

    Args:
        name_or_path: `local-dir:/folder` or a folder with open_clip_config.json; a training checkpoint `epoch_N.pt`; or
            open_clip's `NAME/pretrained` (a tag) or `hf-hub:org/name`, which may download.
        model_name, text_model: for a checkpoint whose `params.txt` is away, or whose text tower has moved.

    Raises:
        UserError: whatever cannot be found, does not fit, or would leave the model at random weights.
    """
    text = os.fspath(name_or_path)
    folder = Path(text.removeprefix(LOCAL_DIR)).expanduser()
    if not text.startswith(LOCAL_DIR) and folder.is_file():
        model, preprocess, tokenizer = _load_checkpoint(folder, model_name, text_model)
        return model.to(device).eval(), preprocess, tokenizer
    if model_name or text_model:
        raise UserError(f"a model name or a text tower goes with a training checkpoint, and '{text}' is no such file")
    if text.startswith(LOCAL_DIR) or folder.is_dir():
        return _load_local_dir(folder, device)
    return _load_stock(text, device)


def _load_checkpoint(
    checkpoint: Path, model_name: str | None, text_model: str | None
) -> tuple[nn.Module, Preprocess, HFTokenizer | SimpleTokenizer]:
    weights = read_state_dict(checkpoint)
    spec = read_model_spec(checkpoint, model=model_name, text_model=text_model)
    model, tokenizer = assemble(checkpoint, spec, weights)
    return model, _evaluation_transform(model), tokenizer


def assemble(
    checkpoint: Path, spec: ModelSpec, weights: dict[str, Tensor]
) -> tuple[nn.Module, HFTokenizer | SimpleTokenizer]:
    model = _skeleton(spec)
    _check_weights(weights, model, checkpoint, spec)
    tokenizer = _tokenizer(spec)
    model.load_state_dict(weights)
    return model, tokenizer


def _evaluation_transform(model: nn.Module) -> Preprocess:
    return image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)


def _load_local_dir(folder: Path, device: str | torch.device) -> tuple[nn.Module, Preprocess, Tokenizer]:
    if not folder.is_dir():
        raise UserError(f"folder {folder} does not exist")
    config = read_config(folder)
    # Without weights open_clip would go on with random ones.
    if not any(any(folder.glob(f"*{ending}")) for ending in (".safetensors", ".bin", ".pth")):
        raise UserError(f"{folder} holds no weights: {WEIGHTS_FILE} is missing")
    source = config["model_cfg"].get("text_cfg", {}).get("hf_model_name")
    if source and os.path.isabs(source) and not os.path.isdir(source):
        raise UserError(
            f"{folder} was moved: its text tower is looked for in {source}; set hf_model_name in {CONFIG_FILE} to "
            f"{folder.absolute()}, or export again"
        )
    name = LOCAL_DIR + str(folder)
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(name, device=device)
        tokenizer = open_clip.get_tokenizer(name)
    except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"open_clip cannot load {name}: {first_line(error)}") from error
    return model.eval(), preprocess, tokenizer


def _load_stock(text: str, device: str | torch.device) -> tuple[nn.Module, Preprocess, Tokenizer]:
    name, tag = (text, None) if text.startswith("hf-hub:") else _name_and_tag(text)
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=tag, device=device)
        tokenizer = open_clip.get_tokenizer(name)
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"open_clip cannot load {text}: {first_line(error)}") from error
    return model.eval(), preprocess, tokenizer


def _name_and_tag(text: str) -> tuple[str, str]:
    """`ViT-B/32/laion2b_s34b_b79k` -> ("ViT-B-32", "laion2b_s34b_b79k")."""
    known = open_clip.list_models()
    if (bare := text.replace("/", "-")) in known:
        raise UserError(f"'{text}' names no weights: write {bare}/TAG, {_tags(bare)}")
    name, _, tag = text.rpartition("/")
    name = name.replace("/", "-")
    if name not in known:
        raise UserError(
            f"'{text}' is neither a folder with {CONFIG_FILE}, nor a checkpoint file, nor open_clip's NAME/TAG"
        )
    if tag not in list_pretrained_tags_by_model(name):
        raise UserError(f"open_clip has no weights '{tag}' of {name}: {_tags(name)}")
    return name, tag


def _tags(name: str) -> str:
    tags = list_pretrained_tags_by_model(name)
    return f"with a tag of {', '.join(tags)}" if tags else "open_clip has none for this model"
