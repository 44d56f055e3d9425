"""What a model returns of a micro-batch: checked, copied, and backpropagated from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.objective import FEATURES, SCALARS, TEXTS


def checked_outputs(outputs: Any, rows: dict[str, int]) -> dict[str, Tensor]:
    """The model's output dict, with these rows of features; a pair becomes one. UserError for an output that would get no
    gradient."""
    if isinstance(outputs, tuple | list) and len(outputs) == 2 and all(isinstance(part, Tensor) for part in outputs):
        outputs = dict(zip(FEATURES, outputs, strict=True))
    elif not isinstance(outputs, dict) or not {*FEATURES, "logit_scale"} <= outputs.keys():
        seen = sorted(outputs) if isinstance(outputs, dict) else type(outputs).__name__
        raise UserError(
            "The model must return a dict with image_features, text_features and logit_scale, or a pair of features, but "
            f"returned {seen}; create open_clip models with output_dict=True, and put others in an adapter (docs/dga.md)."
        )
    extra = sorted(outputs.keys() - {*FEATURES, *SCALARS})
    if extra:
        kind = (
            "token logits for a caption loss (CoCa)"
            if {"logits", "labels"} & set(extra)
            else "a teacher's outputs (distillation)"
            if any(name.startswith("dist_") for name in extra)
            else "outputs unknown to it"
        )
        raise UserError(f"Decoupled gradient accumulation cannot use {kind}: the model returned {', '.join(extra)}.")
    for name, size in rows.items():
        if outputs[name].ndim != 2 or len(outputs[name]) != size:
            raise UserError(f"{name} of {size} samples must be ({size}, width), but are {tuple(outputs[name].shape)}.")
    return outputs


def paired(features: dict[str, Tensor], order: Tensor | None) -> dict[str, Tensor]:
    """The same with text features in the order of their images: row order[j] is what was row j."""
    if order is None:
        return features
    texts = features[TEXTS]
    return features | {TEXTS: torch.empty_like(texts).index_copy_(0, order, texts)}


def detached_copy(output: Tensor) -> Tensor:
    """A copy in fp32 or fp64. Always a copy, because a compiled model may overwrite its output in the next call."""
    return output.detach().to(torch.promote_types(output.dtype, torch.float32), copy=True)


def backpropagate(outputs: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """One backward pass from all outputs that depend on a trainable parameter; in several passes DDP would miss some."""
    roots = {name: gradient for name, gradient in gradients.items() if outputs[name].requires_grad}
    if roots:
        torch.autograd.backward(
            [outputs[name] for name in roots],
            [gradient.to(outputs[name].dtype) for name, gradient in roots.items()],
        )
