"""Phase (2) of a step: the loss on the features of all micro-batches, and its gradients.

Shapes: `b` rows of this rank (all its micro-batches), `W` ranks, `D` embedding width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import ieee_products
from open_clip_zerovl.dga.model import IMAGES, SCALARS, leaves_of, open_clips
from open_clip_zerovl.losses import ContrastiveLoss, gathered_sizes

log = logging.getLogger(__name__)

TOTALS = {"loss", "total_loss", "total"}  # names of a sum, which must not stand beside its parts
LossGradients = list[tuple[nn.Parameter, Tensor | None]]  # of a loss that has parameters


class Objective:
    """A loss that is called with features as plain tensors in fp32 or fp64, outside of autocast, with IEEE fp32 products.

    Args:
        loss: see `DecoupledGradientAccumulation`.
        device: the features' device.
        ddp: the model's DDP wrapper, which averages gradients over its ranks; None for one process.
        scaler: multiplies the gradients.

    Raises:
        UserError: a loss that cannot be exact over these ranks.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        device: torch.device,
        ddp: DistributedDataParallel | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._loss = loss.module if isinstance(loss, DistributedDataParallel) else loss
        self._device, self._scaler = device, scaler
        self._group = ddp.process_group if ddp is not None else None
        self._world_size = dist.get_world_size(self._group) if ddp is not None else 1
        self._module = _module_of(self._loss)
        self._feature_factor = feature_factor(self._module, self._world_size)

    @property
    def scaled(self) -> bool:
        """Return whether gradients are multiplied by a GradScaler's scale."""
        return self._scaler is not None

    def scale(self, value: Tensor) -> Tensor:
        """Multiply a value by the GradScaler's scale, if there is one."""
        return value if self._scaler is None else self._scaler.scale(value)

    def gradients(
        self, values: dict[str, Tensor], loss_inputs: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], LossGradients]:
        """Compute the detached losses and the gradients of their sum by `values` and by the loss' own parameters.

        The gradients are times the scaler's scale; those of the loss' parameters are for `add_loss_gradients`.

        Args:
            values: the features (b, D), and the scalars that the model returned.

        Raises:
            UserError: a loss that returns a total beside its parts, or trains a tensor that is not its parameter.
        """
        if self._world_size > 1 and isinstance(self._module, open_clips("ClipLoss", "SigLipLoss")):
            # open_clip's gathers assume equal sizes; with unequal ones its averages over ranks would weigh rows differently.
            sizes = gathered_sizes(len(values[IMAGES]), self._world_size, self._device, self._group)
            if min(sizes) != max(sizes):
                raise UserError(
                    f"{type(self._module).__name__} over ranks needs as many samples on each, but they hold {sizes}; "
                    "drop the remainder or use ContrastiveLoss, which takes any sizes."
                )
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        with (
            torch.enable_grad(),
            torch.autocast(self._device.type, enabled=False),
            ieee_products(self._device.type),
        ):
            losses = self._losses(leaves, loss_inputs)
            first, *others = losses.values()
            total = sum(others, start=first)
            self._check_leaves(total, [*leaves.values(), *parameters])
            all_gradients = torch.autograd.grad(
                self.scale(total), [*leaves.values(), *parameters], allow_unused=True
            )
        loss_gradients: LossGradients = list(
            zip(parameters, all_gradients[len(leaves) :], strict=True)
        )
        gradients = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), all_gradients, strict=False)
        }
        if self._feature_factor != 1:
            features = gradients.keys() - SCALARS
            gradients |= {name: gradients[name] * self._feature_factor for name in features}
        detached = {name: value.detach() for name, value in losses.items()} | {
            "loss": total.detach()
        }
        return detached, gradients, loss_gradients

    def add_loss_gradients(self, loss_gradients: LossGradients, factor: Tensor | None) -> None:
        """Add the loss' own parameters' gradients, times a factor, to `.grad`, averaged over ranks as in DDP.

        All ranks call it together, after the last backward pass of the towers.
        """
        for parameter, loss_gradient in loss_gradients:
            gradient = (
                loss_gradient if loss_gradient is None or factor is None else loss_gradient * factor
            )
            if self._world_size > 1:
                gradient = (
                    torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
                )
                dist.all_reduce(gradient, group=self._group)
                gradient = gradient / self._world_size
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                with torch.no_grad():
                    parameter.grad.add_(gradient)

    def parameters(self) -> list[nn.Parameter]:
        """List the loss' own parameters."""
        return list(self._module.parameters()) if isinstance(self._module, nn.Module) else []

    def _losses(self, leaves: dict[str, Tensor], loss_inputs: dict[str, Any]) -> dict[str, Tensor]:
        result = self._loss(**leaves, **loss_inputs, output_dict=True)
        losses = result if isinstance(result, dict) else {"contrastive_loss": result}
        total = next(iter(losses.keys() & TOTALS), None)
        if total is not None and len(losses) > 1:
            parts = ", ".join(losses.keys() - {total})
            raise UserError(
                f"{_name(self._loss)} returned '{total}' beside {parts}: if it is their sum, each part would be summed twice; "
                "return the total or the parts alone."
            )
        return losses

    def _check_leaves(self, total: Tensor, known: Sequence[Tensor]) -> None:
        """Refuse a loss whose graph contains a trainable tensor that is neither its input nor its own parameter."""
        seen = {id(tensor) for tensor in known}
        leaf = next((leaf for leaf in leaves_of([total]) if id(leaf) not in seen), None)
        if leaf is not None:
            raise UserError(
                f"{_name(self._loss)} learns a tensor of shape {tuple(leaf.shape)} that is not its own parameter and "
                "would get no gradient; make the loss an nn.Module that holds it, or let the model return it."
            )


