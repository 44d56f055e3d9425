"""A checkpoint of the paper's released code, or of a run of the recipes, as a folder for stock open_clip.

    python -m scripts.paper.convert zerovl_14m.pth converted/14m --image-model vit_base_patch16_224.augreg_in21k \\
        --text-model bert-base-uncased --verify

The released layout, under `state_dict`:

    image_encoder.model.model.*     timm ViT without classifier; its feature is the class token after the last norm
    text_encoder.model.model.*      Hugging Face BERT; its feature is the [CLS] of the last hidden state
    image_projection.linear.weight  (D, image width), text_projection.linear.weight (D, text width), no bias
    loss.temperature                a temperature, clamped to 0.001..0.5 where it is used; absent if it was constant

open_clip's own layout (`visual.trunk.*`, `text.transformer.*`, also with `module.` and `_orig_mod.` prefixes) is split into the
same pieces. A tensor that has no place is refused, unless no embedding depends on it; the card then names it.

open_clip builds a timm ViT at the size of its name only. Weights for another size, trained at it or interpolated to it
(`--image-size`), go into open_clip's own ViT, which computes the same (`layouts`).
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated as A
from typing import Any, Literal

import open_clip
import timm
import torch
import torch.nn.functional as F
from open_clip.factory import get_model_config
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from transformers import AutoConfig

from open_clip_zerovl.checkpoints.card import ModelCard
from open_clip_zerovl.checkpoints.export import (
    PROBE_TEXTS,
    check_destination,
    loading_notes,
    write_local_dir,
)
from open_clip_zerovl.checkpoints.loading import ModelSpec
from open_clip_zerovl.checkpoints.transformers_towers import as_native_vit
from open_clip_zerovl.checkpoints.weights import read_state_dict
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.configs import LOCAL_DIR, no_code_from_data
from open_clip_zerovl.models.text_towers import TowerModel
from scripts.program import program

log = logging.getLogger(__name__)

INITIAL_TEMPERATURE = 0.02
NORMALIZATIONS = {
    "imagenet": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "half": ((0.5,) * 3, (0.5,) * 3),
}
TEMPERATURE_RANGE = (0.001, 0.5)  # to which the released code clamps the temperature
CONTEXT_LENGTH = 25  # of the released configurations
TOLERANCE = (
    1e-5  # largest difference that --verify allows in an entry of an L2-normalised embedding
)

# prefix in the file -> piece; the longer prefixes come first
_RELEASED = {
    "image_encoder.model.model.": "image",
    "text_encoder.model.model.": "text",
    "image_projection.linear.weight": "image_projection",
    "text_projection.linear.weight": "text_projection",
    "loss.temperature": "temperature",
}
_OPEN_CLIP = {
    "visual.trunk.": "image",
    "text.transformer.": "text",
    "visual.head.proj.weight": "image_projection",
    "text.proj.weight": "text_projection",
    "logit_scale": "logit_scale",
}
# Tensors of BERT on which no embedding depends: an index, and the pooler after the raw [CLS].
_WITHOUT_EFFECT = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


@dataclass(frozen=True)
class DualEncoder:
    """A checkpoint's weights by piece.

    Attributes:
        image, text: state dicts of the timm ViT and of the Hugging Face encoder, under their own names.
        image_projection, text_projection: (D, width).
        logit_scale: (), the logarithm of the factor on the cosines.
        without_effect: names of the file's tensors on which no embedding depends; they are left out.
    """

    image: dict[str, Tensor]
    text: dict[str, Tensor]
    image_projection: Tensor
    text_projection: Tensor
    logit_scale: Tensor
    without_effect: tuple[str, ...]


@no_code_from_data()
def convert_checkpoint(
    checkpoint: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    image_model: str,
    text_model: str,
    image_size: int | None = None,
    normalization: str = "imagenet",
    verify: bool = False,
    force: bool = False,
) -> Path:
    """Write a checkpoint as a folder that stock open_clip loads, see `export_local_dir`.

    Args:
        checkpoint: a file of the paper's released code or of open_clip's training.
        out_dir: the folder to make.
        image_model: the timm ViT (`vit_base_patch16_224.augreg_in21k`), or a model of open_clip that has one.
        text_model: folder or hub name of the Hugging Face text tower: its config and its tokenizer.
        image_size: side in pixels of the images that the folder's model takes. None takes the size that the position
            embedding was trained for; for another size the embedding is interpolated.
        normalization: of images: `imagenet` (the released 14M weights) or `half`, 0.5 for both (100M).
        verify: compare embeddings of the written folder with those of the checkpoint's own towers.
        force: replace an earlier export in `out_dir`.

    Returns:
        The absolute path of the folder.

    Raises:
        UserError: a file that cannot be read, holds a tensor that has no place, or belongs to other models; a destination
            that holds something else; embeddings that differ by more than TOLERANCE.
    """
    checkpoint = Path(checkpoint)
    check_destination(Path(os.path.abspath(Path(out_dir).expanduser())), force)
    log.info("reading %s", checkpoint)
    weights = read_state_dict(checkpoint)
    encoder = split_weights(weights, checkpoint)
    configured = (get_model_config(image_model) or {}).get("vision_cfg") or {}
    timm_name = configured.get("timm_model_name") or image_model
    with torch.device("meta"):  # no memory for its weights
        trunk = timm.create_model(timm_name, pretrained=False, num_classes=0)
    if other := trunk.state_dict().keys() ^ encoder.image.keys():
        raise UserError(
            f"the image tower of {checkpoint} is not a {timm_name}: {len(other)} names differ ({min(other)} ...)"
        )
    patch = encoder.image["patch_embed.proj.weight"].shape[-1]
    positions = encoder.image["pos_embed"]
    trained_side = math.isqrt(positions.shape[1] - 1) * patch
    side = image_size or trained_side
    if side % patch:
        raise UserError(
            f"--image-size {side} is not a multiple of the patches' {patch} px; give {side // patch * patch}"
        )
    if side != trained_side:
        positions = timm.layers.resample_abs_pos_embed(positions, [side // patch] * 2)
    resized = replace(encoder, image={**encoder.image, "pos_embed": positions})
    placed, vision_cfg = _placed(resized, trunk, timm_name, side)

    text_folder = Path(text_model).expanduser()
    source = str(text_folder.absolute()) if text_folder.is_dir() else text_model
    spec = _spec(encoder, vision_cfg, timm_name, source, side, normalization)
    notes = _notes(encoder, trained_side, side, normalization)
    card = ModelCard(spec, placed, origin=f"Converted from `{checkpoint.name}`.", notes=notes)
    folder = write_local_dir(checkpoint, placed, spec, out_dir, card=card, force=force)
    if verify:
        log.info("comparing embeddings with those of the checkpoint's own towers")
        image_tower, text_tower = _own_towers(encoder, timm_name, side, source)
        _compare(folder, image_tower, text_tower, open_clip.get_tokenizer(LOCAL_DIR + str(folder)))
    return folder


def _spec(
    encoder: DualEncoder,
    vision_cfg: dict[str, Any],
    timm_name: str,
    text_source: str,
    side: int,
    normalization: str,
) -> ModelSpec:
    """Describe the converted model."""
    mean, std = NORMALIZATIONS[normalization]
    return ModelSpec(
        name=f"{timm_name} with {Path(text_source).name}",
        model_cfg={
            "embed_dim": encoder.image_projection.shape[0],
            "init_logit_scale": float(encoder.logit_scale),
            "vision_cfg": vision_cfg,
            "text_cfg": {
                "hf_model_name": text_source,
                "hf_tokenizer_name": text_source,
                "hf_model_pretrained": False,
                "hf_pooler_type": "cls_last_hidden_state_pooler",
                "hf_proj_type": "linear",
                "context_length": CONTEXT_LENGTH,
            },
        },
        # The paper squashes to 256 and crops 224, which open_clip's config cannot express; squashing alone is the nearest.
        preprocess_cfg=merge_preprocess_dict(
            PreprocessCfg(),
            {
                "size": side,
                "mean": mean,
                "std": std,
                "interpolation": "bilinear",
                "resize_mode": "squash",
            },
        ),
    )


def _notes(encoder: DualEncoder, trained_side: int, side: int, normalization: str) -> list[str]:
    """Write the card's sentences on the conversion."""
    mean, std = NORMALIZATIONS[normalization]
    notes = [
        f"Images are normalised with mean {mean} and standard deviation {std}, as was asked for (`{normalization}`).",
        "The paper's evaluation squashes to 256 px and crops 224, which open_clip's config cannot express: this folder "
        "squashes to the size alone. `zerovl retrieval --paper-transform` measures with the paper's.",
    ]
    if side != trained_side:
        notes.append(
            f"Its position embedding was interpolated from {trained_side} px, at which it was trained, to {side} px."
        )
    if encoder.without_effect:
        notes.append(
            f"Left out, since no embedding depends on it: {', '.join(encoder.without_effect)}."
        )
    return notes


