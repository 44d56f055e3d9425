"""DistributedDataParallel's gradient buckets get their final layout before the first step.

After a process's first synchronised backward pass DDP rearranges its buckets by the order in which gradients came. With three
ranks or more, the place of a gradient in its bucket decides in which order the ranks' parts are summed. A run that resumes at
step s would take that step with the first layout, a run that was never interrupted with the second: the last bits would differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.core.wrappers import unwrapped
from open_clip_zerovl.dga.inputs import on_device
from open_clip_zerovl.dga.replay import buffers_kept
from open_clip_zerovl.dga.step import Prepare


def settle_buckets(
    model: torch.nn.Module,
    micro_batch: Sequence[Any],
    prepare: Prepare,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Make DDP's final layout by a backward pass of zeros, which all ranks take together. Without DDP nothing is done.

    Gradients are None afterwards and norm statistics as before; random numbers are drawn, so seed after it.

    Args:
        model: in DDP, perhaps compiled (then gradients come in another order); called as `model(images, texts)`, returns
            open_clip's output dict.
        micro_batch: some samples: images, texts and further parts for `prepare`, in host memory.
        prepare: makes the model's inputs of them, on its device.
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
