"""A plain timm ViT as open_clip's own VisionTransformer, which computes the same at any image size.

open_clip passes no image size on to timm, so a timm ViT keeps the size of its name there (224 px for the paper's). open_clip's
own ViT takes the size from the config. The two differ in the names of the tensors and in the bias of the patch embedding:
open_clip's ViT has none, so it is added to the position embedding of the patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError

_NAMES = {
    "norm1": "ln_1",
    "attn.qkv.weight": "attn.in_proj_weight",
    "attn.qkv.bias": "attn.in_proj_bias",
    "attn.proj": "attn.out_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def resample_positions(positions: Tensor, grid: int) -> Tensor:
    """A ViT's position embedding for another number of patches: bicubic with antialiasing, as timm and open_clip resize.

    Args:
        positions: (1, 1 + G*G, width): of the class token, which is kept, and of a square of patches.
        grid: patches a side of the result.

    Returns:
        (1, 1 + grid*grid, width) in the dtype given.
    """
    token, patches = positions[:, :1], positions[:, 1:]
    side = round(patches.shape[1] ** 0.5)
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2).float()
    resized = F.interpolate(square, size=(grid, grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([token, resized.permute(0, 2, 3, 1).reshape(1, grid * grid, -1).to(positions.dtype)], dim=1)


def as_native_vit(image: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a plain timm ViT (class token, no classifier) under the names of open_clip's VisionTransformer.

    Raises:
        UserError: a tensor that open_clip's ViT has no place for.
    """
    position = image["pos_embed"][0].clone()  # (1 + patches, width)
    position[1:] += image.get("patch_embed.proj.bias", 0)
    placed = {
        "conv1.weight": image["patch_embed.proj.weight"],
        "class_embedding": image["cls_token"][0, 0],
        "positional_embedding": position,
        "ln_post.weight": image["norm.weight"],
        "ln_post.bias": image["norm.bias"],
    }
    top = {"patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed", "cls_token", "norm.weight", "norm.bias"}
    for key in image.keys() - top:
        parts = key.split(".", 2)
        old = next((name for name in _NAMES if parts[0] == "blocks" and parts[2].startswith(name)), None)
        if old is None:
            raise UserError(f"'{key}' has no place in open_clip's own ViT, which the image size asks for")
        placed[f"transformer.resblocks.{parts[1]}.{_NAMES[old]}{parts[2].removeprefix(old)}"] = image[key]
    return placed


def native_vision_config(trunk: nn.Module, image_size_px: int) -> dict[str, Any]:
    """open_clip's `vision_cfg` of its own ViT with the shape of a timm one."""
    block = trunk.blocks[0]
    return {
        "image_size": image_size_px,
        "patch_size": trunk.patch_embed.patch_size[0],
        "layers": len(trunk.blocks),
        "width": trunk.embed_dim,
        "head_width": trunk.embed_dim // block.attn.num_heads,
        "mlp_ratio": block.mlp.fc1.out_features / trunk.embed_dim,
        "no_ln_pre": True,
        "norm_kwargs": {"eps": trunk.norm.eps},
    }
