"""A frozen tower from the name of an encoder, in open_clip's form: its embeddings are those of the exported model.

    timm:NAME|FOLDER         an image tower of timm
    timm:NAME,FILE           the same with the weights of a file (.pth, .safetensors) under timm's or torchvision's names
    hf:NAME|FOLDER           a vision model of transformers, as it pools itself; or a text tower of transformers or
                             sentence-transformers, pooled by its own config
    NAME/TAG, FOLDER, *.pt   either tower of an open_clip model

`F` width of the features, which come before any projection.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor, nn

from open_clip_zerovl.checkpoints.loading import ModelSpec, load_model, spec_of, tokenizer_of
from open_clip_zerovl.checkpoints.transformers_folder import preprocess_of
from open_clip_zerovl.checkpoints.transformers_towers import PooledVision
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.features.encoder import (
    FrozenModel,
    module_digest,
    split_transform,
    text_tower_before_projection,
    tower_before_projection,
)
from open_clip_zerovl.models.configs import DEFAULT_CONTEXT_LENGTH, hub_or_cache, no_code_from_data
from open_clip_zerovl.models.text_towers import DECODERS, LAST_TOKEN

# The other tower of a model that is built for one of them.
SMALL_IMAGE = {"image_size": 8, "layers": 1, "width": 8, "head_width": 8, "patch_size": 8}
SMALL_TEXT = {"context_length": 4, "vocab_size": 8, "width": 8, "heads": 1, "layers": 1}
_POOLERS = {"cls": "cls_last_hidden_state_pooler", "mean": "mean_pooler", "lasttoken": LAST_TOKEN}
# Text models whose positions begin after the padding token's number.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "mpnet", "camembert")
_PROJECTION = re.compile(r"(proj|text_projection|head\.proj|head\.mlp|attnpool\.c_proj)(\..*)?")


@dataclass(frozen=True)
class Tower:
    """One frozen tower.

    Attributes:
        side: "image" or "text".
        name: as given.
        kind: kind of its projection in open_clip: "timm", "vit", "resnet", "hf" or "clip"; "vision" if it has no such tower.
        cfg: open_clip's vision_cfg or text_cfg.
        module: pictures or tokens -> features (b, F).
        tensors: the tower's weights under open_clip's names, without its projection.
        width: F.
        preprocess_cfg: open_clip's settings of an image tower's transform.
        tokenizer: the tokenizer of a text tower.
        quick_gelu: whether the model that the tower comes from has QuickGELU; None if it has no such choice.
        files: a folder with config and tokenizer that `cfg` names; it is removed with the tower.
    """

    side: str
    name: str
    kind: str
    cfg: dict[str, Any]
    module: nn.Module
    tensors: dict[str, Tensor]
    width: int
    preprocess_cfg: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    quick_gelu: bool | None = None
    files: TemporaryDirectory[str] | None = None

    def frozen(self, device: torch.device) -> FrozenModel:
        """Move the tower to its device, for `features.embed`."""
        module = self.module.eval().to(device).requires_grad_(False)
        given: dict[str, Any] = {
            "device": device,
            "unit_length": False,
        }
        if self.side == "image":
            transform = image_transform_v2(PreprocessCfg(**self.preprocess_cfg), is_train=False)
            picture_transform, mean, std = split_transform(transform)
            given |= {
                "image_tower": module,
                "picture_transform": picture_transform,
                "mean": mean,
                "std": std,
            }
        else:
            config: Any = getattr(module, "config", None)  # of transformers' towers
            padding = config.pad_token_id if self.kind == "hf" else None
            given |= {
                "text_tower": module,
                "tokenizer": self.tokenizer,
                "text_padding": padding,
            }
        digest = module_digest(
            module,
            inputs=transform if self.side == "image" else self.tokenizer,
            precision="fp32",
        )
        return FrozenModel(self.name, **given, fingerprints={self.side: digest})

    def words(self) -> str:
        """Describe the tower in a line."""
        line = f"{self.name}: features of width {self.width}"
        if self.side == "image":
            return f"{line}, pictures of {' x '.join(map(str, self.size))} px"
        pooled = (self.cfg.get("hf_pooler_type") or "").split("_")[0]
        return f"{line}, {self.tokenizer.context_length} tokens" + (
            f", pooling {pooled}" if pooled else ""
        )

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width of an image tower's pictures."""
        return size_of(self.preprocess_cfg)


def size_of(preprocess_cfg: Mapping[str, Any]) -> tuple[int, int]:
    """Read height and width from open_clip's preprocess_cfg."""
    size = preprocess_cfg["size"]
    return (size, size) if isinstance(size, int) else tuple(size)


