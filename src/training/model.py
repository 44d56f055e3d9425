"""The model as the recipe's flags ask for it, before DDP and compile, and its optimizer."""

from __future__ import annotations

import argparse
import logging
from functools import partial
from typing import Any

import torch

from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.models.tower_weights import load_pretrained_tower
from open_clip_zerovl.recipe.apply import apply_methods
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.start import init_from
from open_clip_zerovl.recipe.towers import lock_text_layers
from training.config import RecipeConfig


def create_model(
    config: RecipeConfig, args: argparse.Namespace, model_name: str, pretrained: str | None, **options: Any
) -> tuple[torch.nn.Module, Any, Any, CoinFlipMixup | None]:
    """open_clip's model and transforms, then: starting weights, checks, frozen towers, temperature, mixup, augmentation.

    Raises:
        UserError: weights that do not fit, a tower that cannot do what a flag asks.
    """
    model, transform_train, transform_eval = create_model_and_transforms(model_name, pretrained, **options)
    if config.init_from is not None:
        logging.info(f"Starting from {config.init_from}:\n{init_from(model, config.init_from)}")
    for tower, path in (("image", config.init_image), ("text", config.init_text)):
        if path is not None:
            loaded = load_pretrained_tower(model, tower, path)  # type: ignore[arg-type]
            logging.info(f"Loaded {loaded.loaded} tensors of the {tower} tower from {path}; unused: {loaded.unused}")
    transform_train, mixup = apply_methods(model, transform_train, config, seed=args.seed)
    if config.active and hasattr(getattr(model, "text", None), "config"):
        # open_clip's table lacks the names of BERT's layers, so that --lock-text-unlocked-layers ends in a KeyError.
        model.lock_text_tower = partial(lock_text_layers, model)
    return model, transform_train, transform_eval, mixup


def create_adamw(model: torch.nn.Module, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """AdamW on groups that exempt class tokens and embeddings from decay.

    Args:
        options: `lr`, `betas`, `eps`.
    """
    return torch.optim.AdamW(parameter_groups(model, weight_decay, exempt_embeddings=True), **options)
