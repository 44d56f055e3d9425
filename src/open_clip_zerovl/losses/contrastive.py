"""InfoNCE over a distributed batch with gradient-reserved gather, in row chunks (eq. 1-4, A.1-A.3), and its options.

Shapes: `B` micro-batch per rank, `K` micro-batches, `W` ranks, `N = B*K*W` effective batch, `D` embedding width. A rank
holds `b` local rows (`B*K` of them in a decoupled gradient accumulation step); `b` may differ from rank to rank.

With scale s, local rows I_r, T_r (b, D), gathered I, T (N, D), log-sum-exps a (N,) of the rows and c (N,) of the columns of
s I T^T, and targets Y (a row sums to one, Y symmetric):

    P = exp(s I_r T^T - a_r)     Q = exp(s I_r T^T - c)                                        (b, N)
    dL/dI_r = s/(2N) (P + Q - 2Y) T     the text side alike     dL/ds = sum over ranks of <I_r, (P + Q - 2Y) T> / (2N)

P is the part of an image's gradient that comes from its own softmax. Q comes from the softmaxes of all texts of all ranks: a
gather without gradient loses it (A.1). Both follow from gathered features and log-sum-exps, so that the backward pass needs no
communication but the all-reduce of the parameters' gradients. That takes the mean over W ranks; a factor W undoes it.

`Evaluation` computes value and gradient in two sweeps over chunks of rows, for any targets (`softmax`): Y_rows of the images'
softmaxes, whose rows sum to one, and Y_columns of the texts', whose columns do. With logits z_ij = s <I_i, T_j>:

    L = 1/(2N) sum_i (logsumexp_j z_ij - sum_j Y_rows_ij z_ij)  +  1/(2N) sum_j (logsumexp_i z_ij - sum_i Y_columns_ij z_ij)
    dL/dI = s/(2N) (P + Q - Y_rows - Y_columns) T     the text side alike     dL/ds = <I, dL/dI> / s

The sigmoid loss (SigLIP, Zhai et al., ICCV 2023) has a term for each pair (i, j), without a normaliser. With
z_ij = s <I_i, T_j> + b, and y_ij = 1 for positives and -1 else,

    L = 1/N sum_ij softplus(-y_ij z_ij)        dL/dz_ij = -1/N y_ij sigmoid(-y_ij z_ij)

its derivative replaces P + Q - Y_rows - Y_columns; all else is the same. Side 0: rows are images; side 1: rows are texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.memory import ieee_products
from open_clip_zerovl.losses.gathering import Logits, Ranks
from open_clip_zerovl.losses.softmax import Normalisers, PairTargets, SharedTargets

_SHARED_IDS = {
    "pair": (),
    "caption": ("caption",),
    "image": ("image",),
    "both": ("caption", "image"),
}


class ContrastiveLoss(nn.Module):
    """Symmetric InfoNCE, called like open_clip's `ClipLoss`, exact over ranks, in little memory.

    It can replace `ClipLoss` in any loop: alone, under `DistributedDataParallel`, or inside
    `DecoupledGradientAccumulation`. The value returned is the mean over all N pairs of all ranks, the same on every rank.
    The gradients are those of that mean times W, since DDP's averaging divides by W. Logits, log-sum-exps and
    gradients are computed in IEEE fp32 whatever the features' precision, torch's TF32 flags and autocast (fp64 stays fp64).

    Args:
        chunk_size: rows of the logit matrix alive at once; memory is O(chunk_size * N + N * D), about
            `2 * 4 * chunk_size * N` bytes for the chunks. None: all local rows at once.
            The gradient is computed together with the value, so nothing of size (b, N) waits for the backward pass.
        rank, world_size: as in open_clip; `world_size` > 1 needs an initialised process group of that size.
        gather_grad: False gives the paper's Table 4 baseline without gradient-reserved gather, as its released code
            computes it over several ranks. Every gathered feature is a constant, also the rank's own: a feature gets P - Y
            through its own softmax and nothing through the softmaxes of other rows. This gradient is wrong, for that comparison
            only. (A.1 speaks of other ranks' features only; the released gather detaches all.)
        positives: samples that are positives in addition to the pair itself: "pair" none, "caption" those with the same
            `ids["caption"]`, "image" those with the same `ids["image"]`, "both" those with either. A row's target
            is even over its positives (UniCL, CVPR 2022).
        weight: factor on the loss, beside a second one (open_clip's `--coca-contrastive-loss-weight`).

    Attributes:
        report: each pair's loss, source and duplicate positives in the last call, for a log (`problem.Report`).

    Raises:
        UserError: a value out of range, or `positives` together with gather_grad=False.
    """

    _sigmoid = False

    def __init__(
        self,
        *,
        chunk_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        gather_grad: bool = True,
        positives: str = "pair",
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise UserError(
                f"rank must be in 0..world_size-1, but rank is {rank} and world_size is {world_size}."
            )
        if not gather_grad and (self._sigmoid or positives != "pair"):
            raise UserError(
                "gather_grad=False is the paper's comparison of the plain loss; it takes no sigmoid or positives."
            )
        self.chunk_size = chunk_size
        self.rank = rank
        self.world_size = world_size
        self.gather_grad = gather_grad
        self.positives = positives
        self.weight = weight
        self.report = Report()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        *,
        mixup_lambda: float | None = None,
        partner: Tensor | None = None,
        ids: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the loss of this rank's pairs against all ranks' pairs.

        Args:
            image_features, text_features: (b, D), L2-normalised; row j of both is a pair.
            logit_scale: the factor on the cosines (1 / temperature), not its logarithm; shape () or (1,).
            logit_bias: accepted, with a gradient of zero: a constant on all logits changes no softmax.
            output_dict: return {"contrastive_loss": loss}, as open_clip's training loop asks for.
            mixup_lambda: weight of the pair itself if one modality was mixed (A.3); the partner has the weight 1 - lambda.
            partner: (b,) local index of the row that each row was mixed with; its own inverse (see `reversed_partner`).
            ids: "source", "caption", "image" -> (b,) int64 each, on any device: equal numbers are the same source,
                caption or picture. Those that `positives` needs must be given; "source" is kept for the report.

        Raises:
            UserError: shapes that do not match, one mixup argument without the other, or mixup with an option for which it is
                not defined.
        """
        _check_shapes(image_features, text_features)
        b, ids = len(image_features), ids or {}
        for name, numbers in ids.items():  # torch would broadcast or cut some of them
            if numbers.shape != (b,):
                raise UserError(f"{name} has {tuple(numbers.shape)} rows, but the pairs need {b}.")
        if (mixup_lambda is None) != (partner is None):
            raise UserError(
                "mixup_lambda and partner belong together, but only "
                f"{'partner' if mixup_lambda is None else 'mixup_lambda'} was given."
            )
        pairs = _pairs(b, mixup_lambda, partner)
        if partner is not None:
            self._check_mixup()
        make = partial(
            self._evaluation,
            pairs=pairs,
            sources=ids.get("source"),
            shared=[ids[name] for name in _SHARED_IDS[self.positives]],
        )
        self.report = Report()
        loss = ChunkedLoss.apply(
            image_features,
            text_features,
            logit_scale,
            logit_bias if self._sigmoid else None,
            make,
            self.report,
            torch.is_grad_enabled(),
        )
        loss = loss if self.weight == 1 else self.weight * loss
        if logit_bias is not None and not self._sigmoid:
            # zero, but present: DDP needs a gradient from every parameter
            loss = loss + 0.0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss

    def _evaluation(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        *,
        pairs: Sequence[tuple[float, Tensor | None]],
        sources: Tensor | None,
        shared: Sequence[Tensor],
    ) -> Evaluation:
        """Gather the features, and choose the targets over all ranks that the options ask for."""
        precision = torch.promote_types(image_features.dtype, torch.float32)
        b, device = len(image_features), image_features.device
        ranks, chunks = Ranks(self.rank, self.world_size, b, device), row_chunks(b, self.chunk_size)
        gather_grad = self.gather_grad or self.world_size == 1

        everywhere = [ranks.gather(ids.to(device, non_blocking=True)) for ids in shared]
        positives = SharedTargets(everywhere, ranks.mine, precision) if everywhere else None
        if sources is not None:
            sources = ranks.gather(sources.to(device, non_blocking=True))
        scale = logit_scale.to(precision).reshape(())
        logits = Logits(image_features, text_features, scale, ranks, precision=precision)

        targets: PairTargets | SharedTargets | None = positives
        sigmoid = None
        if self._sigmoid:
            bias = (
                scale.new_zeros(()) if logit_bias is None else logit_bias.to(precision).reshape(())
            )
            sigmoid, targets = Sigmoid(bias, ranks.mine, positives), None
        elif positives is None:
            diagonal = torch.arange(b, device=device)
            weighed = [
                (weight, diagonal if column is None else column.to(device, non_blocking=True))
                for weight, column in pairs
            ]
            targets = PairTargets(weighed, ranks.mine.start, 2.0 if gather_grad else 1.0)
        return Evaluation(
            logits,
            ranks,
            chunks,
            targets=targets,
            sigmoid=sigmoid,
            gather_grad=gather_grad,
            sources=sources,
        )

    def _check_mixup(self) -> None:
        undefined = {
            "the sigmoid loss: a pair is a positive or a negative, nothing between": self._sigmoid,
            f"positives={self.positives!r}: a mixed sample has two captions and pictures": self.positives
            != "pair",
        }
        for option, given in undefined.items():
            if given:
                raise UserError(f"mixup is not defined with {option}; leave one of them out.")


class SigmoidLoss(ContrastiveLoss):
    """SigLIP's sigmoid loss (Zhai et al., ICCV 2023), exact over ranks, in row chunks, called like open_clip's `SigLipLoss`.

    Each pair of an image and a text is a binary classification: softplus(-y (s <I_i, T_j> + b)), summed over the texts,
    averaged over the images of all ranks. As in `ContrastiveLoss` the value is the mean over ranks, the same on each, and the
    ranks may hold different numbers of rows.

    Args:
        chunk_size, rank, world_size: see `ContrastiveLoss`; gather_grad=False is refused.
        positives: which samples are each other's positives, as in `ContrastiveLoss`; each is a term of weight 1.

    Raises:
        UserError: a value out of range.
    """

    _sigmoid = True


def reversed_partner(sizes: Sequence[int]) -> Tensor:
    """Reverse each micro-batch for the mixup partners of an effective batch (A.3's N-j, per rank and micro-batch).

    Args:
        sizes: the micro-batches' sizes on this rank, in order.

    Returns:
        (sum(sizes),) int64 on the CPU: `reversed_partner([3, 2])` is `[2, 1, 0, 4, 3]`.
    """
    partners, start = [torch.empty(0, dtype=torch.long)], 0
    for size in sizes:
        partners.append(torch.arange(start + size - 1, start - 1, -1))
        start += size
    return torch.cat(partners)


def _check_shapes(image_features: Tensor, text_features: Tensor) -> None:
    """Refuse features that are not matrices of as many texts as images."""
    if (
        image_features.ndim != 2
        or text_features.shape != image_features.shape
        or not len(image_features)
    ):
        raise UserError(
            "image_features and text_features (pairs, width) must fit, but are "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}."
        )


def _pairs(
    b: int, mixup_lambda: float | None, partner: Tensor | None
) -> list[tuple[float, Tensor | None]]:
    """Return the non-zeros of the target matrix as (weight, local column of each local row).

    Returns:
        None stands for the diagonal.
    """
    if mixup_lambda is None or partner is None:
        return [(1.0, None)]
    if not 0 <= mixup_lambda <= 1:
        raise UserError(f"mixup_lambda lies in 0..1, but is {mixup_lambda}.")
    rows = torch.arange(b, device=partner.device)
    if not torch.equal(partner[partner], rows):
        raise UserError(
            "partner must be its own inverse within this rank's rows (partner[partner[j]] == j), as mixing two rows with "
            "each other gives; open_clip_zerovl.losses.reversed_partner(sizes) makes one."
        )
    return [(float(mixup_lambda), None), (1.0 - float(mixup_lambda), partner)]


# ---------------------------------------------------------------------------------------------------------------------
# One evaluation: value and gradient
# ---------------------------------------------------------------------------------------------------------------------


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

    def losses(self, negative_margins: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Sum N times the loss over the texts for each image row (rows,), and over the rows for each text (N,).

        Args:
            negative_margins: values for these local image rows; it is not changed.
        """
        each = logsigmoid(negative_margins.neg_()).neg_()
        negative_margins.neg_()
        return each.sum(dim=1), each.sum(dim=0)

    def derivative(self, negative_margins: Tensor, rows: slice) -> Tensor:
        """Compute N times the derivative of the loss by the logits (rows, N), in the memory of `negative_margins`.

        It is the same for both sides.
        """
        each = negative_margins.sigmoid_()
        self._negate_positives(each, rows)
        return each

    def negative_margins(self, logits: Tensor, rows: slice) -> Tensor:
        """Compute -y z of s <I_i, T_j> (rows, N), positive where a pair is classified wrongly, in the logits' memory."""
        negative_margins = logits.add_(self.bias)
        self._negate_positives(negative_margins, rows)
        return negative_margins

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
        make: Callable[..., Evaluation],
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


class Evaluation:
    """One evaluation of a loss: `value()` in a first sweep, with all communication, then `gradients()` in a second, without.

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
        self.reused: Tensor | None = None

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
                logits = self.sigmoid.negative_margins(logits, rows)
                parts, sign = self.sigmoid.losses(logits, rows), 1.0
            else:
                assert self.targets is not None
                parts, sign = self.targets.inner(logits, rows), -1.0
                self.normalisers.see(logits, keep=whole)
            of_rows[rows].add_(parts[0], alpha=sign)
            of_columns.add_(parts[1], alpha=sign)
            self.reused = logits if only and not (whole and self.targets is not None) else None
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
        logits, self.reused = self.reused, None
        if self.sigmoid is not None:
            if logits is None:
                logits = self.sigmoid.negative_margins(self.logits.chunk(rows, side), rows)
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
