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
from open_clip_zerovl.losses.gathering import Ranks, require_process_group
from open_clip_zerovl.losses.logits import Logits
from open_clip_zerovl.losses.problem import ChunkedLoss, Problem, Report, row_chunks
from open_clip_zerovl.losses.sigmoid import Sigmoid
from open_clip_zerovl.losses.softmax import Normalisers
from open_clip_zerovl.losses.targets import PairTargets, SharedTargets, TeacherTargets

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
            `2 * 4 * chunk_size * N` bytes for the chunks, and as much again with teachers. None: all local rows at once.
            The gradient is computed together with the value, so nothing of size (b, N) waits for the backward pass.
        rank, world_size: as in open_clip; `world_size` > 1 needs an initialised process group of that size.
        gather_grad: False gives the paper's Table 4 baseline without gradient-reserved gather, as its released code
            computes it over several ranks. Every gathered feature is a constant, also the rank's own: a feature gets P - Y
            through its own softmax and nothing through the softmaxes of other rows. This gradient is wrong, for that comparison
            only. (A.1 speaks of other ranks' features only; the released gather detaches all.)
        positives: samples that are positives in addition to the pair itself: "pair" none, "caption" those with the same
            `ids["caption"]`, "image" those with the same `ids["image"]`, "both" those with either. A row's target
            is even over its positives (UniCL, CVPR 2022).
        distill_weight: W in (1 - W) * contrastive + W * distillation: the cross-entropy from the mean of the teachers'
            softmaxes to the student's, over the effective batch, both directions.
        distill_temperature: temperature of the teachers' softmaxes (MobileCLIP's teacher scale 100 is 0.01).
        weight: factor on the loss, beside a second one (open_clip's `--coca-contrastive-loss-weight`).

    Attributes:
        report: each pair's loss, source and duplicate positives in the last call, for a log (`problem.Report`).

    Raises:
        UserError: a value out of range, or one of the next three together with gather_grad=False.
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
        distill_weight: float = 0.0,
        distill_temperature: float = 0.01,
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise UserError(
                f"rank must be in 0..world_size-1, but rank is {rank} and world_size is {world_size}."
            )
        if not 0 <= distill_weight <= 1 or distill_temperature <= 0:
            raise UserError(
                f"distill_weight lies in 0..1 and distill_temperature is positive, but they are {distill_weight} and "
                f"{distill_temperature}."
            )
        if not gather_grad and (self._sigmoid or positives != "pair" or distill_weight):
            raise UserError(
                "gather_grad=False is the paper's comparison of the plain loss; it takes no sigmoid, positives or "
                "distill_weight."
            )
        self.chunk_size = chunk_size
        self.rank = rank
        self.world_size = world_size
        self.gather_grad = gather_grad
        self.positives = positives
        self.distill_weight = float(distill_weight)
        self.distill_temperature = float(distill_temperature)
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
        teacher_features: Sequence[tuple[Tensor, Tensor]] = (),
        texts_per_image: int = 1,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of this rank's pairs against all ranks' pairs.

        Args:
            image_features, text_features: (b, D), L2-normalised; row j of both is a pair. With C texts of each image the
                texts are (C*b, D), the first of all images, then the second.
            logit_scale: the factor on the cosines (1 / temperature), not its logarithm; shape () or (1,).
            logit_bias: accepted, with a gradient of zero: a constant on all logits changes no softmax.
            output_dict: return {"contrastive_loss": loss}, as open_clip's training loop asks for.
            mixup_lambda: weight of the pair itself if one modality was mixed (A.3); the partner has the weight 1 - lambda.
            partner: (b,) local index of the row that each row was mixed with; its own inverse (see `reversed_partner`).
            ids: "source", "caption", "image" -> (b,) int64 each, on any device: equal numbers are the same source,
                caption or picture; "caption" is (C*b,). Those that the options need must be given; "source" is also kept for
                the report.
            teacher_features: (image features, text features) of each teacher, (b, D_t) and (C*b, D_t), L2-normalised, on
                any device, in any precision (fp16 and bf16 are gathered and kept so); as many teachers on each rank.
            texts_per_image: C. The loss is the sum of C losses, each of the images and one text of each of them: texts of
                another number are not negatives (as MobileCLIP trains with a caption and a synthetic one). All options apply
                to each of these losses.

        Raises:
            UserError: shapes that do not match, one mixup argument without the other, missing ids or teachers that an
                option needs, mixup with an option for which it is not defined, or no process group of `world_size` ranks.
        """
        _check_shapes(image_features, text_features, texts_per_image)
        b = len(image_features)
        _check_rows(b, len(text_features), ids or {}, teacher_features)
        if (mixup_lambda is None) != (partner is None):
            raise UserError(
                "mixup_lambda and partner belong together, but only "
                f"{'partner' if mixup_lambda is None else 'mixup_lambda'} was given."
            )
        if self.world_size > 1:
            require_process_group(self.world_size, type(self).__name__)
        pairs = _pairs(b, mixup_lambda, partner)
        ids = ids or {}
        if partner is not None:
            self._check_mixup()
        if bool(teacher_features) != bool(self.distill_weight):
            raise UserError(
                f"distill_weight is {self.distill_weight:g} and {len(teacher_features)} teachers' features are given; give "
                "both or neither."
            )
        losses, reports = [], []
        for number in range(texts_per_image):
            rows = slice(number * b, (number + 1) * b)  # of the texts
            make = partial(
                self._problem,
                pairs=pairs,
                sources=ids.get("source"),
                shared=[
                    ids[name][rows if name == "caption" else ...]
                    for name in _SHARED_IDS[self.positives]
                ],
                teachers=[(images, texts[rows]) for images, texts in teacher_features],
            )
            texts, bias = text_features if texts_per_image == 1 else text_features[rows], logit_bias
            if not self._sigmoid:
                bias = None
            reports.append(Report())
            losses.append(
                ChunkedLoss.apply(
                    image_features,
                    texts,
                    logit_scale,
                    bias,
                    make,
                    reports[-1],
                    torch.is_grad_enabled(),
                )
            )
        loss, self.report = sum(losses[1:], start=losses[0]), Report.sum_of(reports)
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
        teachers: Sequence[tuple[Tensor, Tensor]],
    ) -> Problem:
        """The loss of one text of each image: targets over all ranks, as the options ask for."""
        precision = torch.promote_types(image_features.dtype, torch.float32)
        b, device = len(image_features), image_features.device
        ranks, chunks = Ranks(self.rank, self.world_size, b, device), row_chunks(b, self.chunk_size)
        contrastive = 1.0 - self.distill_weight
        gather_grad = self.gather_grad or self.world_size == 1

        everywhere = [ranks.gather(ids.to(device, non_blocking=True)) for ids in shared]
        positives = (
            SharedTargets(everywhere, ranks.mine, precision, contrastive) if everywhere else None
        )
        if sources is not None:
            sources = ranks.gather(sources.to(device, non_blocking=True))
        scale = logit_scale.to(precision).reshape(())
        logits = Logits(image_features, text_features, scale, ranks, precision=precision)

        targets: list[PairTargets | SharedTargets | TeacherTargets] = []
        sigmoid = None
        if self._sigmoid:
            bias = (
                scale.new_zeros(()) if logit_bias is None else logit_bias.to(precision).reshape(())
            )
            sigmoid = Sigmoid(bias, ranks.mine, positives, contrastive)
        elif positives is not None:
            targets.append(positives)
        elif contrastive:
            diagonal = torch.arange(b, device=device)
            columns = [
                diagonal if column is None else column.to(device, non_blocking=True)
                for _, column in pairs
            ]
            weights = [weight * contrastive for weight, _ in pairs]
            weighed = list(zip(weights, columns, strict=True))
            targets.append(PairTargets(weighed, ranks.mine.start, 2.0 if gather_grad else 1.0))
        if teachers:
            targets.append(self._teachers(teachers, ranks, chunks, scale))
        return Problem(
            logits,
            ranks,
            chunks,
            targets=targets,
            share=self.distill_weight if self._sigmoid else 1.0,
            sigmoid=sigmoid,
            gather_grad=gather_grad,
            sources=sources,
            duplicates=None if positives is None else positives.counts > 1,
        )

    def _teachers(
        self,
        teachers: Sequence[tuple[Tensor, Tensor]],
        ranks: Ranks,
        chunks: Sequence[slice],
        scale: Tensor,
    ) -> TeacherTargets:
        """The teachers' softmaxes over all ranks; their normalisers are gathered here."""
        # a kernel; a copy makes the host wait
        scale = scale.new_full((), 1.0 / self.distill_temperature)
        teacher_softmaxes = []
        for pair in teachers:
            images, texts = (
                features.detach().to(scale.device, non_blocking=True) for features in pair
            )
            logits = Logits(
                images,
                texts,
                scale,
                ranks,
                precision=scale.dtype,
                widen_at_once=False,
            )
            teacher_softmaxes.append(
                (logits, Normalisers.of((logits.chunk(rows, side=0) for rows in chunks), ranks))
            )
        return TeacherTargets(teacher_softmaxes, self.distill_weight)

    def _check_mixup(self) -> None:
        undefined = {
            "the sigmoid loss: a pair is a positive or a negative, nothing between": self._sigmoid,
            f"positives={self.positives!r}: a mixed sample has two captions and pictures": self.positives
            != "pair",
            "distill_weight: no teacher has seen the mixed samples": self.distill_weight > 0,
        }
        for option, given in undefined.items():
            if given:
                raise UserError(f"mixup is not defined with {option}; leave one of them out.")


class SigmoidLoss(ContrastiveLoss):
    """SigLIP's sigmoid loss (Zhai et al., ICCV 2023), exact over ranks, in row chunks; called like open_clip's `SigLipLoss`.

    Each pair of an image and a text is a binary classification: softplus(-y (s <I_i, T_j> + b)), summed over the texts,
    averaged over the images of all ranks. As in `ContrastiveLoss` the value is the mean over ranks, the same on each, and the
    ranks may hold different numbers of rows.

    Args:
        chunk_size, rank, world_size: see `ContrastiveLoss`; gather_grad=False is refused.
        positives: which samples are each other's positives, as in `ContrastiveLoss`; each is a term of weight 1.
        distill_weight, distill_temperature: as in `ContrastiveLoss`, a cross-entropy of softmaxes; the student's logits are
            taken without bias.

    Raises:
        UserError: a value out of range.
    """

    _sigmoid = True


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


def _check_shapes(image_features: Tensor, text_features: Tensor, texts_per_image: int) -> None:
    """UserError unless the features are matrices with `texts_per_image` texts of each image."""
    b = len(image_features)
    wanted = (texts_per_image * b, *image_features.shape[1:])
    if image_features.ndim != 2 or text_features.shape != wanted or b == 0:
        raise UserError(
            f"image_features (pairs, width) and text_features, {texts_per_image} rows a pair, must fit, but are "
            f"{tuple(image_features.shape)} and {tuple(text_features.shape)}."
        )


def _check_rows(
    b: int,
    texts: int,
    ids: Mapping[str, Tensor],
    teacher_features: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """UserError for ids or teachers of another number of samples: torch would broadcast or cut some of them."""
    wanted: dict[str, tuple[int, ...]] = {
        name: (texts if name == "caption" else b,) for name in ids
    }
    rows: dict[str, tuple[int, ...]] = {name: tuple(numbers.shape) for name, numbers in ids.items()}
    for number, features in enumerate(teacher_features):
        wanted[f"teacher {number}"] = (b, texts)
        rows[f"teacher {number}"] = tuple(map(len, features))
    for name, count in rows.items():
        if count != wanted[name]:
            raise UserError(f"{name} has {count} rows, but the pairs need {wanted[name]}.")


def _pairs(
    b: int, mixup_lambda: float | None, partner: Tensor | None
) -> list[tuple[float, Tensor | None]]:
    """The non-zeros of the target matrix as (weight, local column of each local row); None stands for the diagonal."""
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
