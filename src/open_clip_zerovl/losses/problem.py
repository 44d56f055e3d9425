"""One evaluation of a contrastive loss: its value and closed-form gradient in two sweeps over chunks of rows.

Shapes: `b` local rows, `N` rows of all ranks, `W` ranks, `D` width. Side 0: rows are images; side 1: rows are texts.

With logits z_ij = s <I_i, T_j> + o_ij, their softmaxes P over the texts of each image and Q over the images of each text, and
targets Y (rows of Y_rows and columns of Y_columns sum to one):

    L = 1/(2N) sum_i (logsumexp_j z_ij - sum_j Y_rows_ij z_ij)  +  1/(2N) sum_j (logsumexp_i z_ij - sum_i Y_columns_ij z_ij)
    dL/dI = s/(2N) (P + Q - Y_rows - Y_columns) T     the text side alike     dL/ds = <I, dL/dI> / s

A loss is a choice of offsets o (`logits`) and of targets Y (`targets`). With sigmoids in place of the two softmaxes (`sigmoid`)
their derivative replaces P + Q - Y_rows - Y_columns; all else is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from open_clip_zerovl.core.precision import ieee_products
from open_clip_zerovl.losses.gathering import Ranks
from open_clip_zerovl.losses.logits import CrossSource, Logits
from open_clip_zerovl.losses.sigmoid import Sigmoid
from open_clip_zerovl.losses.softmax import Normalisers
from open_clip_zerovl.losses.targets import Pairs, Shared, Teachers


@dataclass(frozen=True)
class Settings:
    """Options of the loss, the same in each step.

    Attributes:
        chunk_size: rows of the logits alive at once, None: all local rows.
        gather_grad: False: every gathered feature is a constant (Table 4's baseline).
        cross_source_weight: of negatives from other sources.
        sigmoid: the contrastive part is SigLIP's; the teachers' part always has softmaxes.
        distill_weight, distill_temperature: the teachers' share of the loss, and the temperature of their softmaxes.
    """

    chunk_size: int | None = None
    rank: int = 0
    world_size: int = 1
    gather_grad: bool = True
    cross_source_weight: float = 1.0
    sigmoid: bool = False
    distill_weight: float = 0.0
    distill_temperature: float = 0.01


@dataclass(frozen=True)
class Batch:
    """Targets, ids and teachers of this rank's b samples.

    Attributes:
        pairs: (weight, local column of each local row) of the targets; None stands for the diagonal.
        sources: (b,) source of each sample, or None.
        shared: ids (b,); samples with an equal id are each other's positives.
        teachers: (image features (b, D_t), text features (b, D_t)) of each teacher.
    """

    pairs: Sequence[tuple[float, Tensor | None]] = ((1.0, None),)
    sources: Tensor | None = None
    shared: Sequence[Tensor] = ()
    teachers: Sequence[tuple[Tensor, Tensor]] = ()


@dataclass
class Report:
    """Losses of all ranks' samples in the last call, for a log; tensors on the device, without graph.

    Attributes:
        pair_losses: (N,) of each pair: the mean of its image's and its text's loss. Their mean is the loss. With several texts
            of each image it is the sum over them.
        sources: (N,) source of each sample, if it was given.
        twins: (N,) bool, whether another sample is a positive of this one, if samples share positives.
    """

    pair_losses: Tensor | None = None
    sources: Tensor | None = None
    twins: Tensor | None = None

    @classmethod
    def sum_of(cls, reports: Sequence[Report]) -> Report:
        """Of a loss that is the sum of losses over the same samples."""
        first, *others = reports
        summed = cls(first.pair_losses, first.sources, first.twins)
        for other in others:
            assert summed.pair_losses is not None and other.pair_losses is not None
            summed.pair_losses = summed.pair_losses + other.pair_losses
            if summed.twins is not None and other.twins is not None:
                summed.twins = summed.twins | other.twins
        return summed


class ChunkedLoss(torch.autograd.Function):
    """Computes value and gradient together in the forward pass; the backward pass only scales the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        settings: Settings,
        batch: Batch,
        report: Report,
        grad_enabled: bool,
    ) -> Tensor:
        device_type = image_features.device.type
        with torch.autocast(device_type, enabled=False), ieee_products(device_type):
            problem = Problem(image_features, text_features, logit_scale, logit_bias, settings, batch)
            value = problem.value()
            report.pair_losses, report.sources, report.twins = problem.pair_losses, problem.sources, problem.twins
            if grad_enabled and any(ctx.needs_input_grad[:4]):
                image_grad, text_grad, scale_grad, bias_grad = problem.gradients()
                # Kept in fp32 until `backward` has multiplied them by a loss scaler's factor: fp16 rounds small ones to zero.
                scalars = [
                    (scalar.dtype, grad.reshape(scalar.shape))
                    for scalar, grad in ((logit_scale, scale_grad), (logit_bias, bias_grad))
                    if scalar is not None
                ]
                ctx.save_for_backward(image_grad, text_grad, *(grad for _, grad in scalars))
                ctx.dtypes = image_features.dtype, text_features.dtype, *(dtype for dtype, _ in scalars)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            (grad_output * grad).to(dtype) if needed else None
            for grad, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        ]
        return (*grads, *[None] * (8 - len(grads)))