@no_code_from_data()
def open_tower(
    name: str,
    side: str,
    *,
    context_length: int | None = None,
    load: Callable[[str], Any] = load_model,
) -> Tower:
    """Open the tower of an encoder.

    Args:
        name: see the module's text.
        side: "image" or "text".
        context_length: tokens of an `hf:` encoder's texts; None: its own, at most 77.
        load: `load_model`, or one that keeps its models, so that both towers of a model come from one loading.

    Raises:
        UserError: an encoder that cannot be found, or whose tower open_clip cannot hold.
    """
    kind, colon, place = name.partition(":")
    if colon and kind == "timm":
        if side == "text":
            raise UserError(
                f"{name} is an image encoder of timm; give it as --image, and a text encoder as --text"
            )
        return _timm(name, place)
    if colon and kind == "hf":
        folder = Path(place).expanduser()
        source = str(folder.absolute()) if folder.is_dir() else place
        with hub_or_cache(asked=not folder.is_dir()):
            if side == "image":
                return _hf_vision(name, source)
            return _hf_text(name, source, context_length)
    if context_length is not None:
        raise UserError(
            f"--context-length is of hf: encoders, and {name} is a model of open_clip, whose texts have its own length"
        )
    return _of_open_clip(name, side, load)


def _timm(name: str, place: str) -> Tower:
    from timm.data import resolve_model_data_config

    place, _, file = place.partition(",")
    folder = Path(place).expanduser()
    source, architecture = place, place.removeprefix("hf-hub:").rpartition("/")[2]
    if folder.is_dir():
        source = f"local-dir:{folder.absolute()}"
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
            "architecture"
        ]
    cfg: dict[str, Any] = {"timm_pool": "", "timm_proj": "linear", "image_size": 224}
    with hub_or_cache(asked=not (file or folder.is_dir())):
        visual = _visual({**cfg, "timm_model_name": source, "timm_model_pretrained": not file})
    if file:
        _load_file(visual.trunk, architecture, Path(file).expanduser())
    data = resolve_model_data_config(visual.trunk)
    size = list(data["input_size"][1:])
    pool = getattr(visual.trunk, "global_pool", "")
    cfg |= {
        "timm_model_name": architecture,
        "timm_model_pretrained": False,
        "image_size": size,
        "timm_pool": pool if isinstance(pool, str) else "",
    }
    rebuilt = {key: value.shape for key, value in _visual(cfg).state_dict().items()}
    if rebuilt != {key: value.shape for key, value in visual.state_dict().items()}:
        raise UserError(
            f"{name} was built with special arguments, but open_clip builds timm's {architecture} from its name alone, which "
            "gives other tensors; give a model that timm builds from its name"
        )
    preprocess = {
        "size": size,
        "mean": list(data["mean"]),
        "std": list(data["std"]),
        "mode": "RGB",
        "interpolation": data["interpolation"],
        "resize_mode": "squash" if data["crop_mode"] == "squash" else "shortest",
    }
    return _image_tower(name, visual, cfg, preprocess)


def _load_file(trunk: Any, architecture: str, file: Path) -> None:
    """Load a file's weights as timm loads its own: renamed where timm knows the names, all of them, the classifier left out."""
    import timm
    from timm.models import load_state_dict

    file.stat()  # timm's error names no file
    cfg = timm.get_pretrained_cfg(architecture)
    classifier = load_state_dict(str(file)).get(f"{cfg.classifier}.weight") if cfg else None
    # With another number of classes than its own timm would load what fits, and leave the rest random.
    classes = {} if classifier is None else {"num_classes": len(classifier)}
    overlay = {"file": str(file), **classes}
    whole = timm.create_model(
        architecture, pretrained=True, pretrained_cfg_overlay=overlay, **classes
    )
    trunk.load_state_dict({name: whole.state_dict()[name] for name in trunk.state_dict()})


def _visual(vision_cfg: dict[str, Any]) -> Any:
    return CustomTextCLIP(8, vision_cfg, SMALL_TEXT).visual


def _image_tower(
    name: str,
    visual: Any,
    cfg: dict[str, Any],
    preprocess: dict[str, Any],
    quick_gelu: bool | None = None,
) -> Tower:
    if type(visual).__name__ == "TimmModel" and not cfg.get("timm_proj", "linear"):
        visual.trunk.reset_classifier(0)  # the classifier is this tower's projection
    module = tower_before_projection(visual)
    kind = {"TimmModel": "timm", "VisionTransformer": "vit", "ModifiedResNet": "resnet"}[
        type(visual).__name__
    ]
    cfg = {**cfg, "output_tokens": False} if kind == "vit" else cfg
    with torch.no_grad():
        width = module.eval()(torch.zeros(1, 3, *size_of(preprocess))).shape[1]
    quick_gelu = None if kind == "timm" else quick_gelu
    return Tower(
        "image",
        name,
        kind,
        cfg,
        module,
        _towers_own(visual),
        width,
        preprocess,
        quick_gelu=quick_gelu,
    )


