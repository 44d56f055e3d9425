"""The model inside of DistributedDataParallel, torch.compile and adapters."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from open_clip_zerovl.core.errors import UserError


def unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the model inside of DDP and torch.compile in any order, and the DDP wrapper if there is one."""
    ddp = None
    while True:
        if isinstance(model, DistributedDataParallel):
            ddp, model = model, model.module
        elif isinstance(inside := getattr(model, "_orig_mod", None), nn.Module):
            model = inside
        else:
            return model, ddp


def is_compiled(model: nn.Module) -> bool:
    """Look for a module that torch.compile runs: the model, a wrapper or a block."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def wrapped_inside(adapter: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of the model inside of an adapter, where the adapter itself is not wrapped; None if there is none.

    Raises:
        UserError: parameters that this DDP does not average.
    """
    ddp_models = [
        module for module in adapter.modules() if isinstance(module, DistributedDataParallel)
    ]
    if not ddp_models:
        return None
    averaged = {id(parameter) for ddp in ddp_models for parameter in ddp.parameters()}
    outside = [
        name for name, p in adapter.named_parameters() if p.requires_grad and id(p) not in averaged
    ]
    if len(ddp_models) > 1 or outside:
        what = (
            f"trains {outside[0]} outside of it"
            if outside
            else f"holds {len(ddp_models)} models in it"
        )
        raise UserError(
            f"{type(adapter).__name__} wraps a model in DistributedDataParallel and {what}, so that gradients would not be "
            "averaged together; put the whole adapter into one DistributedDataParallel."
        )
    return ddp_models[0]
