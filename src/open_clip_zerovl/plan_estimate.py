"""Arithmetic of a step on hardware that is not here: FLOPs and bytes counted on the CPU, a table of GPUs, one utilisation.

    B  micro-batch per rank    K  micro-batches    W  ranks    N = B*K*W    b = B*K    R  graphs retained    D  width

A step of a rank takes R micro-batches once forward and backward (g each) and K-R of them twice forward (h each), and its
share of the loss. With f the share of the forward pass, that is K*g*(1 + f*(K-R)/K), as section 4.1 has it.

The share of a GPU's peak that training reaches is taken from the paper's own run and held for all: 14.23 M pairs, 20 epochs,
ViT-B/16 and BERT-base at 224 px, 16 DGA steps and no token drop took 680 GPU hours on V100s (Table 5).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from open_clip_zerovl.dga import DecoupledGradientAccumulation
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.plan_model import PlannedModel
from open_clip_zerovl.retain import AUTO_SHARE, PeakBytes, most_graphs
from open_clip_zerovl.sampling import Batching


@dataclass(frozen=True)
class Gpu:
    """A GPU as its maker describes it.

    Attributes:
        memory_gib: as sold.
        tflops: peak of dense fp16 products summed in fp32, 10^12 a second.
        bf16: whether it multiplies bf16 natively.
    """

    label: str
    memory_gib: float
    tflops: float
    bf16: bool = True


# Makers' data sheets; figures "with sparsity" are halved.
GPUS = {
    "v100": Gpu("V100 32 GB", 32, 125, bf16=False),
    "v100-16": Gpu("V100 16 GB", 16, 125, bf16=False),
    "t4": Gpu("T4", 16, 65, bf16=False),
    "a10": Gpu("A10", 24, 125),
    "a30": Gpu("A30", 24, 165),
    "a40": Gpu("A40", 48, 150),
    "a6000": Gpu("RTX A6000", 48, 155),
    "a100": Gpu("A100 40 GB", 40, 312),
    "a100-80": Gpu("A100 80 GB", 80, 312),
    "h100": Gpu("H100 80 GB", 80, 989),
    "h200": Gpu("H200", 141, 989),
    "l4": Gpu("L4", 24, 121),
    "l40s": Gpu("L40S", 48, 362),
    "rtx3090": Gpu("RTX 3090", 24, 71),
    "rtx4090": Gpu("RTX 4090", 24, 165),
}

# Table 5: 680 GPU hours for 16 DGA steps. FLOPs of a sample: counted by `count_costs` (tests/test_plan.py counts them
# again), both passes of each micro-batch taken, none retained.
PAPER_SAMPLES = 14_230_000 * 20
PAPER_GPU_HOURS = 680
PAPER_FLOPS = 158.1e9
UTILISATION = PAPER_FLOPS * PAPER_SAMPLES / (PAPER_GPU_HOURS * 3600) / (GPUS["v100"].tflops * 1e12)

USABLE_SHARE = 0.92  # of a GPU's memory: the rest is CUDA's context and fragmentation


def micro_batch_for(memory_gib: float) -> int:
    """The micro-batch of ViT-B/16 + BERT-base for a GPU: the paper's 128 on 32 GiB in proportion, a power of two.

    A board sold with 32 GB reports a little less, hence the tolerance of 5 %.
    """
    if memory_gib <= 0:
        raise UserError(f"a GPU with {memory_gib:g} GiB of memory holds nothing; give its memory in GiB")
    return max(1, 2 ** math.floor(math.log2(4 * memory_gib * 1.05)))


def parse_hardware(text: str) -> tuple[Gpu, int]:
    """`v100:8` -> the GPU and how many; the count is 1 where it is left out.

    Raises:
        UserError: a GPU that the table does not have, or no count.
    """
    name, _, count = text.partition(":")
    gpu = GPUS.get(name.lower().replace("_", "-"))
    if gpu is None:
        raise UserError(f"--assume {text} names no GPU of the table; give one of {', '.join(GPUS)}, as v100:8")
    if count and (not count.isdigit() or int(count) < 1):
        raise UserError(f"--assume {text} tells no number of GPUs after the colon; write {name}:8")
    return gpu, int(count or 1)


# ---------------------------------------------------------------------------------------------------------------------
# Counting
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Estimating
# ---------------------------------------------------------------------------------------------------------------------


def estimated_seconds(costs: Costs, batching: Batching, retained: int, loss_chunk: int | None, gpu: Gpu) -> float:
    """Seconds of a step if the GPU is used as well as the paper's."""
    return costs.step_flops(batching, retained, loss_chunk) / (UTILISATION * gpu.tflops * 1e12)
