"""Kernels, bytes and FLOPs of the 14M recipe's step, counted by shapes without a GPU, and the speed that follows from them.

    python -m scripts.bench.roofline [--micro-batch 512] [--record docs/results/performance/roofline.csv]

Forward and backward passes run on tensors without values that claim to be on a GPU, under CUDA's autocast: every operation is
seen with its inputs and outputs. A view is no kernel. The counts make one row of the record, which has a row for each release:

    kernels forward, kernels    of a micro-batch's forward pass, and with its backward pass
    kernels replayed            that one more micro-batch adds to a step, which forwards it twice
    MB, GFLOP a sample          read and written, and computed in products, with the backward pass
    graph MiB a sample          of forward's tensors that backward reads
    waits a step                reads of values and copies that block, in the third step of K = 4
    graphs                      that dynamo makes of the recipe with mixup, sorted texts and evaluations in between

The estimate: a kernel takes the time of its bytes or of its FLOPs, whichever is longer, at rates below the data sheets'.
`compiled` is what a compiler can reach at best: chains of element-wise operations and row norms become one kernel, which reads
each tensor from outside once and writes what others use.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import open_clip_zerovl
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data import images as images_module
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe import step as step_module
from open_clip_zerovl.recipe.step import text_padding
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import build, caption_lengths, make_batches, recipe_step, register
from support.fake_cuda import Waits, fake_cuda, to_fake_cuda

CONTEXT, STEPS, SAMPLES = (
    25,
    32,
    14.23e6 * 20,
)  # tokens, K, and what 20 epochs of the 14M recipe see
GPUS = {
    "H100": (3.0e12, 790e12),
    "H200": (4.3e12, 790e12),
}  # bytes a second that copies reach; bf16 FLOPs of large products
LAUNCH = 2e-6  # seconds between two kernels
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
# They read other rows than they write, so that nothing is fused with them.
ACROSS_ROWS = (
    "sum",
    "native_layer_norm_backward",
    "embedding_dense_backward",
    "topk",
    "gather",
    "scatter_add",
)
NOT_KERNELS = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "device")


@dataclass
class Kernel:
    """An operation: bytes of each storage that it reads and writes, by the storage's number."""

    name: str
    backward: bool
    flops: int
    shape: tuple[int, int, int] | None  # m, n, k of a product of matrices
    reads: dict[int, int]
    writes: dict[int, int]

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def fuses(self) -> bool:
        return not self.flops and self.name not in (*ACROSS_ROWS, *PRODUCTS)


@dataclass
class Kernels(TorchDispatchMode):
    """Records the kernels of a block."""

    seen: list[Kernel] = field(default_factory=list)
    backward: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self._alive: list[Tensor] = []  # so that no storage's number comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, made = tensors(args, kwargs), tensors(result)
        held = {number(tensor) for tensor in given}
        new = [tensor for tensor in made if number(tensor) not in held]
        name = func._schema.name.split("::")[1].rstrip("_")
        if name in NOT_KERNELS or not (new or func._schema.is_mutable):
            return result
        self._alive += given + made
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count else 0
        shape = (*given[-2].shape, given[-1].shape[1]) if name in ("mm", "addmm") else None
        reads = {number(part): min(part.nbytes, part.untyped_storage().nbytes()) for part in given}
        writes = {number(part): part.nbytes for part in new or made[:1]}
        self.seen.append(Kernel(name, self.backward, flops, shape, reads, writes))
        return result


def tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def number(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@torch.no_grad()
def backpropagate(outputs: Sequence[Tensor]) -> None:
    """Call each node of a graph when its gradients are complete, as autograd's engine does, which wants a GPU for CUDA's."""
    edges: Counter[Any] = Counter()
    todo: list[Any] = [output.grad_fn for output in outputs]
    seen = set(todo)
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is not None:
                edges[following] += 1
                todo += [following] * (following not in seen)
                seen.add(following)
    gradients: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    for output in outputs:
        gradients[output.grad_fn][output.output_nr] = torch.empty_like(output)
    ready = [node for node in seen if not edges[node]]
    while ready:
        node = ready.pop()
        given = gradients.pop(node, {})
        if hasattr(node, "variable"):
            accumulate(node.variable, given[0])
            continue
        made = node(*map(given.get, range(len(node._input_metadata)))) if given else None
        made = made if isinstance(made, tuple) else (made,) * len(node.next_functions)
        for (following, place), gradient in zip(node.next_functions, made, strict=True):
            if following is None:
                continue
            if gradient is not None:
                wanted = following._input_metadata[place]
                gradient = gradient.sum_to_size(wanted.shape).to(wanted.dtype)
                there = gradients[following].get(place)
                gradients[following][place] = gradient if there is None else there + gradient
            edges[following] -= 1
            ready += [following] * (not edges[following])


def accumulate(leaf: Tensor, gradient: Tensor) -> None:
    leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> Tensor:  # fmt: skip
    """Attention by the kernels that a GPU takes; without one torch would take its products of matrices."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p)[0]
    bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    bias = bias.expand(*query.shape[:2], -1, -1)
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(query, key, value, bias, torch.is_grad_enabled(), dropout_p)[0]


@contextmanager
def on_fake_gpu(model: nn.Module) -> Iterator[nn.Module]:
    """Within, tensors have no values, and the model's claim to be on a GPU."""
    images_module._scale_and_shift.cache_clear()
    name = "torch.nn.functional.scaled_dot_product_attention"
    with fake_cuda(), mock.patch(name, fused_attention):
        yield to_fake_cuda(model)
    images_module._scale_and_shift.cache_clear()


def counted(encode: Callable[..., Any], *inputs: Tensor, graph: bool) -> list[Kernel]:
    """The kernels of features from a micro-batch's inputs, and with `graph` of their backward pass."""
    with Kernels() as kernels:
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.set_grad_enabled(graph):
            features = [part for part in tensors(encode(*inputs)) if part.ndim > 1]
        kernels.backward = True
        if graph:
            backpropagate(features)
    return kernels.seen


def replayed_micro_batch(model: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Count the kernels and bytes that one more micro-batch, forwarded twice, adds to a step: K = 4 less K = 3."""
    counts = []
    for steps in (3, 4):
        autocast = partial(torch.autocast, "cuda", dtype=torch.bfloat16)
        dga = DecoupledGradientAccumulation(
            model, ContrastiveLoss(), autocast=autocast, check="never"
        )
        model.zero_grad(set_to_none=True)
        walk = mock.patch("torch.autograd.backward", lambda outputs, _: backpropagate(outputs))
        with walk, Kernels() as kernels:
            dga.backward([pair] * steps)
        counts.append((len(kernels.seen), sum(kernel.bytes for kernel in kernels.seen)))
    (fewer, less), (more, most) = counts
    return more - fewer, most - less


def graph_bytes(kernels: Sequence[Kernel]) -> int:
    """Bytes of forward's results that backward reads."""
    read = {storage for kernel in kernels if kernel.backward for storage in kernel.reads}
    forward = [kernel.writes for kernel in kernels if not kernel.backward]
    sizes = {storage: size for writes in forward for storage, size in writes.items()}
    return sum(size for storage, size in sizes.items() if storage in read)


# ---------------------------------------------------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------------------------------------------------


def kernel_seconds(kernel: Kernel, size: int, gpu: tuple[float, float]) -> float:
    """The time of a kernel that reads and writes `size` bytes."""
    memory, peak = size / (0.92 * gpu[0]), gpu[1]
    if not kernel.flops:
        return memory + LAUNCH
    if kernel.shape is None:  # convolutions, and attention at short lengths
        rate = (0.45 if kernel.name in PRODUCTS else 0.32) * peak
    else:  # tiles of 128 x 256 on 132 multiprocessors in whole waves, and a prologue that a short k does not hide
        m, k, n = kernel.shape
        tiles = -(-m // 128) * -(-n // 256)
        busy = (
            min(1.0, tiles * max(1, k // 2048) / 132)
            if tiles < 132
            else tiles / 132 / -(-tiles // 132)
        )
        rate = peak * 0.92 * max(busy, 0.15) * k / (k + 96)
    return max(memory, kernel.flops / rate) + LAUNCH


def eager_seconds(kernels: Sequence[Kernel], gpu: tuple[float, float]) -> float:
    return sum(kernel_seconds(kernel, kernel.bytes, gpu) for kernel in kernels)


def compiled_seconds(kernels: Sequence[Kernel], gpu: tuple[float, float]) -> float:
    """The time with chains fused: a group's first kernel stands for it, and moves what crosses the group's border."""
    group = fused_groups(kernels)
    made: dict[int, int] = {}
    users: dict[int, set[int]] = defaultdict(set)
    for index, kernel in enumerate(kernels):
        for storage in kernel.reads:
            users[storage].add(group[index])
        for storage in kernel.writes:
            made.setdefault(storage, group[index])
    moved: dict[int, dict[tuple[bool, int], int]] = defaultdict(dict)
    for index, kernel in enumerate(kernels):
        crossing = moved[group[index]]
        crossing |= {
            (True, s): size for s, size in kernel.reads.items() if made.get(s) != group[index]
        }
        outside = {s: size for s, size in kernel.writes.items() if users[s] - {group[index]}}
        crossing |= {(False, s): size for s, size in outside.items()}
    return sum(
        kernel_seconds(kernels[first], sum(sizes.values()), gpu) for first, sizes in moved.items()
    )


def fused_groups(kernels: Sequence[Kernel]) -> list[int]:
    """For each kernel the first one of its group, in which one kernel reads what another writes and all fuse."""
    parent = list(range(len(kernels)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    maker: dict[int, int] = {}
    for index, kernel in enumerate(kernels):
        for storage in kernel.reads if kernel.fuses else ():
            before = maker.get(storage)
            if (
                before is not None
                and kernels[before].fuses
                and kernels[before].backward == kernel.backward
            ):
                first, second = sorted((root(index), root(before)))
                parent[second] = first
        maker |= dict.fromkeys(kernel.writes, index)
    return [root(index) for index in range(len(kernels))]


def estimate(model: Any, images: Tensor, text_of: Callable[[int], Tensor]) -> list[list[str]]:
    """A row for each GPU and way: samples a second with R = 1 of K = 32 graphs kept, and hours of the 14M recipe."""
    lengths = np.sort(caption_lengths(len(images) * STEPS, CONTEXT, 0))
    cut = lengths.reshape(STEPS, -1).max(axis=1).tolist()
    passes = {  # (tower, text length) -> kernels without and with graph
        ("text", length): [
            counted(model.encode_text, text_of(length), graph=graph) for graph in (False, True)
        ]
        for length in {CONTEXT, *cut}
    }
    passes["image", 0] = [
        counted(model.encode_image, images, graph=graph) for graph in (False, True)
    ]
    rows = []
    for gpu, rates in GPUS.items():
        for way, seconds in {"eager": eager_seconds, "compiled": compiled_seconds}.items():
            times = {
                key: [seconds(kernels, rates) for kernels in both] for key, both in passes.items()
            }
            for name, each in {way: [CONTEXT] * STEPS, f"{way}, texts sorted": cut}.items():
                forward, step = (
                    sum(times["image", 0][n] + times["text", length][n] for length in each)
                    for n in (0, 1)
                )
                rate = len(images) * STEPS / (step + forward * (STEPS - 1) / STEPS)
                rows.append([gpu, name, f"{rate:,.0f}", f"{SAMPLES / rate / 3600:.1f}"])
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Waits and graphs
# ---------------------------------------------------------------------------------------------------------------------


def waits_of_a_step(name: str) -> int:
    """Count what makes the host wait in the third step of K = 4; the first ones fill caches and check the replay."""
    model = build(name, 0.25, torch.device("cpu"), torch.float32)
    micro_batches = make_batches(name, model, [4] * 4, seed=1)
    padding = text_padding(model)
    with on_fake_gpu(model), mock.patch.object(step_module, "text_padding", lambda model: padding):
        step = recipe_step(model, 1024, sort_text=True)
        for number in range(3):
            with Waits() as waits:
                step.take(micro_batches, number)
    return sum(waits.found.values())


def graphs_of_the_recipe(name: str) -> int:
    """Count the graphs that dynamo makes in 14 steps of sorted texts, with evaluations of other batches in between."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = build(name, 0.25, torch.device("cpu"), torch.float32)
    compiled: Any = torch.compile(model, backend=counter)
    step = recipe_step(compiled, None, sort_text=True)
    for number in range(14):
        step.take(make_batches(name, model, [8, 8, 8], seed=number), number)
        if number in (5, 9):
            model.eval()
            for rows in (16, 5):
                images, texts = make_batches(name, model, [rows], seed=1)[0]
                with torch.no_grad():
                    compiled(images / 255, texts)
            model.train()
    return counter.frame_count


def captions(rows: int, length: int) -> Tensor:
    return torch.ones(rows, length, dtype=torch.long, device="cuda:0")


def row_of(name: str, micro_batch: int) -> tuple[dict[str, str], list[list[str]]]:
    """Count this release's row, and estimate its speed."""
    model: Any = build(name, 0.25, torch.device("cpu"), torch.float32)
    with on_fake_gpu(model):
        images = torch.empty(micro_batch, 3, *to_2tuple(model.visual.image_size), device="cuda:0")
        pair = images, captions(micro_batch, CONTEXT)
        forward, both = (counted(model, *pair, graph=graph) for graph in (False, True))
        replayed = replayed_micro_batch(model, pair)
        speeds = estimate(model, images, partial(captions, micro_batch))
    row = {
        "release": open_clip_zerovl.__version__,
        "torch": torch.__version__,
        "kernels forward": f"{len(forward)}",
        "kernels": f"{len(both)}",
        "kernels replayed": f"{replayed[0]}",
        "MB a sample": f"{sum(kernel.bytes for kernel in both) / micro_batch / 1e6:.1f}",
        "MB replayed": f"{replayed[1] / micro_batch / 1e6:.1f}",
        "GFLOP a sample": f"{sum(kernel.flops for kernel in both) / micro_batch / 1e9:.1f}",
        "graph MiB a sample": f"{graph_bytes(both) / micro_batch / 2**20:.1f}",
    }
    return row, speeds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batch", type=int, default=512)
    parser.add_argument(
        "--record", type=Path, metavar="FILE.csv", help="write this release's row there"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        row, speeds = row_of(
            register("ViT-B-16+BERT-base", None, 0.1, Path(scratch)), args.micro_batch
        )
    with tempfile.TemporaryDirectory() as scratch:
        tiny = register("tiny", None, 0.1, Path(scratch))
        row |= {
            "waits a step": f"{waits_of_a_step(tiny)}",
            "graphs": f"{graphs_of_the_recipe(tiny)}",
        }
    rows = [row]
    if args.record is not None:
        rows = with_row(args.record, row)
    print(markdown_table(list(row), [list(each.values()) for each in rows]))
    print()
    print(markdown_table(["GPU", "way", "samples/s", "hours of 20 epochs"], speeds))


def with_row(file: Path, row: dict[str, str]) -> list[dict[str, str]]:
    """Write a release's row in place of its earlier one, and return all rows."""
    rows = list(csv.DictReader(file.open(encoding="utf-8"))) if file.is_file() else []
    rows = [each for each in rows if each["release"] != row["release"]] + [row]
    write_atomically(
        file, "".join(",".join(line) + "\n" for line in (row, *(each.values() for each in rows)))
    )
    return rows


if __name__ == "__main__":
    main()
