"""Micro-batches: their allowed contents, their number of samples, and the copy to the model's device.

A micro-batch is a tuple of two inputs (images, texts) and further parts for `prepare` and terms. An input is a tensor, a dict
or a tuple of tensors, in which row j of every tensor belongs to sample j:

    (images, texts)                                                (B, C, H, W), (B, L)
    (images, {"input_ids": ids, "attention_mask": mask})           a tokenizer's BatchEncoding likewise
    (images, texts, origin)                                        with prepare(images, texts, origin) -> images, texts

With a `text_order` the texts of a step stand in another order than its images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import total_bytes

INPUT_SHARE = 0.05  # half of the memory that retain="auto" leaves free


def checked_sizes(micro_batches: Sequence[Sequence[Any]], *, prepared: bool) -> list[int]:
    """Return the number of samples of each micro-batch.

    Args:
        prepared: whether there is a `prepare` or terms, which take the parts after the first two.

    Raises:
        UserError: no sequence or an empty one, a micro-batch without two inputs or with parts that no `prepare` takes, an
            input that is not a tensor, dict or tuple of tensors, an input without rows, or other numbers of texts than images.
    """
    if not isinstance(micro_batches, Sequence) or len(micro_batches) == 0:
        raise UserError(
            "micro_batches must be a non-empty sequence of (images, texts), which is read twice, but is "
            + (
                "empty."
                if isinstance(micro_batches, Sequence)
                else f"a {type(micro_batches).__name__}."
            )
        )
    sizes = [_checked_size(k, micro_batch, prepared) for k, micro_batch in enumerate(micro_batches)]
    for k, (images, texts) in enumerate(sizes):
        if images != texts:
            raise UserError(
                f"Micro-batch {k} must hold as many texts as images; the numbers are {texts} and {images}."
            )
    return [images for images, _ in sizes]


def _checked_size(k: int, micro_batch: Any, prepared: bool) -> tuple[int, int]:
    if (
        not isinstance(micro_batch, Sequence)
        or isinstance(micro_batch, str)
        or len(micro_batch) < 2
    ):
        raise UserError(
            f"Micro-batch {k} must be a pair of inputs (images, texts), but is a {type(micro_batch).__name__}"
            + (f" of {len(micro_batch)}." if isinstance(micro_batch, Sequence) else ".")
        )
    if len(micro_batch) > 2 and not prepared:
        raise UserError(
            f"Micro-batch {k} must be a pair of inputs (images, texts), but has {len(micro_batch)} parts; parts after the "
            "first two are for `prepare` and terms=, and none is given."
        )
    sizes = []
    for part in micro_batch[:2]:
        wrong = next(
            (leaf for leaf in _leaves(part) if not isinstance(leaf, Tensor) or leaf.ndim == 0), None
        )
        if wrong is not None:
            kind = (
                "a tensor without rows"
                if isinstance(wrong, Tensor)
                else f"a {type(wrong).__name__}"
            )
            raise UserError(
                f"Micro-batch {k} must be a pair of inputs (images, texts), each a tensor, a dict or a tuple of tensors with "
                f"a row for each sample, but holds {kind}."
            )
        rows = sorted({len(leaf) for leaf in _leaves(part)})
        if len(rows) != 1:
            raise UserError(
                f"Micro-batch {k} must have a row for each sample in every tensor, but an input's tensors have {rows} rows."
            )
        sizes.append(rows[0])
    if 0 in sizes:
        raise UserError(
            f"Micro-batch {k} is empty ({sizes[0]} images, {sizes[1]} texts); leave it out, or give it one sample or more."
        )
    return sizes[0], sizes[1]


def checked_order(order: Tensor, rows: int) -> Tensor:
    """`order` itself.

    Raises:
        UserError: it is not a permutation of 0..rows-1 on the host.
    """
    if (
        order.shape != (rows,)
        or order.dtype != torch.int64
        or not torch.equal(order.sort().values, torch.arange(rows))
    ):
        raise UserError(
            f"text_order must hold each of 0..{rows - 1} once, as int64, but is {tuple(order.shape)} of {order.dtype}."
        )
    return order


class DeviceInputs:
    """A step's inputs on the model's device. Those of replayed micro-batches stay there between the passes if they are small.

    They stay if together they take at most `room_bytes`; else each is copied again for its replay. Images as bytes are small:
    16,384 of 224 x 224 take 2.5 GB, 1.7 % of an H200's memory.

    Args:
        micro_batches: the step's.
        prepare: makes the model's inputs from those on the device, in each pass.
        replayed: indices of the micro-batches that are forwarded twice.
        room_bytes: see `input_room`.
    """

    def __init__(
        self,
        micro_batches: Sequence[Sequence[Any]],
        prepare: Callable[..., Sequence[Any]] | None,
        replayed: Collection[int],
        device: torch.device,
        room_bytes: float,
    ) -> None:
        self._micro_batches = micro_batches
        self._prepare = prepare
        self._device = device
        leaves = (leaf for k in replayed for part in micro_batches[k][:2] for leaf in _leaves(part))
        stay = sum(leaf.nbytes for leaf in leaves if leaf.device != device) <= room_bytes
        self._to_keep = set(replayed) if stay else set()
        self._inputs: dict[int, Any] = {}

    def take(self, k: int) -> tuple[Any, ...]:
        """Take the model's inputs for micro-batch k, in the first pass or the replay, and its further parts."""
        first, second, *others = self._micro_batches[k]
        inputs = (
            self._inputs.pop(k) if k in self._inputs else on_device((first, second), self._device)
        )
        if k in self._to_keep:
            self._to_keep.remove(k)
            self._inputs[k] = inputs
        images, texts = inputs if self._prepare is None else self._prepare(*inputs, *others)
        return images, texts, *others


def input_room(device: torch.device) -> float:
    """Return the bytes of a device's memory that inputs may take between the passes."""
    return INPUT_SHARE * (total_bytes(device) or 0)


def on_device(part: Any, device: torch.device) -> Any:
    """Copy nested tensors to a device.

    Containers are copied, so that the caller's input does not change.
    """
    if isinstance(part, Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, MutableMapping):
        moved = copy.copy(part)
        for key, value in part.items():
            moved[key] = on_device(value, device)
        return moved
    if isinstance(part, Mapping):
        return {key: on_device(value, device) for key, value in part.items()}
    values = [on_device(value, device) for value in part]
    return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)


def _leaves(part: Any) -> Iterator[Any]:
    if isinstance(part, Mapping):
        for value in part.values():
            yield from _leaves(value)
    elif isinstance(part, tuple | list):
        for value in part:
            yield from _leaves(value)
    else:
        yield part
