"""A model built by the recipe as in training, with its optimizer step and random micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import open_clip
import torch
from torch import Tensor

from open_clip_zerovl.data.images import normalize, split_normalize
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.recipe.build import apply_methods
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.step import RecipeStep


@dataclass
class RecipeModel:
    """A model in training mode, with the normalisation of its pictures on the device, its tokenizer and its mixup."""

    model: Any
    normalize: Callable[[Tensor], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    mixup: CoinFlipMixup | None
    precision: str

    def texts(self, size: int) -> Tensor:
        """Tokens (B, L)."""
        return self.tokenizer(["a photo of a cat beside two dogs on the road"] * size)

    def optimizer(self, lr: float = 0.0) -> torch.optim.Optimizer:
        """Make training's AdamW."""
        groups = parameter_groups(self.model, 0.2, exempt_embeddings=False)
        return torch.optim.AdamW(groups, lr=lr)

    def step(self, optimizer: torch.optim.Optimizer, retain: int, **more: Any) -> RecipeStep:
        """Make training's step, of one rank."""
        return RecipeStep(
            self.model,
            ContrastiveLoss(),
            optimizer,
            precision=self.precision,
            normalize=self.normalize,
            mixup=self.mixup,
            retain=retain,
            **more,
        )


def recipe_model(config: AllFlags, *, seed: int, precision: str) -> RecipeModel:
    """Build the model of a run with these flags, with random weights on the CPU."""
    options = {"precision": precision, "device": torch.device("cpu"), "pretrained_image": False}
    model, transform, _ = create_model_and_transforms(
        config.model, None, output_dict=True, **options
    )
    transform, mixup = apply_methods(model, transform, config, seed=seed)
    _, mean, std = split_normalize(transform)
    tokenizer = open_clip.get_tokenizer(config.model)
    return RecipeModel(
        model.train(), partial(normalize, mean=mean, std=std), tokenizer, mixup, precision
    )
