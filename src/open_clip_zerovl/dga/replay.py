"""Two passes that act as one graph: buffers are restored, replayed features compared, and hooks on gradients act once.

Shapes: `B` micro-batch per rank, `K` micro-batches, `D` embedding width; a micro-batch has an index k in 0..K-1.

Hooks on the gradients of parameters act once per step, on the gradient of the whole batch, as with one graph. A hook that
runs in the backward pass of each micro-batch would clamp, normalise or record a part of the gradient. So until the last
backward pass of a step the hooks are taken off, and the micro-batches' gradients are summed beside `.grad`; in the last one the
hooks get the sum. With DistributedDataParallel that is the rank's own gradient before the average, also as with one graph. A
step holds one more gradient of each parameter that has a hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import product_precision
from open_clip_zerovl.dga.model import SCALARS, name_of

# Largest relative difference (L2, of the worst row) between a replayed and a cached feature vector, by the coarsest
# precision in use. The same kernel gives exactly 0. Another kernel with grad on than off gives rounding errors. Other masks
# give 0.1 and more (measured: token drop 0.25 in a random ViT-B/16 0.1, dropout 0.1 in a small BERT 0.3).
REPLAY_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}


CHECK_EVERY = 500  # steps between two checks of check="first"
# Steps with a check of their own: in the first one a new head may be zero, and a copy equal to its original.
EARLY = (10, 100)

WEIGHTS, REPLAYED = "weights", "replayed"  # kinds of names that are compared, beside the SCALARS
# by the bytes of an element
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplayError(UserError, RuntimeError):
    """A replayed forward pass gave other features than the first: the gradients would be wrong."""


class WeightVersions:
    """The version counters of a model's parameters at the beginning of a step, which a change in place raises."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._versions = [(parameter, parameter._version) for parameter in model.parameters()]

    def check(self) -> None:
        """Refuse a parameter that has changed since the step began.

        Raises:
            UserError: such a parameter.
        """
        for parameter, version in self._versions:
            if parameter._version != version:
                raise UserError(
                    f"{name_of(self._model, parameter)} was changed within the step: after loss() and before its backward "
                    "pass, by an optimizer in a hook, or by forward itself. The replay would forward with other weights, and "
                    "the gradient would be wrong; change weights between two steps only, and call loss() again."
                )


