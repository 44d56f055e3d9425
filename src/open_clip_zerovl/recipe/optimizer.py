"""The optimizer (sections 2.2 and A.9): parameter groups, clipping, the temperature's bounds.

open_clip exempts parameters from weight decay that have fewer than two axes, or the name of a norm, a bias or the logit scale.
So it decays class tokens and position and word embeddings, which are lookup tables and not matrices of a product.

The temperature tau is learned as open_clip's logit scale s = ln(1 / tau), clamped to 0..ln 100: tau from 0.01 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.recipe.towers import group_of, layers_of

MAX_LOGIT_SCALE = math.log(100)

# Last parts of the names of embeddings that timm and open_clip hold as bare parameters.
EMBEDDING_PARAMETERS = frozenset(
    {
        "cls_token",  # timm
        "dist_token",
        "reg_token",
        "pos_embed",
        "class_embedding",  # open_clip's ViT
        "positional_embedding",  # open_clip's ViT and text transformer
        "cls_emb",
    }
)


@dataclass(frozen=True)
class Rates:
    """Learning rates of the parts of a model, where None is `lr`.

    Without `layer_decay` a tower has one rate. The rate of a tower's layer is the tower's times `layer_decay` to the number of
    layers above it, as in BEiT and timm: 1 for the top block, one more for each block below, and for the embeddings below the
    lowest. Projections, logit scale and pooling above the blocks have the whole rate. A tower's last norm belongs to its top
    block, as in timm.
    """

    lr: float
    image: float | None = None
    text: float | None = None
    head: float | None = None
    layer_decay: float | None = None

    def of(self, model: nn.Module) -> dict[str, tuple[int, int, str, float]]:
        """Name of each trainable parameter -> order of its part, layer, part in words, its rate as a multiple of `lr`.

        Raises:
            UserError: a rate of a part of which nothing is trained; a tower whose layers are not known.
        """
        rates = {"image tower": self.image, "text tower": self.text, "heads": self.head}
        parts = list(rates)
        places: dict[str, tuple[int, int, str, float]] = {}
        layers = layers_of(model) if self.layer_decay is not None else {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                group = group_of(name)
                part = group if group in rates else "heads"
                layer, top = layers.get(name, (0, 0))
                scale = (
                    (rates[part] or self.lr) / self.lr * (self.layer_decay or 1) ** (top - layer)
                )
                words = f"{part}, layer {layer} of {top}" if top else part
                places[name] = (parts.index(part), layer, words, scale)
        for order, (part, rate) in enumerate(rates.items()):
            if rate is not None and all(order != each[0] for each in places.values()):
                option = {"heads": "head"}.get(part, part.removesuffix(" tower"))
                raise UserError(
                    f"--lr-{option} {rate:g} has no effect, since nothing of the {part} is trained; leave it out"
                )
        return places


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    exempt_embeddings: bool = False,
    rates: Rates | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into the groups of open_clip's training program: no decay, decay.

    Args:
        model: plain, or in DistributedDataParallel; plain with `rates`.
        weight_decay: weight decay of the second group; the paper's is 1e-3.
        exempt_embeddings: also exempt EMBEDDING_PARAMETERS and the weights of every `nn.Embedding`. False gives open_clip's
            groups, with the same parameters in the same order, so that its optimizer states load.
        rates: divides both groups by rate. A group then has `part`, its name, and `rate_scale`, which `scale_rates` applies.

    Raises:
        UserError: as `Rates.of`.
    """
    tables = {
        id(p)
        for m in model.modules()
        if isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
    }
    parts = {} if rates is None else rates.of(model)
    groups: dict[tuple, list[nn.Parameter]] = {}  # (part, decayed) -> its parameters
    if rates is None:
        groups = {((), False): [], ((), True): []}  # open_clip's two groups, also if one is empty
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        embedding = id(parameter) in tables or name.rpartition(".")[2] in EMBEDDING_PARAMETERS
        spare = _spared_by_open_clip(name, parameter) or (exempt_embeddings and embedding)
        groups.setdefault((parts.get(name, ()), not spare), []).append(parameter)
    return [
        {"params": groups[part, decayed], "weight_decay": weight_decay if decayed else 0.0}
        | ({"part": part[2], "rate_scale": part[3]} if part else {})
        for part, decayed in sorted(groups)
    ]


def scale_rates(optimizer: torch.optim.Optimizer) -> None:
    """Multiply the rate of a group by its `rate_scale` in each step.

    A schedule sets one rate for all groups.

    The key is not timm's `lr_scale`, which the schedules of open_clip 4 apply themselves: the scale would count twice.
    """
    scheduled: list[float] = []

    def scale(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        scheduled[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * group["rate_scale"]

    def restore(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
            group["lr"] = lr

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(restore)


def described_groups(optimizer: torch.optim.Optimizer) -> list[tuple[str, str, str, int, str]]:
    """Describe each group made with `Rates`: part, multiple of the learning rate, weight decay, tensors and numbers.

    Returns:
        Nothing for other groups.
    """
    return [
        (
            group["part"],
            f"{group['rate_scale']:.3g}",
            f"{group['weight_decay']:g}",
            len(group["params"]),
            f"{sum(p.numel() for p in group['params']):,}",
        )
        for group in optimizer.param_groups
        if "rate_scale" in group
    ]


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scaler: torch.amp.GradScaler | None = None,
    grad_clip_norm: float | None = None,
) -> None:
    """Clip the gradients, step, and clamp the temperature to its bounds.

    Args:
        model: plain, compiled or in DistributedDataParallel.
        scaler: the GradScaler that multiplied the gradients, if any; it skips a step with infinite ones and lowers its scale.
        grad_clip_norm: largest norm of all gradients together.
    """
    scales = [p for name, p in model.named_parameters() if name.rpartition(".")[2] == "logit_scale"]
    if grad_clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    with torch.no_grad():
        for scale in scales:
            if scale.requires_grad:  # a constant one stays where it is
                scale.clamp_(0, MAX_LOGIT_SCALE)


def _spared_by_open_clip(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))


def warmup_cosine(step: int, steps: int, peak: float, warmup: int, floor: float = 0.0) -> float:
    """Compute the learning rate of a step: a linear rise to `peak` over `warmup` steps, then half a cosine to `floor` at
    `steps`.

    Steps count from 0. With `floor=0` this is open_clip's schedule.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - floor)
