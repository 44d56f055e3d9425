"""A number whose backward pass is a given function: phase (3) of a step, called by a trainer's own `loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from open_clip_zerovl.core.errors import UserError


def deferred(value: Tensor, backward: Callable[[Tensor], None], device: torch.device) -> Tensor:
    """`value`, (), whose backward pass calls `backward` once, with what the number was multiplied by.

    It runs in the precision of the place of this call: autocast is as it is now, not as it is around `loss.backward()`.

    Args:
        value: detached.
        backward: computes gradients and adds them to `.grad` itself.
        device: of the model, whose autocast state is kept.
    """
    autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    def in_this_precision(factor: Tensor) -> None:
        enabled, dtype = autocast
        with torch.autocast(device.type, enabled=enabled, dtype=dtype):
            backward(factor)

    return _Deferred.apply(torch.zeros((), device=value.device, requires_grad=True), value, in_this_precision)


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, value: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.later = backward
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[None, None, None]:
        later, ctx.later = ctx.later, None
        if later is None:
            raise UserError(
                "The loss of a decoupled gradient accumulation was backpropagated a second time, but its graphs are freed in "
                "the first; call loss() again."
            )
        later(factor)
        return None, None, None
