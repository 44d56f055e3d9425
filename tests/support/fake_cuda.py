"""Training steps on a GPU that is not there: tensors without values that claim to be on cuda:0, and waits for them.

A step runs on `FakeTensorMode`'s tensors (shape, dtype and device, no memory) under a mode that sees every operation. It
finds

- operations on tensors of two devices, which FakeTensorMode refuses,
- operations that make the host wait for the GPU, each with its source line: values read (`.item()`, `bool()`,
  `.tolist()`, nonzero, boolean masks), copies from the GPU, copies to it that block, CPU index tensors,
- parameters without gradient, and gradients of another dtype or device than their output's.

Not seen: kernels, values, memory. Autograd's engine refuses to run without a CUDA context, so a stub walks the graph and
leaves zeros in the leaves that it reaches.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers.masking_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
}
GIB = 2**30


def calling_line() -> str:
    """Describe as "package/file.py function: source" the innermost frame that is neither torch's nor this module's."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename
        if "/site-packages/torch/" in path and "grad_scaler" not in path:
            continue
        if (
            path == __file__
            or path.startswith("<")
            or path.endswith(("/contextlib.py", "/functools.py"))
        ):
            continue
        package = path.split("/site-packages/")[-1].split("/src/")[-1]
        return f"{package} {frame.name}: {frame.line}"
    return "?"


class Waits(TorchDispatchMode):
    """Counts the operations that make the host wait.

    Args:
        read: the value that a read from the GPU returns.

    Attributes:
        by_line: how often each source line waited.
        bytes_to_device: copied from the host to the GPU, waiting or not.
    """

    def __init__(self, read: int = 0) -> None:
        super().__init__()
        self.read = read
        self.by_line: Counter[str] = Counter()
        self.bytes_to_device = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        if func in READS and on_gpu:
            self._note()
        if func is aten.equal.default:
            return True  # of fake tensors nothing else is known; checks of arguments pass
        if func is aten._local_scalar_dense.default:
            value = self.read if on_gpu else 1
            dtype = args[0].dtype
            return (
                bool(value)
                if dtype == torch.bool
                else float(value)
                if dtype.is_floating_point
                else int(value)
            )
        if func is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or args[0].device)
            self._copy(args[0], target, bool(kwargs.get("non_blocking")))
        elif func is aten.copy_.default:
            waits_not = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            self._copy(args[1], args[0].device, waits_not)
        elif func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            self._index(args[0], args[1])
        return func(*args, **kwargs)

    def _note(self) -> None:
        self.by_line[calling_line()] += 1

    def _copy(self, tensor: Tensor, target: torch.device, non_blocking: bool) -> None:
        source = tensor.device
        if source.type == target.type:
            return
        if target.type == "cuda":
            self.bytes_to_device += tensor.nbytes
        if not non_blocking or source.type != "cpu":
            self._note()

    def _index(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> None:
        for index in indices:
            if not isinstance(index, Tensor) or not index.ndim or tensor.device.type != "cuda":
                continue
            if index.device.type == "cpu" or index.dtype == torch.bool:
                self._note()


class Engine:
    """Stands in for autograd's engine."""

    def backward(self, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for tensor, gradient in zip(tensors, grad_tensors or [None] * len(tensors), strict=True):
            assert gradient is None or (gradient.device, gradient.dtype, gradient.shape) == (
                tensor.device,
                tensor.dtype,
                tensor.shape,
            ), (gradient, tensor)
        for leaf in reached_from(tensors):
            zero = torch.zeros_like(leaf)
            leaf.grad = zero if leaf.grad is None else leaf.grad + zero

    def grad(
        self, outputs: Any, inputs: Sequence[Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        reached = {
            id(leaf)
            for leaf in reached_from([outputs] if isinstance(outputs, Tensor) else list(outputs))
        }
        return tuple(torch.zeros_like(value) if id(value) in reached else None for value in inputs)


def reached_from(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Find the leaves that a backward pass from `outputs` would reach."""
    todo, seen, found = [output.grad_fn for output in outputs], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions]
    return found + [output for output in outputs if output.grad_fn is None and output.requires_grad]


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Fake tensors within, where `torch.cuda` answers the calls of a step and autograd's engine is the stub."""
    allocated = [10 * GIB]

    def memory_allocated(device: Any = None) -> int:
        allocated[0] += GIB  # a graph of a GiB between any two questions
        return allocated[0]

    answers = {
        "torch.cuda.get_rng_state": lambda device="cuda": ("state", str(device)),
        "torch.cuda.set_rng_state": lambda state, device="cuda": None,
        "torch.cuda.memory_allocated": memory_allocated,
        "torch.cuda.max_memory_allocated": lambda device=None: allocated[0] + GIB,
        "torch.cuda.reset_peak_memory_stats": lambda device=None: None,
        "torch.cuda.memory_reserved": lambda device=None: allocated[0] + GIB,
        "torch.cuda.mem_get_info": lambda device=None: (100 * GIB, 141 * GIB),
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.manual_seed_all": lambda seed: None,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        # transformers takes fake tensors for tracing, and would skip its GPU path
        "transformers.masking_utils.is_tracing": lambda *_, **__: False,
        "torch.Tensor.pin_memory": lambda tensor, *_: tensor,
        "torch.autograd.backward": Engine().backward,
        "torch.autograd.grad": Engine().grad,
    }
    if not hasattr(torch.backends.mkldnn, "matmul"):  # before torch 2.9
        pytest.skip("torch 2.6 aborts the process on fake CUDA tensors")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        if not hasattr(transformers.masking_utils, "is_tracing"):  # transformers 4
            del answers["transformers.masking_utils.is_tracing"]
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(mode)
        yield mode


def to_fake_cuda(model: nn.Module) -> nn.Module:
    """Replace parameters and buffers by fake ones on cuda:0, within `fake_cuda`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    _fake(parameter), requires_grad=parameter.requires_grad
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _fake(buffer)
    return model


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0")


class FakeDDP(DistributedDataParallel):
    """DistributedDataParallel without its reducer, which takes real tensors only: gradients are not averaged."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.static_graph = False
        self.process_group = dist.group.WORLD
        self.reducer = SimpleNamespace(_rebuild_buckets=lambda: False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Fake this many ranks within, of which this process is the first and none answers."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
