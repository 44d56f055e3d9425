"""Estimate of a step on other hardware: FLOPs and bytes counted on the CPU, a table of GPUs, and one utilisation for all.

    B  micro-batch per rank    K  micro-batches    W  ranks    N = B*K*W    b = B*K    R  graphs retained    D  width

In a step a rank forwards R micro-batches once (g each, with the backward pass) and K-R twice (h each), and computes its share
of the loss. With f the forward pass' share of g the towers cost K*g*(1 + f*(K-R)/K), as in section 4.1.

The share of a GPU's peak that training reaches is that of the paper's own run, for all GPUs: 14.23 M pairs, 20 epochs,
ViT-B/16 and BERT-base at 224 px, 16 DGA steps and no token drop took 680 GPU hours on V100s (Table 5).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from open_clip_zerovl.core.memory import PeakBytes
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.dga.retain import AUTO_SHARE, most_graphs
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.plan.gpus import GPUS, Batch, Gpu, fastest_batch
from open_clip_zerovl.plan.model import PlannedModel

# Table 5: 680 GPU hours for 16 DGA steps. FLOPs of a sample: counted by `count_costs` (tests/plan/test_plan.py repeats it),
# with every micro-batch forwarded twice.
PAPER_SAMPLES = 14_230_000 * 20
PAPER_GPU_HOURS = 680
PAPER_FLOPS = 158.1e9
UTILISATION = PAPER_FLOPS * PAPER_SAMPLES / (PAPER_GPU_HOURS * 3600) / (GPUS["v100"].tflops * 1e12)


@dataclass(frozen=True)
class Costs:
    """FLOPs and bytes of a step, counted.

    Attributes:
        retained_flops: g, of a sample whose graph is kept: forward and backward.
        replayed_flops: h, of a sample that is forwarded twice.
        sample_bytes: of a micro-batch's graph and its gradients, for each sample.
        fixed_bytes: of a step, whatever the micro-batch: gradients, copies in half precision.
        state_bytes: weights and optimizer.
        embed_dim: D.
        texts_per_image: texts of each image in a step, each with a loss of its own.
        teacher_widths: of the stored teachers, in the loss.
    """

    retained_flops: float
    replayed_flops: float
    sample_bytes: float
    fixed_bytes: float
    state_bytes: int
    embed_dim: int
    texts_per_image: int = 1
    teacher_widths: tuple[int, ...] = ()

    def step_flops(self, batching: Batching, retained: int, loss_chunk: int | None) -> float:
        """FLOPs of one rank's step, with the loss."""
        b, k = batching.micro_batch, batching.dga_steps
        towers = b * (retained * self.retained_flops + (k - retained) * self.replayed_flops)
        rows, total = b * k, batching.effective_batch
        products = self.embed_dim * loss_products(rows, total, loss_chunk)
        products += sum(self.teacher_widths) * teacher_products(rows, total)
        return towers + 2.0 * rows * total * products * self.texts_per_image

    def peak_bytes(self, batching: Batching, retained: int, loss_chunk: int | None) -> float:
        """Peak memory of one rank's step, without fragmentation."""
        graphs = max(1, retained) * batching.micro_batch * self.sample_bytes
        loss = loss_bytes(batching, self.embed_dim, loss_chunk, self.texts_per_image, self.teacher_widths)
        return self.state_bytes + self.fixed_bytes + graphs + loss

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
    """How many products of (rows, D) with (D, total) `ContrastiveLoss` computes on `rows` of `total` pairs.

    One for the value, one for each side's gradient, and the logits once more in each sweep of the gradients (one sweep on a
    single rank, two over ranks). If one chunk holds all rows, one of these is not needed: the first logits are kept.
    """
    sweeps = 1 if rows == total else 2
    return 1 + 2 + sweeps - (chunk is None or chunk >= rows)


def teacher_products(rows: int, total: int) -> int:
    """How many products of (rows, D) with (D, total) of a teacher's embeddings the loss computes.

    One for the teacher's normalisers, one for the value, and one in each sweep of the gradients.
    """
    return 2 + (1 if rows == total else 2)


def loss_bytes(
    batching: Batching, width: int, chunk: int | None, texts_per_image: int = 1, teacher_widths: tuple[int, ...] = ()
) -> float:
    """Memory of the loss: the chunks of the logits, and gathered features with their gradients, in fp32.

    Teachers have chunks of their own, one teacher at a time, and gathered embeddings in half precision. Each further text of an
    image has features and gradients of its own; the rest is used for one text after the other.
    """
    rows, total = batching.micro_batch * batching.dga_steps, batching.effective_batch
    chunks = 2 * (1 + bool(teacher_widths)) * min(chunk or rows, rows) * total
    features = 4 * (rows + total) * width + 3 * (texts_per_image - 1) * rows * width
    return 4.0 * (chunks + features) + 2.0 * (1 + texts_per_image) * (rows + total) * sum(teacher_widths)


def count_costs(planned: PlannedModel, *, with_memory: bool = True) -> Costs:
    """Count FLOPs and bytes of the real step on the smallest micro-batches, on the model's device.

    Frozen towers, token drop and gradient checkpointing count as they run. Gradients are removed at the end.

    Args:
        with_memory: also count bytes, which takes twice as long.
    """
    model = planned.model
    size = 2 if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1
    width = 0

    def step(size: int, steps: int, counter: AbstractContextManager[Any]) -> None:
        dga = DecoupledGradientAccumulation(model, _sum_of_features, autocast=planned.autocast, retain=1, check="never")
        micro_batches = [planned.micro_batch(size)[:2]] * steps
        model.zero_grad(set_to_none=True)
        with counter:
            dga.backward(micro_batches, prepare=planned.prepare, texts_per_image=planned.texts_per_image)
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
    return Costs(
        flops[0],
        flops[1] - flops[0],
        a_sample,
        fixed,
        planned.state_bytes,
        width,
        planned.texts_per_image,
        planned.teacher_widths,
    )


def _sum_of_features(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, output_dict: bool = False, **_: Any
) -> Tensor:
    """A loss of almost no cost, since `loss_products` and `loss_bytes` count the real one."""
    return (image_features.sum() + text_features.sum()) * logit_scale


def estimated_seconds(costs: Costs, batching: Batching, retained: int, loss_chunk: int | None, gpu: Gpu) -> float:
    """Seconds of a step at the paper's utilisation."""
    return costs.step_flops(batching, retained, loss_chunk) / (UTILISATION * gpu.tflops * 1e12)
