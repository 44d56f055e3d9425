"""Heads between frozen features and a shared space, in the forms of open_clip's towers.

    linear   W x                             timm_proj, hf_proj_type "linear"; CLIP's own projections
    mlp      W2 gelu(W1 x)                   timm_proj "mlp" (hidden 2 D, W1 with bias), hf_proj_type "mlp" (hidden (F + D) / 2)

`F` width of the features, `D` of the shared space, `b` pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from open_clip_zerovl.align.encoders import Tower
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, seeded, stream_seed

_FIRST = {"linear": "weight", "mlp": "0.weight"}  # of the layer that sees the features
START = {
    "clip": (math.log(1 / 0.07), None),
    "siglip": (math.log(10.0), -10.0),
}  # logit_scale and logit_bias, as open_clip's


class _Unit(torch.autograd.Function):
    """Rows of unit length. The gradient in two passes over the rows, where `F.normalize` takes eleven: (g - y <g, y>) / |x|."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True).clamp_min_(1e-12)
        y = x / length
        ctx.save_for_backward(y, length)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, length = ctx.saved_tensors
        return torch.addcmul(grad, y, (grad * y).sum(dim=-1, keepdim=True), value=-1.0).div_(length)


def make_head(kind: str, side: str, width: int, embed_dim: int) -> nn.Module:
    """A head of a kind, as the tower of this side has it in open_clip."""
    if kind == "linear":
        return nn.Linear(width, embed_dim, bias=False)
    hidden = 2 * embed_dim if side == "image" else (width + embed_dim) // 2
    return nn.Sequential(
        nn.Linear(width, hidden, bias=side == "image"),
        nn.GELU(),
        nn.Linear(hidden, embed_dim, bias=False),
    )


class Heads(nn.Module):
    """Both heads and the temperature.

    Args:
        widths: the widths of the image's and the text's features.
        seed: the seed of the initial weights.
    """

    def __init__(
        self, kind: str, widths: tuple[int, int], embed_dim: int, loss: str = "clip", seed: int = 0
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        scale, bias = START[loss]
        with seeded(stream_seed(seed, Purpose.ALIGN_HEADS)):
            self.image = make_head(kind, "image", widths[0], embed_dim)
            self.text = make_head(kind, "text", widths[1], embed_dim)
        self.logit_scale = nn.Parameter(torch.tensor(scale))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Features (b, F) each -> embeddings of unit length (b, D) each."""
        return _Unit.apply(self.image(images)), _Unit.apply(self.text(texts))

    @property
    def weights(self) -> int:
        """Numbers in the two heads."""
        return sum(p.numel() for head in (self.image, self.text) for p in head.parameters())


def check_head(kind: str, tower: Tower) -> None:
    """UserError for a head of two layers on a tower that the exported model gives none."""
    if kind == "mlp" and tower.kind not in ("timm", "hf"):
        library = "transformers" if tower.kind == "vision" else "open_clip"
        raise UserError(
            f"--head mlp: {library} gives {tower.name}'s {tower.side} tower only a linear projection; give --head linear, or "
            f"an encoder of {'timm' if tower.side == 'image' else 'transformers'}"
        )


def folded(kind: str, weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """A head's weights for features as they are, from weights for features that were multiplied by `scale`."""
    first = _FIRST[kind]
    return {name: value * scale if name == first else value for name, value in weights.items()}


def placed(
    kind: str, tower: Tower, weights: Mapping[str, Tensor]
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """A head as entries of open_clip's config of a tower, and as tensors under open_clip's names.

    Args:
        kind: "linear" or "mlp".
        weights: the weights of a head, `folded`.
    """
    if tower.kind == "timm":
        names = {
            "weight": "proj.weight",
            "0.weight": "mlp.fc1.weight",
            "0.bias": "mlp.fc1.bias",
            "2.weight": "mlp.fc2.weight",
        }
        return {"timm_proj": kind, "timm_proj_bias": False}, {
            f"visual.head.{names[k]}": v for k, v in weights.items()
        }
    if tower.kind == "hf":
        return {"hf_proj_type": kind}, {f"text.proj.{k}": v for k, v in weights.items()}
    weight = weights["weight"]
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