def feature_factor(loss: Any, world_size: int) -> int:
    """Return the factor on the features' gradient of `loss` that makes DDP's mean over ranks right.

    With d the gradient of the mean loss over all N pairs, DDP's mean needs W * d for each rank's own rows.
    - ContrastiveLoss gives W * d. So does ClipLoss(gather_with_grad=True): the gather's backward sums over ranks W equal
      losses, or (local_loss) the W losses whose mean the whole loss is. SigLipLoss sums over ranks in every dist_impl.
    - ClipLoss() gives d: each rank computes the whole loss and gets the gradient of its own rows only. The scale's gradient
      is complete on every rank, so that its mean needs no factor.
    - ClipLoss(local_loss=True) lacks the gradient through other ranks' losses (A.1); no factor corrects that.

    Raises:
        UserError: a loss that no factor corrects, or that was made for other ranks.
    """
    ranked: tuple[Any, ...] = (ContrastiveLoss, *open_clips("ClipLoss", "SigLipLoss"))
    if not isinstance(loss, ranked):
        return 1
    if loss.world_size != world_size:
        raise UserError(
            f"{type(loss).__name__} was made for world_size={loss.world_size}, but the model's gradients are averaged over "
            f"{world_size} rank(s): pass the loss rank and world_size of the process group, and the model in "
            "DistributedDataParallel where there are several."
        )
    if world_size == 1:
        return 1
    if isinstance(loss, open_clips("ClipLoss")):
        if loss.local_loss and not loss.gather_with_grad:
            raise UserError(
                "ClipLoss(local_loss=True, gather_with_grad=False) over several ranks loses the gradient that reaches a "
                "feature through other ranks' losses (ZeroVL, A.1); set gather_with_grad=True or use ContrastiveLoss."
            )
        if not loss.gather_with_grad:
            log.info(
                "ClipLoss without gather_with_grad gives 1/%d of the features' gradient; corrected.",
                world_size,
            )
            return world_size
    return 1


def _module_of(loss: Callable[..., Any]) -> Any:
    """Return the module of a `functools.partial` or of a method.

    Another callable is returned as it is.
    """
    held: Any = loss
    while isinstance(held, functools.partial):
        held = held.func
    return getattr(held, "__self__", held)


def _name(loss: Callable[..., Any]) -> str:
    return f"The loss {getattr(loss, '__name__', type(loss).__name__)}"
