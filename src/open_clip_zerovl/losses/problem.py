"""One evaluation of a contrastive loss: its value and closed-form gradient in two sweeps over chunks of rows.

Shapes: `b` local rows, `N` rows of all ranks, `W` ranks, `D` width. Side 0: rows are images; side 1: rows are texts.

With logits z_ij = s <I_i, T_j>, their softmaxes P over the texts of each image and Q over the images of each text, and
targets Y (rows of Y_rows and columns of Y_columns sum to one):

    L = 1/(2N) sum_i (logsumexp_j z_ij - sum_j Y_rows_ij z_ij)  +  1/(2N) sum_j (logsumexp_i z_ij - sum_i Y_columns_ij z_ij)
    dL/dI = s/(2N) (P + Q - Y_rows - Y_columns) T     the text side alike     dL/ds = <I, dL/dI> / s

A loss is a choice of targets Y (`softmax`). The sigmoid loss (SigLIP, Zhai et al., ICCV 2023) has a term for each pair (i, j),
without a normaliser. With z_ij = s <I_i, T_j> + b, and y_ij = 1 for positives and -1 else,

    L = 1/N sum_ij softplus(-y_ij z_ij)        dL/dz_ij = -1/N y_ij sigmoid(-y_ij z_ij)

its derivative replaces P + Q - Y_rows - Y_columns; all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from open_clip_zerovl.core.memory import ieee_products
from open_clip_zerovl.losses.gathering import Logits, Ranks
from open_clip_zerovl.losses.softmax import Normalisers, PairTargets, SharedTargets


@dataclass(frozen=True)
class Sigmoid:
    """Values and derivatives for a chunk of logits.

    Args:
        bias: b, shape ().
        mine: the local rows among all.
        shared: samples that are positives in addition to the pair itself; None for none.
    """

    bias: Tensor
    mine: slice
    shared: SharedTargets | None

    def losses(self, missed: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Sum N times the loss over the texts for each image row (rows,), and over the rows for each text (N,).

        Args:
            missed: values for these local image rows; it is not changed.
        """
        each = logsigmoid(missed.neg_()).neg_()
        missed.neg_()
        return each.sum(dim=1), each.sum(dim=0)

    def derivative(self, missed: Tensor, rows: slice) -> Tensor:
        """Compute N times the derivative of the loss by the logits (rows, N), in the memory of `missed`.

        It is the same for both sides.
        """
        each = missed.sigmoid_()
        self._negate_positives(each, rows)
        return each

    def missed(self, logits: Tensor, rows: slice) -> Tensor:
        """Compute -y z of s <I_i, T_j> (rows, N), positive where a pair is classified wrongly, in the logits' memory."""
        missed = logits.add_(self.bias)
        self._negate_positives(missed, rows)
        return missed

    def _negate_positives(self, values: Tensor, rows: slice) -> None:
        if self.shared is not None:
            torch.where(self.shared.related(rows), -values, values, out=values)
            return
        index = torch.arange(len(values), device=values.device)
        positive_columns = self.mine.start + rows.start + index
        values[index, positive_columns] = -values[index, positive_columns]


@dataclass
class Report:
    """Losses of all ranks' samples in the last call, for a log, as tensors on the device without graph.

    Attributes:
        pair_losses: (N,) of each pair: the mean of its image's and its text's loss. Their mean is the loss.
        sources: (N,) source of each sample; None if not given.
    """

    pair_losses: Tensor | None = None
    sources: Tensor | None = None


class ChunkedLoss(torch.autograd.Function):
    """A loss whose forward pass computes value and gradient, which the backward pass only scales."""

    @staticmethod
    def forward(
        ctx: Any,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        make: Callable[..., Problem],
        report: Report,
        grad_enabled: bool,
    ) -> Tensor:
        """Compute the loss.

        `make` gives the problem of the four tensors, which have no graph.
        """
        device_type = image_features.device.type
        with torch.autocast(device_type, enabled=False), ieee_products(device_type):
            problem = make(image_features, text_features, logit_scale, logit_bias)
            value = problem.value()
            report.pair_losses = problem.pair_losses
            report.sources = problem.sources
            if grad_enabled and any(ctx.needs_input_grad[:4]):
                image_grad, text_grad, scale_grad, bias_grad = problem.gradients()
                # Kept in fp32 until `backward` has multiplied them by a loss scaler's factor: fp16 rounds small ones to zero.
                scalars = [
                    (scalar.dtype, grad.reshape(scalar.shape))
                    for scalar, grad in ((logit_scale, scale_grad), (logit_bias, bias_grad))
                    if scalar is not None
                ]
                ctx.save_for_backward(image_grad, text_grad, *(grad for _, grad in scalars))
                ctx.dtypes = (
                    image_features.dtype,
                    text_features.dtype,
                    *(dtype for dtype, _ in scalars),
                )
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            (grad_output * grad).to(dtype) if needed else None
            for grad, dtype, needed in zip(
                ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False
            )
        ]
        return (*grads, *[None] * (7 - len(grads)))


def row_chunks(rows: int, chunk_size: int | None) -> list[slice]:
    """Cut the local rows into chunks of `chunk_size`, or into one."""
    step = min(chunk_size or rows, rows)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