class BufferState:
    """A copy of a model's buffers: running statistics of norms, counters, moving averages."""

    def __init__(self, model: nn.Module) -> None:
        self._copies = [
            (module, name, buffer, buffer.clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Restore the buffers that have changed since."""
        with torch.no_grad():
            for module, name, buffer, value, version in self._copies:
                module._buffers[name] = buffer
                # Unchanged buffers are not written to, because a graph may hold them. Norms' statistics always are: compiled
                # code may change them without raising the version.
                if buffer._version != version or isinstance(module, _NormBase):
                    buffer.copy_(value)


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers after forward passes within the block."""
    before = BufferState(model)
    try:
        yield
    finally:
        before.restore()


class ReplayCheck:
    """Compares replayed with cached features, and scalars between micro-batches, with one result for all ranks.

    Differences stay on the device until `verdict`, so that no micro-batch waits for the GPU.

    Args:
        mode: "first": the first step in which there is something to compare, those in EARLY and each CHECK_EVERY-th, and
            replayed outputs of a compiled model in each step; "always" or "never".
        group: process group of the ranks that step together; None for the default one.
    """

    def __init__(
        self, mode: str, world_size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.mode = mode
        self._due: set[str] = set()  # kinds of names that are compared in the present step
        self._passed: set[str] = set()  # those that were compared once
        self._world_size, self._group = world_size, group
        self._steps = 0
        self._seen: list[tuple[str, int, Tensor]] = []

    @property
    def active(self) -> bool:
        """Return whether anything may be compared in the present step."""
        return bool(self._due)

    def start(self, *, compiled: bool = False) -> None:
        """Begin a step.

        Args:
            compiled: any step may make a new graph, of another shape for one, and the replay may then have another graph than
                the first pass.
        """
        again = self.mode == "always" or self._steps % CHECK_EVERY == 0 or self._steps in EARLY
        names = {REPLAYED, *SCALARS, WEIGHTS}
        passed = self._passed - {REPLAYED} if compiled else self._passed
        self._due = names - (set() if again else passed) if self.mode != "never" else set()
        self._steps += 1
        self._seen = []

    def compare(self, name: str, index: int, replayed: Tensor, cached: Tensor) -> None:
        """Record the difference of `name` (B, D), or of a number, of micro-batch `index`.

        Two NaN count as equal.
        """
        if _kind(name) not in self._due:
            return
        replayed, cached = (
            value.detach().to(cached.dtype).reshape(-1, value.shape[-1:].numel())
            for value in (replayed, cached)
        )
        same = (replayed == cached) | (replayed.isnan() & cached.isnan())
        difference = torch.where(same, 0.0, replayed - cached)
        relative = difference.norm(dim=-1) / cached.norm(dim=-1).clamp_min(
            torch.finfo(cached.dtype).tiny
        )
        worst = torch.where(same.all(dim=-1), 0.0, relative).max()
        self._seen.append((name, index, torch.stack([worst, difference.abs().max()])))

    def bits_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the sum of the bits of each parameter, for `compare_bits`.

        Returns:
            Nothing in a step that does not compare them.
        """
        return {
            name: parameter.detach()
            .view(_INTEGERS[parameter.element_size()])
            .sum(dtype=torch.int64)
            for name, parameter in model.named_parameters()
            if WEIGHTS in self._due and _shows_bits(parameter.data)
        }

    def compare_bits(
        self, index: int, current: dict[str, Tensor], before: dict[str, Tensor]
    ) -> None:
        """Record the parameters that have changed up to micro-batch `index`, also those whose version has not (`.data`)."""
        self._seen += [
            (f"{WEIGHTS} {name}", index, (current[name] != bits).float().expand(2))
            for name, bits in before.items()
        ]

    def verdict(self, tolerance: float, device: torch.device) -> None:
        """Raise `ReplayError` on every rank if the outputs of any rank differ by more than `tolerance`.

        Called once per step, before the gradients are averaged, so that no rank waits for one that has stopped.
        """
        if not self.active or (self._world_size == 1 and not self._seen):
            return
        seen = [
            (*numbers, name, k)
            for (name, k, _), numbers in zip(self._seen, self._numbers(), strict=True)
        ]
        # `not <=` rather than `>`: a NaN is a difference.
        bad = [entry for entry in seen if not entry[0] <= tolerance]
        any_bad = bool(bad)
        replayed = any(_kind(name) == REPLAYED for _, _, name, _ in seen)
        compared = bool(seen)
        if self._world_size > 1:
            anywhere = torch.tensor([any_bad, replayed, compared], dtype=torch.long, device=device)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._group)
            any_bad, replayed, compared = (bool(number) for number in anywhere.tolist())
        self._seen = []
        if any_bad and not bad:
            raise ReplayError(
                "Another rank's replayed outputs differ from its cached ones; its message names them."
            )
        if bad:
            raise ReplayError(_difference(bad, tolerance))
        # A step that keeps all graphs compares scalars only: features are still due, which costs nothing until one replays.
        self._passed |= (
            {REPLAYED, *SCALARS, WEIGHTS} if replayed else {*SCALARS} if compared else set()
        )

    def _numbers(self) -> list[tuple[float, float]]:
        """Return the (relative, largest absolute) difference of each comparison, in one copy to the host."""
        if not self._seen:
            return []
        device = self._seen[0][2].device  # parameters may lie on several
        return [
            (relative, largest)
            for relative, largest in torch.stack(
                [pair.to(device) for *_, pair in self._seen]
            ).tolist()
        ]


def _kind(name: str) -> str:
    """Return the kind of a compared name: WEIGHTS, one of the SCALARS, or REPLAYED for features and sums of terms."""
    return name if name in SCALARS else WEIGHTS if name.startswith(f"{WEIGHTS} ") else REPLAYED


def _shows_bits(value: Tensor) -> bool:
    """Return whether a tensor is plain and dense, so that its elements can be read as integers."""
    plain = type(value) is Tensor and value.layout == torch.strided
    return (
        plain
        and not (value.is_quantized or value.is_meta or value.is_conj())
        and value.element_size() in _INTEGERS
    )


def _difference(bad: list[tuple[float, float, str, int]], tolerance: float) -> str:
    """Write the sentence for the largest of the differences."""
    relative, absolute, name, k = max(
        bad, key=lambda entry: (_kind(entry[2]) != REPLAYED, math.isnan(entry[0]), entry[0])
    )
    if _kind(name) == WEIGHTS:
        return (
            f"{name.removeprefix(f'{WEIGHTS} ')} was changed within the step, through .data or a kernel that leaves no trace, "
            "by forward itself or by an optimizer in a hook. The replay changes it once more, and the gradient may be wrong; "
            "change weights between two steps only, or keep a copy that follows them in a buffer."
        )
    if name in SCALARS:
        return (
            f"The {name} of micro-batch {k} is another than that of the last one (relative difference {relative:.3g}). The "
            "loss takes one for the whole batch, so it must not depend on samples or on dropout: make it a parameter."
        )
    return (
        f"Replayed {name} of micro-batch {k} differ from the cached ones: relative difference {relative:.3g} "
        f"(largest element {absolute:.3g}), tolerance {tolerance:.3g}. The gradient would be wrong. Likely causes: "
        "a kernel or compiled graph that draws other random masks with grad on than off (a torch._dynamo.config."
        "recompile_limit that is too low for the model's graphs leaves one of the two passes eager); a random generator that "
        "is not a default one of torch, NumPy or Python; a module that changes with each forward (a cache, a counter, "
        "spectral norm); a `prepare` that is not deterministic. Find it with the model in eval(), then module by module; "
        "retain=K avoids the second forward in one process, check='never' accepts the difference."
    )


def replay_tolerance(model: nn.Module, device: torch.device, autocast: Callable[[], Any]) -> float:
    """Choose the `REPLAY_TOLERANCE` of the coarsest precision among those of parameters, autocast and fp32 products."""
    precisions = {p.dtype for p in model.parameters() if p.dtype in REPLAY_TOLERANCE}
    with autocast():
        if torch.is_autocast_enabled(device.type):
            precisions.add(torch.get_autocast_dtype(device.type))
    if torch.float32 in precisions:
        precisions.add(product_precision(device.type))
    return max(
        (REPLAY_TOLERANCE[p] for p in precisions if p in REPLAY_TOLERANCE),
        default=REPLAY_TOLERANCE[torch.float32],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Hooks on the parameters' gradients
# ---------------------------------------------------------------------------------------------------------------------


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
