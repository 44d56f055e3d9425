"""DistributedDataParallel's gradient buckets, laid out before the first gradient counts.

DDP lays them out anew after a process's first synchronised backward pass, in the order in which gradients came. From three
ranks on, the place of a gradient in its bucket decides in which order the ranks' parts are summed. A run that resumes at
step s would take its step s with the first layout and a run never interrupted with the second: the last bits would differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.dga.inputs import on_device
from open_clip_zerovl.dga.replay import buffers_kept
from open_clip_zerovl.dga.step import Prepare, unwrapped


def settle_buckets(
    model: torch.nn.Module,
    micro_batch: Sequence[Any],
    prepare: Prepare,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Make DDP's final layout by a backward pass of zeros, which all ranks take together; anything else is left alone.

    Gradients are None afterwards and norm statistics as before; random numbers are drawn, so seed after it.

    Args:
        model: in DDP, perhaps compiled (whose graphs give gradients in an order of their own); called as
            `model(images, texts)`, returns open_clip's output dict.
        micro_batch: some samples, images, texts and what `prepare` takes besides, in host memory.
        prepare: makes them what the model takes, on its device.
    """
    inner, ddp, _ = unwrapped(model)
    if ddp is None:
        return
    device = next(model.parameters()).device
    images, texts = prepare(*on_device(tuple(micro_batch[:2]), device), *micro_batch[2:])
    with buffers_kept(inner):
        with autocast():
            outputs = model(images, texts)
        parts = [value for value in outputs.values() if isinstance(value, Tensor) and value.requires_grad]
        torch.stack([part.float().sum() * 0 for part in parts]).sum().backward()
    model.zero_grad(set_to_none=True)