def split_weights(weights: dict[str, Tensor], checkpoint: Path) -> DualEncoder:
    """Sort all tensors of a checkpoint, of either layout, into its pieces.

    Raises:
        UserError: a tensor that belongs to no piece, a piece that is missing, projections of different widths.
    """
    released = any(key.startswith("image_encoder.") for key in weights)
    layout = _RELEASED if released else _OPEN_CLIP
    towers: dict[str, dict[str, Tensor]] = {"image": {}, "text": {}}
    singles: dict[str, Tensor] = {}
    without_effect, unknown = [], []
    for key, tensor in weights.items():
        prefix = next((prefix for prefix in layout if key.startswith(prefix)), None)
        if prefix is None:
            unknown.append(key)
            continue
        piece = layout[prefix]
        if piece not in towers:
            if key == prefix:
                singles[piece] = tensor
            else:
                unknown.append(key)
        elif piece == "text" and key.removeprefix(prefix) in _WITHOUT_EFFECT:
            without_effect.append(key)
        else:
            towers[piece][key.removeprefix(prefix)] = tensor
    if unknown:
        kind = (
            "the released ZeroVL layout"
            if released
            else "an open_clip model with timm and Hugging Face towers"
        )
        raise UserError(
            f"{checkpoint} holds {len(unknown)} tensors that are not part of {kind} (first: {', '.join(unknown[:3])}); "
            "for a checkpoint of another open_clip model use zerovl export --model NAME"
        )
    needed = [piece for piece in layout.values() if piece != "temperature"]
    if missing := [piece for piece in needed if not towers.get(piece) and piece not in singles]:
        raise UserError(
            f"{checkpoint} has no {' and no '.join(piece.replace('_', ' ') for piece in missing)}"
        )
    temperature = float(singles.get("temperature", INITIAL_TEMPERATURE))
    clamped = min(max(temperature, TEMPERATURE_RANGE[0]), TEMPERATURE_RANGE[1])
    scale = singles.get("logit_scale", torch.tensor(-math.log(clamped)))
    return DualEncoder(
        towers["image"],
        towers["text"],
        singles["image_projection"],
        singles["text_projection"],
        scale,
        tuple(without_effect),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The image tower
# ---------------------------------------------------------------------------------------------------------------------


def _placed(
    encoder: DualEncoder,
    trunk: timm.models.VisionTransformer,
    timm_name: str,
    side: int,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all weights under the names of open_clip's model, and its vision config."""
    native_side = trunk.patch_embed.img_size[0]
    placed = {f"text.transformer.{key}": tensor for key, tensor in encoder.text.items()}
    placed |= {"text.proj.weight": encoder.text_projection, "logit_scale": encoder.logit_scale}
    if side == native_side:
        placed |= {f"visual.trunk.{key}": tensor for key, tensor in encoder.image.items()}
        placed["visual.head.proj.weight"] = encoder.image_projection
        return placed, {
            "timm_model_name": timm_name,
            "timm_model_pretrained": False,
            "timm_pool": "token",
            "timm_proj": "linear",
            "timm_proj_bias": False,
            "image_size": side,
        }
    log.info(
        "timm's %s takes %d px, not %d: the weights go into open_clip's own ViT",
        timm_name,
        native_side,
        side,
    )
    placed |= {f"visual.{key}": tensor for key, tensor in as_native_vit(encoder.image).items()}
    placed["visual.proj"] = encoder.image_projection.T
    return placed, native_vision_config(trunk, side)


def native_vision_config(trunk: Any, image_size_px: int) -> dict[str, Any]:
    """Return open_clip's `vision_cfg` for its own ViT with the shape of timm's VisionTransformer `trunk`."""
    block = trunk.blocks[0]
    scale = {"ls_init_value": 1.0} if hasattr(block.ls1, "gamma") else {}
    return scale | {
        "image_size": image_size_px,
        "patch_size": trunk.patch_embed.patch_size[0],
        "layers": len(trunk.blocks),
        "width": trunk.embed_dim,
        "head_width": trunk.embed_dim // block.attn.num_heads,
        "mlp_ratio": block.mlp.fc1.out_features / trunk.embed_dim,
        "no_ln_pre": True,
        "norm_kwargs": {"eps": trunk.norm.eps},
    }


# ---------------------------------------------------------------------------------------------------------------------
# --verify
# ---------------------------------------------------------------------------------------------------------------------

Encode = Callable[[Tensor], Tensor]


def _own_towers(
    encoder: DualEncoder, timm_name: str, side: int, text_source: str
) -> tuple[Encode, Encode]:
    """Build the checkpoint's towers by timm and transformers, without open_clip."""
    trunk = timm.create_model(timm_name, pretrained=False, num_classes=0, img_size=side).eval()
    positions = timm.layers.resample_abs_pos_embed(
        encoder.image["pos_embed"], trunk.patch_embed.grid_size
    )
    trunk.load_state_dict({**encoder.image, "pos_embed": positions})
    config = AutoConfig.from_pretrained(text_source)
    bert = TowerModel.from_config(config, add_pooling_layer=False).eval()
    bert.load_state_dict(encoder.text)

    def image_features(images: Tensor) -> Tensor:
        return trunk(images) @ encoder.image_projection.float().T

    def text_features(tokens: Tensor) -> Tensor:
        hidden = bert(
            input_ids=tokens, attention_mask=(tokens != config.pad_token_id).long()
        ).last_hidden_state
        return hidden[:, 0] @ encoder.text_projection.float().T

    return image_features, text_features


def _compare(
    folder: Path, image_tower: Encode, text_tower: Encode, tokenizer: Callable[[list[str]], Tensor]
) -> None:
    """Compare the embeddings of the folder in stock open_clip with the given towers', on noise and some texts.

    Raises:
        UserError: they differ by more than TOLERANCE.
    """
    model, _, _ = open_clip.create_model_and_transforms(LOCAL_DIR + str(folder))
    model.eval()
    size = model.visual.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    tokens = tokenizer(PROBE_TEXTS)
    with torch.no_grad():
        for name, ours, theirs in (
            ("image", model.encode_image(images), image_tower(images)),
            ("text", model.encode_text(tokens), text_tower(tokens)),
        ):
            difference = float(
                (F.normalize(ours, dim=-1) - F.normalize(theirs, dim=-1)).abs().max()
            )
            if not difference <= TOLERANCE:
                raise UserError(
                    f"{folder} was written, but its {name} embeddings differ from the checkpoint's own towers by "
                    f"{difference:.1e} (bound {TOLERANCE:.0e}): do not use it"
                )
            log.info("verified: %s embeddings differ by %.1e at most.", name, difference)


def convert(
    checkpoint: A[Path, "the released .pth, or an epoch_N.pt", "CHECKPOINT"],
    out_dir: A[Path, "folder to write", "OUT"],
    /,
    *,
    image_model: A[str, "timm's name of the ViT", "NAME"],
    text_model: A[str, "its config and tokenizer", "NAME_OR_DIR"],
    image_size: A[int | None, "side of the images (default: as trained)", "PX"] = None,
    normalization: A[
        Literal["imagenet", "half"],
        "mean and deviation: imagenet for the released 14M weights, half (0.5) for 100M",
    ] = "imagenet",
    verify: A[bool, "compare embeddings with the checkpoint's towers"] = False,
    force: A[bool, "replace an earlier export"] = False,
) -> None:
    """Convert a checkpoint, and say how the folder is loaded."""
    folder = convert_checkpoint(
        checkpoint,
        out_dir,
        image_model=image_model,
        text_model=text_model,
        image_size=image_size,
        normalization=normalization,
        verify=verify,
        force=force,
    )
    print(
        f"Converted{', verified' * verify}. Load it with "
        f"open_clip.create_model_and_transforms('local-dir:{folder}').",
        *loading_notes(folder),
        sep="\n",
    )


if __name__ == "__main__":
    sys.exit(program(convert))
