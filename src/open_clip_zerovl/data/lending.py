"""Batches of images in shared memory that is used again: a loader worker lends a block, the training process gives it back.

By itself a DataLoader copies each batch into a new segment of shared memory, which the system fills with zeros first and maps
page by page into both processes. Here a worker writes its images into a block that it keeps:

    worker 0: block 3 is free  -->  images are written into it  -->  Lent(block 3) travels through the queue
    training process:  a tensor over block 3's memory; when the last tensor over it is gone: "block 3 is free" to worker 0

A worker that finds no free block makes a new one, so that there are as many as batches are under way at once. The word that
a block is free goes through a pipe: the system orders the memory accesses before and after it on every kind of processor.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

_WORD = struct.Struct("<IB")  # process and number of a block that is free again; written and read whole (PIPE_BUF)
_MOST_BLOCKS = 256  # of a worker; more batches than that are handed over as a DataLoader does it


@dataclass(frozen=True)
class Lent:
    """A micro-batch on its way to the training process.

    Attributes:
        process: of the worker.
        images: over the block's memory.
        others: what goes with them, small and therefore sent through the queue itself.
        pinned: images and others copied to memory that a GPU reads from by itself, by the DataLoader's pinning thread.
    """

    worker: int
    process: int
    block: int
    images: torch.Tensor
    others: tuple[Any, ...]
    pinned: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, worker: int, block: int, images: torch.Tensor, others: Sequence[Any]) -> Lent:
        """The micro-batch (images, *others), in the worker: a tensor sent as such would take a segment and a descriptor."""
        sent = _each(torch.Tensor, torch.Tensor.numpy, tuple(others))
        return cls(worker, os.getpid(), block, images, sent)

    def received(self) -> tuple[Any, ...]:
        """`others` as they were."""
        return _each(np.ndarray, torch.from_numpy, self.others)

    def pin_memory(self) -> Lent:
        """What torch's DataLoader calls on items that are no tensors."""
        return replace(self, pinned=_each(torch.Tensor, torch.Tensor.pin_memory, (self.images, *self.received())))


def _each(kind: type, function: Callable[[Any], Any], parts: Any) -> Any:
    """`parts` with the function applied to what is of a kind, in tuples within tuples too."""
    if isinstance(parts, tuple):
        return tuple(_each(kind, function, part) for part in parts)
    return function(parts) if isinstance(parts, kind) else parts


@dataclass
class _Blocks:
    """A worker's blocks; they live in its process alone."""

    made: list[torch.Tensor] = field(default_factory=list)
    free: list[int] = field(default_factory=list)


class Lending:
    """Both ends of the blocks of a loader's workers. Made in the training process before its workers, and handed to them."""

    def __init__(self, workers: int) -> None:
        self._pipes = [Pipe(duplex=False) for _ in range(workers)]
        for ends in self._pipes:
            for end in ends:
                os.set_blocking(end.fileno(), False)
        self._blocks = _Blocks()
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}  # keeps what was received mapped

    def __getstate__(self) -> dict[str, Any]:  # to a worker that is spawned
        return {**self.__dict__, "_blocks": _Blocks(), "_mapped": {}}

    def block(self, worker: int, like: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """(number, tensor) of a block of shared memory in the shape, type and strides of `like` (a meta tensor does);
        None where a worker has too many."""
        self._collect(worker)
        blocks = self._blocks
        for number in blocks.free:
            made = blocks.made[number]
            if made.shape == like.shape and made.dtype == like.dtype and made.stride() == like.stride():
                blocks.free.remove(number)
                return number, made
        if len(blocks.made) == _MOST_BLOCKS:
            return None
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        blocks.made.append(made.share_memory_())
        return len(blocks.made) - 1, blocks.made[-1]

    def _collect(self, worker: int) -> None:
        """Note the blocks that the training process has given back."""
        descriptor = self._pipes[worker][0].fileno()
        while True:
            try:
                words = os.read(descriptor, 4096 // _WORD.size * _WORD.size)
            except BlockingIOError:
                return
            self._blocks.free += [block for process, block in _WORD.iter_unpack(words) if process == os.getpid()]

    def receive(self, lent: Lent) -> tuple[Any, ...]:
        """(images, *others) in the training process; the block is given back when no tensor uses its memory any more."""
        give_back = partial(_give_back, self._pipes[lent.worker][1], lent.process, lent.block, os.getpid())
        if lent.pinned is not None:
            give_back()
            return lent.pinned
        self._mapped[lent.process, lent.block] = lent.images
        array: np.ndarray = lent.images.numpy()
        weakref.finalize(array, give_back).atexit = False
        return torch.from_numpy(array), *lent.received()  # the tensor's memory keeps `array`


def _give_back(pipe: Connection, process: int, block: int, holder: int) -> None:
    """Tell worker process `process` that `block` is free, if this is process `holder` and no fork of it that drops its copy."""
    if os.getpid() != holder:
        return
    # The pipe object stays open for this: the bare number of a closed descriptor may be another file's by now.
    with suppress(OSError):  # the pipe is full or closed: the worker makes a new block, or is gone
        os.write(pipe.fileno(), _WORD.pack(process, block))
