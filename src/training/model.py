"""The model with the recipe's methods, before DDP and compile; its optimizer, learning rates, device and precision."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

import open_clip
import open_clip_train.main as host
import torch
from open_clip_train.distributed import is_device_available
from open_clip_train.scheduler import assign_learning_rate

from open_clip_zerovl.checkpoints.loading import spec_of_run
from open_clip_zerovl.checkpoints.weights import load_pretrained_tower
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import keep_freed_memory
from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.models.configs import LOCAL_DIR
from open_clip_zerovl.recipe.build import apply_methods, init_from
from open_clip_zerovl.recipe.flags import RecipeConfig
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.optimizer import (
    Rates,
    described_groups,
    parameter_groups,
    scale_rates,
    warmup_cosine,
)
from open_clip_zerovl.recipe.towers import batch_norms


def create_model(
    config: RecipeConfig,
    args: argparse.Namespace,
    model_name: str,
    pretrained: str | None,
    **options: Any,
) -> tuple[torch.nn.Module, Any, Any, CoinFlipMixup | None]:
    """Build open_clip's model with starting weights and the recipe's methods.

    Returns:
        Model, training transform, evaluation transform, mixup if asked for.

    Raises:
        UserError: weights that do not fit, a tower that does not support a flag.
    """
    model, transform, evaluation = create_model_and_transforms(model_name, pretrained, **options)
    if hasattr(model, "text_decoder") and not (pretrained or config.init_from):
        # open_clip leaves this weight as the memory was, NaN included.
        decoder: Any = model.text_decoder
        projection = decoder.text_projection
        torch.nn.init.normal_(projection, std=len(projection) ** -0.5)
    if config.init_from is not None:
        report = init_from(model, config.init_from, _model_cfg(model_name, args))
        logging.info(f"Starting from {config.init_from}:\n{report}")
    for tower, path in (("image", config.init_image), ("text", config.init_text)):
        if path is not None:
            loaded = load_pretrained_tower(model, tower, path)  # type: ignore[arg-type]
            logging.info(
                f"Loaded {loaded.loaded} tensors of the {tower} tower from {path}; unused: {loaded.unused}"
            )
    transform, mixup = apply_methods(model, transform, config, seed=args.seed)
    begins_trained = bool(
        pretrained or config.init_from or config.init_image or model_name.startswith(LOCAL_DIR)
    )
    one_source = config.sampling in ("debiased", "sequential")
    locked = getattr(args, "lock_image", False)
    if (begins_trained or one_source) and not locked and batch_norms(model):
        logging.warning(
            f"The model has batch norms, whose running statistics follow "
            f"{'batches of one source' if one_source else 'small batches'} and leave those of the pool"
            f"{' and of the trained tower' if begins_trained else ''}: --freeze-norm-statistics keeps them."
        )
    return model, transform, evaluation, mixup


def _model_cfg(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Read the config of a run's model.

    Returns:
        None, with a warning, of a model whose config lies on the hub.
    """
    if name.startswith("hf-hub:"):
        logging.warning(
            f"--init-from compares only names and shapes of tensors: the config of {name} lies on the hub."
        )
        return None
    return spec_of_run(name, vars(args)).model_cfg


def check_contrastive(model: torch.nn.Module, name: str) -> None:
    """Refuse a captioner other than CoCa, which the recipe's step would train without its caption loss.

    open_clip 4 knows its models' traits. Its later captioners have CoCa's decoder and another loss.
    """
    if type(model) is open_clip.CoCa:  # the step knows its caption loss
        return
    traits_of = getattr(host, "get_model_traits", None) or getattr(
        open_clip, "get_model_traits", None
    )
    generative = traits_of is not None and getattr(traits_of(model), "generative", False)
    if generative or hasattr(model, "text_decoder"):
        raise UserError(
            f"--model {name} does not work with the recipe's step: it also learns to write captions, but not as CoCa does, "
            "and that loss would be lost; leave the step's flags out, and give --train-data without names"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer and learning rates
# ---------------------------------------------------------------------------------------------------------------------


def create_adamw(
    model: torch.nn.Module, config: RecipeConfig, weight_decay: float, lr: float, **options: Any
) -> torch.optim.Optimizer:
    """Build AdamW on groups with rates of their own, or with class tokens and embeddings exempt from decay.

    Groups are logged.

    Args:
        options: `betas`, `eps`.
    """
    rates = (
        Rates(lr, config.lr_image, config.lr_text, config.lr_head, config.layer_decay)
        if config.own_rates
        else None
    )
    groups = parameter_groups(
        model, weight_decay, exempt_embeddings=config.no_embedding_decay, rates=rates
    )
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    if rates is not None:
        scale_rates(optimizer)
        for part, scale, decay, tensors, numbers in described_groups(optimizer):
            logging.info(
                f"Group {part}: {scale} x --lr, weight decay {decay}, {tensors} tensors, {numbers} numbers"
            )
    return optimizer


def cosine_lr(
    optimizer: torch.optim.Optimizer,
    base_lr: float,
    warmup_length: int,
    steps: int,
    *,
    lr_min: float,
) -> Callable[[int], float]:
    """Make open_clip's warm-up and cosine with a floor (section 2.2: 1e-4 down to 1e-5), which sets and returns the rate of a
    step.

    See `recipe.optimizer.warmup_cosine`.
    """

    def adjust(step: int) -> float:
        lr = warmup_cosine(step, steps, base_lr, warmup_length, lr_min)
        assign_learning_rate(optimizer, lr)
        return lr

    return adjust


# ---------------------------------------------------------------------------------------------------------------------
# Device and precision
# ---------------------------------------------------------------------------------------------------------------------


def settle_device(args: argparse.Namespace, *, recipe: bool) -> None:
    """Warn if a run asks for a GPU and trains on the CPU, and take fp32 instead of `amp` there.

    Args:
        args: `precision` is changed.
        recipe: whether any of our flags was given; if not, the run is open_clip's own and keeps its precision.
    """
    kind = args.device.partition(":")[0]
    if kind != "cpu":
        available, known = is_device_available(kind)
        if available or not known:
            return
        logging.warning(
            f"There is no {kind} device here: this run trains on the CPU, as with --device cpu."
        )
    keep_freed_memory()
    if args.precision != "amp":
        return
    slow = "--precision amp is several times slower than fp32 on a CPU"
    logging.warning(
        f"{slow}: fp32 is used instead." if recipe else f"{slow}; give --precision fp32."
    )
    if recipe:
        args.precision = "fp32"
