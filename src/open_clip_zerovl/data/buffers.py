"""Batches of images in reused shared memory: a loader worker fills a block of the pool, and the training process frees it.

A DataLoader copies each batch into a new segment of shared memory, which the system fills with zeros and maps page by page into
both processes. Here a worker writes its images into a block that it keeps:

    worker 0            block 3 is free, images are written into it, PooledBatch(block 3) goes through the queue
    training process    makes a tensor over block 3's memory; when no tensor uses it any more, tells worker 0 that it is free

A worker without a free block makes a new one; it ends up with one block per batch in use. The message that a block is free goes
through a pipe, which also orders the memory accesses before and after it.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from open_clip_zerovl.core.errors import UserError, first_line

# Message: process and number of a block that is free; shorter than PIPE_BUF, so never in parts.
_WORD = struct.Struct("<IB")
_MOST_BLOCKS = 256  # of a worker; further batches are sent as a DataLoader sends them


@dataclass(frozen=True)
class PooledBatch:
    """A micro-batch on its way to the training process.

    Attributes:
        worker, process: number and process of the worker.
        block: number of the block.
        images: tensor over the block's memory.
        others: the other items of the batch (small), sent through the queue.
        pinned: images and `others` in pinned memory, copied by the DataLoader's pinning thread; None without it.
    """

    worker: int
    process: int
    block: int
    images: torch.Tensor
    others: tuple[Any, ...]
    pinned: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls, worker: int, block: int, images: torch.Tensor, others: Sequence[Any]
    ) -> PooledBatch:
        """Make the micro-batch (images, *others), in the worker. Other tensors travel as arrays: as tensors, each would take a
        segment of shared memory and a descriptor."""
        sent = _each(torch.Tensor, _as_array, tuple(others))
        return cls(worker, os.getpid(), block, images, sent)

    def received(self) -> tuple[Any, ...]:
        """Return `others` with arrays as tensors again."""
        return _each(_Bfloat16, _Bfloat16.tensor, _each(np.ndarray, torch.from_numpy, self.others))

    def pin_memory(self) -> PooledBatch:
        """Return a copy with `pinned`, for torch's DataLoader, which calls this on items that are not tensors."""
        return replace(
            self,
            pinned=_each(torch.Tensor, torch.Tensor.pin_memory, (self.images, *self.received())),
        )


@dataclass(frozen=True)
class _Bfloat16:
    """A bfloat16 tensor on its way: its bits, since numpy has no such type."""

    bits: np.ndarray

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.bits).view(torch.bfloat16)


def _as_array(tensor: torch.Tensor) -> np.ndarray | _Bfloat16:
    if tensor.dtype == torch.bfloat16:
        return _Bfloat16(tensor.view(torch.int16).numpy())
    return tensor.numpy()


def _each(kind: type, function: Callable[[Any], Any], parts: Any) -> Any:
    """Apply a function to each item of a type, also in nested tuples."""
    if isinstance(parts, tuple):
        return tuple(_each(kind, function, part) for part in parts)
    return function(parts) if isinstance(parts, kind) else parts


class BufferPool:
    """The blocks of a loader's workers, and the pipes by which they are given back.

    It is made in the training process before the workers, which get a copy each.
    """

    def __init__(self, workers: int) -> None:
        self._pipes = [Pipe(duplex=False) for _ in range(workers)]
        for ends in self._pipes:
            for end in ends:
                os.set_blocking(end.fileno(), False)
        self._made: list[torch.Tensor] = []  # a worker's blocks, in its own process
        self._free: list[int] = []  # numbers of those that nobody uses
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}  # keeps received memory mapped

    def __getstate__(self) -> dict[str, Any]:  # for a spawned worker
        return {**self.__dict__, "_made": [], "_free": [], "_mapped": {}}

    def block(self, worker: int, like: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Find or make a free block of shared memory (number, tensor), in the worker, None if it has _MOST_BLOCKS in use.

        Args:
            like: has the wanted shape, type and strides; may be a meta tensor.

        Raises:
            UserError: the machine's shared memory is full.
        """
        self._collect(worker)
        for number in self._free:
            made = self._made[number]
            if (
                made.shape == like.shape
                and made.dtype == like.dtype
                and made.stride() == like.stride()
            ):
                self._free.remove(number)
                return number, made
        if len(self._made) == _MOST_BLOCKS:
            return None
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        try:
            made.share_memory_()
        except RuntimeError as error:
            if "No space left" not in str(error):
                raise
            raise UserError(
                f"the shared memory (/dev/shm) has no room for another batch of {made.nbytes / 2**20:.1f} MiB; each "
                f"loader worker keeps several ({first_line(error)}); start a container with a larger one (--shm-size=8g), or "
                "lower --workers or --batch-size"
            ) from error
        self._made.append(made)
        return len(self._made) - 1, made

    def _collect(self, worker: int) -> None:
        """Read from the pipe which blocks are free again."""
        descriptor = self._pipes[worker][0].fileno()
        while True:
            try:
                words = os.read(descriptor, 4096 // _WORD.size * _WORD.size)
            except BlockingIOError:
                return
            self._free += [
                block for process, block in _WORD.iter_unpack(words) if process == os.getpid()
            ]

    def receive(self, batch: PooledBatch) -> tuple[Any, ...]:
        """Return (images, *others), in training. The block is given back when no tensor uses its memory any more."""
        give_back = partial(
            _give_back, self._pipes[batch.worker][1], batch.process, batch.block, os.getpid()
        )
        if batch.pinned is not None:
            give_back()
            return batch.pinned
        self._mapped[batch.process, batch.block] = batch.images
        array: np.ndarray = batch.images.numpy()
        weakref.finalize(array, give_back).atexit = False
        return torch.from_numpy(array), *batch.received()  # the tensor keeps `array` alive


def _give_back(pipe: Connection, process: int, block: int, holder: int) -> None:
    """Tell worker process `process` that `block` is free. A fork of process `holder` sends nothing: it has only a copy."""
    if os.getpid() != holder:
        return
    # By the pipe object, not its descriptor's number, which another file may have got since.
    with suppress(OSError):  # full: the worker makes a new block; closed: it has ended
        os.write(pipe.fileno(), _WORD.pack(process, block))
