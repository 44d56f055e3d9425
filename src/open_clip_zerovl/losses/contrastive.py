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

`problem` computes this for any targets, which the options below choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.losses.gathering import Logits, Ranks, require_process_group
from open_clip_zerovl.losses.problem import ChunkedLoss, Problem, Report, Sigmoid, row_chunks
from open_clip_zerovl.losses.softmax import PairTargets, SharedTargets

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
            UserError: shapes that do not match, one mixup argument without the other, missing ids that
                `positives` needs, mixup with an option for which it is not defined, or no process group of `world_size` ranks.
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
        if self.world_size > 1:
            require_process_group(self.world_size, type(self).__name__)
        pairs = _pairs(b, mixup_lambda, partner)
        if partner is not None:
            self._check_mixup()
        make = partial(
            self._problem,
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

    def _problem(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        *,
        pairs: Sequence[tuple[float, Tensor | None]],
        sources: Tensor | None,
        shared: Sequence[Tensor],
    ) -> Problem:
        """Make the problem: targets over all ranks, as the options ask for."""
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
        return Problem(
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
