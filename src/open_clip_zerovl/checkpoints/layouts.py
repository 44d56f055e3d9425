"""The names of a transformer's tensors in timm, open_clip and transformers: one table, and the ViT of one as that of another.

open_clip passes no image size on to timm, so a timm ViT keeps the size of its name there (224 px for the paper's). open_clip's
own ViT takes the size from the config, and computes the same. The two differ in the names of the tensors and in the bias of the
patch embedding: open_clip's ViT has none, so it is added to the position embedding of the patches.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from open_clip_zerovl.core.errors import UserError

LAYOUTS = ("timm", "open_clip", "CLIP", "DINOv2")  # the last two are transformers'
_BLOCKS = ("blocks.", "transformer.resblocks.", "encoder.layers.", "encoder.layer.")
_QKV = ("attn.qkv.", "attn.in_proj_")
_SPLIT = {  # transformers has the attention's first map in three parts
    "CLIP": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    "DINOv2": (
        "attention.attention.query.",
        "attention.attention.key.",
        "attention.attention.value.",
    ),
}
# Names, or beginnings that end in a dot, in each of LAYOUTS; "" if a layout has no such tensor.
_IN_BLOCK = (
    ("norm1.", "ln_1.", "layer_norm1.", "norm1."),
    ("attn.proj.", "attn.out_proj.", "self_attn.out_proj.", "attention.output.dense."),
    ("norm2.", "ln_2.", "layer_norm2.", "norm2."),
    ("mlp.fc1.", "mlp.c_fc.", "mlp.fc1.", "mlp.fc1."),
    ("mlp.fc2.", "mlp.c_proj.", "mlp.fc2.", "mlp.fc2."),
    ("ls1.gamma", "ls_1.gamma", "", "layer_scale1.lambda1"),
    ("ls2.gamma", "ls_2.gamma", "", "layer_scale2.lambda1"),
)
_OUTSIDE = (
    ("cls_token", "class_embedding", "embeddings.class_embedding", "embeddings.cls_token"),
    (
        "pos_embed",
        "positional_embedding",
        "embeddings.position_embedding.weight",
        "embeddings.position_embeddings",
    ),
    (
        "patch_embed.proj.weight",
        "conv1.weight",
        "embeddings.patch_embedding.weight",
        "embeddings.patch_embeddings.projection.weight",
    ),
    ("", "ln_pre.", "pre_layrnorm.", ""),
    ("norm.", "ln_post.", "post_layernorm.", "layernorm."),
    ("", "token_embedding.weight", "embeddings.token_embedding.weight", ""),
    ("", "ln_final.", "final_layer_norm.", ""),
)


def renamed(
    weights: Mapping[str, Tensor], source: str, target: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Rename the tensors of a ViT or a text transformer to another layout, and name those that have no place there.

    In the layout "timm" and "DINOv2" class token and positions have leading dimensions of one, which the other layouts lack.
    """
    old, new = LAYOUTS.index(source), LAYOUTS.index(target)
    placed: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in weights.items():
        number, _, part = key.removeprefix(_BLOCKS[old]).partition(".")
        inside = key.startswith(_BLOCKS[old]) and number.isdigit()
        stem, table = (f"{_BLOCKS[new]}{number}.", _IN_BLOCK) if inside else ("", _OUTSIDE)
        name = part if inside else key
        row = next(
            (row for row in table if row[old] and row[new] and name.startswith(row[old])), None
        )
        if inside and name.startswith(_QKV[old]):
            kind = name.removeprefix(_QKV[old])
            names = _SPLIT.get(target, (_QKV[new],) if new < len(_QKV) else ())
            parts = tensor.chunk(3) if len(names) == 3 else (tensor,)
            placed |= {
                f"{stem}{projection}{kind}": third
                for projection, third in zip(names, parts, strict=True)
            }
        elif row is None or not (row[old].endswith(".") or name == row[old]):
            unknown.append(key)
        else:
            if row in _OUTSIDE[:2]:
                tensor = tensor.reshape(
                    tensor.shape[-2:] if row is _OUTSIDE[1] else tensor.shape[-1:]
                )
                tensor = (
                    tensor
                    if target in ("open_clip", "CLIP")
                    else tensor.reshape(1, -1, tensor.shape[-1])
                )
            placed[f"{stem}{row[new]}{name.removeprefix(row[old])}"] = tensor
    return placed, unknown


def as_native_vit(image: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the state dict of a plain timm ViT (class token, no classifier) to open_clip's VisionTransformer.

    Raises:
        UserError: a tensor that open_clip's ViT has no place for.
    """
    bias = "patch_embed.proj.bias"
    placed, unknown = renamed(
        {key: tensor for key, tensor in image.items() if key != bias}, "timm", "open_clip"
    )
    if unknown:
        raise UserError(
            f"'{unknown[0]}' is not part of a plain ViT, the only one that open_clip's own can replace"
        )
    position = placed["positional_embedding"].clone()  # (1 + patches, width)
    position[1:] += image.get(bias, 0)
    return placed | {"positional_embedding": position}
