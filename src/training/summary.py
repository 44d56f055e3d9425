"""A run in about ten lines, before its first step."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.models.configs import context_length_of
from training.config import RecipeConfig
from training.params import flags_given

_LABEL = 10


@dataclass(frozen=True)
class Facts:
    """What a run knows of itself before its first step.

    Attributes:
        model: without DDP.
        sources: with the samples that an epoch takes of each; none for open_clip's own data.
        epoch_samples, steps: of an epoch.
        epoch, start: where the run begins or goes on.
        resumed: the checkpoint that it goes on from.
    """

    args: argparse.Namespace
    config: RecipeConfig
    model: Any
    loss: Any
    sources: Sequence[tuple[Source, int]]
    epoch_samples: int
    steps: int
    epoch: int
    start: int
    resumed: str | None

    @property
    def batch(self) -> str:
        """The effective batch and what it is made of."""
        parts = (self.args.batch_size, self.config.dga_steps, self.args.world_size)
        whole = parts[0] * parts[1] * parts[2]
        return f"{parts[0]} x {parts[1]} x {parts[2]} = {whole:,} pairs a step (micro-batch x DGA steps x ranks)"

    @property
    def loss_at_chance(self) -> float | None:
        """The loss of a model that tells no pair from another, ln of the effective batch; None for losses of another form."""
        args, config = self.args, self.config
        if getattr(args, "siglip", False) or args.distill_model or config.teacher or "coca" in args.model.lower():
            return None
        return math.log(args.batch_size * config.dga_steps * args.world_size)


def summary(facts: Facts) -> list[str]:
    """The lines, with a label each."""
    args, config = facts.args, facts.config
    said = [
        ("model", _model(facts)),
        *_weights(facts),
        ("data", _data(facts)),
        ("batch", facts.batch),
        (
            "run",
            f"{facts.steps:,} steps an epoch, {args.epochs} epoch{'s' * (args.epochs != 1)}: "
            f"{facts.steps * args.epochs:,} steps"
            + (f"; goes on after step {facts.start} of epoch {facts.epoch}" if facts.epoch or facts.start else ""),
        ),
        ("loss", _loss(facts)),
        ("optimizer", _optimizer(facts)),
        ("device", _device(args)),
        ("saves", _saves(args, config)),
    ]
    if args.log_path:
        path = os.path.normpath(args.log_path)
        said.append(("log", f"{path} has all settings, the model, and what is not shown here (--verbose shows it)"))
    return [f"{label:<{_LABEL}}{text}" for label, text in said]


def settings_of(args: argparse.Namespace, config: RecipeConfig) -> dict[str, str]:
    """The flags that are not at their defaults, as a command line has them: name -> value."""
    return {name: str(value) for name, value in flags_given(args, config).items()}


def _model(facts: Facts) -> str:
    counts = [(p.numel(), p.requires_grad) for p in facts.model.parameters()]
    whole, trained = sum(n for n, _ in counts), sum(n for n, wanted in counts if wanted)
    words = f"{facts.args.model}, {whole / 1e6:,.1f} M parameters"
    if trained != whole:
        words += f", {trained / 1e6:,.1f} M of them trained"
    size = getattr(facts.model.visual, "image_size", None)
    if size is not None:
        sides = size if isinstance(size, tuple | list) else (size, size)
        words += f"; {' x '.join(map(str, sides))} px"
    context = facts.args.force_context_length or context_length_of(facts.args.model, facts.model)
    return words + (f", {context} tokens" if context else "")


def _weights(facts: Facts) -> list[tuple[str, str]]:
    args, config = facts.args, facts.config
    if facts.resumed:
        return [("weights", facts.resumed)]
    named = {
        "--init-from": config.init_from, "--init-image": config.init_image, "--init-text": config.init_text,
        "--pretrained": args.pretrained or None, "--pretrained-image": args.pretrained_image or None,
    }  # fmt: skip
    given = [f"{flag} {value}".removesuffix(" True") for flag, value in named.items() if value]
    return [("weights", ", ".join(given))] if given else []


def _data(facts: Facts) -> str:
    if not facts.sources:
        return f"{facts.epoch_samples:,} samples an epoch, in open_clip's own pipeline"
    taken = ", ".join(f"{source.name} {count:,}" for source, count in facts.sources)
    order = {
        "debiased": "each step from one source",
        "random": "steps mix sources",
        "sequential": "one source after another",
    }
    words = f"{facts.epoch_samples:,} samples an epoch: {taken}"
    return f"{words}; {order[facts.config.sampling or 'random']}" if len(facts.sources) > 1 else words


def _loss(facts: Facts) -> str:
    config = facts.config
    words = [type(facts.loss).__name__]
    words += [f"in chunks of {config.loss_chunk} rows"] if config.loss_chunk else []
    words += [f"mixup {config.mixup_alpha:g}"] if config.coin_flip_mixup else []
    words += [f"teachers {config.teacher}, weight {config.distill_weight:g}"] if config.teacher else []
    words += [f"token drop {config.token_drop:g}"] if config.token_drop else []
    words += [f"word augmentation {config.text_augment:g}"] if config.text_augment else []
    words += [f"frozen: {', '.join(config.freeze)}"] if config.freeze else []
    return ", ".join(words)


def _optimizer(facts: Facts) -> str:
    args, config = facts.args, facts.config
    words = f"{args.opt}, lr {args.lr:g}, weight decay {args.wd:g}"
    if args.skip_scheduler:
        return words
    warm = args.warmup if config.warmup_share is None else round(config.warmup_share * facts.steps * args.epochs)
    floor = f" to {config.lr_min:g}" if config.lr_min else ""
    return f"{words}; {warm:,} steps of warm-up, then {args.lr_scheduler}{floor}"


def _device(args: argparse.Namespace) -> str:
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    loaders = "1 loader process" if args.workers == 1 else f"{args.workers} loader processes"
    words = f"{args.world_size} x {name}, {args.precision}, {loaders} a rank"
    cores = usable_cores()
    if args.workers * args.world_size > cores:
        enough = max(1, cores // args.world_size)
        words += f" (on {cores} CPU core{'s' * (cores > 1)}: --workers {enough} is enough)"
    return words


def _saves(args: argparse.Namespace, config: RecipeConfig) -> str:
    if not args.save_logs:
        return "nothing (--logs none)"
    often = []
    if config.save_every_steps:
        often.append(f"every {config.save_every_steps:,} steps (the newest {config.keep_checkpoints} kept)")
    if args.save_frequency > 0:
        often.append("each epoch" if args.save_frequency == 1 else f"every {args.save_frequency} epochs")
    else:
        often.append("at the end")
    where = os.path.normpath(os.path.join(args.logs, args.name, "checkpoints"))
    return f"{' and '.join(often)}, to {where}"