def _towers_own(tower: nn.Module) -> dict[str, Tensor]:
    return {
        key: value for key, value in tower.state_dict().items() if not _PROJECTION.fullmatch(key)
    }


def _hf_vision(name: str, source: str) -> Tower:
    from transformers import AutoConfig, AutoImageProcessor, AutoModel

    config = AutoConfig.from_pretrained(source)
    config = getattr(config, "vision_config", config)  # of a dual encoder
    model, loading = AutoModel.from_pretrained(source, config=config, output_loading_info=True)
    if loading["missing_keys"]:
        raise UserError(
            f"{name} holds no weights of {sorted(loading['missing_keys'])[0]}; give an encoder with all of them"
        )
    preprocess = preprocess_of(AutoImageProcessor.from_pretrained(source))
    visual = PooledVision(model.float().eval(), preprocess)
    with torch.no_grad():
        pooled = model(pixel_values=torch.zeros(1, 3, *size_of(preprocess))).get("pooler_output")
    if pooled is None or pooled.shape != (1, getattr(config, "hidden_size", 0)):
        raise UserError(
            f"{name}, a {config.model_type}, pools no vector of its pictures; give another encoder"
        )
    cfg = {"hf_model_name": Path(source).name, "image_size": preprocess["size"]}
    return Tower("image", name, "vision", cfg, visual, {}, pooled.shape[1], preprocess)


def _hf_text(name: str, source: str, context_length: int | None) -> Tower:
    _refuse_unread(name, source)
    pool, own_length = _sentence_transformer(source)
    decoder = _config(source, "config.json").get("model_type") in DECODERS
    pool = pool or ("lasttoken" if decoder else "cls")
    if pool not in _POOLERS:
        raise UserError(
            f"{name} pools its tokens by {pool}, which open_clip's text towers cannot; give an encoder that pools by "
            + " or ".join(_POOLERS)
        )
    cfg = {
        "hf_model_name": source,
        "hf_tokenizer_name": source,
        "hf_model_pretrained": True,
        "hf_pooler_type": _POOLERS[pool],
        "hf_proj_type": "linear",
    }
    text = CustomTextCLIP(8, SMALL_IMAGE, cfg).text.float()
    config, files = text.config, _with_padding(text, name, source)
    if files is not None:
        cfg |= dict.fromkeys(("hf_model_name", "hf_tokenizer_name"), files.name)
    places = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT_LENGTH
    places -= config.pad_token_id + 1 if config.model_type in _OFFSET_POSITIONS else 0
    length = context_length or min(own_length, places)
    if length > places:
        raise UserError(
            f"--context-length {length}: {name} has {places} positions; give at most {places}"
        )
    cfg |= {"hf_model_pretrained": False, "context_length": length}
    return _text_tower(name, text, cfg, files=files)


def _with_padding(text: Any, name: str, source: str) -> TemporaryDirectory[str] | None:
    """Write config and tokenizer of a tower that pads after a text, with a token of its own.

    open_clip's towers take for padding each token with the number of the config's. Decoders have none, or end their texts with
    it, and some tokenizers pad before the text, where learned positions would be shifted.

    Returns:
        None where those of `source` do.
    """
    from transformers import AutoTokenizer

    config, tokenizer = text.config, AutoTokenizer.from_pretrained(source)
    pieces = 1 + max(tokenizer.get_vocab().values())
    embedded = text.transformer.get_input_embeddings().num_embeddings
    if pieces > embedded:
        raise UserError(
            f"the tokenizer of {name} has {pieces:,} pieces, and the model embeds {embedded:,}; give the tokenizer that it was "
            "trained with"
        )
    of_text, padding = tokenizer("a").input_ids, getattr(config, "pad_token_id", None)
    lacking = tokenizer.pad_token_id is None or tokenizer.pad_token_id in of_text
    if not lacking and tokenizer.pad_token_id == padding and tokenizer.padding_side == "right":
        return None
    if config.model_type in _OFFSET_POSITIONS and (lacking or tokenizer.pad_token_id != padding):
        raise UserError(
            f"{name} has no padding token that its texts lack, by which open_clip's text towers find the end of a text; give "
            "another encoder"
        )
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"  # the second is saved
    if lacking:
        tokenizer.add_special_tokens({"pad_token": "<|padding|>"})
        rows = text.transformer.get_input_embeddings().num_embeddings
        if len(tokenizer) > rows:
            table = text.transformer.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            table.weight.data[rows:] = 0.0  # no text has this token
    config.pad_token_id, config.vocab_size = (
        tokenizer.pad_token_id,
        text.transformer.config.vocab_size,
    )
    files = TemporaryDirectory()
    config.save_pretrained(files.name)
    tokenizer.save_pretrained(files.name)
    return files


