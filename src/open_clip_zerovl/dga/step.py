"""Decoupled gradient accumulation (section 4.1, eq. 5 and 7; A.2): the gradient of a large batch, one micro-batch at a time.

Shapes: `B` micro-batch per rank (sizes may differ), `K` micro-batches, `W` ranks, `N = B*K*W` effective batch, `D`
embedding width, `R` graphs retained, b = B*K rows of this rank.

The gradient of a contrastive loss splits at the features: d loss / d parameters is the sum over micro-batches of
(d features / d parameters)^T (d loss / d features), and the second factor depends on the features' values only. So

    (1) forward each micro-batch without graph; keep its features and the random state from which it started.
        The last R micro-batches are forwarded with graph instead, and their graphs retained. A compiled model has a graph
        in every pass, freed at once: its code for passes without one rounds otherwise.
    (2) the loss on all features, gathered over ranks, gives d loss / d features, d loss / d logit_scale (and logit_bias).
    (3) backpropagate the retained graphs; forward each other micro-batch again, with graph and the same random masks, and
        backpropagate its features' gradient. DDP synchronises once, in the last backward pass.

R graphs are in memory at the end of (1) and in (2), one more at a time in (3). Only the features' memory grows with K.

All of it holds for any number of features. Losses that are means over samples need no features (`extras`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import RngState
from open_clip_zerovl.dga.extras import Collected, Extras, TermsOfMicroBatch, parts_of_coca_loss
from open_clip_zerovl.dga.model import (
    IMAGES,
    SCALARS,
    TEXTS,
    DeviceInputs,
    Outputs,
    ReplayState,
    Towers,
    backpropagate,
    checked_order,
    checked_sizes,
    detached_copy,
    input_room,
    is_compiled,
    open_clips,
    require_gradients,
    shared_casts,
    unwrapped,
    wrapped_inside,
)
from open_clip_zerovl.dga.objective import LossGradients, Objective
from open_clip_zerovl.dga.replay import (
    BufferState,
    GradientHooks,
    ReplayCheck,
    ReplayError,
    WeightVersions,
    replay_tolerance,
    restored_buffers,
)
from open_clip_zerovl.dga.retain import Decision, Retention

__all__ = ["DecoupledGradientAccumulation", "ReplayError"]

log = logging.getLogger(__name__)

# (images, texts, further parts of a micro-batch) -> the model's two inputs
Prepare = Callable[..., tuple[Any, Any]]


@dataclass
class _Step:
    """A step between its phases: which graphs are kept, and the results of phases (1) and (2).

    K = 5, R = 2:  forwarded 0 1 2 3 4, with graph 3 4; backpropagated 3 4 0 1 2, synchronised in 2
    K = 2, R = 2:  forwarded 0 1, with graph 0 1; backpropagated 0 1, synchronised in 1

    Attributes:
        sizes: samples of each micro-batch.
        graphs: R.
        inputs: the micro-batches' inputs, copied to the device when they are taken.
        order: (b,) the place of each text, None if texts stand in their images' order.
        retained_outputs: retained micro-batch -> its outputs with graph; phase (3) removes them one by one.
        replay_states: the states from which each micro-batch is replayed.
        features: (b, D) of images and of texts, without graph, in fp32 at least.
        extras: terms, and a teacher's features.
        scalars: logit_scale, and logit_bias if the model has one, without graph, for each micro-batch.
        weights: the parameters' versions at the beginning of the step.
        compiled: whether torch.compile runs the model or a part of it.
        losses: the loss' entries and "loss", their sum, detached.
        gradients: the sum's gradients by the features (b, D) and by the scalars.
        loss_gradients: the sum's gradients by the loss' own parameters.
    """

    sizes: list[int]
    graphs: int
    inputs: DeviceInputs
    order: Tensor | None
    weights: WeightVersions
    compiled: bool
    retained_outputs: dict[int, Outputs] = field(default_factory=dict)
    replay_states: list[ReplayState] = field(default_factory=list)
    features: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, list[Tensor]] = field(default_factory=dict)
    extras: Collected = field(default_factory=Collected)
    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss_gradients: LossGradients = field(default_factory=list)

    @property
    def replayed(self) -> range:
        """Return the micro-batches that are forwarded twice.

        The last R keep their graph, so that none is in memory before them.
        """
        return range(len(self.sizes) - self.graphs)

    @property
    def backward_order(self) -> list[int]:
        """Order retained micro-batches first, which frees their memory for the replays.

        DDP averages gradients in the last one.
        """
        return [*range(len(self.sizes) - self.graphs, len(self.sizes)), *self.replayed]


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
            ranks, as DDP gives the model's. open_clip's `CoCaLoss` becomes its contrastive loss and a `CaptionTerm`.
        terms: `terms(outputs, images, texts, ...)` gets the model's output dict for a micro-batch, and the micro-batch as the
            model got it. For each name it returns (sum, count), such as the cross-entropy of its tokens and their number: the
            loss gets the mean over the whole effective batch (a count of 0 gives 0). A sum alone is added up over micro-batches
            and ranks. Weights go into the sum. It runs under `autocast` in both passes; what it learns must be the model's.
        features: further features (B, ...) that the model returns and the loss takes by name -> "images" or "texts", the input
            whose rows they follow.
        teacher: called like the model on each micro-batch, without graph; put it into eval(). Its features, in the loss'
            order, and its logit_scale go to the loss as dist_image_features, dist_text_features and dist_logit_scale
            (open_clip's `DistillClipLoss`).
        autocast: a factory of the context of each forward pass, as open_clip_train's `get_autocast` returns. The loss is
            computed outside of it, on fp32 features (fp64 stays fp64).
        scaler: a GradScaler; gradients are multiplied by its scale, as by `scaler.scale(loss).backward()`.
        retain: graphs kept from the first pass: 0 to K (K-1 over several ranks), or "auto" for the largest number that fits.
            Where a step fills the memory nevertheless, one graph fewer is kept from there on: in one process `backward` takes
            the step once more, unless `.grad` held something before; over ranks the rank drops a graph of its first pass.
        check: compare replayed with cached features "first" (as `ReplayCheck` has it: in each step of a compiled model),
            "always" or "never".
        replay_rng: False draws new random masks in the replay, which gives a wrong gradient (the paper's Table 6).

    Raises:
        UserError: a model or loss with which the gradient cannot be exact, such as a loss made for other ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        *,
        terms: TermsOfMicroBatch | None = None,
        features: Mapping[str, str] | None = None,
        teacher: Callable[..., Any] | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scaler: torch.amp.GradScaler | None = None,
        retain: int | str = 1,
        check: str = "first",
        replay_rng: bool = True,
    ) -> None:
        if check not in ("first", "always", "never"):
            raise UserError(f"check must be 'first', 'always' or 'never', but is {check!r}.")
        inner, self._ddp = unwrapped(model)
        if self._ddp is None:
            self._ddp = wrapped_inside(inner)
        every_term = [] if terms is None else [terms]
        if isinstance(loss, open_clips("CoCaLoss")):
            loss, captions = parts_of_coca_loss(loss)
            every_term.append(captions)
        inputs = {"images": IMAGES, "texts": TEXTS}
        self._inputs_of = {IMAGES: IMAGES, TEXTS: TEXTS} | {
            name: inputs[kind] for name, kind in (features or {}).items()
        }
        if self._ddp is not None and self._ddp.static_graph:
            raise UserError(
                "DistributedDataParallel(static_graph=True) (open_clip's --ddp-static-graph) expects one backward pass per "
                "step, but decoupled gradient accumulation takes one per micro-batch; leave it out."
            )
        if not replay_rng:
            log.warning(
                "Replay of random masks is off: gradients are WRONG wherever there is dropout (an ablation)."
            )
            check = "never"
        self._model, self._inner = model, inner
        self._device = next(inner.parameters()).device
        self._autocast = autocast
        group = self._ddp.process_group if self._ddp is not None else None
        self._world_size = dist.get_world_size(group) if self._ddp is not None else 1
        self._extras = Extras(every_term, teacher, autocast, inner, self._world_size, group)
        self._towers = Towers(
            model, inner, self._device, autocast, self._extras, [*self._inputs_of]
        )
        self._objective = Objective(loss, self._device, self._ddp, scaler)
        self._retention = Retention(
            retain, self._device, self._world_size, inner.parameters(), group
        )
        self._check = ReplayCheck(check, self._world_size, group)
        self._replay_rng = replay_rng
        self._input_room = input_room(self._device)

    def backward(
        self,
        micro_batches: Sequence[Sequence[Any]],
        *,
        prepare: Prepare | None = None,
        text_order: Tensor | None = None,
        **loss_inputs: Any,
    ) -> dict[str, Tensor]:
        """Add the effective batch's gradient to every parameter's `.grad`.

        The caller steps the optimizer.

        Args:
            micro_batches: K tuples (images, texts, ...), one row a sample; sizes may differ. Images and texts may be in
                (pinned) host memory. They are copied to the model's device one micro-batch at a time: once, if those that are
                forwarded twice take at most 5 % of its memory together, else in each pass. Further parts are handed to
                `prepare` as they are.
            prepare: `(images, texts, ...) -> (images, texts)` on the device, in both passes (dtype, normalisation, input
                mixup). It must not change its inputs, and must be deterministic but for torch's random numbers, which the
                replay repeats.
            text_order: (b,) int64, a permutation of 0..b-1: text j of this rank's step (micro-batches in order) belongs to
                image text_order[j]. None: text j belongs to image j. Not for a model in which a row's text features depend on
                that row's image.
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

        def take() -> dict[str, Tensor]:
            with self._undone_on_failure():
                step = self._begun(micro_batches, prepare, text_order)
                self._first_pass(step)
                self._differentiate(step, loss_inputs)
                self._second_pass(step)
            return step.losses | {
                name: values[-1] for name, values in step.scalars.items() if name == "logit_scale"
            }

        parameters = [*self._inner.parameters(), *self._objective.parameters()]
        # Gradients of earlier calls could not be told from those of a failed one. Other ranks would wait for this one.
        again = self._world_size == 1 and all(parameter.grad is None for parameter in parameters)
        try:
            return take()
        except torch.OutOfMemoryError:
            if not (again and self._retention.keep_fewer()):
                raise
        # out of the handler, whose traceback holds the graphs
        for parameter in parameters:
            parameter.grad = None  # of the failed step
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return take()

    def loss(
        self,
        micro_batches: Sequence[Sequence[Any]],
        *,
        prepare: Prepare | None = None,
        text_order: Tensor | None = None,
        **loss_inputs: Any,
    ) -> Tensor:
        """Compute the loss of the effective batch, for a loop or trainer that calls `loss.backward()` itself.

        This call runs phases (1) and (2); the backward pass of the returned number runs phase (3), once. Until then the
        weights must not change. A factor on the number (a GradScaler, a share of accumulated steps) multiplies the
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
                "loss() does not work with scaler=; leave scaler= out and scale the returned loss."
            )
        learns = torch.is_grad_enabled()
        with self._undone_on_failure():
            step = self._begun(micro_batches, prepare, text_order, graphs=None if learns else 0)
            self._first_pass(step)
            self._differentiate(step, loss_inputs)
        if not learns:
            return step.losses["loss"]
        # The precision of this place, not that of the place of `loss.backward()`.
        enabled = torch.is_autocast_enabled(self._device.type)
        dtype = torch.get_autocast_dtype(self._device.type)

        def second_pass(factor: Tensor) -> None:
            with (
                torch.autocast(self._device.type, enabled=enabled, dtype=dtype),
                self._undone_on_failure(),
            ):
                self._second_pass(step, factor)

        return _Deferred.apply(
            torch.zeros((), device=self._device, requires_grad=True),
            step.losses["loss"],
            second_pass,
        )

    def adopt(self, decision: Decision) -> None:
        """Keep the number of graphs of an earlier process of the same run, with retain="auto" and before the first step."""
        self._retention.adopt(decision)

    def decision(self) -> Decision | None:
        """Return the number of graphs that retain="auto" keeps, for `adopt`.

        Call it between two steps after `zero_grad`, on every rank.

        Returns:
            None before it has decided, and for a given R.
        """
        return self._retention.decision()

    # ------------------------------------------------------------------------------------------------- a step's phases

    def _begun(
        self,
        micro_batches: Sequence[Sequence[Any]],
        prepare: Prepare | None,
        text_order: Tensor | None,
        graphs: int | None = None,
    ) -> _Step:
        """Check the arguments, phase (0).

        `graphs` are retained; None: the number that `retain` asks for.
        """
        if not any(parameter.requires_grad for parameter in self._inner.parameters()):
            raise UserError(
                "No parameter of the model is trainable, so there is no gradient to accumulate."
            )
        weights = WeightVersions(self._inner)
        prepared = prepare is not None or bool(self._extras.terms)
        sizes = checked_sizes(micro_batches, prepared=prepared)
        if text_order is not None and self._extras.terms:
            raise UserError(
                "text_order does not work with terms: a term gets outputs of which a row's text is not that of its image (a "
                "captioner's logits, for one); leave text_order (--sort-text) out."
            )
        order = None
        if text_order is not None:
            order = checked_order(text_order, sum(sizes)).to(self._device, non_blocking=True)
        graphs = self._retention.graphs(sizes) if graphs is None else graphs
        replayed = range(len(sizes) - graphs)
        inputs = DeviceInputs(micro_batches, prepare, replayed, self._device, self._input_room)
        compiled = is_compiled(self._model)
        return _Step(sizes, graphs, inputs, order, weights, compiled)

    def _first_pass(self, step: _Step) -> None:
        """Compute the features of every micro-batch and the graphs of the last R, phase (1)."""
        if self._ddp is not None and torch.is_grad_enabled():
            # DDP rebuilds its buckets, a collective, in the first forward pass with a graph, and broadcasts buffers in the
            # first of all. Those are one pass or two, by this rank's K and R; here all ranks have the same order.
            self._ddp.reducer._rebuild_buckets()
        collected: dict[str, list[Tensor]] = {}
        frozen = self._towers.skippable() if step.replayed else set()
        # Weights are cast once for all passes without graph; `retain="auto"` measures a graph with casts of its own.
        with shared_casts():
            for k in step.replayed:
                self._forward(step, k, frozen, collected)
        droppable = self._world_size > 1 and self._retention.can_keep_fewer
        forward = self._forward_within_memory if droppable else self._forward
        for k in range(len(step.replayed), len(step.sizes)):
            forward(step, k, frozen, collected)
        step.features = {name: torch.cat(collected[name]) for name in self._inputs_of}
        step.scalars = {name: collected[name] for name in SCALARS if name in collected}
        step.extras = self._extras.collected(collected, step.order)
        step.weights.check()

    def _forward(
        self, step: _Step, k: int, frozen: set[str], collected: dict[str, list[Tensor]]
    ) -> None:
        """Forward micro-batch k in the first pass, and collect its outputs."""
        graph = k not in step.replayed
        measured = self._retention.measured(step.sizes[k]) if graph else nullcontext()
        with self._synchronised(graph and self._synchronises(step, k)), measured:
            take = partial(step.inputs.take, k)
            outputs, repeat = self._towers.first_pass(
                take, step.sizes[k], frozen, graph=graph or step.compiled
            )
        copies = {name: detached_copy(output) for name, output in outputs.items()}
        step.replay_states.append(repeat)
        if graph:
            step.retained_outputs[k] = outputs
        for name, copy in copies.items():
            collected.setdefault(name, []).append(copy)

    def _forward_within_memory(
        self, step: _Step, k: int, frozen: set[str], collected: dict[str, list[Tensor]]
    ) -> None:
        """Forward micro-batch k with its graph.

        In a full memory drop the first kept graph and replay its micro-batch instead.

        Other ranks need not know: each rank's passes between two collectives are its own. Not so where the passes themselves
        communicate, as those of SyncBatchNorm do.
        """
        rng, buffers = RngState.capture(self._device), BufferState(self._inner)
        try:
            self._forward(step, k, frozen, collected)
            return
        except torch.OutOfMemoryError:
            communicates = any(isinstance(m, nn.SyncBatchNorm) for m in self._inner.modules())
            if communicates or not step.retained_outputs or not self._retention.keep_fewer():
                raise
        # out of the handler, whose traceback holds the graph
        del step.retained_outputs[min(step.retained_outputs)]
        step.graphs -= 1
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        buffers.restore()
        rng.restore()
        self._forward_within_memory(step, k, frozen, collected)

    def _differentiate(self, step: _Step, loss_inputs: dict[str, Any]) -> None:
        """Compute the loss on all features and its gradients by features and scalars, phase (2)."""
        values = step.features | {name: parts[-1] for name, parts in step.scalars.items()}
        ordered: dict[str, Tensor] = {}
        if step.order is not None:
            of_texts = [name for name, of in self._inputs_of.items() if of == TEXTS]
            ordered = dict.fromkeys(of_texts, step.order)
        for name, order in ordered.items():
            values[name] = torch.empty_like(values[name]).index_copy_(0, order, values[name])
        step.losses, step.gradients, step.loss_gradients = self._objective.gradients(
            values, loss_inputs | step.extras.loss_inputs
        )
        for name, order in ordered.items():
            step.gradients[name] = step.gradients[name][order]
        self._add_terms(step)

    def _second_pass(self, step: _Step, factor: Tensor | None = None) -> None:
        """Backpropagate the gradients of (2), times `factor`, into the parameters, one graph at a time, phase (3).

        The scalars' gradient is backpropagated once, with the graph that synchronises. Without it DDP would treat their
        parameters as unused, and the ranks would drift apart.
        """
        ended = RngState.capture(self._device)
        self._check.start(compiled=step.compiled)
        before = self._check.bits_of(self._inner) if step.replayed else {}
        for name, values in step.scalars.items():
            for k, value in enumerate(values[:-1]):
                self._check.compare(name, k, value, values[-1])
        gradients = {
            name: gradient if factor is None else gradient * factor
            for name, gradient in step.gradients.items()
        }
        rows = {name: gradients[name].split(step.sizes) for name in step.features}
        cached = {name: value.split(step.sizes) for name, value in step.features.items()}
        shares = {name: gradients[name] for name in step.extras.shares}
        learns = False
        hooks = GradientHooks(self._inner, averaged=self._world_size > 1)
        with restored_buffers(self._inner), hooks:
            for k in step.backward_order:
                step.weights.check()
                wanted = {name: each[k] for name, each in rows.items()} | shares
                with self._synchronised(self._synchronises(step, k)):
                    if k in step.retained_outputs:
                        outputs = step.retained_outputs.pop(k)
                    else:
                        take = partial(step.inputs.take, k)
                        outputs = self._towers.replay(
                            take, step.sizes[k], step.replay_states[k], rng=self._replay_rng
                        )
                        for name, each in (cached | step.extras.sums).items():
                            if name in outputs:
                                self._check.compare(name, k, outputs[name], each[k])
                    learns = learns or any(
                        outputs[name].requires_grad for name in outputs.keys() - SCALARS
                    )
                    if k == step.backward_order[-1]:
                        hooks.release()
                        if before:
                            self._check.compare_bits(k, self._check.bits_of(self._inner), before)
                        self._check.verdict(self._tolerance(), self._device)
                        wanted |= {name: gradients[name] for name in step.scalars}
                        if not learns:
                            require_gradients(self._inner, [outputs[name] for name in step.scalars])
                    backpropagate(outputs, wanted)
                del outputs  # frees this graph before the next one is built
        self._objective.add_loss_gradients(step.loss_gradients, factor)
        if self._replay_rng:
            ended.restore()
        self._retention.step_done(step.sizes)

    # ----------------------------------------------------------------------------------------------------------- helpers

    def _add_terms(self, step: _Step) -> None:
        """Add the terms to the losses, and their gradients by each micro-batch's sums to the gradients."""
        terms = step.extras.losses
        if taken := terms.keys() & (step.losses.keys() | SCALARS):
            raise UserError(
                f"{', '.join(sorted(taken))} is a term and another entry of the result; give the term another name."
            )
        total = sum(terms.values(), start=step.losses.pop("loss"))
        step.losses |= {**terms, "loss": total}
        step.gradients |= {
            name: self._objective.scale(share) for name, share in step.extras.shares.items()
        }

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

    def _synchronises(self, step: _Step, k: int) -> bool:
        """Return whether DDP averages gradients in the backward pass of micro-batch k.

        It prepares for that in the forward pass.

        DDP of one rank may keep all graphs. Its reducer expects a forward and its backward pass to be adjacent, which they are
        not then, and it has nothing to average: it never synchronises.
        """
        return k == step.backward_order[-1] and not step.graphs == len(step.sizes) > 1

    def _synchronised(self, wanted: bool) -> AbstractContextManager[Any]:
        return nullcontext() if wanted or self._ddp is None else self._ddp.no_sync()

    def _tolerance(self) -> float:
        return (
            replay_tolerance(self._inner, self._device, self._autocast)
            if self._check.active
            else 0.0
        )


class _Deferred(torch.autograd.Function):
    """A number, (), whose backward pass calls a function once, with the factor on the number."""

    @staticmethod
    def forward(
        ctx: Any, trigger: Tensor, value: Tensor, backward: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.later = backward
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[None, None, None]:
        later, ctx.later = ctx.later, None
        if later is None:
            raise UserError(
                "The loss of a decoupled gradient accumulation was backpropagated a second time, but its graphs are freed in "
                "the first; call loss() again."
            )
        later(factor)
        return None, None, None
