"""The precision of products of fp32 matrices: IEEE fp32, or TF32 or bf16 factors where torch's flags allow it.

torch has two sets of flags: the older `allow_tf32` and `set_float32_matmul_precision`, and `fp32_precision` (torch 2.9).
Setting a flag of one set and reading one of the other may raise, so both sets are handled in this module only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# torch's name of a precision -> the dtype with as many bits of mantissa (TF32 has as many as fp16).
_ROUNDED = {"tf32": torch.float16, "bf16": torch.bfloat16}


def product_precision(device_type: str) -> torch.dtype:
    """The effective precision of fp32 matmuls on "cuda" or "cpu", as the dtype with as many mantissa bits."""
    backend = _backend(device_type)
    if hasattr(backend, "fp32_precision"):
        return _ROUNDED.get(backend.fp32_precision, torch.float32)
    if device_type == "cpu":  # before torch 2.9
        return torch.bfloat16 if torch.get_float32_matmul_precision() == "medium" else torch.float32
    return torch.float16 if getattr(backend, "allow_tf32", False) else torch.float32


@contextmanager
def ieee_products(device_type: str) -> Iterator[None]:
    """Inside the block, products of fp32 matrices on "cuda" or "cpu" are IEEE fp32; torch's flags are restored afterwards."""
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
    """True if the older flags allow TF32; False if reading them raises, which happens if they contradict the newer ones."""
    try:
        return (
            torch.backends.cuda.matmul.allow_tf32
            and torch.get_float32_matmul_precision() != "highest"
        )
    except RuntimeError:
        return False


def _backend(device_type: str):
    """torch's flags for the matrix products of a device, or None if it has none."""
    if device_type == "cuda":
        return torch.backends.cuda.matmul
    return getattr(torch.backends.mkldnn, "matmul", None) if device_type == "cpu" else None