class Problem:
    """Call `value()` (first sweep, with all communication), then `gradients()` (second sweep, without).

    Args:
        chunks: of local rows; one of them has its logits in memory at a time.
        targets: targets of the softmaxes over the logits; None for SigLIP's loss.
        sigmoid: SigLIP's loss, None for softmaxes.
        gather_grad: False: every gathered feature is a constant (Table 4's baseline).
        sources: for the report.
    """

    def __init__(
        self,
        logits: Logits,
        ranks: Ranks,
        chunks: Sequence[slice],
        *,
        targets: PairTargets | SharedTargets | None,
        sigmoid: Sigmoid | None = None,
        gather_grad: bool = True,
        sources: Tensor | None = None,
    ) -> None:
        self.logits = logits
        self.ranks = ranks
        self.chunks = chunks
        self.targets = targets
        self.sigmoid = sigmoid
        self.gather_grad = gather_grad
        self.sources = sources
        self.normalisers = Normalisers()
        # Where one chunk holds all local rows, the second sweep takes this matrix of the first, once, and overwrites it: the
        # logits, or the sigmoids' arguments.
        self.only: Tensor | None = None

    def value(self) -> Tensor:
        """Compute the mean loss over the N pairs of all ranks.

        Keeps both softmaxes' normalisers for the gradients.
        """
        scale = self.logits.scale
        of_rows = scale.new_zeros(len(self.logits.local[0]))
        of_columns = scale.new_zeros(self.ranks.total)

        only = len(self.chunks) == 1
        whole = only and self.ranks.world_size == 1
        for rows in self.chunks:
            logits = self.logits.chunk(rows, side=0)  # (chunk, N)
            if self.sigmoid is not None:
                logits = self.sigmoid.missed(logits, rows)
                parts, sign = self.sigmoid.losses(logits, rows), 1.0
            else:
                assert self.targets is not None
                parts, sign = self.targets.inner(logits, rows), -1.0
                self.normalisers.see(logits, keep=whole)
            of_rows[rows].add_(parts[0], alpha=sign)
            of_columns.add_(parts[1], alpha=sign)
            self.only = logits if only and not (whole and self.targets is not None) else None
            del logits  # before the next chunk is made: one chunk in memory at a time
        images, texts = self.normalisers.gather(self.ranks, rows=[of_rows], columns=[of_columns])
        self.pair_losses = (images + texts) / 2
        if self.targets is not None:
            over_texts, over_images = self.normalisers.over_texts, self.normalisers.over_images
            self.pair_losses += (over_texts.logsumexp() + over_images.logsumexp()) / 2
        return self.pair_losses.mean()

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute W times the mean loss' gradient by this rank's image and text rows, (b, D) each, s and b (its share)."""
        n, w = self.ranks.total, self.ranks.world_size
        self.bias_sum = self.logits.scale.new_zeros(())
        # the texts' logits are the images' logits, transposed: one sweep gives both sides
        if w == 1:
            text_sums = torch.zeros_like(self.logits.local[1])
            image_sums, scale_sum = self._sweep(0, text_sums)
        else:
            image_sums, scale_sum = self._sweep(0)
            text_sums, text_scale_sum = self._sweep(1)
            if not self.gather_grad:  # without Q each direction holds only its own half of d/ds
                scale_sum = scale_sum + text_scale_sum
        factor = w / (2 * n)
        scaled = self.logits.scale * factor
        return (
            image_sums.mul_(scaled),
            text_sums.mul_(scaled),
            scale_sum * factor,
            self.bias_sum * factor,
        )

    def _sweep(self, side: int, other_sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute (P + Q - Y_rows - Y_columns) @ others for the local rows of a side, and its inner product with these rows.

        Without `gather_grad` it is (P - Y) @ others. (P + Q - Y_rows - Y_columns)^T @ local_rows is added to `other_sums`.
        """
        local_rows, others = self.logits.local[side], self.logits.all[1 - side]
        sums = torch.empty_like(local_rows)
        scale_sum = local_rows.new_zeros(())
        for rows in self.chunks:
            weights = self._weights(rows, side)  # (chunk, N)
            torch.mm(weights, others, out=sums[rows])
            scale_sum += (local_rows[rows] * sums[rows]).sum()
            if other_sums is not None:
                other_sums.addmm_(weights.T, local_rows[rows])
            del weights
        return sums, scale_sum

    def _weights(self, rows: slice, side: int) -> Tensor:
        """Return P + Q - Y_rows - Y_columns of local rows, (rows, N), or 2N times the derivative of the sigmoids' losses."""
        if (both := self.normalisers.both()) is not None:
            assert self.targets is not None
            weights = both[0].add_(both[1])
            self.targets.subtract_from(weights, rows, side)
            return weights
        logits, self.only = self.only, None
        if self.sigmoid is not None:
            if logits is None:
                logits = self.sigmoid.missed(self.logits.chunk(rows, side), rows)
            weights = self.sigmoid.derivative(logits, rows).mul_(2.0)
            if side == 0:
                self.bias_sum += weights.sum()
            return weights
        assert self.targets is not None
        if logits is None:
            logits = self.logits.chunk(rows, side)
        weights = self.normalisers.over_others(logits.clone(), rows, side)
        if self.gather_grad:
            weights.add_(self.normalisers.over_local(logits, side))
        self.targets.subtract_from(weights, rows, side)
        return weights
