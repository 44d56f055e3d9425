"""Hooks on the gradients of parameters: they act once per step, on the gradient of the whole batch, as with one graph.

A hook that runs in the backward pass of each micro-batch would clamp, normalise or record a part of the gradient. So until the
last backward pass of a step the hooks are taken off, and the micro-batches' gradients are summed beside `.grad`; in the last
one the hooks get the sum. With DistributedDataParallel that is the rank's own gradient before the average, also as with one
graph. A step holds one more gradient of each parameter that has a hook.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError


class GradientHooks:
    """Within the block the hooks of a model's parameters wait for `release`, before the last backward pass.

    Args:
        model: without wrappers.
        averaged: whether DistributedDataParallel averages gradients over several ranks.
    """

    def __init__(self, model: nn.Module, *, averaged: bool) -> None:
        self._averaged = averaged
        self._waiting = {
            name: _WaitingHooks(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and (parameter._backward_hooks or _hooks_after_accumulation(parameter))
        }

    def release(self) -> None:
        """Let the hooks act in the next backward pass, which is the step's last."""
        for hooks in self._waiting.values():
            hooks.release()

    def __enter__(self) -> GradientHooks:
        for hooks in self._waiting.values():
            hooks.take_off()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Put the hooks back.

        Raises:
            UserError: over several ranks, a parameter with a hook that the last micro-batch does not use.
        """
        for hooks in self._waiting.values():
            hooks.put_back()
        for name, hooks in self._waiting.items() if kind is None else ():
            if hooks.gradient is not None and self._averaged:
                raise UserError(
                    f"{name} has a gradient hook, and the step's last micro-batch, in which the ranks' gradients are "
                    "averaged, does not use it; take the hook off and do its work after backward()."
                )
            hooks.finish()


class _WaitingHooks:
    """The hooks of one parameter, and the sum of its gradients so far."""

    def __init__(self, parameter: nn.Parameter) -> None:
        if not parameter._backward_hooks:
            parameter.register_hook(lambda gradient: None).remove()  # makes the dict
        self.parameter = parameter
        self.gradient: Tensor | None = None
        self._before: Any = parameter._backward_hooks
        self._after: Any = _hooks_after_accumulation(parameter)
        self._given: tuple[dict[int, Any], dict[int, Any]] = (
            dict(self._before or {}),
            dict(self._after),
        )
        self._released = False

    def take_off(self) -> None:
        self._before.clear()
        self._after.clear()
        self._before[id(self)] = self  # autograd calls the functions that this dict holds

    def release(self) -> None:
        self._released = True
        self._after.update(self._given[1])

    def put_back(self) -> None:
        if id(self) in self._before:
            del self._before[id(self)]
            self._before.update(self._given[0])
        if not self._released:
            self._after.update(self._given[1])

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return zero for `.grad` until the last backward pass, then the hooks' result for the sum."""
        whole = gradient if self.gradient is None else self.gradient + gradient
        if not self._released:
            self.gradient = whole
            return torch.zeros_like(gradient)
        self.gradient = None
        self.put_back()  # before the hooks run: one may remove itself
        for hook in self._given[0].values():
            changed = hook(whole)
            whole = whole if changed is None else changed
        return whole

    def finish(self) -> None:
        """Add the sum to `.grad` if the parameter took no part in the last micro-batch."""
        if self.gradient is None:
            return
        with torch.no_grad():
            self.parameter.grad += self(torch.zeros_like(self.gradient))  # type: ignore[operator]
        for hook in self._after.values():
            hook(self.parameter)


def _hooks_after_accumulation(parameter: nn.Parameter) -> dict[int, Any]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