def _refuse_unread(name: str, source: str) -> None:
    """Refuse settings of sentence-transformers that change its embeddings and that open_clip's text towers do not have.

    Raises:
        UserError: a layer besides Transformer, Pooling and Normalize, a model in a folder of its own, lower case, a prompt.
    """
    modules: Any = _config(source, "modules.json") or []
    settings = _config(source, "config_sentence_transformers.json")
    layers = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    others = sorted(layers.keys() - {"Transformer", "Pooling", "Normalize"})
    prompt = (settings.get("prompts") or {}).get(settings.get("default_prompt_name"))
    reason = None
    if others:
        reason = f"has a layer {others[0]} after its pooling"
    elif layers.get("Transformer"):
        reason = f"has its model in {layers['Transformer']}; save it again with a new sentence-transformers"
    elif _config(source, "sentence_bert_config.json").get("do_lower_case"):
        reason = "writes texts in lower case before its tokenizer (do_lower_case)"
    elif prompt:
        reason = f"puts the prompt {prompt!r} before each text"
    if reason:
        raise UserError(
            f"{name} {reason}, which open_clip's text towers do not; give another encoder"
        )


def _sentence_transformer(source: str) -> tuple[str | None, int]:
    """Read pooling (None: not named) and longest text from the configs of sentence-transformers and of the tokenizer."""
    pooling = _config(source, "1_Pooling/config.json")
    prefix, older = "pooling_mode_", {"cls_token": "cls", "mean_tokens": "mean"}
    modes = [
        key.removeprefix(prefix)
        for key, on in pooling.items()
        if key.startswith(prefix) and on is True
    ]
    modes = [older.get(mode, mode) for mode in modes]
    lengths = [
        DEFAULT_CONTEXT_LENGTH,
        _config(source, "sentence_bert_config.json").get("max_seq_length"),
        _config(source, "tokenizer_config.json").get("model_max_length"),
    ]
    return pooling.get("pooling_mode") or "+".join(modes) or None, int(
        min(length for length in lengths if length)
    )


def _config(source: str, file: str) -> dict[str, Any]:
    """Read a JSON file of a model's folder or of the hub, {} if it has none."""
    from transformers.utils import cached_file

    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    path = cached_file(source, file, **quiet)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else {}


def _text_tower(name: str, text: Any, cfg: dict[str, Any], **more: Any) -> Tower:
    kind = "hf" if cfg.get("hf_model_name") else "clip"
    tokenizer = tokenizer_of(ModelSpec("text", {"text_cfg": cfg}, {}))
    settings = _towers_own(text)
    module = text_tower_before_projection(text)
    with torch.no_grad():
        features = module.eval()(tokenizer(["a"])).shape[1]
    return Tower("text", name, kind, cfg, module, settings, features, tokenizer=tokenizer, **more)


def _of_open_clip(name: str, side: str, load: Callable[[str], Any]) -> Tower:
    """Open a tower of an open_clip model."""
    model, _, _ = load(name)
    spec = spec_of(name)
    quick = bool(spec.model_cfg.get("quick_gelu"))
    if side == "image":
        cfg, preprocess = dict(spec.model_cfg["vision_cfg"]), dict(model.visual.preprocess_cfg)
        return _image_tower(name, model.visual, cfg, preprocess, quick)
    if "multimodal_cfg" in spec.model_cfg:
        raise UserError(
            f"{name} writes captions, and its text tower has no features of a whole text; give another --text"
        )
    cfg = copy.deepcopy(spec.model_cfg["text_cfg"])
    if not hasattr(model, "text"):
        built = CustomTextCLIP(spec.model_cfg["embed_dim"], SMALL_IMAGE, cfg, quick_gelu=quick)
        weights = convert_to_custom_text_state_dict(model.state_dict())
        built.text.load_state_dict(
            {key[5:]: value for key, value in weights.items() if key.startswith("text.")}
        )
        return _text_tower(name, built.text, cfg, quick_gelu=quick)
    more: Mapping[str, Any] = {} if cfg.get("hf_model_name") else {"quick_gelu": quick}
    return _text_tower(name, model.text, cfg, **more)
