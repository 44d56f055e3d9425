"""Making the second forward pass equal to the first: restoring buffers, reusing frozen towers' outputs, comparing features.

Shapes: `B` micro-batch per rank, `K` micro-batches, `D` embedding width; a micro-batch has an index k in 0..K-1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import open_clip
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.precision import product_precision
from open_clip_zerovl.core.randomness import RngState

log = logging.getLogger(__name__)

# Largest relative difference (L2, of the worst row) between a replayed and a cached feature vector, by the coarsest
# precision in use. The same kernel gives exactly 0. Another kernel with grad on than off gives rounding errors. Other masks
# give 0.1 and more (measured: token drop 0.25 in a random ViT-B/16 0.1, dropout 0.1 in a small BERT 0.3).
REPLAY_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


# (encode method, micro-batch) -> a frozen tower's output, and the random state after it.
TowerOutputs = dict[tuple[str, int], tuple[Tensor, RngState]]


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


def _encoder(model: nn.Module, tower: str) -> str:
    """The name of the method by which open_clip's `forward` runs a tower: `encode_image`, in open_clip 4 `_encode_image`."""
    inner = f"_encode_{tower}"
    return inner if hasattr(type(model), inner) else f"encode_{tower}"


class FrozenTowers:
    """Runs a tower in which nothing is trained once per micro-batch: the replay gets its first output again.

    The model is still called as a whole (DDP needs that), with `encode_image` or `encode_text` of the open_clip model
    replaced during a step. Parameters show which towers may be frozen, the output shows whether one is: if an adapter or a
    weight shared with the other tower is trained inside, the output of a pass with graph requires gradient, and the tower
    runs twice. The random state after the tower is kept too, because the other tower may draw next. A model that is not
    open_clip's, or is compiled with fullgraph=True, runs its frozen tower twice, with the same gradients; the log says so.

    In a compiled model the replacement itself stays outside of the graphs; the tower's code is a graph of its own. There is one
    replacement for all steps, because a new one in each step would be compiled again.

    Args:
        model: without wrappers.
        splits: whether a compiled model may be split into several graphs; True if the model is not compiled.
    """

    def __init__(self, model: nn.Module, device: torch.device, splits: bool) -> None:
        self._model = model
        self._device = device
        self._index = 0
        self._replaying = False
        self._restore_rng = True
        self._outputs: TowerOutputs = {}
        self._learning: set[str] = set()  # encode methods whose output required gradient
        self._once: dict[str, Callable[..., Tensor]] = {}  # their replacements
        scripted = isinstance(model, torch.jit.ScriptModule)  # whose class has no forward to look at
        self._reusable = (
            splits
            and not scripted
            and type(model).forward in (open_clip.CLIP.forward, open_clip.CustomTextCLIP.forward)
        )
        self._told = False

    def frozen(self) -> list[str]:
        """Names of the encode methods whose tower has no trainable parameter now ([] for a model of another class)."""
        visual = getattr(self._model, "visual", None)
        if not isinstance(visual, nn.Module):
            return []
        image = {id(parameter) for parameter in visual.parameters()}
        heads = {id(getattr(self._model, name, None)) for name in ("logit_scale", "logit_bias")}
        trainable = {id(p) for p in self._model.parameters() if p.requires_grad} - heads
        names = []
        if not trainable & image:
            names.append(_encoder(self._model, "image"))
        if not trainable - image:
            names.append(_encoder(self._model, "text"))
        return names

    @contextmanager
    def reused(self, restore_rng: bool = True, outputs: TowerOutputs | None = None) -> Iterator[TowerOutputs]:
        """Within the block a forward pass after `first_pass` records outputs, and one after `replay` reuses them.

        Args:
            restore_rng: whether a reused output also sets the random state to that after its tower.
            outputs: those recorded in an earlier block.

        Yields:
            what is recorded in this block.
        """
        self._restore_rng = restore_rng
        self._outputs = {} if outputs is None else outputs
        names = [name for name in self.frozen() if name not in self._learning]
        if names and not self._reusable:
            if not self._told:
                log.info(
                    "The frozen tower (%s) runs in both passes: only open_clip models, not compiled with fullgraph=True, can "
                    "skip the second.",
                    names,
                )
            self._told, names = True, []
        for name in names:
            if name not in self._once:
                self._once[name] = self._encoded_once(name, self._model.__dict__.get(name))
        before = {name: self._model.__dict__.get(name) for name in names}
        self._model.__dict__.update({name: self._once[name] for name in names})
        try:
            yield self._outputs
        finally:
            for name, method in before.items():
                del self._model.__dict__[name]
                if method is not None:
                    self._model.__dict__[name] = method
            self._outputs = {}
            self._replaying = False

    def first_pass(self, index: int) -> None:
        """The next forward is the first of micro-batch `index`."""
        self._index, self._replaying = index, False

    def replay(self, index: int) -> None:
        """The next forward is the second of micro-batch `index`."""
        self._index, self._replaying = index, True

    def _encoded_once(self, name: str, own: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
        """The replacement of the method `name`, or of the function `own` that the caller has set in its place."""
        method = getattr(type(self._model), name)

        def encode(*args: Any, **kwargs: Any) -> Tensor:
            return method(self._model, *args, **kwargs) if own is None else own(*args, **kwargs)

        def encode_once(*args: Any, **kwargs: Any) -> Tensor:
            if name in self._learning:
                return encode(*args, **kwargs)
            if self._replaying:
                output, state = self._outputs.pop((name, self._index))
                if self._restore_rng:
                    state.restore()
                return output
            with_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                output = encode(*args, **kwargs)
            if output.requires_grad:
                self._learning.add(name)
                return output if with_graph else output.detach()
            self._outputs[name, self._index] = output, RngState.capture(self._device)
            return output

        return torch._dynamo.disable(encode_once, recursive=False)


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
