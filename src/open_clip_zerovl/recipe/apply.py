"""A model built with the paper's methods, in the order of training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from open_clip_zerovl.data.transforms import with_auto_augment
from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.recipe.flags import RecipeConfig
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import constant_temperature
from open_clip_zerovl.recipe.text_lengths import text_padding
from open_clip_zerovl.recipe.towers import (
    check_token_drop,
    checkpoint_without_reentry,
    freeze,
    freeze_norm_statistics,
    lock_text_layers,
    open_clip_locks_layers,
)


def build_model(
    name: str,
    pretrained: str | None,
    methods: RecipeConfig,
    *,
    seed: int,
    start: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> tuple[Any, Callable[..., Any], Callable[..., Any], CoinFlipMixup | None]:
    """Build open_clip's model with the methods of a run.

    Its `lock_text_tower` also unlocks layers of BERT.

    Args:
        name, pretrained, options: as for `models.build.create_model_and_transforms`.
        seed: the seed of mixup's draws.
        start: loads starting weights, before towers are frozen.

    Returns:
        model, training transform, evaluation transform, mixup if asked for.

    Raises:
        UserError: weights that do not fit, a tower that does not support a method.
    """
    model, transform, evaluation = create_model_and_transforms(name, pretrained, **options)
    if start is not None:
        start(model)
    transform, mixup = apply_methods(model, transform, methods, seed=seed)
    checkpoint_without_reentry(model)
    if not open_clip_locks_layers(model):
        model.lock_text_tower = partial(lock_text_layers, model)
    return model, transform, evaluation, mixup


def apply_methods(
    model: nn.Module, transform: Callable[..., Any], methods: RecipeConfig, *, seed: int
) -> tuple[Callable[..., Any], CoinFlipMixup | None]:
    """Make a run's changes to the model, in order: norms, memory format, adapters, frozen towers, temperature, mixup, padding.

    Call it before DDP and compile.

    Args:
        transform: of training images.
        seed: the seed of mixup's draws.

    Returns:
        The transform (with AutoAugment if asked for), and the mixup if asked for.

    Raises:
        UserError: a tower that does not support a method.
    """
    if methods.token_drop is not None:
        check_token_drop(model, methods.token_drop)
    if methods.freeze_norm_statistics:
        count = freeze_norm_statistics(model)
        logging.info(f"Running statistics of {count} batch norms are frozen.")
    if methods.channels_last:
        model.visual.to(memory_format=torch.channels_last)
    if methods.lora is not None:
        from open_clip_zerovl.recipe.lora import add_lora

        add_lora(model, methods.lora, methods.lora_on)
    if methods.freeze:
        count = freeze(model, methods.freeze)
        logging.info(f"Frozen: {' and '.join(methods.freeze)} ({count / 1e6:.1f} M parameters).")
    if methods.temperature_constant:
        constant_temperature(model)
    mixup = None
    if methods.coin_flip_mixup:
        mixup = CoinFlipMixup(methods.mixup_alpha, seed=seed)
        mixup.attach(model)
    if methods.sort_text:
        text_padding(model)
    if methods.auto_augment is not None:
        transform = with_auto_augment(transform, methods.auto_augment)
    return transform, mixup
