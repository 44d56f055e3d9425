"""Arithmetic of a step on hardware that is not here: FLOPs and bytes counted on the CPU, a table of GPUs, one utilisation.

    B  micro-batch per rank    K  micro-batches    W  ranks    N = B*K*W    b = B*K    R  graphs retained    D  width

A step of a rank takes R micro-batches once forward and backward (g each) and K-R of them twice forward (h each), and its
share of the loss. With f the share of the forward pass, that is K*g*(1 + f*(K-R)/K), as section 4.1 has it.

The share of a GPU's peak that training reaches is taken from the paper's own run and held for all: 14.23 M pairs, 20 epochs,
ViT-B/16 and BERT-base at 224 px, 16 DGA steps and no token drop took 680 GPU hours on V100s (Table 5).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.dga.retain import AUTO_SHARE, most_graphs
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.memory import PeakBytes
from open_clip_zerovl.plan.gpus import GPUS, Batch, Gpu, fastest_batch
from open_clip_zerovl.plan.model import PlannedModel

# Table 5: 680 GPU hours for 16 DGA steps. FLOPs of a sample: counted by `count_costs` (tests/plan/test_plan.py counts them
# again), both passes of each micro-batch taken, none retained.
PAPER_SAMPLES = 14_230_000 * 20
PAPER_GPU_HOURS = 680
PAPER_FLOPS = 158.1e9
UTILISATION = PAPER_FLOPS * PAPER_SAMPLES / (PAPER_GPU_HOURS * 3600) / (GPUS["v100"].tflops * 1e12)


@dataclass(frozen=True)
class Costs:
    """What a step consists of, counted and not timed.

    Attributes:
        retained_flops: g, of a sample whose graph is kept: forward and backward.
        replayed_flops: h, of a sample that is forwarded again.
        sample_bytes: that a micro-batch's graph and its gradients take a sample.
        fixed_bytes: that a step takes beside it: gradients, copies in half precision.
        state_bytes: weights and optimizer.
        embed_dim: D.
    """

    retained_flops: float
    replayed_flops: float
    sample_bytes: float
    fixed_bytes: float
    state_bytes: int
    embed_dim: int

    def step_flops(self, batching: Batching, retained: int, loss_chunk: int | None) -> float:
        """Of one rank's step, the loss included."""
        b, k = batching.micro_batch, batching.dga_steps
        towers = b * (retained * self.retained_flops + (k - retained) * self.replayed_flops)
        rows, total = b * k, batching.effective_batch
        return towers + 2.0 * rows * total * self.embed_dim * loss_products(rows, total, loss_chunk)

    def peak_bytes(self, batching: Batching, retained: int, loss_chunk: int | None) -> float:
        """Most memory of one rank's step, if nothing is lost to fragmentation."""
        graphs = max(1, retained) * batching.micro_batch * self.sample_bytes
        return self.state_bytes + self.fixed_bytes + graphs + loss_bytes(batching, self.embed_dim, loss_chunk)

    def graphs_that_fit(self, batching: Batching, memory_bytes: float, loss_chunk: int | None) -> int:
        """R of `--dga-retain auto` on a device of this size."""
        one = self.peak_bytes(batching, 1, loss_chunk)
        more = (AUTO_SHARE * memory_bytes - one) // (batching.micro_batch * self.sample_bytes)
        return min(most_graphs(batching.dga_steps, batching.world_size), 1 + max(0, int(more)))

    def fastest(
        self, effective_batch: int, ranks: int, memory_bytes: float, loss_chunk: int | None, retain: int | str
    ) -> Batch:
        """B, K and R for the least time within `memory_bytes` of a rank."""
        whole = Batching(1, max(1, effective_batch // ranks), ranks)
        fixed = self.peak_bytes(whole, 1, loss_chunk) - self.sample_bytes
        most = max(1, retain) if isinstance(retain, int) else 0
        return fastest_batch(effective_batch, ranks, memory_bytes, self.sample_bytes, fixed, most=most)


def loss_products(rows: int, total: int, chunk: int | None) -> int:
    """Products of (rows, D) with (D, total) that `ContrastiveLoss` takes on `rows` of `total` pairs.

    One for the value; one for either side's gradient; the logits again in each sweep (one for both sides alone, two over
    ranks), but for a first one that has all rows in one chunk.
    """
    sweeps = 1 if rows == total else 2
    return 1 + 2 + sweeps - (chunk is None or chunk >= rows)


def loss_bytes(batching: Batching, width: int, chunk: int | None) -> float:
    """Of the loss: the chunks of the logits, and gathered features with their gradients, in fp32."""
    rows, total = batching.micro_batch * batching.dga_steps, batching.effective_batch
    return 4.0 * (2 * min(chunk or rows, rows) * total + 4 * (rows + total) * width)


def count_costs(planned: PlannedModel, *, with_memory: bool = True) -> Costs:
    """Count FLOPs and bytes of the real step on the smallest micro-batches, on the model's device.

    Frozen towers, token drop and gradient checkpointing count as they run. The gradients left behind are removed.

    Args:
        with_memory: also count bytes, which takes twice as long.
    """
    model = planned.model
    size = 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1
    width = 0

    def step(size: int, steps: int, counter: AbstractContextManager[Any]) -> None:
        dga = DecoupledGradientAccumulation(model, _sum_of_features, autocast=planned.autocast, retain=1, check="never")
        micro_batches = [planned.micro_batch(size)] * steps
        model.zero_grad(set_to_none=True)
        with counter:
            dga.backward(micro_batches, prepare=planned.prepare)
        model.zero_grad(set_to_none=True)

    def note_width(_module: nn.Module, _inputs: Any, outputs: dict[str, Tensor]) -> None:
        nonlocal width
        width = outputs["image_features"].shape[-1]

    hook = model.register_forward_hook(note_width)
    try:
        flops = []
        for steps in (1, 2):
            counter = FlopCounterMode(display=False)
            step(size, steps, counter)
            flops.append(counter.get_total_flops() / size)
        peaks = []
        for rows in (size, 2 * size) if with_memory else ():
            live = PeakBytes()
            step(rows, 2, live)
            peaks.append(live.peak)
    finally:
        hook.remove()
    a_sample = (peaks[1] - peaks[0]) / size if peaks else 0.0
    fixed = max(0.0, peaks[0] - size * a_sample) if peaks else 0.0
    return Costs(flops[0], flops[1] - flops[0], a_sample, fixed, planned.state_bytes, width)


def _sum_of_features(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, output_dict: bool = False, **_: Any
) -> Tensor:
    """A loss that costs nothing: the real one is counted by `loss_products` and `loss_bytes`."""
    return (image_features + text_features).sum() * logit_scale


def estimated_seconds(costs: Costs, batching: Batching, retained: int, loss_chunk: int | None, gpu: Gpu) -> float:
    """Seconds of a step if the GPU is used as well as the paper's."""
    return costs.step_flops(batching, retained, loss_chunk) / (UTILISATION * gpu.tflops * 1e12)
