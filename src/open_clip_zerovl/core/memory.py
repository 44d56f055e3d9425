"""Memory and precision: the bytes of live tensors, free and freed memory, and the precision of products of fp32 matrices.

torch has two sets of flags for products: the older `allow_tf32` and `set_float32_matmul_precision`, and `fp32_precision` (torch
2.9). Setting a flag of one set and reading one of the other may raise, so both sets are handled in this module only.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that operations inside the context have allocated and that are still alive.

    Tensors that existed before (parameters, inputs) and views of them do not count. Unlike hooks on saved tensors, it also sees
    the tensors that gradient checkpointing and custom autograd functions keep.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes(self) -> int:
        """Count the bytes that are alive now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


def available_bytes(device: torch.device) -> int | None:
    """Ask for the bytes that this process can still allocate: on CUDA free plus cached, on CPU its share of the host's.

    Returns:
        None if they are unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_meminfo_available(), _cgroup_available()) if limit is not None]
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if limits else None


@cache
def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, as a GPU's caching allocator does (glibc only).

    glibc returns large blocks to the kernel and requests them again as pages that must be cleared. Without it a forward pass
    of 64 pictures of 224 px through EfficientNet-Lite0 takes three times its arithmetic (docs/performance.md). Thresholds that
    the user has set in the environment stay.
    """
    chosen = any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))
    mallopt = None if chosen else _mallopt()
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold = -1, -3  # numbers of malloc.h
    # Older releases of glibc take at most 32 MiB.
    mapped = mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)
    return bool(mallopt(trim_threshold, 2**31 - 1) and mapped)


def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None


def _meminfo_available() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _cgroup_available() -> int | None:
    """Ask for the bytes that the container's memory limit leaves (cgroup v2).

    Returns:
        None without a limit.
    """
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.exists() and used.exists()) or limit.read_text().strip() == "max":
        return None
    return max(0, int(limit.read_text()) - int(used.read_text()))


# torch's name of a precision -> the dtype with as many bits of mantissa (TF32 has as many as fp16).
_ROUNDED = {"tf32": torch.float16, "bf16": torch.bfloat16}


def product_precision(device_type: str) -> torch.dtype:
    """Return the effective precision of fp32 matmuls on "cuda" or "cpu", as the dtype with as many mantissa bits."""
    backend = _backend(device_type)
    if hasattr(backend, "fp32_precision"):
        return _ROUNDED.get(backend.fp32_precision, torch.float32)
    if device_type == "cpu":  # before torch 2.9
        return torch.bfloat16 if torch.get_float32_matmul_precision() == "medium" else torch.float32
    return torch.float16 if getattr(backend, "allow_tf32", False) else torch.float32


@contextmanager
def ieee_products(device_type: str) -> Iterator[None]:
    """Compute products of fp32 matrices on "cuda" or "cpu" in IEEE fp32 within the block."""
    if product_precision(device_type) == torch.float32:
        yield
        return
    backend = _backend(device_type)
    if not hasattr(backend, "fp32_precision") or (device_type == "cuda" and _older_flags_agree()):
        before = torch.get_float32_matmul_precision()
        cpu_backend = _backend("cpu")
        of_cpu = getattr(cpu_backend, "fp32_precision", None)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
            if of_cpu is not None:  # the line above may have changed it
                cpu_backend.fp32_precision = of_cpu
    else:
        before = backend.fp32_precision
        backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            backend.fp32_precision = before


def _older_flags_agree() -> bool:
    """Return whether the older flags allow TF32, and can be read: they raise where they contradict the newer ones."""
    try:
        return (
            torch.backends.cuda.matmul.allow_tf32
            and torch.get_float32_matmul_precision() != "highest"
        )
    except RuntimeError:
        return False


def _backend(device_type: str):
    """Return torch's flags for the matrix products of a device, or None if it has none."""
    if device_type == "cuda":
        return torch.backends.cuda.matmul
    return getattr(torch.backends.mkldnn, "matmul", None) if device_type == "cpu" else None
