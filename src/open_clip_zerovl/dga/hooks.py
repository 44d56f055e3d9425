"""Hooks on the gradients of parameters, which act on the gradient of each micro-batch instead of that of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import RngState

# Sizes of the gradients that a hook is tried on: a clamp at any bound cuts gradients of some size, and leaves more of them
# than rounding does.
_SIZES = tuple(10.0**power for power in range(-8, 4))
_SIZES_FP16 = tuple(10.0**power for power in range(-4, 4))
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the hook's results


class GradientHooks:
    """Finds hooks with which the sum over micro-batches is another gradient than that of one graph.

    A linear hook, such as a mask, may stay, and so may one that only looks; a clamp may not. Each hook is tried once, on
    gradients that are made up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._linear: dict[int, Any] = {}  # hooks that were tried, by id

    def check(self) -> None:
        """UserError for a hook that is not linear in the gradient, or acts on the accumulated one."""
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UserError(
                    f"{name} has a hook that acts on its accumulated gradient, which would run after each micro-batch; do "
                    "its work after backward()."
                )
            for hook in (parameter._backward_hooks or {}).values():
                if id(hook) not in self._linear and not _is_linear(hook, parameter):
                    raise UserError(
                        f"A hook on the gradient of {name} is not linear: it would act on each micro-batch's gradient instead "
                        "of the whole batch's (a clamp, a norm). Do its work after backward()."
                    )
                self._linear[id(hook)] = hook


def _is_linear(hook: Callable[[Tensor], Any], parameter: nn.Parameter) -> bool:
    """True if hook(a + b) = hook(a) + hook(b) for gradients of several sizes. A hook without result changes nothing."""
    kept = RngState.capture(parameter.device)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(parameter.shape, generator=generator).to(parameter) for _ in range(2)]

    def applied(gradient: Tensor) -> Tensor:
        result = hook(gradient.clone())
        return gradient if result is None else result

    try:
        with torch.no_grad():
            for size in _SIZES_FP16 if parameter.dtype == torch.float16 else _SIZES:
                one, other = (value * size for value in values)
                whole, first, second = applied(one + other), applied(one), applied(other)
                # Relative to the results: a clamp's are small beside large gradients. The rest is the rounding of those.
                bound = _TOLERANCE.get(parameter.dtype, 3e-2) * (
                    whole.norm() + first.norm() + second.norm()
                )
                rounding = 4 * torch.finfo(parameter.dtype).eps * (one.norm() + other.norm())
                if not (whole - (first + second)).norm() <= bound + rounding:
                    return False
    finally:
        kept.restore()
    return True
