"""Two towers and their heads as a folder that stock open_clip loads, or transformers where open_clip has no such towers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip.model import CustomTextCLIP
from torch import Tensor
from torch.nn.functional import normalize

from open_clip_zerovl.align.encoders import SMALL_IMAGE, SMALL_TEXT, Tower
from open_clip_zerovl.align.train import Heads
from open_clip_zerovl.checkpoints.card import ModelCard
from open_clip_zerovl.checkpoints.export import PROBE_TEXTS, check_destination, write_local_dir
from open_clip_zerovl.checkpoints.loading import ModelSpec, load_model
from open_clip_zerovl.checkpoints.transformers_folder import (
    is_transformers_folder,
    whole_model,
    write_transformers,
)
from open_clip_zerovl.checkpoints.transformers_towers import POOLED_TYPES, refuse
from open_clip_zerovl.core.errors import UserError

TRANSFORMERS_ALONE = "transformers' AutoModel and AutoProcessor open it; open_clip and zerovl's other commands cannot"
TOLERANCE = 1e-4  # of an embedding's entries: exported model and heads on features


def check_together(image: Tower, text: Tower) -> None:
    """Check that a folder can hold both towers with heads.

    Raises:
        UserError: it cannot.
    """
    if image.kind == "vision":
        try:
            if text.kind != "hf":
                refuse(f"{text.name} is a text tower of open_clip's own")
            whole_model(_in_memory(image, text, Heads((image.width, text.width), 1), (1.0, 1.0)))
        except UserError as error:
            raise UserError(
                f"open_clip has no image tower such as {image.name}, and {str(error).partition(';')[0]}; give a "
                f"text encoder of {', '.join(POOLED_TYPES)} with CLS pooling, or an image encoder of timm"
            ) from error
    # A model of open_clip has QuickGELU or GELU in both towers.
    both = (image.quick_gelu, text.quick_gelu)
    if None not in both and both[0] != both[1]:
        named = (image.name, text.name) if image.quick_gelu else (text.name, image.name)
        raise UserError(
            f"{named[0]} was trained with QuickGELU and {named[1]} without, but both towers of an open_clip model have the "
            "same activation; give two encoders that agree, or take one of them from timm or transformers"
        )


def export_aligned(
    out: Path,
    image: Tower,
    text: Tower,
    heads: Heads,
    scales: tuple[float, float],
    *,
    metrics: Mapping[str, float],
    params: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model in open_clip's form, or with a vision model of transformers as its dual encoder.

    Args:
        scales: by which image and text features were multiplied (`rows.Features`).
        metrics, params: of the training of the heads, for the model card.

    Raises:
        UserError: as `write_local_dir`; a folder whose model gives other embeddings than the heads.
    """
    metrics = {f"held-out_{key}": value for key, value in metrics.items()}
    encoders = (image.name, text.name)
    origin = f"Linear heads trained on the frozen encoders {image.name} and {text.name}."
    if image.kind == "vision":
        cfg = {"embed_dim": heads.embed_dim, "vision_cfg": image.cfg, "text_cfg": text.cfg}
        spec, model = (
            ModelSpec("aligned", cfg, image.preprocess_cfg),
            _in_memory(image, text, heads, scales),
        )
        check_destination(
            out, force=True, is_export=is_transformers_folder, kind="export for transformers"
        )
        card = ModelCard(
            spec,
            model.state_dict(),
            origin,
            metrics=metrics,
            params=params,
            base_models=encoders,
            library="transformers",
        )
        return write_transformers(model, text.tokenizer, out, card)
    state = {name: value.detach().cpu() for name, value in heads.state_dict().items()}
    weights: dict[str, Tensor] = {"logit_scale": state["logit_scale"]}
    cfgs = []
    for side, (tower, scale) in {"image": (image, scales[0]), "text": (text, scales[1])}.items():
        entries, head = placed(tower, state[f"{side}.weight"] * scale)
        cfgs.append({**tower.cfg, **entries})
        prefix = "visual" if side == "image" else "text"
        weights |= {f"{prefix}.{key}": value.cpu() for key, value in tower.tensors.items()} | head
    model_cfg = {
        "embed_dim": heads.embed_dim,
        "vision_cfg": cfgs[0],
        "text_cfg": cfgs[1],
        "custom_text": True,
        "quick_gelu": bool(image.quick_gelu or text.quick_gelu),
    }
    spec = ModelSpec("aligned", model_cfg, image.preprocess_cfg)
    card = ModelCard(spec, weights, origin, metrics=metrics, params=params, base_models=encoders)
    folder = write_local_dir(origin, weights, spec, out, card=card, force=True)
    _verify(folder, image, text, heads, scales)
    return folder


def placed(tower: Tower, weight: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Write a head (D, F) as entries of open_clip's config of a tower, and as tensors under open_clip's names."""
    if tower.kind == "timm":
        config = {"timm_proj": "linear", "timm_proj_bias": False}
        return config, {"visual.head.proj.weight": weight}
    if tower.kind == "hf":
        return {"hf_proj_type": "linear"}, {"text.proj.weight": weight}
    if tower.kind == "resnet":
        return {}, {
            "visual.attnpool.c_proj.weight": weight,
            "visual.attnpool.c_proj.bias": weight.new_zeros(len(weight)),
        }
    if tower.kind == "vit":
        return {}, {"visual.proj": weight.T.contiguous()}
    return {"proj_type": "linear", "proj_bias": False}, {
        "text.text_projection": weight.T.contiguous()
    }


def _in_memory(image: Tower, text: Tower, heads: Heads, scales: tuple[float, float]) -> Any:
    """Join towers and linear heads to a model of open_clip that shares the towers' weights."""
    model: Any = CustomTextCLIP(heads.embed_dim, SMALL_IMAGE, SMALL_TEXT)
    heads = copy.deepcopy(heads).cpu()
    for part, tower, head, scale in (
        ("visual", image, heads.image, scales[0]),
        ("text", text, heads.text, scales[1]),
    ):
        whole = copy.copy(tower.module)
        head.weight.data *= scale
        whole._modules = {**whole._modules, "proj": head}
        setattr(model, part, whole)
    model.logit_scale = heads.logit_scale
    return model.eval()


@torch.no_grad()
def _verify(
    folder: Path, image: Tower, text: Tower, heads: Heads, scales: tuple[float, float]
) -> None:
    """Check that the folder's model embeds a picture and some texts as towers and heads do.

    Raises:
        UserError: it does not.
    """
    model, _, tokenizer = load_model(folder)
    pixels = torch.rand(2, 3, *image.size, generator=torch.Generator().manual_seed(0))
    tokens = tokenizer(PROBE_TEXTS)
    for tower, head, scale, inputs, encode in (
        (image, heads.image, scales[0], pixels, model.encode_image),
        (text, heads.text, scales[1], tokens, model.encode_text),
    ):
        expected = normalize(head.cpu()(tower.module.cpu()(inputs) * scale), dim=-1)
        difference = float((normalize(encode(inputs), dim=-1) - expected).abs().max())
        if not difference <= TOLERANCE:
            raise UserError(
                f"{folder} does not give the {tower.side} embeddings that were trained (entries differ by {difference:.1e}): "
                f"open_clip computes {tower.name} in another way; give another encoder"
            )
