"""The number of kept graphs of a step's first pass (section 4.1); their micro-batches are not forwarded twice.

Shapes: `K` micro-batches, `R` of them retained, `W` ranks. If a forward pass is a third of plain training, a step costs
1 + (K-R)/(3K) of it; R graphs are in memory at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import LiveBytes, available_bytes

log = logging.getLogger(__name__)

# Share of the free memory that "auto" fills; the rest is for fragmentation and for steps with longer texts.
AUTO_SHARE = 0.9


def most_graphs(k: int, world_size: int) -> int:
    """Return the largest R.

    Over several ranks one of several micro-batches must be replayed, because DDP synchronises there.
    """
    return k - 1 if world_size > 1 and k > 1 else k


@dataclass(frozen=True)
class Decision:
    """The decision of "auto", which a later process of the same run adopts to keep the same number of graphs.

    R changes the order in which gradients are added: with another R they agree to rounding, and not bit for bit.

    Attributes:
        graphs: R.
        graph_bytes: memory of one graph.
        other_bytes: further memory of a step at its peak, with one graph and without tensors that stay between steps.
    """

    graphs: int
    graph_bytes: float
    other_bytes: float

    @property
    def needed_bytes(self) -> float:
        """Sum the free memory that a step needs."""
        return self.other_bytes + max(0, self.graphs - 1) * self.graph_bytes


class Retention:
    """Decides R for each step: the given number, or, for "auto", the largest number that fits into the free memory.

    "auto" keeps one graph in the first step and measures it: on CUDA by the allocator, elsewhere by counting the bytes
    of tensors that a forward pass leaves alive. It decides R in the first step after an optimizer step, because the optimizer's
    state is then allocated, from the memory that is free then; on CUDA after two steps, since cuDNN tries its kernels in the
    first one. Over ranks all take the smallest number.

    Args:
        retain: R, or "auto".
        parameters: the optimizer's; a change shows that it has stepped (a GradScaler skips steps). Without
            them the second step decides.
        group: process group of the ranks that step together; None for the default one.
    """

    def __init__(
        self,
        retain: int | str,
        device: torch.device,
        world_size: int,
        parameters: Iterable[nn.Parameter] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(retain, bool) or not (
            retain == "auto" or (isinstance(retain, int) and retain >= 0)
        ):
            raise UserError(f"retain must be 'auto' or a number of graphs >= 0, but is {retain!r}.")
        self._retain = retain
        self._device = device
        self._world_size, self._group = world_size, group
        self._bytes_per_sample = 0.0
        self._transient_bytes = 0.0
        self._allocated_before = 0
        self._steps = 0  # measured on CUDA
        self._decided: Decision | None = None
        self._earlier: Decision | None = None  # of another process, until its memory is looked at
        self._sizes: list[int] = []  # of the last step
        self._parameters = list(parameters)
        self._versions: dict[
            int, int
        ] = {}  # of each parameter with a gradient, after the first step

    def graphs(self, sizes: list[int]) -> int:
        """Decide R for a step with micro-batches of these sizes.

        Over ranks it is a collective until "auto" has decided.
        """
        most = most_graphs(len(sizes), self._world_size)
        if isinstance(self._retain, int):
            if self._retain > most:
                reason = " (over several ranks one must be replayed, where DDP synchronises)"
                raise UserError(
                    f"retain={self._retain} graphs were asked for, but a step of {len(sizes)} micro-batches over "
                    f"{self._world_size} rank(s) can keep at most {most}{reason if most < len(sizes) else ''}."
                )
            return self._retain
        self._sizes = sizes
        if self._earlier is not None:
            self._adopt_if_it_fits(self._earlier)
        self._settle()
        if self._device.type == "cuda" and self._decided is None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated_before = torch.cuda.memory_allocated(self._device)
        return self._graphs

    def adopt(self, decision: Decision) -> None:
        """Keep the number of graphs of an earlier process of this run, if all ranks have room, from the first step on."""
        if self._retain == "auto":
            self._earlier = decision

    def decision(self) -> Decision | None:
        """Return the decision of "auto", made now if it can be.

        Call it between two steps, without gradients in memory. Over ranks it is a collective until "auto" has decided.

        Returns:
            None before an optimizer step without an earlier decision, and for a given R.
        """
        self._settle()  # not before a step is measured
        if self._decided is None:
            return self._earlier
        return replace(self._decided, graphs=self._graphs)

    @property
    def can_keep_fewer(self) -> bool:
        """Return whether "auto" keeps several graphs."""
        return self._graphs > 1

    @property
    def _graphs(self) -> int:
        most = most_graphs(len(self._sizes), self._world_size)
        return min(1 if self._decided is None else self._decided.graphs, most)

    def keep_fewer(self) -> bool:
        """Keep one graph fewer from now on, after a step has filled the device's memory.

        Returns:
            False if "auto" keeps one only.
        """
        graphs = self._graphs
        if self._decided is None or graphs < 2:
            return False
        self._decided = replace(self._decided, graphs=graphs - 1)
        log.warning(
            "The device's memory is full with the graphs of %d micro-batches: %d are kept in this step, taken again, and from "
            "here on.",
            graphs,
            graphs - 1,
        )
        return True

    def _settle(self) -> None:
        """Decide R if a step is measured and the optimizers of all ranks have stepped."""
        if self._decided is not None or not (self._bytes_per_sample and self._transient_bytes):
            return
        graph_bytes = self._bytes_per_sample * max(self._sizes)
        graphs = self._smallest(self._fitting(graph_bytes) if self._optimizer_has_stepped() else 0)
        if graphs:
            self._decided = Decision(graphs, graph_bytes, float(self._transient_bytes))

    def _adopt_if_it_fits(self, decision: Decision) -> None:
        """Take an earlier decision over if all ranks have the memory for it."""
        self._earlier = None
        free = available_bytes(self._device)
        if self._smallest(int(free is None or decision.needed_bytes <= free)):
            self._decided = decision
            # the number is that of all ranks
            if self._world_size == 1 or dist.get_rank(self._group) == 0:
                log.info("Graphs kept a step, as before this run was resumed: %d.", decision.graphs)
            return
        log.warning(
            "The graphs of %d micro-batches that were kept before this run was resumed need %.0f MiB, and %s MiB are free on "
            "this rank; their number is decided anew, so that gradients agree with an uninterrupted run to rounding and not "
            "bit for bit.",
            decision.graphs,
            decision.needed_bytes / 2**20,
            "unknown" if free is None else round(free / 2**20),
        )

    def _smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        if self._world_size == 1:
            return number
        agreed = torch.tensor([number], device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._group)
        return int(agreed.item())

    @contextmanager
    def measured(self, size: int) -> Iterator[None]:
        """Measure the graph of a retained micro-batch of `size` samples once, around its forward pass, for "auto"."""
        if self._retain != "auto" or self._bytes_per_sample or self._decided is not None:
            yield
        elif self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device)
            yield
            self._bytes_per_sample = (
                max(1, torch.cuda.memory_allocated(self._device) - before) / size
            )
        else:
            with LiveBytes() as live:
                yield
            self._bytes_per_sample = max(1, live.bytes()) / size

    def step_done(self, sizes: list[int]) -> None:
        """Record the step's peak memory after its backward passes, without tensors that stay between steps."""
        if self._retain != "auto" or self._decided is not None:
            return
        if not self._versions:
            # Scalars do not count: training clamps logit_scale also after skipped steps.
            self._versions = {
                i: p._version
                for i, p in enumerate(self._parameters)
                if p.grad is not None and p.numel() > 1
            }
        if self._device.type == "cuda":
            self._steps += 1
            if self._steps > 1:
                self._transient_bytes = (
                    torch.cuda.max_memory_allocated(self._device) - self._allocated_before
                )
        else:
            # the graph, and gradients within it
            self._transient_bytes = 2 * self._bytes_per_sample * max(sizes)

    def _optimizer_has_stepped(self) -> bool:
        # One is enough: a caller may train with gradients that its optimizer does not use.
        changed = [self._parameters[i]._version != version for i, version in self._versions.items()]
        return not changed or any(changed)

    def _fitting(self, graph: float) -> int:
        """Compute R from the free memory and the bytes of a graph.

        One graph is part of the measured peak; further graphs may fill AUTO_SHARE of the rest.
        """
        free = available_bytes(self._device)
        if free is None:
            count = 1
            log.warning(
                "The free memory of a %s device cannot be measured: the graph of one micro-batch a step is kept.",
                self._device.type,
            )
        else:
            count = 1 + max(0, int((AUTO_SHARE * free - self._transient_bytes) // graph))
            log.info(
                "This rank has memory to keep the graphs of %d of a step's %d micro-batches (%.1f MiB each, %.0f MiB free); "
                "the other micro-batches are forwarded twice.",
                min(count, most_graphs(len(self._sizes), self._world_size)),
                len(self._sizes),
                graph / 2**20,
                free / 2**20,
            )
        return count
