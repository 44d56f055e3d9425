"""Linear heads between frozen features and a shared space, in the forms of open_clip's towers.

`F` width of the features, `D` of the shared space, `b` pairs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from open_clip_zerovl.align.encoders import Tower
from open_clip_zerovl.core.randomness import Purpose, seeded, stream_seed

START_SCALE = math.log(1 / 0.07)  # of logit_scale, as open_clip's


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


class Heads(nn.Module):
    """Both heads and the temperature.

    Args:
        widths: the widths of the image's and the text's features.
        seed: the seed of the initial weights.
    """

    def __init__(self, widths: tuple[int, int], embed_dim: int, seed: int = 0) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        with seeded(stream_seed(seed, Purpose.ALIGN_HEADS)):
            self.image = nn.Linear(widths[0], embed_dim, bias=False)
            self.text = nn.Linear(widths[1], embed_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(START_SCALE))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Project features (b, F) each to embeddings of unit length (b, D) each."""
        return _Unit.apply(self.image(images)), _Unit.apply(self.text(texts))

    @property
    def weights(self) -> int:
        """Numbers in the two heads."""
        return self.image.weight.numel() + self.text.weight.numel()


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
