"""InfoNCE over a distributed batch with gradient-reserved gather, in row chunks, with mixup targets (eq. 1-4, A.1-A.3).

Shapes: `B` micro-batch per rank, `K` micro-batches, `W` ranks, `N = B*K*W` effective batch, `D` embedding width. A rank
holds `b` local rows (`B*K` of them in a decoupled gradient accumulation step); `b` may differ from rank to rank.

With scale s, local rows I_r, T_r (b, D), gathered I, T (N, D), log-sum-exps a (N,) of the rows and c (N,) of the columns of
s I T^T, and targets Y (a row sums to one, Y symmetric):

    P = exp(s I_r T^T - a_r)     Q = exp(s I_r T^T - c)                                        (b, N)
    dL/dI_r = s/(2N) (P + Q - 2Y) T     the text side alike     dL/ds = sum over ranks of <I_r, (P + Q - 2Y) T> / (2N)

P is what pulls image j through its own softmax, Q what reaches it through the softmaxes of all texts, on every rank: the
part that a gather without gradient loses (A.1). Both follow from gathered features and log-sum-exps, so that the backward
pass needs no communication but the all-reduce of the parameters' gradients, whose mean over W ranks a factor W undoes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.precision import ieee_products


class ContrastiveLoss(nn.Module):
    """Symmetric InfoNCE, called as open_clip's `ClipLoss` is, exact over ranks and lean in memory.

    It stands in for `ClipLoss` in any loop: alone, under `DistributedDataParallel`, or inside
    `DecoupledGradientAccumulation`. The value returned is the mean over all N pairs of all ranks, the same on every rank;
    the gradients are those of that mean times W, which DDP's averaging divides by W again. Logits, log-sum-exps and
    gradients are computed in IEEE fp32 whatever the features' precision, torch's TF32 flags and autocast (fp64 stays fp64).

    Args:
        chunk_size: rows of the logit matrix alive at once; memory is O(chunk_size * N + N * D), about
            `2 * 4 * chunk_size * N` bytes for the chunks. None: all local rows at once. The gradient is computed together
            with the value, so nothing of size (b, N) waits for the backward pass.
        rank, world_size: as in open_clip; `world_size` > 1 needs an initialised process group of that size.
        gather_grad: False gives the paper's Table 4 baseline without gradient-reserved gather, as its released code
            computes it over several ranks: every gathered feature is a constant, the rank's own among them, so that a
            feature gets P - Y through its own softmax and nothing through the others'. It is a wrong gradient, for that
            comparison only. (A.1 writes of other ranks' features alone; the released gather detaches all.)
    """

    def __init__(
        self, *, chunk_size: int | None = None, rank: int = 0, world_size: int = 1, gather_grad: bool = True
    ) -> None:
        super().__init__()
        if chunk_size is not None and chunk_size < 1:
            raise UserError(f"chunk_size must be a positive number of rows or None (all rows), but is {chunk_size}.")
        if not 0 <= rank < world_size:
            raise UserError(f"rank must be in 0..world_size-1, but rank is {rank} and world_size is {world_size}.")
        self.chunk_size = chunk_size
        self.rank = rank
        self.world_size = world_size
        self.gather_grad = gather_grad

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
    ) -> Tensor | dict[str, Tensor]:
        """The loss of this rank's pairs against all ranks' pairs.

        Args:
            image_features, text_features: (b, D), L2-normalised; row j of both is a pair.
            logit_scale: the factor on the cosines itself (1 / temperature), not its logarithm; shape () or (1,).
            logit_bias: a constant on all logits changes no softmax: accepted, and given its true gradient of zero.
            output_dict: return {"contrastive_loss": loss}, as open_clip's training loop asks for.
            mixup_lambda: weight of the pair itself where one modality was mixed (A.3); the partner weighs 1 - lambda.
            partner: (b,) local index of the row that each row was mixed with, its own inverse (see `reversed_partner`).

        Raises:
            UserError: shapes that do not match, half of the mixup arguments, or no process group of `world_size` ranks.
        """
        if image_features.ndim != 2 or image_features.shape != text_features.shape or len(image_features) == 0:
            raise UserError(
                "image_features and text_features must be two non-empty matrices of one shape (pairs, width), but are "
                f"{tuple(image_features.shape)} and {tuple(text_features.shape)}."
            )
        if logit_scale.numel() != 1:
            raise UserError(f"logit_scale must hold one number, but has shape {tuple(logit_scale.shape)}.")
        if (mixup_lambda is None) != (partner is None):
            raise UserError(
                "mixup_lambda and partner belong together, but only "
                f"{'partner' if mixup_lambda is None else 'mixup_lambda'} was given."
            )
        if self.world_size > 1:
            require_process_group(self.world_size, "ContrastiveLoss")
        positives = _positives(len(image_features), mixup_lambda, partner)
        loss = _InfoNCE.apply(image_features, text_features, logit_scale, self, positives, torch.is_grad_enabled())
        if logit_bias is not None:
            loss = loss + 0.0 * logit_bias.sum()  # zero, but present: DDP needs a gradient from every parameter
        return {"contrastive_loss": loss} if output_dict else loss

    def extra_repr(self) -> str:
        return (
            f"chunk_size={self.chunk_size}, rank={self.rank}, world_size={self.world_size}, "
            f"gather_grad={self.gather_grad}"
        )


def reversed_partner(sizes: Sequence[int]) -> Tensor:
    """Mixup partners of an effective batch: the reversal within each micro-batch (A.3's N-j, per rank and micro-batch).

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


def require_process_group(world_size: int, who: str) -> None:
    """Raise `UserError` unless torch.distributed runs with exactly `world_size` ranks."""
    seen = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if seen != world_size:
        raise UserError(
            f"{who} was made for world_size={world_size}, but torch.distributed "
            + ("is not initialised" if seen is None else f"runs with {seen} ranks")
            + "; initialise the process group first and pass its rank and world_size."
        )


def gathered_sizes(size: int, world_size: int, device: torch.device) -> list[int]:
    """Each rank's `size`, in rank order (one small collective; no collective for one rank)."""
    if world_size == 1:
        return [size]
    sizes = torch.empty(world_size, dtype=torch.long, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([size], device=device))
    return sizes.tolist()


def _gather_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """All ranks' rows, (sum(sizes), ...) in rank order; a rank with fewer rows pads them for the collective."""
    if len(sizes) == 1:
        return rows
    longest = max(sizes)
    padded = rows.contiguous()
    if len(rows) < longest:
        padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    gathered = rows.new_empty(len(sizes) * longest, *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, padded)
    if min(sizes) == longest:
        return gathered
    return torch.cat([block[:size] for block, size in zip(gathered.split(longest), sizes, strict=True)])


def _positives(b: int, mixup_lambda: float | None, partner: Tensor | None) -> list[tuple[float, Tensor | None]]:
    """The non-zeros of the target matrix as (weight, local column of each local row); None stands for the diagonal.

    Y = lambda * 1 + (1 - lambda) * Perm: since the partner of my partner is I, Perm is symmetric, and one Y serves both
    directions of A.3 (image j against text partner(j), and text j against image partner(j)).
    """
    if mixup_lambda is None or partner is None:
        return [(1.0, None)]
    if not 0.0 <= mixup_lambda <= 1.0:
        raise UserError(f"mixup_lambda must lie between 0 and 1, but is {mixup_lambda}.")
    if partner.shape != (b,) or partner.dtype != torch.long:
        raise UserError(
            f"partner must be ({b},) int64, one local row index per pair, but is {tuple(partner.shape)} {partner.dtype}."
        )
    rows = torch.arange(b, device=partner.device)
    if not bool(((partner >= 0) & (partner < b)).all()) or not torch.equal(partner[partner], rows):
        raise UserError(
            "partner must be its own inverse within this rank's rows (partner[partner[j]] == j), as mixing two rows with "
            "each other gives; open_clip_zerovl.losses.reversed_partner(sizes) makes one."
        )
    return [(float(mixup_lambda), None), (1.0 - float(mixup_lambda), partner)]


class _InfoNCE(torch.autograd.Function):
    """Value and closed-form gradient in two sweeps over row chunks; the backward pass only scales what is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        loss: ContrastiveLoss,
        positives: list[tuple[float, Tensor | None]],
        grad_enabled: bool,
    ) -> Tensor:
        device_type = image_features.device.type
        with torch.autocast(device_type, enabled=False), ieee_products(device_type):
            problem = _Problem(image_features, text_features, logit_scale, loss, positives)
            value = problem.value()
            if grad_enabled and any(ctx.needs_input_grad[:3]):
                image_grad, text_grad, scale_grad = problem.gradients()
                # In fp32 until a loss scaler's factor is on them: fp16 would round small ones to zero here.
                ctx.save_for_backward(image_grad, text_grad, scale_grad.reshape(logit_scale.shape))
                ctx.dtypes = image_features.dtype, text_features.dtype, logit_scale.dtype
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            (grad_output * grad).to(dtype) if needed else None
            for grad, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        )
        return (*grads, None, None, None)


class _Problem:
    """One evaluation of the loss: `value()` (first sweep, all communication), then `gradients()` (second sweep, none)."""

    def __init__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        loss: ContrastiveLoss,
        positives: list[tuple[float, Tensor | None]],
    ) -> None:
        precision = torch.promote_types(image_features.dtype, torch.float32)
        b, device = len(image_features), image_features.device
        self.world_size, self.gather_grad = loss.world_size, loss.gather_grad
        self.sizes = gathered_sizes(b, loss.world_size, device)
        self.start = sum(self.sizes[: loss.rank])  # first global row of this rank
        self.scale = logit_scale.detach().to(precision).reshape(())
        # Gathered in their own precision (half the traffic in bf16), then widened, which is exact.
        self.images, self.texts = image_features.detach().to(precision), text_features.detach().to(precision)  # (b, D)
        self.all_images = _gather_rows(image_features.detach(), self.sizes).to(precision)  # (N, D)
        self.all_texts = _gather_rows(text_features.detach(), self.sizes).to(precision)  # (N, D)
        local = torch.arange(b, device=device)
        self.positives = [
            (weight, local if partner is None else partner.to(device, non_blocking=True))
            for weight, partner in positives
        ]
        step = min(loss.chunk_size or b, b)
        self.chunks = [slice(first, min(first + step, b)) for first in range(0, b, step)]
        self.only_logits: Tensor | None = None  # where one chunk holds all rows, the second sweep need not redo it

    def value(self) -> Tensor:
        """Mean loss over the N pairs of all ranks; leaves both softmaxes' normalisers for the gradients."""
        over_texts, over_images = [], None
        for rows in self.chunks:
            logits = self._logits(self.images[rows], self.all_texts)  # (chunk, N)
            over_texts.append(_Normaliser.of(logits, dim=1))
            part = _Normaliser.of(logits, dim=0)
            over_images = part if over_images is None else _Normaliser.merged([over_images, part])
            if len(self.chunks) == 1:
                self.only_logits = logits
            del logits  # before the next chunk is made, so that one is alive at a time
        assert over_images is not None
        positive = self.scale * sum(
            weight * (self.images * self.texts[column]).sum(dim=1) for weight, column in self.positives
        )
        # Columns were seen from this rank's images only: the ranks' parts, (W, 2, N), make the whole.
        parts = _gather_rows(torch.stack([over_images.maximum, over_images.total])[None], [1] * self.world_size)
        self.over_images = _Normaliser.merged([_Normaliser(*part) for part in parts])  # of each text, (N,)
        own = torch.stack(
            [
                torch.cat([part.maximum for part in over_texts]),
                torch.cat([part.total for part in over_texts]),
                positive,
            ],
            dim=1,
        )
        maximum, total, positive = _gather_rows(own, self.sizes).unbind(dim=1)
        self.over_texts = _Normaliser(maximum, total)  # of each image, (N,)
        return ((self.over_texts.logsumexp() + self.over_images.logsumexp()) / 2 - positive).mean()

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """W times the mean loss' gradient by this rank's image rows (b, D), text rows (b, D), and its share of d/ds."""
        n, w = len(self.all_images), self.world_size
        if w == 1:  # the texts' logits are the images', transposed: one sweep gives both sides
            text_sums = torch.zeros_like(self.texts)
            image_sums, scale_sum = self._sweep(
                self.images, self.all_texts, self.over_texts, self.over_images, text_sums
            )
        else:
            image_sums, scale_sum = self._sweep(self.images, self.all_texts, self.over_texts, self.over_images)
            self.only_logits = None
            text_sums, text_scale_sum = self._sweep(self.texts, self.all_images, self.over_images, self.over_texts)
            if not self.gather_grad:  # the scale is no feature: each direction gives its share of the whole gradient
                scale_sum = scale_sum + text_scale_sum
        factor = w / (2 * n)
        return image_sums.mul_(self.scale * factor), text_sums.mul_(self.scale * factor), scale_sum * factor

    def _logits(self, rows: Tensor, others: Tensor) -> Tensor:
        return (rows * self.scale) @ others.T

    def _sweep(
        self,
        own: Tensor,
        others: Tensor,
        over_others: _Normaliser,
        over_own: _Normaliser,
        other_sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(P + Q - 2Y) others for the local rows `own`, and its inner product with them; P - Y without gather's gradient.

        `over_others` normalises the softmax of each row of `own`'s side over `others`, `over_own` that of each row of
        `others` over `own`'s side; both (N,). With `other_sums`, (P + Q - 2Y)^T own is added to it.
        """
        sums = torch.empty_like(own)
        scale_sum = own.new_zeros(())
        mine = slice(self.start, self.start + len(own))
        for rows in self.chunks:
            logits = self._logits(own[rows], others) if self.only_logits is None else self.only_logits
            weights = over_others[mine][rows].unsqueezed().probabilities(logits.clone())  # P (chunk, N)
            if self.gather_grad or self.world_size == 1:
                from_others = over_own.probabilities(logits)  # Q, in the logits' memory
                self._subtract_targets(weights.add_(from_others), rows, 2.0)
                del from_others
            else:
                self._subtract_targets(weights, rows, 1.0)
            sums[rows] = weights @ others
            scale_sum += (own[rows] * sums[rows]).sum()
            if other_sums is not None:
                other_sums.addmm_(weights.T, own[rows])
            del logits, weights
        return sums, scale_sum

    def _subtract_targets(self, weights: Tensor, rows: slice, times: float) -> None:
        """weights -= times * Y for these local rows; inside the matrix, where P is near Y and cancels without loss."""
        index = torch.arange(len(weights), device=weights.device)
        for weight, column in self.positives:
            weights[index, self.start + column[rows]] -= times * weight


@dataclass(frozen=True)
class _Normaliser:
    """Normalisers of softmaxes as maximum and sum of exponentials of what lies below it; both (rows,).

    Kept apart rather than as a log-sum-exp: logits near 100 leave its sum only five digits in fp32, and a softmax
    divided by it would miss one by 1e-5.
    """

    maximum: Tensor
    total: Tensor

    @classmethod
    def of(cls, logits: Tensor, dim: int) -> _Normaliser:
        maximum = logits.amax(dim=dim)
        return cls(maximum, (logits - maximum.unsqueeze(dim)).exp_().sum(dim=dim))

    @classmethod
    def merged(cls, parts: Sequence[_Normaliser]) -> _Normaliser:
        """Of the same rows, each part over other columns."""
        maximum = torch.stack([part.maximum for part in parts]).amax(dim=0)
        total = torch.stack([part.total * (part.maximum - maximum).exp() for part in parts]).sum(dim=0)
        return cls(maximum, total)

    def logsumexp(self) -> Tensor:
        return self.maximum + self.total.log()

    def __getitem__(self, rows: slice) -> _Normaliser:
        return _Normaliser(self.maximum[rows], self.total[rows])

    def unsqueezed(self) -> _Normaliser:
        """As a column, to normalise rows; as it is, it normalises columns."""
        return _Normaliser(self.maximum[:, None], self.total[:, None])

    def probabilities(self, logits: Tensor) -> Tensor:
        """The softmax, in the logits' memory."""
        return logits.sub_(self.maximum).exp_().div_(self.total)
