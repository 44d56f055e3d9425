"""open_clip's towers as models of transformers: their configs, and their tensors under the names that hubs hold.

    image tower                                           model of transformers
    timm's plain ViT, DINOv2's; open_clip's, no `ln_pre`  Dinov2Model; layers without a scale are scaled by 1
    open_clip's ViT                                       CLIPVisionModel
    open_clip's causal text transformer                   CLIPTextModel
    BERT, RoBERTa, XLM-RoBERTa, pooled at the first token the same, with its pooler
    `PooledVision`                                        the same

transformers' dual encoder takes the output of a text tower's pooler, tanh(W h + b), where open_clip may take h, the state
of the first token. `straight_pooler` gives tanh(2^-k h), of which the projection, times 2^k, makes the same feature: tanh(x) is
x (1 - x^2 / 3 + ...), and 2^-k only moves the exponent of a float. k is chosen so that x^2 / 3 < 2^-20 for the largest entry
that the last LayerNorm can give; common entries are ten times smaller, and their error is below float32's rounding. Such a
tower is for inference only: an optimizer's step of 1e-6 is as large as the entries of the pooler's matrix.

The names are those of transformers 4, which 5 reads too; 4 does not read the names that 5 writes for a CLIPVisionModel in a
dual encoder, and leaves it at random.

D: width of the embeddings.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import timm.layers
import torch
from open_clip.hf_model import ClsLastHiddenStatePooler, ClsPooler, HFTextEncoder
from open_clip.timm_model import TimmModel
from open_clip.transformer import (
    QuickGELU,
    TextTransformer,
    VisionTransformer,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.models.configs import ClipModel

# ---------------------------------------------------------------------------------------------------------------------
# The names of a transformer's tensors in timm, open_clip and transformers: one table, and the ViT of one as that of another
#
# open_clip passes no image size on to timm, so a timm ViT keeps the size of its name there (224 px for the paper's). The ViT
# of open_clip takes the size from the config, and computes the same. The two differ in the names of the tensors and in the bias
# of the patch embedding: open_clip's ViT has none, so it is added to the position embedding of the patches.
# ---------------------------------------------------------------------------------------------------------------------

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


# Text towers whose pooler is a linear map of the first token's state and a tanh.
POOLED_TYPES = ("bert", "roberta", "xlm-roberta")
_HEADROOM_BITS = 10  # x < 2^-10, so that tanh(x) = x to 2^-21


@dataclass(frozen=True)
class TransformersTower:
    """A tower as a model of transformers.

    Attributes:
        config: its config, with `model_type`.
        tensors: its state dict.
        projection: (D, width), of the model's pooled output.
        trainable: whether an optimizer can go on from these weights; False for `straight_pooler`.
    """

    config: Any
    tensors: dict[str, Tensor]
    projection: Tensor
    trainable: bool = True


class PooledVision(nn.Module):
    """A vision model of transformers as an image tower: pictures (b, 3, H, W) -> its pooled output, projected.

    Args:
        transformer: the model.
        preprocess_cfg: open_clip's.
    """

    def __init__(self, transformer: Any, preprocess_cfg: dict[str, Any]) -> None:
        super().__init__()
        self.transformer = transformer
        self.preprocess_cfg = preprocess_cfg
        self.proj = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(self.transformer(pixel_values=images).pooler_output)


def refuse(what: str) -> NoReturn:
    """Refuse a part of the model that transformers cannot represent."""
    raise UserError(
        f"transformers cannot hold this model: {what}; the format open_clip, which is the default, takes every model"
    )


def image_tower(model: ClipModel) -> TransformersTower:
    """Convert the image tower of an open_clip model.

    Raises:
        UserError: it is not a ViT with a class token, or has a part that transformers' ViT lacks; the sentence names it.
    """
    visual: Any = model.visual
    if isinstance(visual, PooledVision):
        return TransformersTower(
            _config_of(visual.transformer), _saved(visual.transformer), _linear(visual.proj)
        )
    if isinstance(visual, VisionTransformer):
        weights = visual.state_dict()
        attention = visual.transformer.resblocks[0].attn.num_heads
        activation = _activation(visual.transformer.resblocks[0].mlp.gelu)
        projection = visual.proj
        projection = (
            torch.eye(len(visual.ln_post.weight)) if projection is None else projection.detach().T
        )
        has_first_norm = isinstance(visual.ln_pre, nn.LayerNorm)
        size, patch = visual.image_size, visual.patch_size
    elif isinstance(visual, TimmModel):
        trunk = visual.trunk
        of_trunk = {
            key: value for key, value in trunk.state_dict().items() if not key.startswith("head.")
        }
        try:
            weights = as_native_vit(of_trunk)
        except UserError:  # its sentence is for the exchange of two towers in open_clip
            refuse(f"its image tower {type(trunk).__name__} is not a plain ViT")
        attention, activation = trunk.blocks[0].attn.num_heads, _activation(trunk.blocks[0].mlp.act)
        projection = _linear(visual.head.proj) if len(visual.head) else torch.eye(trunk.embed_dim)
        has_first_norm = False
        size, patch = trunk.patch_embed.img_size, trunk.patch_embed.patch_size
    else:
        refuse(f"its image tower {type(visual).__name__} is not a ViT")
    if size[0] != size[1]:
        refuse(f"its images are {size[0]} x {size[1]} px, and transformers' are square")
    sizes = {
        "image_size": size[0],
        "patch_size": patch[0],
        "hidden_act": activation,
        "num_attention_heads": attention,
        "layer_norm_eps": _norm_epsilon(visual),
    }
    layout = _clip_vision if has_first_norm else _vit
    return layout(weights, sizes, projection.float())


def text_tower(model: ClipModel) -> TransformersTower:
    """Convert the text tower of an open_clip model.

    Raises:
        UserError: a tower or a pooling that transformers lacks; the sentence names it.
    """
    text = getattr(model, "text", model)  # CLIP itself holds the parts of its text tower
    if isinstance(text, HFTextEncoder):
        return _hugging_face_text(text)
    return _clip_text(text)


def straight_pooler(norm_weight: Tensor, norm_bias: Tensor) -> tuple[dict[str, Tensor], float]:
    """Make a pooler tanh(W h + b) that passes h on as h / factor, and the factor, a power of two.

    Args:
        norm_weight, norm_bias: (width,), of the LayerNorm that h comes from. |h| <= sqrt(width) |weight| + |bias|.
    """
    width = len(norm_weight)
    largest = (math.sqrt(width) * norm_weight.abs() + norm_bias.abs()).max().item()
    factor = 2.0 ** (max(0, math.ceil(math.log2(max(largest, 1e-30)))) + _HEADROOM_BITS)
    return {
        "pooler.dense.weight": torch.eye(width) / factor,
        "pooler.dense.bias": torch.zeros(width),
    }, factor


def _vit(
    weights: Mapping[str, Tensor], sizes: Mapping[str, Any], projection: Tensor
) -> TransformersTower:
    from transformers import Dinov2Config

    tensors, shape = _transformer(weights, "DINOv2")
    width, inner = shape["hidden_size"], shape.pop("intermediate_size")
    if inner % width:
        refuse(
            f"the inner width {inner} of its image tower's MLPs is not a multiple of the width {width}"
        )
    tensors["embeddings.patch_embeddings.projection.bias"] = torch.zeros(width)
    tensors["embeddings.mask_token"] = torch.zeros(1, width)
    for number in range(shape["num_hidden_layers"]):
        for part in (1, 2):
            tensors.setdefault(
                f"encoder.layer.{number}.layer_scale{part}.lambda1", torch.ones(width)
            )
    return TransformersTower(
        Dinov2Config(mlp_ratio=inner // width, **shape, **sizes), tensors, projection
    )


def _clip_vision(
    weights: Mapping[str, Tensor], sizes: Mapping[str, Any], projection: Tensor
) -> TransformersTower:
    from transformers import CLIPVisionConfig

    tensors, shape = _transformer(weights, "CLIP")
    named = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
    return TransformersTower(
        CLIPVisionConfig(projection_dim=len(projection), **shape, **sizes), named, projection
    )


def _clip_text(text: ClipModel | TextTransformer) -> TransformersTower:
    from transformers import CLIPTextConfig

    weights = text.state_dict()
    tensors, shape = _transformer(
        {
            name: tensor
            for name, tensor in weights.items()
            if name.startswith(
                ("transformer.", "token_embedding.", "positional_embedding", "ln_final.")
            )
        },
        "CLIP",
    )
    projection, width = text.text_projection, shape["hidden_size"]
    if isinstance(projection, nn.Linear):
        matrix = _linear(projection)
    else:
        matrix = torch.eye(width) if projection is None else projection.detach().T
    words = len(weights["token_embedding.weight"])
    config = CLIPTextConfig(
        vocab_size=words,
        max_position_embeddings=len(weights["positional_embedding"]),
        projection_dim=len(matrix),
        hidden_act=_activation(text.transformer.resblocks[0].mlp.gelu),
        num_attention_heads=text.transformer.resblocks[0].attn.num_heads,
        layer_norm_eps=_norm_epsilon(text.transformer),
        bos_token_id=words - 2,
        eos_token_id=words - 1,
        pad_token_id=words - 1,
        **shape,
    )
    return TransformersTower(
        config, {f"text_model.{name}": tensor for name, tensor in tensors.items()}, matrix.float()
    )


def _hugging_face_text(text: HFTextEncoder) -> TransformersTower:
    kind = text.config.model_type
    if kind not in POOLED_TYPES:
        refuse(
            f"its dual encoder takes a text tower with a pooler ({', '.join(POOLED_TYPES)}), and not '{kind}'"
        )
    if not isinstance(text.pooler, (ClsPooler, ClsLastHiddenStatePooler)):
        name = type(text.pooler).__name__
        refuse(
            f"its dual encoder pools the text at the first token, and this model by {name} (hf_pooler_type)"
        )
    tensors = dict(text.transformer.state_dict())
    projection = (
        torch.eye(text.config.hidden_size)
        if isinstance(text.proj, nn.Identity)
        else _linear(text.proj)
    )
    trainable = (
        not isinstance(text.pooler, ClsLastHiddenStatePooler) and "pooler.dense.weight" in tensors
    )
    if not trainable:
        last = max(int(name.split(".")[2]) for name in tensors if name.startswith("encoder.layer."))
        norm = f"encoder.layer.{last}.output.LayerNorm"
        pooler, factor = straight_pooler(tensors[f"{norm}.weight"], tensors[f"{norm}.bias"])
        tensors |= pooler
        projection = projection * factor
    return TransformersTower(_config_of(text), tensors, projection, trainable)


def _config_of(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config._name_or_path = ""  # the folder on this machine
    return config


def _saved(model: Any) -> dict[str, Tensor]:
    """Return a model's tensors under the names that hubs hold, which transformers 5 has in files alone."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, max_shard_size="1TB")
        return load_file(Path(scratch, "model.safetensors"))


