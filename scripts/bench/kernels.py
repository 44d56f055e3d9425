"""Kernels, bytes and FLOPs of the 14M recipe's step, counted by shapes without a GPU.

    python -m scripts.bench.kernels [--micro-batch 512]

Forward and backward passes run on tensors without values that claim to be on a GPU, under CUDA's autocast: every operation is
seen with its inputs and outputs. A view is no kernel. It prints this release's row of docs/results/performance/kernels.csv:

    kernels forward, kernels    of a micro-batch's forward pass, and with its backward pass
    kernels replayed            that one more micro-batch adds to a step, which forwards it twice
    MB, GFLOP a sample          read and written, and computed in products, with the backward pass
    kernels, MB compiled        what a compiler can reach at best: chains of element-wise operations and row norms are one
                                kernel, which reads each tensor from outside once and writes what others use
    graph MiB a sample          of forward's tensors that backward reads
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated as A
from typing import Any
from unittest import mock

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import open_clip_zerovl
from open_clip_zerovl.data import images as images_module
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from scripts.bench.harness import build, register
from scripts.program import program
from support.fake_cuda import fake_cuda, to_fake_cuda

CONTEXT = 25  # tokens
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
        reads = {number(part): min(part.nbytes, part.untyped_storage().nbytes()) for part in given}
        writes = {number(part): part.nbytes for part in new or made[:1]}
        self.seen.append(Kernel(name, self.backward, flops, reads, writes))
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
    """Attend by the kernels that a GPU takes, in the place of products of matrices."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p)[0]
    bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    bias = bias.expand(*query.shape[:2], -1, -1)
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(query, key, value, bias, torch.is_grad_enabled(), dropout_p)[0]


@contextmanager
def on_fake_gpu(model: nn.Module) -> Iterator[nn.Module]:
    """Give tensors no values within, where the model's claim to be on a GPU."""
    images_module._scale_and_shift.cache_clear()
    name = "torch.nn.functional.scaled_dot_product_attention"
    with fake_cuda(), mock.patch(name, fused_attention):
        yield to_fake_cuda(model)
    images_module._scale_and_shift.cache_clear()


def counted(encode: Callable[..., Any], *inputs: Tensor, graph: bool) -> list[Kernel]:
    """List the kernels of features from a micro-batch's inputs, and with `graph` of their backward pass."""
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
    """Count the bytes of forward's results that backward reads."""
    read = {storage for kernel in kernels if kernel.backward for storage in kernel.reads}
    forward = [kernel.writes for kernel in kernels if not kernel.backward]
    sizes = {storage: size for writes in forward for storage, size in writes.items()}
    return sum(size for storage, size in sizes.items() if storage in read)


def fused(kernels: Sequence[Kernel]) -> list[int]:
    """Count the bytes that cross the border of each group, in which one kernel reads what another writes and all fuse."""
    group = list(range(len(kernels)))
    maker: dict[int, int] = {}
    for index, kernel in enumerate(kernels):
        for storage in kernel.reads if kernel.fuses else ():
            before = kernels[maker[storage]] if storage in maker else None
            if before is not None and before.fuses and before.backward == kernel.backward:
                first, second = sorted((group[index], group[maker[storage]]))
                group = [first if each == second else each for each in group]
        maker |= dict.fromkeys(kernel.writes, index)
    users: dict[int, set[int]] = defaultdict(set)
    makers: dict[int, int] = {}
    for number, kernel in zip(group, kernels, strict=True):
        for storage in kernel.reads:
            users[storage].add(number)
        for storage in kernel.writes:
            makers.setdefault(storage, number)
    crossing: dict[int, dict[tuple[str, int], int]] = defaultdict(dict)
    for number, kernel in zip(group, kernels, strict=True):
        read = {("read", s): n for s, n in kernel.reads.items() if makers.get(s) != number}
        written = {("written", s): n for s, n in kernel.writes.items() if users[s] - {number}}
        crossing[number] |= read | written
    return [sum(sizes.values()) for sizes in crossing.values()]


def row_of(name: str, micro_batch: int) -> dict[str, str]:
    """Count this release's row."""
    model: Any = build(name, 0.25, torch.device("cpu"), torch.float32)
    with on_fake_gpu(model):
        images = torch.empty(micro_batch, 3, *to_2tuple(model.visual.image_size), device="cuda:0")
        texts = torch.ones(micro_batch, CONTEXT, dtype=torch.long, device="cuda:0")
        pair = images, texts
        forward, both = (counted(model, *pair, graph=graph) for graph in (False, True))
        replayed = replayed_micro_batch(model, pair)
    compiled = fused(both)
    return {
        "release": open_clip_zerovl.__version__,
        "torch": torch.__version__,
        "kernels forward": f"{len(forward)}",
        "kernels": f"{len(both)}",
        "kernels replayed": f"{replayed[0]}",
        "MB a sample": f"{sum(kernel.bytes for kernel in both) / micro_batch / 1e6:.1f}",
        "kernels compiled": f"{len(compiled)}",
        "MB compiled": f"{sum(compiled) / micro_batch / 1e6:.1f}",
        "MB replayed": f"{replayed[1] / micro_batch / 1e6:.1f}",
        "GFLOP a sample": f"{sum(kernel.flops for kernel in both) / micro_batch / 1e9:.1f}",
        "graph MiB a sample": f"{graph_bytes(both) / micro_batch / 2**20:.1f}",
    }


def kernels(*, micro_batch: A[int, "samples", "B"] = 512) -> None:
    """Count this release's row, and print it as CSV."""
    with tempfile.TemporaryDirectory() as scratch:
        row = row_of(register("ViT-B-16+BERT-base", 0.1, Path(scratch)), micro_batch)
    print(",".join(row))
    print(",".join(row.values()))


if __name__ == "__main__":
    sys.exit(program(kernels))
