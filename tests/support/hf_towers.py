"""Small models with an HF text tower, and micro-batches for them."""

from __future__ import annotations

from pathlib import Path

import open_clip
import torch

from support.tiny_clip import NATIVE_VISION, bert_text, register


def small_model(configs: Path, name: str, text_folder: Path) -> str:
    """Register a small model with dropout 0.1 everywhere in the text tower and token drop in the image tower; its name."""
    text = {**bert_text(text_folder), "context_length": 24}
    return register(configs, name, {**NATIVE_VISION, "patch_dropout": 0.25}, text, init_logit_scale=3.9)


def micro_batches_of(name: str, texts: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three micro-batches of float64 pictures, each with the texts in another order."""
    tokens, generator = open_clip.get_tokenizer(name)(texts), torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(len(texts), 3, 32, 32, generator=generator, dtype=torch.float64),
            tokens[torch.randperm(len(texts), generator=generator)],
        )
        for _ in range(3)
    ]