class Problem:
    """Call `value()` (first sweep, with all communication), then `gradients()` (second sweep, without)."""

    def __init__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        settings: Settings,
        batch: Batch,
    ) -> None:
        precision = torch.promote_types(image_features.dtype, torch.float32)
        b, device = len(image_features), image_features.device
        self.ranks = ranks = Ranks(settings.rank, settings.world_size, b, device)
        self.gather_grad = settings.gather_grad or settings.world_size == 1
        step = min(settings.chunk_size or b, b)
        self.chunks = [slice(first, min(first + step, b)) for first in range(0, b, step)]

        def everywhere(ids: Tensor) -> Tensor:
            return ranks.gather(ids.to(device, non_blocking=True))

        contrastive = 1.0 - settings.distill_weight
        shared = [everywhere(ids) for ids in batch.shared]
        self.shared = Shared(shared, ranks.mine, precision, contrastive) if shared else None
        self.twins = self.shared.counts > 1 if self.shared is not None else None
        self.sources = everywhere(batch.sources) if batch.sources is not None else None
        offset = None
        if settings.cross_source_weight != 1.0:
            assert self.sources is not None
            positives = self.shared.related if self.shared is not None else None
            offset = CrossSource(settings.cross_source_weight, self.sources, ranks.mine, positives)

        self.scale = logit_scale.detach().to(precision).reshape(())
        self.logits = Logits(
            image_features.detach(), text_features.detach(), self.scale, ranks, offset=offset, precision=precision
        )
        local = torch.arange(b, device=device)
        self.pairs = None
        self.sigmoid = None
        if settings.sigmoid:
            bias = self.scale.new_zeros(()) if logit_bias is None else logit_bias.detach().to(precision).reshape(())
            self.sigmoid = Sigmoid(bias, ranks.mine, self.shared, offset, contrastive)
        elif self.shared is None and contrastive:
            weighed = [
                (weight * contrastive, local if column is None else column.to(device, non_blocking=True))
                for weight, column in batch.pairs
            ]
            self.pairs = Pairs(weighed, ranks.mine.start)
        self.teachers = None
        if batch.teachers:
            scale = self.scale.new_full((), 1.0 / settings.distill_temperature)  # a kernel; a copy makes the host wait
            teachers = [
                Logits(
                    images.detach().to(device, non_blocking=True),
                    texts.detach().to(device, non_blocking=True),
                    scale,
                    ranks,
                    offset=offset,
                    precision=precision,
                    widen_at_once=False,
                )
                for images, texts in batch.teachers
            ]
            self.teachers = Teachers(
                [
                    (logits, Normalisers.of((logits.chunk(rows, side=0) for rows in self.chunks), ranks))
                    for logits in teachers
                ],
                settings.distill_weight,
            )
        softmax_targets = (self.shared if self.sigmoid is None else None, self.teachers)
        self.dense = [targets for targets in softmax_targets if targets is not None]
        self.softmax = self.pairs is not None or bool(self.dense)
        self.softmax_share = 1.0 if self.sigmoid is None else settings.distill_weight  # what its targets sum to
        self.normalisers = Normalisers()
        self.only_logits: Tensor | None = None  # the logits, kept for the second sweep where one chunk holds all rows

    def value(self) -> Tensor:
        """Mean loss over the N pairs of all ranks. Keeps both softmaxes' normalisers for the gradients."""
        b, n = len(self.logits.own[0]), self.ranks.total
        positive = self.scale.new_zeros(b) if self.pairs is None else self.pairs.logit(self.logits)
        # Sum over i of Y_columns_ij z_ij, less the sigmoid's losses: this rank's part.
        of_texts = self.scale.new_zeros(n) if self.dense or self.sigmoid is not None else None
        for rows in self.chunks:
            if self.sigmoid is not None:
                assert of_texts is not None
                of_rows, of_columns = self.sigmoid.losses(self.logits.chunk_without_offset(rows, side=0), rows)
                positive[rows] -= of_rows / 2
                of_texts -= of_columns / 2
            if not self.softmax:
                continue
            logits = self.logits.chunk(rows, side=0)  # (chunk, N)
            self.normalisers.see(logits)
            for targets in self.dense:
                of_rows, of_columns = targets.inner(logits, rows)
                positive[rows] += of_rows / 2
                of_texts += of_columns / 2
            if len(self.chunks) == 1:
                self.only_logits = logits
            del logits  # before the next chunk is made: one chunk in memory at a time
        if self.softmax:
            positive, *others = self.normalisers.gather(
                self.ranks, rows=[positive], columns=[] if of_texts is None else [of_texts]
            )
            over_texts, over_images = self.normalisers.over_texts, self.normalisers.over_images
            normalisers = (over_texts.logsumexp() + over_images.logsumexp()) / 2
            self.pair_losses = normalisers * self.softmax_share - positive
        else:
            assert of_texts is not None
            self.pair_losses, others = -self.ranks.gather(positive), [self.ranks.stack(of_texts).sum(dim=0)]
        for of_texts in others:
            self.pair_losses -= of_texts
        return self.pair_losses.mean()

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W times the mean loss' gradient with respect to this rank's image and text rows, (b, D) each, s and b (its share)."""
        n, w = self.ranks.total, self.ranks.world_size
        self.bias_sum = self.scale.new_zeros(())
        if w == 1:  # the texts' logits are the images' logits, transposed: one sweep gives both sides
            text_sums = torch.zeros_like(self.logits.own[1])
            image_sums, scale_sum = self._sweep(0, text_sums)
        else:
            image_sums, scale_sum = self._sweep(0)
            self.only_logits = None
            text_sums, text_scale_sum = self._sweep(1)
            if not self.gather_grad:  # without Q each direction holds only its own half of d/ds
                scale_sum = scale_sum + text_scale_sum
        factor = w / (2 * n)
        scaled = self.scale * factor
        return image_sums.mul_(scaled), text_sums.mul_(scaled), scale_sum * factor, self.bias_sum * factor

    def _sweep(self, side: int, other_sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(P + Q - Y_rows - Y_columns) @ others for the local rows of a side, and its inner product with these rows.

        Without `gather_grad` it is (P - Y) @ others. (P + Q - Y_rows - Y_columns)^T @ own is added to `other_sums`.
        """
        own, others = self.logits.own[side], self.logits.all[1 - side]
        sums = torch.empty_like(own)
        scale_sum = own.new_zeros(())
        for rows in self.chunks:
            weights = self._weights(rows, side)  # (chunk, N)
            sums[rows] = weights @ others
            scale_sum += (own[rows] * sums[rows]).sum()
            if other_sums is not None:
                other_sums.addmm_(weights.T, own[rows])
            del weights
        return sums, scale_sum

    def _weights(self, rows: slice, side: int) -> Tensor:
        """P + Q - Y_rows - Y_columns of local rows, (rows, N), or 2N times the derivative of the sigmoids' losses."""
        of_sigmoids = None
        if self.sigmoid is not None:
            of_sigmoids = self.sigmoid.derivative(self.logits.chunk_without_offset(rows, side), rows).mul_(2.0)
            if side == 0:
                self.bias_sum += of_sigmoids.sum()
        if not self.softmax:
            assert of_sigmoids is not None
            return of_sigmoids
        logits = self.logits.chunk(rows, side) if self.only_logits is None else self.only_logits
        weights = self.normalisers.over_others(logits.clone(), rows, side)
        if self.gather_grad:
            weights.add_(self.normalisers.over_own(logits, side))
        if self.softmax_share != 1:
            weights.mul_(self.softmax_share)
        if self.pairs is not None:
            self.pairs.subtract_from(weights, rows, 2.0 if self.gather_grad else 1.0)
        for targets in self.dense:
            targets.subtract_from(weights, rows, side)
        return weights if of_sigmoids is None else weights.add_(of_sigmoids)
