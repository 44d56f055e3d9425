"""Random numbers: the streams of a seed, and generator states that are kept and restored around a forward pass.

Everything that a run draws comes from a stream of its own, named by (seed, purpose, key):

    stream(0, Purpose.MIXUP, 5)          coin and lambda of optimizer step 5 of a run with seed 0
    stream(0, Purpose.SCHEDULE, 5)       the sources of epoch 5's steps, independent of the stream above

A resumed run draws from the same streams, so that no generator's state has to be saved. The datasets that `zerovl data` writes
depend on its own `--seed` alone, not on these streams.

Section 4.1 ("stable decoupled gradient accumulation") reseeds the process before each of its two passes. Restoring a kept
state for each micro-batch does the same, and leaves the generator where a single pass would have left it.
"""

from __future__ import annotations

import enum
import hashlib
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
    """States of the process's default generators: Python's, NumPy's, torch's and, for an accelerator, that device's.

    Attributes:
        python, numpy, cpu: states of `random`, NumPy's and torch's CPU generator.
        device, device_state: the accelerator and its generator's state; None on the CPU.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    device: torch.device | None
    device_state: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RngState:
        """Take the present states of the generators that a forward pass on `device` draws from."""
        host = random.getstate(), np.random.get_state(), torch.get_rng_state()
        if device.type == "cpu":
            return cls(*host, None, None)
        return cls(*host, device, _module(device).get_rng_state(*_index(device)))

    def restore(self) -> None:
        """Put the generators back to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            _module(self.device).set_rng_state(self.device_state, *_index(self.device))


def _module(device: torch.device) -> Any:
    # torch.cuda, torch.xpu, torch.mps: each has the two functions used here
    return getattr(torch, device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # torch.mps knows one device and takes no argument
    return () if device.type == "mps" else (device,)


#: Version of the random streams of a seed. A run cannot go on in the middle of an epoch that was begun with another version. In
#: version 1 two purposes could share a stream.
STREAMS_VERSION = 2


@enum.unique
class Purpose(enum.Enum):
    """Purposes of random numbers, whose comments name the rest of the key. A value is never reused for another purpose."""

    SCHEDULE = "schedule"  # epoch: the order of the sources' steps
    ASSIGNMENT = "deal"  # epoch, first and last leaf: how sources mix in a part of the epoch
    SLICES = "pieces"  # epoch, source: the order of shard slices
    ORDER = "order"  # epoch, source, reader, block: the shuffle window
    SUBSTITUTES = "substitutes"  # source, position: which slices replace a lost one
    CAPTION = "caption"  # source, sample: which of several captions is shown first
    CAPTION_FIELD = "caption field"  # source, position: which of several fields' captions is shown
    IMAGE = "image"  # source, position: augmentation of the picture
    WORDS = "words"  # source, position: augmentation of the caption
    MIXUP = "mixup"  # optimizer step: coin and lambda
    MODEL = "model"  # optimizer step, rank: dropout, token drop
    PROBE_HEAD = "probe head"  # none: initial weights
    PROBE_ORDER = "probe order"  # epoch
    PROBE_IMAGE = "probe image"  # epoch, image: augmentation
    ALIGN_HEADS = "align heads"  # none: initial weights
    ALIGN_ORDER = "align order"  # epoch, source (-1: mixed steps): the order of its pairs
    ALIGN_CAPTION = "align caption"  # none: which caption of each picture comes first
    BOOTSTRAP = "bootstrap"  # none: which queries are drawn for an interval


def stream_seed(seed: int, purpose: Purpose, *key: int) -> int:
    """Compute the 64-bit seed of a stream, the same on every platform.

    It is a hash of the key's text ("mixup 0 5"), so that different purposes and keys of different length have different seeds.
    """
    text = " ".join(
        [purpose.value.replace(" ", "-"), str(int(seed)), *(str(int(part)) for part in key)]
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def stream(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
    """Make NumPy's generator of a stream."""
    return np.random.default_rng(stream_seed(seed, purpose, *key))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the process's generators (torch on all devices, numpy, `random`) for one optimizer step.

    Dropout and token drop of a step are then the same whether or not the run was interrupted before it.
    """
    value = stream_seed(seed, Purpose.MODEL, step, rank)
    torch.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def reseed(seed: int) -> None:
    """Seed the CPU generators that transforms draw from: torch's, numpy's and `random`'s."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    reseed_torch(seed)


def reseed_torch(seed: int) -> None:
    """Seed torch's CPU generator alone, as `reseed` does."""
    # torch.manual_seed would also reset the GPU's generators
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the process's CPU generators (torch, numpy, `random`) after the block, also after an error."""
    state = RngState.capture(torch.device("cpu"))
    try:
        yield
    finally:
        state.restore()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under seeded CPU generators and restore the process's own afterwards."""
    with preserved():
        reseed(seed)
        yield
