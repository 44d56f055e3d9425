"""The device of tests marked gpu: a CUDA device, or, to rehearse them, the CPU with ZEROVL_REHEARSE=1."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("ZEROVL_REHEARSE") == "1":
        return torch.device("cpu")
    pytest.skip("needs a CUDA device; ZEROVL_REHEARSE=1 runs it on the CPU")


@pytest.fixture
def to_device(device: torch.device) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A `prepare` that moves a micro-batch: what decoupled accumulation does itself, for the reference."""

    def move(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(device), texts.to(device)

    return move


@pytest.fixture(autouse=True)
def ieee_products():
    """Multiply and convolve fp32 in fp32 unless a test asks for TF32; cuDNN takes TF32 by default."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
