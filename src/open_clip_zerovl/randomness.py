"""Random numbers: the streams that a seed opens, and states kept and put back around a forward pass.

Section 4.1 ("stable decoupled gradient accumulation") reseeds the process before each of its two passes. A kept state does
the same for each micro-batch: it leaves the generator where a single pass would have left it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RngState:
    """State of torch's CPU generator and, for an accelerator, of that device's default generator.

    Python's and NumPy's generators are not part of it: models draw from torch's.
    """

    cpu: Tensor
    device: torch.device | None
    device_state: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        """The states that a forward pass on `device` draws from, as they are now."""
        if device.type == "cpu":
            return cls(torch.get_rng_state(), None, None)
        return cls(torch.get_rng_state(), device, _module(device).get_rng_state(*_index(device)))

    def restore(self) -> None:
        """Put the generators back to this state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            _module(self.device).set_rng_state(self.device_state, *_index(self.device))


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)  # torch.cuda, torch.xpu, torch.mps: each has the two functions used here


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps knows one device and takes no argument


_STREAM_SAMPLE = 4


def sample_seed(seed: int, source: int, position: int) -> int:
    """The 64-bit seed of one sample's augmentation, spread so that neighbours share nothing."""
    entropy = np.random.SeedSequence([seed, _STREAM_SAMPLE, source, position])
    return int(entropy.generate_state(1, np.uint64)[0])


def reseed(seed: int) -> None:
    """Seed the CPU generators that transforms draw from: torch's, numpy's and `random`'s."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reset the GPU's generators


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the process's own CPU generators as they were, whatever happens in the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under seeded CPU generators and leave the process's own as they were."""
    with preserved():
        reseed(seed)
        yield
