"""Parts of a step beside the loss on its features: per-sample losses, further features, a teacher.

Shapes: `B` micro-batch per rank, `K` micro-batches, `W` ranks, `L` tokens of a text, `V` words of a vocabulary.

A term of the loss that is a mean over samples (or tokens) of the whole batch splits into micro-batches by itself:

    mean = sum_k s_k / C      with C = sum_k c_k over the micro-batches of all ranks, known after the first pass
    d mean / d s_k = 1 / C    the same number for every micro-batch; times W, since DDP takes the mean over ranks

So the first pass adds up s_k and c_k, and each backward pass takes s_k with the gradient W / C, in the graph of its features.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.model import FEATURES, SCALARS, Outputs, leaves_of, open_clips

# (the model's outputs, images, texts, further parts of the micro-batch) -> term -> a sum, or a sum and its count
TermsOfMicroBatch = Callable[..., Mapping[str, Tensor | tuple[Tensor, Tensor | float]]]

SUM, COUNT, TEACHER = "sum of ", "count of ", "dist_"  # prefixes of names in the outputs


@dataclass(frozen=True)
class CaptionTerm:
    """Captioning's cross-entropy over the tokens that are not padding, as open_clip's `CoCaLoss` computes it.

    Args:
        weight: of the mean over all tokens of the effective batch (open_clip's `--coca-caption-loss-weight`).
        pad_id: label of padding.
        label_smoothing: as `torch.nn.CrossEntropyLoss` has it.
    """

    weight: float = 1.0
    pad_id: int = 0
    label_smoothing: float = 0.0

    def __call__(
        self, outputs: Mapping[str, Tensor], _: Any, texts: Tensor, *__: Any
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Compute the weighted sum over tokens and their number.

        Args:
            outputs: with `logits` (B, L-1, V) and `labels` (B, L-1), as open_clip 3 returns them, or with `logits` (B, L, V)
                alone, as open_clip 4 does.
            texts: (B, L) tokens; each is the label of the place before it.
        """
        logits = outputs["logits"]
        labels = outputs.get("labels")
        if labels is None:
            logits, labels = logits[:, :-1], texts[:, 1:]
        of_tokens = cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)).permute(0, 2, 1),
            labels,
            ignore_index=self.pad_id,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return {"caption_loss": (self.weight * of_tokens, (labels != self.pad_id).sum())}


