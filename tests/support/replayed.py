"""The recorded steps of a training program through its model again, in one graph: the reference for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from support.dga_reference import errors


def features_of(
    model: nn.Module, entries: Sequence[Mapping[str, Any]], *, replay_masks: bool = True
) -> dict[str, Tensor]:
    """Features of all ranks' micro-batches together, and the logit scale, by the names that a loss takes.

    Args:
        entries: the record of one step by `training_script.py --gradient`, for each rank.
        replay_masks: under the random masks that the ranks drew; False draws other masks.
    """
    outputs: list[dict[str, Tensor]] = []
    for number, entry in enumerate(entries):
        torch.set_rng_state(entry["rng"]) if replay_masks else torch.manual_seed(number)
        outputs += [model(*micro_batch) for micro_batch in entry["prepared"]]
    return {
        "image_features": torch.cat([output["image_features"] for output in outputs]),
        "text_features": torch.cat([output["text_features"] for output in outputs]),
        "logit_scale": outputs[-1]["logit_scale"],
    }


def gradient_errors(
    model: nn.Module,
    entries: Sequence[Mapping[str, Any]],
    loss: Callable[..., Tensor],
    **loss_inputs: Any,
) -> tuple[float, list[float]]:
    """Compute a dense loss of a recorded step, and the largest error of each rank's gradient against that loss' own."""
    model.zero_grad()
    value = loss(**features_of(model, entries), **loss_inputs)
    value.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return float(value.detach()), [
        max(errors(entry["gradients"], wanted).values()) for entry in entries
    ]
