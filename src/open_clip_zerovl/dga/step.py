"""Decoupled gradient accumulation (section 4.1, eq. 5 and 7; A.2): the gradient of a large batch, one micro-batch at a time.

Shapes: `B` micro-batch per rank (sizes may differ), `K` micro-batches, `W` ranks, `N = B*K*W` effective batch, `D`
embedding width, `R` graphs retained, b = B*K rows of this rank.

The gradient of a contrastive loss splits at the features: d loss / d parameters is the sum over micro-batches of
(d features / d parameters)^T (d loss / d features), and the second factor depends on the features' values only. So

    (1) forward each micro-batch without graph; keep its features and the random state from which it started.
        The last R micro-batches are forwarded with graph instead, and their graphs retained.
    (2) the loss on all features, gathered over ranks, gives d loss / d features, d loss / d logit_scale (and logit_bias).
    (3) backpropagate the retained graphs; forward each other micro-batch again, with graph and the same random masks, and
        backpropagate its features' gradient. DDP synchronises once, in the last backward pass.

R graphs are in memory at the end of (1) and in (2), one more at a time in (3). Only the features' memory grows with K.

An image may have `C` texts in a step, such as its caption and a synthetic one. All of it holds for any number of features; the
loss then takes (b, D) image and (C*b, D) text features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import open_clip
import torch
import torch.distributed as dist
from open_clip.loss import CoCaLoss, DistillClipLoss
from torch import Tensor, nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import RngState
from open_clip_zerovl.dga.deferred import deferred
from open_clip_zerovl.dga.inputs import DeviceInputs, checked_order, checked_sizes, input_room, text_places
from open_clip_zerovl.dga.objective import FEATURES, SCALARS, TEXTS, Objective, OwnGradients
from open_clip_zerovl.dga.outputs import backpropagate, checked_outputs, detached_copy, paired
from open_clip_zerovl.dga.replay import (
    BufferState,
    FrozenTowers,
    ReplayCheck,
    ReplayError,
    TowerOutputs,
    buffers_kept,
    replay_tolerance,
)
from open_clip_zerovl.dga.retain import Decision, Retention
from open_clip_zerovl.dga.step_plan import StepPlan
from open_clip_zerovl.dga.wrappers import one_graph_alone, unwrapped, wrapped_inside

__all__ = ["DecoupledGradientAccumulation", "ReplayError"]

log = logging.getLogger(__name__)

Prepare = Callable[..., tuple[Any, Any]]  # (images, texts, further parts of a micro-batch) -> the model's two inputs


@dataclass
class FirstPass:
    """The results of phase (1).

    Attributes:
        features: (b, D) of images and (C*b, D) of texts, without graph, in fp32 at least.
        scalars: logit_scale, and logit_bias if the model has one, without graph.
        graphs: index of each retained micro-batch -> its outputs; phase (3) removes them one by one.
        rng_before: the random state before each micro-batch's forward pass.
    """

    features: dict[str, Tensor]
    scalars: dict[str, Tensor]
    graphs: dict[int, dict[str, Tensor]]
    rng_before: list[RngState]


@dataclass
class HalfStep:
    """What phases (1) and (2) leave for phase (3).

    Attributes:
        losses: detached, the loss' entries and "loss", their sum.
        gradients: of that sum by features (b, D) and scalars.
        own_gradients: of that sum by the loss' own parameters.
    """

    plan: StepPlan
    inputs: DeviceInputs
    first: FirstPass
    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    own_gradients: OwnGradients


class DecoupledGradientAccumulation:
    """The gradient of one optimizer step over K micro-batches, exactly that of one graph over all of them.

    Exact means: for any K, W, sizes, dropout, token drop and targets, the `.grad` of each parameter, logit_scale and logit_bias
    included, equals the gradient of the mean loss over the effective batch under the same random masks, up to the rounding of
    sums in another order. Batch norm in training mode normalises within its micro-batch (synchronised: that of all ranks), as
    in any accumulation.

    Args:
        model: called as `model(images, texts)`, or with any two inputs (such as texts and texts); returns open_clip's output
            dict, or a pair of features. Plain, in DistributedDataParallel, compiled, compiled DDP, or an adapter around one.
        loss: called with open_clip's signature, `loss(image_features=, text_features=, [logit_scale=, [logit_bias=,]]
            **loss_inputs, output_dict=True)`, with the scalars that the model returns; gives one number or a dict of numbers.
            Over ranks DDP's mean of its gradients must be right, as for `ContrastiveLoss`, `ClipLoss(gather_with_grad=True)`
            and `SigLipLoss`. The factor 1/W of `ClipLoss()` is corrected here; `ClipLoss(local_loss=True)` alone is refused;
            other classes are not checked. Parameters of a loss that is a module get their gradient, too: the mean over
            ranks, as DDP gives the model's.
        autocast: a factory of the context of each forward pass, as open_clip_train's `get_autocast` returns. The loss is
            computed outside of it, on fp32 features (fp64 stays fp64).
        scaler: a GradScaler; gradients are multiplied by its scale, as by `scaler.scale(loss).backward()`.
        retain: graphs kept from the first pass: 0 to K (K-1 over several ranks), or "auto" for as many as fit.
        check: compare replayed with cached features "first" (in the first step that replays), "always" or "never".
        replay_rng: False draws new random masks in the replay, which gives a wrong gradient (the paper's Table 6).

    Raises:
        UserError: a model or loss with which the gradient cannot be exact: CoCa, distillation, a loss made for other ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scaler: torch.amp.GradScaler | None = None,
        retain: int | str = 1,
        check: str = "first",
        replay_rng: bool = True,
    ) -> None:
        if check not in ("first", "always", "never"):
            raise UserError(f"check must be 'first', 'always' or 'never', but is {check!r}.")
        inner, self._ddp, _ = unwrapped(model)
        if self._ddp is None:
            self._ddp = wrapped_inside(inner)
        if isinstance(inner, open_clip.CoCa) or isinstance(loss, CoCaLoss):
            raise UserError(
                "Decoupled gradient accumulation cannot train CoCa: its caption loss needs token logits, not the two "
                "feature vectors; train it with open_clip's own loop."
            )
        if isinstance(loss, DistillClipLoss):
            raise UserError(
                "Decoupled gradient accumulation does not distil: DistillClipLoss needs a teacher's features of every "
                "micro-batch; drop the distillation or train with open_clip's own loop."
            )
        if self._ddp is not None and self._ddp.static_graph:
            raise UserError(
                "DistributedDataParallel(static_graph=True) (open_clip's --ddp-static-graph) expects one backward pass per "
                "step, but decoupled gradient accumulation takes one per micro-batch; leave it out."
            )
        parameter = next(inner.parameters(), None)
        if parameter is None:
            raise UserError("The model has no parameters, so there is no gradient to accumulate.")
        if not replay_rng:
            log.warning("Replay of random masks is off: gradients are WRONG wherever there is dropout (an ablation).")
            check = "never"
        self._model, self._inner = model, inner
        self._device = parameter.device
        self._world_size = dist.get_world_size(self._ddp.process_group) if self._ddp is not None else 1
        self._objective = Objective(loss, self._device, self._ddp, scaler)
        self._autocast = autocast
        self._retention = Retention(retain, self._device, self._world_size, inner.parameters())
        self._check = ReplayCheck(check)
        self._replay_rng = replay_rng
        self._input_room = input_room(self._device)
        self._towers = FrozenTowers(inner, self._device, splits=not one_graph_alone(model))

    def backward(
        self,
        micro_batches: Sequence[Sequence[Any]],
        *,
        prepare: Prepare | None = None,
        text_order: Tensor | None = None,
        texts_per_image: int = 1,
        **loss_inputs: Any,
    ) -> dict[str, Tensor]:
        """Add the effective batch's gradient to every parameter's `.grad`; the caller steps the optimizer.

        Args:
            micro_batches: K tuples (images, texts, ...), one row a sample; sizes may differ. Images and texts may be in
                (pinned) host memory. They are copied to the model's device one micro-batch at a time: once, if those that are
                forwarded twice take at most 5 % of its memory together, else in each pass. Further parts are handed to
                `prepare` as they are.
            prepare: `(images, texts, ...) -> (images, texts)` on the device, in both passes (dtype, normalisation, input
                mixup). It must not change what it is given, and be deterministic but for torch's random numbers, which the
                replay repeats.
            text_order: (b,) int64, a permutation of 0..b-1: text j of this rank's step (micro-batches in order) belongs to
                image text_order[j]. None: text j belongs to image j. Not for a model in which a row's text features depend on
                that row's image. With several texts of each image (C*b,): text j stands in place of text text_order[j].
            texts_per_image: C. Each micro-batch has C*B texts: the first text of all its samples, then the second. The loss
                is called with `texts_per_image` and with texts in this order over the whole step: (C*b, D).
            loss_inputs: further arguments of the loss, for this rank's b rows, images in order (for `ContrastiveLoss`:
                `mixup_lambda`, and `partner=reversed_partner(sizes)`).

        Returns:
            Detached scalars: the loss' entries, "loss" (their sum), and "logit_scale" if the model returns it.

        Raises:
            UserError: inputs that cannot be used, before any communication; over ranks let it end the process, since the other
                ranks wait in the next collective.
            ReplayError: the self-check failed; raised by all ranks together.

        After any error the random state and the model's buffers are as before, and `.grad` must not be used.
        """
        self._check_call()
        with self._undone_on_failure(), self._towers.reused(self._replay_rng):
            step = self._half_step(micro_batches, prepare, text_order, texts_per_image, loss_inputs)
            rng_after = RngState.capture(self._device)
            self._second_half(step)
            if self._replay_rng:
                rng_after.restore()
        self._retention.step_done(step.plan.sizes)
        return step.losses | {name: value for name, value in step.first.scalars.items() if name == "logit_scale"}

    def loss(
        self,
        micro_batches: Sequence[Sequence[Any]],
        *,
        prepare: Prepare | None = None,
        text_order: Tensor | None = None,
        texts_per_image: int = 1,
        **loss_inputs: Any,
    ) -> Tensor:
        """The loss of the effective batch, for a loop or trainer that calls `loss.backward()` itself.

        This call makes phases (1) and (2); the backward pass of the returned number makes phase (3), once. Until then the
        weights must stay as they are. What multiplies the number (a GradScaler, a share of accumulated steps) multiplies the
        gradients. Without grad mode it is the loss alone, and nothing is kept.

        Args: as for `backward`.

        Returns:
            The sum of the loss' entries, (). Its `backward()` adds the gradient to every parameter's `.grad`.

        Raises:
            UserError: as `backward`; also if the accumulation has a scaler of its own, which would count twice; from
                the backward pass, if it is called a second time or the weights have changed.
        """
        if self._objective.scaled:
            raise UserError(
                "loss() was called of an accumulation with a scaler; leave scaler= out and scale what loss() returns."
            )
        self._check_call()
        if not torch.is_grad_enabled():
            with self._undone_on_failure(), torch.no_grad(), self._towers.reused(self._replay_rng):
                return self._half_step(
                    micro_batches, prepare, text_order, texts_per_image, loss_inputs, graphs=0
                ).losses["loss"]
        with self._undone_on_failure(), self._towers.reused(self._replay_rng) as outputs:
            step = self._half_step(micro_batches, prepare, text_order, texts_per_image, loss_inputs)
        later = partial(self._backpropagate_later, step, outputs, self._weight_versions())
        return deferred(step.losses["loss"], later, self._device)

    def _weight_versions(self) -> list[int]:
        """Of each parameter a number that rises when it is changed."""
        return [parameter._version for parameter in self._inner.parameters()]

    def _backpropagate_later(self, step: HalfStep, outputs: TowerOutputs, versions: list[int], factor: Tensor) -> None:
        if self._weight_versions() != versions:
            raise UserError(
                "The model's weights were changed after loss() and before its backward pass, which would forward its "
                "micro-batches again with other weights: the gradient would be wrong; call loss() again."
            )
        rng_after = RngState.capture(self._device)
        with self._undone_on_failure(), self._towers.reused(self._replay_rng, outputs):
            self._second_half(step, factor)
        rng_after.restore()
        self._retention.step_done(step.plan.sizes)

    def _check_call(self) -> None:
        if torch.is_inference_mode_enabled():
            raise UserError(
                "decoupled gradient accumulation was called under torch.inference_mode(), where no graph is recorded; call it "
                "outside (torch.no_grad() does no harm)."
            )
        if not any(parameter.requires_grad for parameter in self._inner.parameters()):
            raise UserError("No parameter of the model is trainable, so there is no gradient to accumulate.")

    def _half_step(
        self,
        micro_batches: Sequence[Sequence[Any]],
        prepare: Prepare | None,
        text_order: Tensor | None,
        texts_per_image: int,
        loss_inputs: dict[str, Any],
        graphs: int | None = None,
    ) -> HalfStep:
        """Phases (1) and (2); `graphs` are retained, or as many as `retain` says."""
        sizes = checked_sizes(micro_batches, prepared=prepare is not None, texts_per_image=texts_per_image)
        order = None if text_order is None else checked_order(text_order, sum(sizes) * texts_per_image)
        if texts_per_image > 1:
            loss_inputs["texts_per_image"] = texts_per_image
            places = text_places(sizes, texts_per_image)
            order = places if order is None else places[order]
        order = None if order is None else order.to(self._device, non_blocking=True)
        plan = StepPlan(sizes, self._retention.graphs(sizes) if graphs is None else graphs, texts_per_image)
        inputs = DeviceInputs(micro_batches, prepare, plan.replayed, self._device, self._input_room)
        first = self._first_pass(plan, inputs)
        losses, gradients, own = self._objective.gradients(paired(first.features, order) | first.scalars, loss_inputs)
        if order is not None:
            gradients[TEXTS] = gradients[TEXTS][order]
        return HalfStep(plan, inputs, first, losses, gradients, own)

    def _second_half(self, step: HalfStep, factor: Tensor | None = None) -> None:
        """Phase (3), with all gradients times `factor`."""
        self._check.start()
        gradients = step.gradients
        if factor is not None:
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        self._second_pass(step.plan, step.inputs, step.first, gradients)
        self._objective.add_own_gradients(step.own_gradients, factor)

    def adopt(self, decision: Decision) -> None:
        """With retain="auto", before the first step: keep as many graphs as an earlier process of the same run."""
        self._retention.adopt(decision)

    def decision(self) -> Decision | None:
        """How many graphs retain="auto" keeps, for `adopt`; None before it has decided, and for a given R.

        Call it between two steps after `zero_grad`, on every rank.
        """
        return self._retention.decision()

    def _first_pass(self, plan: StepPlan, inputs: DeviceInputs) -> FirstPass:
        """(1) Features of every micro-batch. Retained ones come last, so that no graph is in memory during the others."""
        rng_before: list[RngState] = []
        features: dict[str, list[Tensor]] = {name: [] for name in FEATURES}
        graphs: dict[int, dict[str, Tensor]] = {}
        for k, size in enumerate(plan.sizes):
            rng_before.append(RngState.capture(self._device))
            self._towers.first_pass(k)
            if k in plan.retained:
                with self._unsynced(plan, k), self._retention.measured(size):
                    outputs = graphs[k] = self._with_graph(plan, k, inputs)
            else:
                with torch.no_grad():
                    outputs = self._forward(plan, k, inputs)
            for name in FEATURES:
                features[name].append(detached_copy(outputs[name]))
        return FirstPass(
            features={name: torch.cat(parts) for name, parts in features.items()},
            scalars={name: detached_copy(outputs[name]) for name in SCALARS if name in outputs},
            graphs=graphs,
            rng_before=rng_before,
        )

    def _second_pass(
        self, plan: StepPlan, inputs: DeviceInputs, first: FirstPass, gradients: dict[str, Tensor]
    ) -> None:
        """(3) Backpropagate the gradients of (2) into the parameters, one graph at a time.

        The scalars' gradient is backpropagated once, with the graph that synchronises. Without it DDP would treat their
        parameters as unused, and the ranks would drift apart.
        """
        rows = {name: gradients[name].split(plan.rows(name)) for name in FEATURES}
        cached = {name: first.features[name].split(plan.rows(name)) for name in FEATURES}
        with buffers_kept(self._inner):
            for k in plan.backward_order:
                with self._unsynced(plan, k):
                    if k in plan.retained:
                        outputs = first.graphs.pop(k)
                    else:
                        if self._replay_rng:
                            first.rng_before[k].restore()
                        self._towers.replay(k)
                        outputs = self._with_graph(plan, k, inputs)
                        for name in FEATURES:
                            self._check.compare(name, k, outputs[name], cached[name][k])
                    wanted = {name: rows[name][k] for name in FEATURES}
                    if k == plan.synchronises:
                        self._check.verdict(self._tolerance(), self._device, self._world_size)
                        wanted |= {name: gradients[name] for name in first.scalars}
                    backpropagate(outputs, wanted)
                del outputs  # frees this graph before the next one is built

    def _with_graph(self, plan: StepPlan, k: int, inputs: DeviceInputs) -> dict[str, Tensor]:
        # If the caller is in an autocast region, its cache holds weights that the first pass has cast without graph.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            return self._forward(plan, k, inputs)

    def _forward(self, plan: StepPlan, k: int, inputs: DeviceInputs) -> dict[str, Tensor]:
        prepared = inputs.take(k)
        with self._autocast():
            outputs = self._model(*prepared)
        return checked_outputs(outputs, {name: plan.rows(name)[k] for name in FEATURES})

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Leave the random state, the model's buffers and DDP's as before if the step fails."""
        rng, buffers = RngState.capture(self._device), BufferState(self._inner)
        try:
            yield
        except BaseException:
            buffers.restore()
            rng.restore()
            if self._ddp is not None and hasattr(self._ddp.reducer, "_reset_state"):
                self._ddp.reducer._reset_state()  # the reducer may still expect the backward pass that synchronises
            raise

    def _unsynced(self, plan: StepPlan, k: int) -> AbstractContextManager[Any]:
        # DDP of one rank may keep all graphs. Its reducer expects a forward and its backward pass to be adjacent, which they
        # are not then, and it has nothing to average: it never synchronises.
        all_kept = plan.graphs == len(plan.sizes) > 1
        apart = k != plan.synchronises or all_kept
        return self._ddp.no_sync() if apart and self._ddp is not None else nullcontext()

    def _tolerance(self) -> float:
        return replay_tolerance(self._inner, self._device, self._autocast) if self._check.active else 0.0