@dataclass
class Collected:
    """The extras of a step's first pass.

    Attributes:
        losses: term -> its mean over the effective batch, the same on every rank.
        sums: name of a term's sum in the outputs -> its value in each micro-batch, without graph.
        shares: the same names -> the gradient of the loss by each micro-batch's sum.
        loss_inputs: the teacher's features (b, D) each, and its logit_scale.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, list[Tensor]] = field(default_factory=dict)
    shares: dict[str, Tensor] = field(default_factory=dict)
    loss_inputs: dict[str, Tensor] = field(default_factory=dict)


class Extras:
    """Adds the terms and the teacher's features to the outputs of a forward pass, and collects them for the loss.

    Args:
        terms: functions, see `DecoupledGradientAccumulation`.
        teacher, autocast: likewise.
        model: without wrappers.
        world_size: W, the ranks over which gradients are averaged.
        group: their process group; None for the default one.
    """

    def __init__(
        self,
        terms: Sequence[TermsOfMicroBatch],
        teacher: Callable[..., Any] | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        model: nn.Module,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.terms, self._teacher, self._autocast = terms, teacher, autocast
        self._world_size, self._group = world_size, group
        parameters = list(model.parameters())
        self._device = parameters[0].device
        self._averaged = {id(parameter) for parameter in parameters}
        self._leaves_checked = world_size == 1
        self._others: list[weakref.ref[Tensor]] | None = None

    def of_teacher(self, inputs: tuple[Any, ...]) -> Outputs:
        """Compute the teacher's features of a micro-batch and its logit_scale, without graph, under the prefix of
        `DistillClipLoss`.
        """
        if self._teacher is None:
            return {}
        with torch.no_grad(), self._autocast():
            outputs = self._teacher(*inputs[:2])
        if not isinstance(outputs, dict):
            outputs = dict(zip(FEATURES, outputs, strict=True))
        wanted = (*FEATURES, "logit_scale")  # a bias does not change the teacher's softmaxes
        return {TEACHER + name: outputs[name] for name in wanted if name in outputs}

    def of_terms(self, outputs: Any, inputs: tuple[Any, ...]) -> Outputs:
        """Compute the sum of each term of a micro-batch, and its count.

        Raises:
            UserError: a term that is divided by something trained, or one that learns what DDP does not average.
        """
        if not self.terms:
            return {}
        if not isinstance(outputs, dict):
            outputs = dict(zip(FEATURES, outputs, strict=True))
        terms = {name: term for of in self.terms for name, term in of(outputs, *inputs).items()}
        sums_and_counts: Outputs = {}
        for name, term in terms.items():
            total, count = term if isinstance(term, tuple) else (term, None)
            sums_and_counts[SUM + name] = total.reshape(())
            if count is not None:
                count = torch.as_tensor(count, device=total.device)
                if count.requires_grad:
                    raise UserError(
                        f"The count of the term {name} is trained; a mean by learned weights does not split into micro-batches."
                    )
                sums_and_counts[COUNT + name] = count.reshape(())
        self._check_leaves(sums_and_counts)
        return sums_and_counts

    def collected(self, outputs: Mapping[str, list[Tensor]], order: Tensor | None) -> Collected:
        """Join the terms to their means over the effective batch, and the teacher's features in the order of the loss.

        Args:
            outputs: name -> its value in each micro-batch, without graph.
            order: (b,) the place of each text, None if texts stand in their images' order.

        Raises:
            UserError: terms or counts that some micro-batches lack, or other terms on another rank.
        """
        extras = Collected(
            sums={name: each for name, each in outputs.items() if name.startswith(SUM)}
        )
        for name, each in outputs.items():
            if name.startswith(TEACHER):
                feature = name.removeprefix(TEACHER)
                whole = each[-1] if feature in SCALARS else torch.cat(each)
                if order is not None and feature == FEATURES[1]:
                    whole = torch.empty_like(whole).index_copy_(0, order, whole)
                extras.loss_inputs[name] = whole
        names = sorted(name.removeprefix(SUM) for name in extras.sums)
        counted = [name for name in names if COUNT + name in outputs]
        if self.terms and self._world_size > 1:
            self._require_same_names(names, counted)
        if not names:
            return extras
        number = max(len(each) for each in outputs.values())
        for name in names:
            if len(extras.sums[SUM + name]) != number:
                raise UserError(
                    f"The term {name} is missing in some micro-batches; return a sum and a count of 0 there."
                )
            if name in counted and len(outputs[COUNT + name]) != number:
                raise UserError(
                    f"The term {name} has a count in some micro-batches only, by which the sums of all would be divided; "
                    "return a sum and its count in each, or a sum alone in each."
                )
        unit = torch.ones_like(extras.sums[SUM + names[0]][0])
        totals = torch.stack(
            [sum(extras.sums[SUM + name], start=0 * unit) for name in names]
            + [sum(outputs[COUNT + name], start=0 * unit) for name in counted]
        )
        if self._world_size > 1:
            dist.all_reduce(totals, group=self._group)
        counts = dict(zip(counted, totals[len(names) :], strict=True))
        for name, total in zip(names, totals, strict=False):
            count = counts.get(name, unit)
            # Nothing to take a mean of: the term is zero, and so is its gradient.
            share = torch.where(count == 0, 0 * unit, 1 / count)
            extras.losses[name] = torch.where(count == 0, 0 * unit, total * share)
            extras.shares[SUM + name] = share * self._world_size
        return extras

    def _require_same_names(self, names: list[str], counted: list[str]) -> None:
        """Compare the terms of all ranks before their sums are added up.

        A sum more on one rank would wait for ever.

        Raises:
            UserError: another rank has other terms; raised by all ranks together.
        """
        digest = zlib.crc32(repr((names, counted)).encode())
        # the smallest and, negative, the largest
        ends = torch.tensor([digest, -digest], device=self._device)
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=self._group)
        if ends.sum().item() != 0:
            raise UserError(
                f"terms= must return the same names on every rank, but here they are {names} (with a count: {counted}) and "
                "others on another rank; return a sum and a count of 0 where there is nothing to add."
            )

    def _check_leaves(self, sums: Outputs) -> None:
        """Refuse a term that trains something outside of the model, where DDP does not average.

        Gradient checkpointing makes a leaf of what frozen embeddings return: another tensor in each pass, which trains nothing.
        So a tensor that is not a parameter is refused when it comes a second time.
        """
        with_graph = [total for total in sums.values() if total.requires_grad]
        if self._leaves_checked or not with_graph:
            return
        others = [leaf for leaf in leaves_of(with_graph) if id(leaf) not in self._averaged]
        seen, self._others = self._others, [weakref.ref(leaf) for leaf in others]
        self._leaves_checked = not others or seen is not None
        came_before = {id(leaf) for each in seen or () if (leaf := each()) is not None}
        if any(isinstance(leaf, nn.Parameter) or id(leaf) in came_before for leaf in others):
            raise UserError(
                "terms= learns a tensor that is not the model's, which DistributedDataParallel does not average over ranks; "
                "make it a part of the model (a head whose output the model returns)."
            )


def parts_of_coca_loss(loss: Any) -> tuple[Callable[..., Any], CaptionTerm]:
    """Split open_clip's `CoCaLoss` into a method of it that takes the features, and the term of its captions.

    Raises:
        UserError: a class derived from it that computes something else.
    """
    if type(loss).forward is not open_clips("CoCaLoss")[0].forward:
        raise UserError(
            f"{type(loss).__name__} changes CoCaLoss.forward; give its contrastive part as the loss, and the rest as terms=."
        )
    captions = loss.caption_loss
    return MethodType(_contrastive_part, loss), CaptionTerm(
        loss.caption_loss_weight, captions.ignore_index, captions.label_smoothing
    )


def _contrastive_part(
    loss: Any,
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    output_dict: bool = True,
) -> dict[str, Tensor]:
    (clip_loss,) = open_clips("ClipLoss")
    value = clip_loss.forward(loss, image_features, text_features, logit_scale)
    return {"contrastive_loss": loss.clip_loss_weight * value}
