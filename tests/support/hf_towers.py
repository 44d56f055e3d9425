"""Small models with an HF text tower, and micro-batches for them."""

from __future__ import annotations

from pathlib import Path

import open_clip
import torch

from support.tiny_clip import NATIVE_VISION, bert_text, register


def small_model(configs: Path, name: str, text_folder: Path) -> str:
    """Register a small model with dropout 0.1 everywhere in the text tower and token drop in the image tower."""
    text = {**bert_text(text_folder), "context_length": 24}
    return register(
        configs, name, {**NATIVE_VISION, "patch_dropout": 0.25}, text, init_logit_scale=3.9
    )


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


class MixedByHand(torch.nn.Module):
    """A model with an HF text tower, on a micro-batch whose texts are mixed with their reverse without hooks."""

    def __init__(self, model: torch.nn.Module, weight: float, *, pad: int = 0) -> None:
        super().__init__()
        self.model, self.weight, self.pad = model, weight, pad

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        tower, mask = self.model.text.transformer, (tokens != self.pad).long()
        image = self.model.encode_image(images)
        states = tower(input_ids=tokens, attention_mask=mask).last_hidden_state
        text = self.model.text.proj(states[:, 0])
        text = self.weight * text + (1 - self.weight) * text.flip(0)
        features = {"image_features": image, "text_features": text}
        unit = {
            name: torch.nn.functional.normalize(value, dim=-1) for name, value in features.items()
        }
        return {**unit, "logit_scale": self.model.logit_scale.exp()}
