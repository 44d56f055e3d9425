"""Random-number states kept and put back around a forward pass (section 4.1, "stable decoupled gradient accumulation").

The paper reseeds the process before each of its two passes; a kept state does the same per micro-batch, leaves the
generator where a single pass would have left it, and repeats whatever stream the run was on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
