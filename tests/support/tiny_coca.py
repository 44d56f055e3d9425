"""A tiny CoCa of open_clip, and texts with paddings of several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.coca_model import CoCa
from torch import Tensor, nn

from support.dga_reference import CONTEXT, VOCABULARY, batches

PAD = 0
TEXT = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 1}
CONFIG: dict[str, Any] = {
    "embed_dim": 32,
    "multimodal_cfg": {**TEXT, "mlp_ratio": 2, "dim_head": 16, "n_queries": 8, "attn_pooler_heads": 2},
    "vision_cfg": {
        "image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "attentional_pool": True,
        "attn_pooler_heads": 2, "attn_pooler_queries": 8, "output_tokens": True, "patch_dropout": 0.25,
    },
    "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
}  # fmt: skip


def tiny_coca(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = CoCa(**CONFIG)
    nn.init.normal_(model.text_decoder.text_projection, std=0.2)  # open_clip leaves it unset
    return model.to(dtype).train()


def padded_batches(
    sizes: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Text j of a micro-batch has j + 2 tokens fewer than the context, so that counts of tokens differ.

    The first has no label.
    """
    padded = []
    for k, (images, texts) in enumerate(batches(sizes, dtype, seed)):
        for j, text in enumerate(texts):
            text[CONTEXT - 2 - (j + 3 * k) % (CONTEXT - 4) if k else 1 :] = PAD
        padded.append((images, texts))
    return padded
