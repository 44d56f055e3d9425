"""The optimizer (sections 2.2 and A.9): parameter groups, clipping, the temperature's bounds.

open_clip exempts parameters from weight decay that have fewer than two axes, or the name of a norm, a bias or the logit scale.
So it decays class tokens and position and word embeddings, which are lookup tables and not matrices of a product.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from open_clip_zerovl.errors import UserError

MAX_LOGIT_SCALE = math.log(100)  # open_clip's lower bound of the temperature is 1/100; the released code's is 0.001

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


def parameter_groups(model: nn.Module, weight_decay: float, *, exempt_embeddings: bool = False) -> list[dict[str, Any]]:
    """The two parameter groups of open_clip's training program: no decay, decay; trainable parameters only.

    Args:
        model: plain, or in DistributedDataParallel.
        weight_decay: of the second group; the paper's is 1e-3.
        exempt_embeddings: also exempt EMBEDDING_PARAMETERS and the weights of every `nn.Embedding`. False gives open_clip's
            groups, with the same parameters in the same order, so that its optimizer states load.

    Raises:
        UserError: a negative weight decay, or nothing to train.
    """
    if weight_decay < 0:
        raise UserError(f"the weight decay must not be negative, but is {weight_decay}.")
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    spared: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        embedding = id(parameter) in tables or name.rpartition(".")[2] in EMBEDDING_PARAMETERS
        spare = _spared_by_open_clip(name, parameter) or (exempt_embeddings and embedding)
        (spared if spare else decayed).append(parameter)
    if not spared and not decayed:
        raise UserError("no parameter of the model is trainable, so there is nothing to optimise.")
    return [{"params": spared, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]


def constant_temperature(model: nn.Module) -> None:
    """Make the temperature constant at its present value (0.02 in the released code): `logit_scale` gets no gradient.

    Call it before DistributedDataParallel and the optimizer are made.

    Raises:
        UserError: a model without `logit_scale`.
    """
    logit_scale = getattr(model, "logit_scale", None)
    if not isinstance(logit_scale, nn.Parameter):
        raise UserError(f"{type(model).__name__} has no logit_scale, so its temperature cannot be made constant.")
    logit_scale.requires_grad_(False)


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
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] == "logit_scale":
                parameter.clamp_(0, MAX_LOGIT_SCALE)


def _spared_by_open_clip(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