def _transformer(
    weights: Mapping[str, Tensor], layout: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Rename the tensors of an open_clip transformer to a layout, and read its sizes as a config has them."""
    placed, unknown = renamed(
        {name: tensor for name, tensor in weights.items() if name != "proj"}, "open_clip", layout
    )
    if unknown:
        refuse(f"'{unknown[0]}' is not a tensor of a plain block")
    # An attention without biases is one with biases of zero.
    for key in [key for key in placed if key.startswith("encoder.") and key.endswith(".weight")]:
        placed.setdefault(key.removesuffix("weight") + "bias", torch.zeros(len(placed[key])))
    inner, width = weights["transformer.resblocks.0.mlp.c_fc.weight"].shape
    layers = len(
        {name.split(".")[2] for name in weights if name.startswith("transformer.resblocks.")}
    )
    return placed, {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}


def _linear(projection: nn.Module) -> Tensor:
    """Return the matrix (D, width) of a projection.

    Raises:
        UserError: an MLP, or one with a bias.
    """
    if not isinstance(projection, nn.Linear):
        refuse(
            f"its projection is a {type(projection).__name__} (an MLP), and transformers' is linear"
        )
    if projection.bias is not None:
        refuse("its projection has a bias, and transformers' has none")
    return projection.weight.detach().float()


def _activation(module: nn.Module) -> str:
    """Return transformers' name of an activation: QuickGELU, or a GELU."""
    if isinstance(module, (QuickGELU, timm.layers.QuickGELU)):
        return "quick_gelu"
    gelu: Any = module
    return "gelu" if gelu.approximate == "none" else "gelu_pytorch_tanh"


def _norm_epsilon(tower: nn.Module) -> float:
    """Return the epsilon of a tower's first LayerNorm, which is that of all in the models of transformers."""
    return next(norm.eps for norm in tower.modules() if isinstance(norm, nn.LayerNorm))
