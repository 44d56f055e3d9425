"""A second forward pass equal to the first: buffers are restored, and features compared.

Shapes: `B` micro-batch per rank, `K` micro-batches, `D` embedding width; a micro-batch has an index k in 0..K-1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.precision import product_precision

# Largest relative difference (L2, of the worst row) between a replayed and a cached feature vector, by the coarsest
# precision in use. The same kernel gives exactly 0. Another kernel with grad on than off gives rounding errors. Other masks
# give 0.1 and more (measured: token drop 0.25 in a random ViT-B/16 0.1, dropout 0.1 in a small BERT 0.3).
REPLAY_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class ReplayError(UserError, RuntimeError):
    """A replayed forward pass gave other features than the first: the gradients would be wrong."""


class BufferState:
    """The buffers of a model as they are now: running statistics of norms, counters, moving averages."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Put back what has changed since."""
        with torch.no_grad():
            for module, name, buffer, value, version in self._kept:
                module._buffers[name] = buffer
                # Unchanged buffers are not written to, because a graph may hold them. Norms' statistics always are: compiled
                # code may change them without raising the version.
                if buffer._version != version or isinstance(module, _NormBase):
                    buffer.copy_(value)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Within the block forward passes may change buffers; at its end they are as before."""
    before = BufferState(model)
    try:
        yield
    finally:
        before.restore()


class ReplayCheck:
    """Compares replayed with cached features; the result is read once a step, and is the same on every rank.

    Differences stay on the device until `verdict`, so that no micro-batch waits for the GPU.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._passed_once = False
        self._seen: list[tuple[str, int, Tensor]] = []

    @property
    def active(self) -> bool:
        return self.mode == "always" or (self.mode == "first" and not self._passed_once)

    def start(self) -> None:
        self._seen = []

    def compare(self, name: str, index: int, replayed: Tensor, cached: Tensor) -> None:
        """Record the difference of `name` (B, D) of micro-batch `index`; two NaN count as equal."""
        if not self.active:
            return
        replayed, cached = replayed.detach().to(cached.dtype), cached.detach()
        same = (replayed == cached) | (replayed.isnan() & cached.isnan())
        difference = torch.where(same, 0.0, replayed - cached)
        relative = difference.norm(dim=-1) / cached.norm(dim=-1).clamp_min(torch.finfo(cached.dtype).tiny)
        worst = torch.where(same.all(dim=-1), 0.0, relative).max()
        self._seen.append((name, index, torch.stack([worst, difference.abs().max()])))

    def verdict(self, tolerance: float, device: torch.device, world_size: int) -> None:
        """Raise `ReplayError` on every rank if the features of any rank differ by more than `tolerance`.

        Called once per step, before the gradients are averaged, so that no rank waits for one that has stopped.
        """
        if not self.active or (world_size == 1 and not self._seen):
            return
        seen = [(*numbers, name, k) for (name, k, _), numbers in zip(self._seen, self._numbers(), strict=True)]
        # `not <=` rather than `>`: a NaN is a difference.
        bad = [entry for entry in seen if not entry[0] <= tolerance]
        any_bad, any_seen = bool(bad), bool(seen)
        if world_size > 1:
            anywhere = torch.tensor([any_bad, any_seen], dtype=torch.long, device=device)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX)
            any_bad, any_seen = (bool(number) for number in anywhere.tolist())
        self._seen = []
        if any_bad and not bad:
            raise ReplayError("Another rank's replayed features differ from its cached ones; its message says where.")
        if bad:
            relative, absolute, name, k = max(bad, key=lambda entry: (math.isnan(entry[0]), entry[0]))
            raise ReplayError(
                f"Replayed {name} of micro-batch {k} differ from the cached ones: relative difference {relative:.3g} "
                f"(largest element {absolute:.3g}), tolerance {tolerance:.3g}. The gradient would be wrong. Likely causes: "
                "a kernel or compiled graph that draws other random masks with grad on than off; a random generator that "
                "is not torch's default one; a module that changes with each forward (a cache, a counter, spectral "
                "norm); a `prepare` that is not deterministic. Find it with the model in eval(), then module by module; "
                "retain=K avoids the second forward in one process, check='never' accepts the difference."
            )
        self._passed_once = self._passed_once or bool(any_seen)

    def _numbers(self) -> list[tuple[float, float]]:
        """(relative, largest absolute) difference of each comparison, in one copy to the host."""
        if not self._seen:
            return []
        return [(relative, largest) for relative, largest in torch.stack([pair for _, _, pair in self._seen]).tolist()]


def replay_tolerance(model: nn.Module, device: torch.device, autocast: Callable[[], Any]) -> float:
    """The `REPLAY_TOLERANCE` of the coarsest precision among those of parameters, autocast and fp32 products."""
    precisions = {p.dtype for p in model.parameters() if p.dtype in REPLAY_TOLERANCE}
    with autocast():
        if torch.is_autocast_enabled(device.type):
            precisions.add(torch.get_autocast_dtype(device.type))
    if torch.float32 in precisions:
        precisions.add(product_precision(device.type))
    return max(
        (REPLAY_TOLERANCE[p] for p in precisions if p in REPLAY_TOLERANCE), default=REPLAY_TOLERANCE[torch.float32]
    )
