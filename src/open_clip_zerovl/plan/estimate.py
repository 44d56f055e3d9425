"""FLOPs and bytes of a step, counted on the smallest micro-batches, and seconds of a step on hardware that is not here.

    B  micro-batch per rank    K  micro-batches    W  ranks    N = B*K*W    b = B*K    R  graphs retained    D  width

In a step a rank forwards R micro-batches once (g each, with the backward pass) and K-R twice (h each), and computes its share
of the loss. With f the forward pass' share of g the towers cost K*g*(1 + f*(K-R)/K), as in section 4.1.

The share of a GPU's peak that training reaches is that of the paper's own run, for all GPUs: 14.23 M pairs, 20 epochs,
ViT-B/16 and BERT-base at 224 px, 16 DGA steps and no token drop took 680 GPU hours on V100s (Table 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from open_clip_zerovl.core.memory import PeakBytes
from open_clip_zerovl.dga.retain import AUTO_SHARE, most_graphs
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.plan.gpus import GPUS, Gpu, fastest_batch
from open_clip_zerovl.plan.model import PlannedModel
from open_clip_zerovl.sampling.schedule import Batching

# Table 5: 680 GPU hours for 16 DGA steps. FLOPs of a sample: counted by `count_costs` (tests/plan/test_plan.py repeats it),
# with every micro-batch forwarded twice.
PAPER_SAMPLES = 14_230_000 * 20
PAPER_GPU_HOURS = 680
PAPER_FLOPS = 157.36e9
LARGE_PARAMETERS = 30_000_000  # a CPU's step takes longer than torch's work on shapes alone
UTILISATION = PAPER_FLOPS * PAPER_SAMPLES / (PAPER_GPU_HOURS * 3600) / (GPUS["v100"].tflops * 1e12)


@dataclass(frozen=True)
class Costs:
    """FLOPs and bytes of a step, counted.

    Attributes:
        retained_flops: g, FLOPs of a sample whose graph is kept: forward and backward.
        replayed_flops: h, FLOPs of a sample that is forwarded twice.
        sample_bytes: bytes of the graph and its gradients, for each sample of a micro-batch.
        fixed_bytes: bytes that do not depend on the micro-batch: gradients, copies in half precision.
        state_bytes: weights and optimizer.
        embed_dim: D.
        loss_chunk: rows of the logit matrix alive at once; None for all.
    """

    retained_flops: float
    replayed_flops: float
    sample_bytes: float
    fixed_bytes: float
    state_bytes: int
    embed_dim: int
    loss_chunk: int | None = None

    def step_flops(self, batching: Batching, retained: int) -> float:
        """FLOPs of one rank's step, with the loss."""
        b, k = batching.micro_batch, batching.dga_steps
        towers = b * (retained * self.retained_flops + (k - retained) * self.replayed_flops)
        rows, total = b * k, batching.effective_batch
        products = self.embed_dim * loss_products(rows, total, self.loss_chunk)
        return towers + 2.0 * rows * total * products

    def peak_bytes(self, batching: Batching, retained: int) -> float:
        """Peak memory of one rank's step, without fragmentation."""
        rows, total = batching.micro_batch * batching.dga_steps, batching.effective_batch
        graphs = max(1, retained) * batching.micro_batch * self.sample_bytes
        # In fp32: chunks of the logits; gathered features with their gradients, of each further text its own.
        chunks = 2 * min(self.loss_chunk or rows, rows) * total
        features = 4 * (rows + total) * self.embed_dim
        return self.state_bytes + self.fixed_bytes + graphs + 4.0 * (chunks + features)

    def graphs_kept(self, batching: Batching, retain: int | str, memory_bytes: float) -> int:
        """R of `--dga-retain` on a device with this much memory; "auto" keeps as many graphs as fit."""
        most = most_graphs(batching.dga_steps, batching.world_size)
        if isinstance(retain, int):
            return min(retain, most)
        left = AUTO_SHARE * memory_bytes - self.peak_bytes(batching, 1)
        return min(most, 1 + max(0, int(left // (batching.micro_batch * self.sample_bytes))))

    def fastest_micro_batch(
        self, effective_batch: int, ranks: int, retain: int | str, memory_bytes: float
    ) -> int:
        """The B that, with its K and R, takes the least time within `memory_bytes` of a rank."""
        whole = Batching(1, max(1, effective_batch // ranks), ranks)
        fixed = self.peak_bytes(whole, 1) - self.sample_bytes
        most = max(1, retain) if isinstance(retain, int) else 0
        return fastest_batch(
            effective_batch, ranks, memory_bytes, self.sample_bytes, fixed, most=most
        ).micro_batch

    def seconds_on(self, gpu: Gpu, batching: Batching, retained: int) -> float:
        """Seconds of a step on a GPU at the paper's utilisation."""
        return self.step_flops(batching, retained) / (UTILISATION * gpu.tflops * 1e12)


def loss_products(rows: int, total: int, chunk: int | None) -> int:
    """Number of products of (rows, D) with (D, total) that `ContrastiveLoss` computes on `rows` of `total` pairs.

    One for the value, one for each side's gradient, and the logits once more in each sweep of the gradients (one sweep on a
    single rank, two over ranks). If one chunk holds all rows, one of these is not needed: the first logits are kept.
    """
    sweeps = 1 if rows == total else 2
    return 1 + 2 + sweeps - (chunk is None or chunk >= rows)


class Flops(TorchDispatchMode):
    """Counts the FLOPs of operations by torch's formulas, in `total`.

    torch's `FlopCounterMode` also follows the modules, and fails at one that is given a view of a parameter in a pass without
    gradients, as in timm's attention pooling (SigLIP, PE).
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


@contextmanager
def without_data(model: nn.Module) -> Iterator[None]:
    """Operations and the model's tensors have shapes and no data, so that a step takes no time and no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    held: list[dict[str, Any]] = [
        tensors for module in model.modules() for tensors in (module._parameters, module._buffers)
    ]
    real = [dict(tensors) for tensors in held]
    try:
        for tensors in held:
            for name, tensor in tensors.items():
                tensors[name] = tensor if tensor is None else mode.from_tensor(tensor)
        with mode:
            yield
    finally:
        for tensors, before in zip(held, real, strict=True):
            tensors.update(before)


def count_costs(planned: PlannedModel, loss_chunk: int | None = None) -> Costs:
    """Count FLOPs and bytes of the step on the smallest micro-batches, on the model's device.

    On a CPU the steps of a large model have shapes alone. Frozen towers, token drop and gradient checkpointing count as they
    run. Gradients are removed at the end.
    """
    model = planned.model
    size = (
        2
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        else 1
    )
    width = 0

    def sum_of_features(
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        output_dict: bool = False,
        **_: Any,
    ) -> Tensor:
        """A loss of almost no cost, since `Costs` counts the real one."""
        nonlocal width
        width = image_features.shape[-1]
        return (image_features.sum() + text_features.sum()) * logit_scale

    def step(size: int, steps: int, counter: AbstractContextManager[Any]) -> None:
        dga = DecoupledGradientAccumulation(
            model, sum_of_features, autocast=planned.autocast, retain=1, check="never"
        )
        model.zero_grad(set_to_none=True)
        with counter:
            micro_batches = [planned.micro_batch(size)] * steps
            dga.backward(micro_batches, prepare=planned.prepare)
        model.zero_grad(set_to_none=True)

    flops, peaks = [], []
    large = planned.device.type == "cpu" and planned.parameters[0] > LARGE_PARAMETERS
    with without_data(model) if large else nullcontext():
        for steps in (1, 2):
            counter = Flops()
            with sdpa_kernel(SDPBackend.MATH):  # fused attention on a CPU is not counted
                step(size, steps, counter)
            flops.append(counter.total / size)
        for rows in (size, 2 * size):
            live = PeakBytes()
            step(rows, 2, live)
            peaks.append(live.peak)
    a_sample = (peaks[1] - peaks[0]) / size
    return Costs(
        retained_flops=flops[0],
        replayed_flops=flops[1] - flops[0],
        sample_bytes=a_sample,
        fixed_bytes=max(0.0, peaks[0] - size * a_sample),
        state_bytes=planned.state_bytes,
        embed_dim=width,
        loss_chunk=loss_chunk,
    )
