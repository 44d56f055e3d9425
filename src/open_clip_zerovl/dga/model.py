"""The model as a step calls it: its micro-batches, each tower forwarded as often as needed, and its outputs checked.

Shapes: `B` micro-batch per rank, `D` embedding width.

A micro-batch is a tuple of two inputs (images, texts) and further parts for `prepare` and terms. An input is a tensor, a dict
or a tuple of tensors, in which row j of every tensor belongs to sample j:

    (images, texts)                                                (B, 3, H, W), (B, L)
    (images, {"input_ids": ids, "attention_mask": mask})           a tokenizer's BatchEncoding likewise
    (images, texts, origin)                                        with prepare(images, texts, origin) -> images, texts

With a `text_order` the texts of a step stand in another order than its images.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import RngState

log = logging.getLogger(__name__)

FEATURES = ("image_features", "text_features")  # (B, D) each
IMAGES, TEXTS = FEATURES
SCALARS = ("logit_scale", "logit_bias")  # the same for every micro-batch

Outputs = dict[str, Tensor]


class ReplayState(NamedTuple):
    """The random states and frozen towers that the replay of a micro-batch starts from.

    Attributes:
        start: the random state before its inputs were made.
        between: the state after a frozen image tower, from which the text tower started; None if that tower is trained.
        frozen: the FEATURES that the replay leaves out.
    """

    start: RngState
    between: RngState | None
    frozen: frozenset[str]


def open_clips(*names: str) -> tuple[Any, ...]:
    """Return classes of open_clip, which is not imported here.

    Where nobody has imported it, no object is an instance of them.
    """
    modules = [
        sys.modules.get(name)
        for name in ("open_clip.model", "open_clip.coca_model", "open_clip.loss")
    ]
    return tuple(
        getattr(module, name) for module in modules for name in names if hasattr(module, name)
    )


class Towers:
    """Forward passes of a model, where a tower in which nothing is trained runs once per micro-batch and is not replayed.

    open_clip's models take images or texts alone. In a step that skips a tower its micro-batches' first pass is two calls, with
    the images and with the texts, and the replay is a call without the input of the skipped tower. Parameters show which
    towers may be skipped, the output shows whether one can be: if an adapter or a weight shared with the other tower is
    trained inside, it requires gradient, and the tower runs twice. A model that is not open_clip's runs its frozen tower twice,
    with the same gradients; this is logged.

    Args:
        model: called as `model(images, texts)`.
        inner: the same without wrappers.
        autocast: see `DecoupledGradientAccumulation`.
        extras: the `Extras` that add terms and a teacher's features to the outputs.
        features: names of all features that the loss takes.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
        extras: Any,
        features: Sequence[str],
    ) -> None:
        self._model = model
        self._inner = inner
        self._device = device
        self._autocast = autocast
        self._extras = extras
        self._features = features
        # features that required gradient although their tower looked frozen
        self._learning: set[str] = set()
        self._logged = False

    def skippable(self) -> set[str]:
        """Return the FEATURES that a step from now on computes once per micro-batch only."""
        if self._extras.terms:  # they may use any output
            return set()
        names = self._without_training() - self._learning
        # The class of a scripted module has no forward to look at, and a hook may look at all inputs.
        forwards = [kind.forward for kind in open_clips("CLIP", "CustomTextCLIP")]
        hooks = [*self._inner._forward_pre_hooks, *self._inner._forward_hooks]
        scripted = isinstance(self._inner, torch.jit.ScriptModule)
        if names and (scripted or hooks or type(self._inner).forward not in forwards):
            if not self._logged:
                log.info(
                    "The frozen tower (%s) runs in both passes: only open_clip models can skip it.",
                    sorted(names),
                )
            self._logged, names = True, set()
        return names

    def first_pass(
        self,
        take: Callable[[], tuple[Any, ...]],
        size: int,
        frozen: set[str],
        *,
        graph: bool,
    ) -> tuple[Outputs, ReplayState]:
        """Forward a micro-batch, with graph or without, and keep the state that its replay needs.

        Args:
            take: gives the micro-batch's two inputs, and its further parts; it may draw random numbers.
            size: its samples.
            frozen: features of towers that look frozen in this step; one that requires gradient nevertheless is replayed.
        """
        start, between = RngState.capture(self._device), None
        inputs = take()
        frozen = frozen - self._learning
        if not frozen:
            outputs = self._outputs(inputs, self._features, size, graph)
            outputs |= self._extras.of_teacher(inputs)
            return outputs, ReplayState(start, None, frozenset())
        outputs = {}
        for name, alone in ((IMAGES, (inputs[0], None)), (TEXTS, (None, inputs[1]))):
            features = self._outputs(alone, [name], size, graph or name in frozen)
            if name in frozen and features[name].requires_grad:
                self._learning.add(name)
            elif name in frozen and name == IMAGES:
                between = RngState.capture(self._device)
            outputs |= features
        outputs |= self._extras.of_teacher(inputs)
        return outputs, ReplayState(start, between, frozenset(frozen - self._learning))

    def replay(
        self,
        take: Callable[[], tuple[Any, ...]],
        size: int,
        repeat: ReplayState,
        *,
        rng: bool = True,
    ) -> Outputs:
        """Forward a micro-batch again with graph, under the random numbers of its first pass unless `rng` is False."""
        if rng:
            repeat.start.restore()
        inputs = take()
        if rng and repeat.between is not None:
            repeat.between.restore()
        images, texts = (
            None if name in repeat.frozen else part
            for name, part in zip(FEATURES, inputs[:2], strict=True)
        )
        wanted = [name for name in self._features if name not in repeat.frozen]
        return self._outputs((images, texts, *inputs[2:]), wanted, size, True)

    def _outputs(
        self, inputs: tuple[Any, ...], features: Sequence[str], size: int, graph: bool
    ) -> Outputs:
        """Forward two inputs and check the outputs, with the sums of the terms."""
        if graph:
            # If the caller is in an autocast region, its cache holds weights that the first pass has cast without graph.
            torch.clear_autocast_cache()
        with torch.set_grad_enabled(graph), self._autocast():
            outputs = self._model(*inputs[:2])
            terms = bool(self._extras.terms)
            checked = checked_outputs(outputs, features, size, others_used=terms)
            return checked | self._extras.of_terms(outputs, inputs)

    def _without_training(self) -> set[str]:
        """Return the FEATURES whose tower has no trainable parameter now.

        Returns:
            Nothing for a model without `visual`.
        """
        visual = getattr(self._inner, "visual", None)
        if not isinstance(visual, nn.Module):
            return set()
        image = {id(parameter) for parameter in visual.parameters()}
        heads = {id(getattr(self._inner, name, None)) for name in SCALARS}
        trainable = {id(p) for p in self._inner.parameters() if p.requires_grad} - heads
        return {
            name
            for name, within in ((IMAGES, trainable & image), (TEXTS, trainable - image))
            if not within
        }


def checked_outputs(
    outputs: Any, features: Sequence[str], size: int, *, others_used: bool
) -> Outputs:
    """Check that the model's outputs are these features of `size` samples and scalars, as a dict.

    A pair of features becomes one.

    Args:
        others_used: whether there are terms, which may use further outputs.

    Raises:
        UserError: an output that would get no gradient, or features of another shape.
    """
    if (
        isinstance(outputs, tuple | list)
        and len(outputs) == 2
        and all(isinstance(part, Tensor) for part in outputs)
    ):
        outputs = dict(zip(FEATURES, outputs, strict=True))
    elif (
        not isinstance(outputs, dict) or not {*FEATURES, "logit_scale", *features} <= outputs.keys()
    ):
        seen = sorted(outputs) if isinstance(outputs, dict) else type(outputs).__name__
        raise UserError(
            "The model must return a dict with image_features, text_features and logit_scale, or a pair of features, but "
            f"returned {seen}; create open_clip models with output_dict=True, or wrap the model in an adapter (docs/dga.md)."
        )
    # open_clip's models return None for a feature that was not asked for, and other models for a bias that they lack.
    outputs = {name: out for name, out in outputs.items() if out is not None or name in features}
    extra = sorted(outputs.keys() - {*FEATURES, *SCALARS, *features})
    if extra and not others_used:
        raise UserError(
            f"The model returned {', '.join(extra)}, which would get no gradient: give features= for features of the loss, "
            "or terms= for a loss of each micro-batch, such as CaptionTerm() for a captioner's logits and labels."
        )
    for name in [*features, *(outputs.keys() & SCALARS)]:
        output = outputs[name]
        if not isinstance(output, Tensor) or not output.is_floating_point():
            kind = str(output.dtype) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise UserError(f"The model's {name} must be a floating point tensor, but is {kind}.")
        if name in features and (output.ndim < 2 or len(output) != size):
            raise UserError(
                f"{name} of {size} samples must be ({size}, width), but are {tuple(output.shape)}."
            )
    return {name: output for name, output in outputs.items() if name in features or name in SCALARS}


def name_of(model: nn.Module, parameter: nn.Parameter) -> str:
    """Find a parameter's name."""
    return next(name for name, candidate in model.named_parameters() if candidate is parameter)


def require_gradients(model: nn.Module, outputs: Iterable[Tensor]) -> None:
    """Refuse outputs, those with a graph, that leave a trainable parameter without gradient.

    Raises:
        UserError: such a parameter.
    """
    reached = {id(leaf) for leaf in leaves_of(outputs)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            raise UserError(
                f"The model computes no gradient for {name}: its features come without graph from every micro-batch. Take "
                "torch.no_grad() and detach() out of its forward, or freeze parameters that need no training."
            )


def leaves_of(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaf tensors that a backward pass from `outputs` would reach."""
    todo: list[Any] = [
        output.grad_fn if output.grad_fn is not None else output for output in outputs
    ]
    visited = set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = node if isinstance(node, Tensor) else getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            yield leaf
        elif not isinstance(node, Tensor):
            todo += [following for following, _ in node.next_functions]


@contextmanager
def shared_casts() -> Iterator[None]:
    """Keep autocast's copies of weights from one forward pass to the next.

    For passes without graph. In a pass with graph a cast is part of the graph, and gradient checkpointing casts again in the
    backward pass: it begins without copies.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def detached_copy(output: Tensor) -> Tensor:
    """Copy an output in fp32 or fp64.

    Always a copy, because a compiled model may overwrite its output in the next call.
    """
    return output.detach().to(torch.promote_types(output.dtype, torch.float32), copy=True)


def backpropagate(outputs: Outputs, gradients: dict[str, Tensor]) -> None:
    """Run one backward pass from all outputs that depend on a trainable parameter.

    In several passes DDP would miss some.
    """
    roots = [name for name in gradients if name in outputs and outputs[name].requires_grad]
    if roots:
        # In an autocast region (loss() opens one) torch 2.6 keeps what gradient checkpointing has cast without graph, and
        # forwards again from it: those weights would get no gradient.
        torch.clear_autocast_cache()
        torch.autograd.backward(
            [outputs[name] for name in roots],
            [gradients[name].to(outputs[name].dtype) for name in roots],
        )


def unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the model inside of DDP and torch.compile in any order, and the DDP wrapper if there is one."""
    ddp = None
    while True:
        if isinstance(model, DistributedDataParallel):
            ddp, model = model, model.module
        elif isinstance(inside := getattr(model, "_orig_mod", None), nn.Module):
            model = inside
        else:
            return model, ddp


def is_compiled(model: nn.Module) -> bool:
    """Look for a module that torch.compile runs: the model, a wrapper or a block."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def wrapped_inside(adapter: nn.Module) -> DistributedDataParallel | None:
    """Find the DDP wrapper of the model inside of an adapter, where the adapter itself is not wrapped.

    Returns:
        None if there is none.

    Raises:
        UserError: parameters that this DDP does not average.
    """
    ddp_models = [
        module for module in adapter.modules() if isinstance(module, DistributedDataParallel)
    ]
    if not ddp_models:
        return None
    averaged = {id(parameter) for ddp in ddp_models for parameter in ddp.parameters()}
    outside = [
        name for name, p in adapter.named_parameters() if p.requires_grad and id(p) not in averaged
    ]
    if len(ddp_models) > 1 or outside:
        what = (
            f"trains {outside[0]} outside of it"
            if outside
            else f"holds {len(ddp_models)} models in it"
        )
        raise UserError(
            f"{type(adapter).__name__} wraps a model in DistributedDataParallel and {what}, so that gradients would not be "
            "averaged together; put the whole adapter into one DistributedDataParallel."
        )
    return ddp_models[0]


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches
# ---------------------------------------------------------------------------------------------------------------------

INPUT_SHARE = 0.05  # half of the memory that retain="auto" leaves free


def checked_sizes(micro_batches: Sequence[Sequence[Any]], *, prepared: bool) -> list[int]:
    """Return the number of samples of each micro-batch.

    Args:
        prepared: whether there is a `prepare` or terms, which take the parts after the first two.

    Raises:
        UserError: a micro-batch without two inputs or with parts that no `prepare` takes, an input that is not a tensor, dict
            or tuple of tensors, an input without rows, or other numbers of texts than images.
    """
    return [_checked_size(k, micro_batch, prepared) for k, micro_batch in enumerate(micro_batches)]


def _checked_size(k: int, micro_batch: Any, prepared: bool) -> int:
    parts = len(micro_batch) if isinstance(micro_batch, Sequence) else 0
    if parts < 2 or (parts > 2 and not prepared):
        raise UserError(
            f"Micro-batch {k} must be a pair of inputs (images, texts), but is a {type(micro_batch).__name__} of {parts}; "
            "parts after the first two are for `prepare` and terms=."
        )
    images, texts = ([*dict.fromkeys(map(_rows, _leaves(part)))] for part in micro_batch[:2])
    if images != texts or len(images) != 1 or images[0] in (None, 0):
        raise UserError(
            f"Micro-batch {k} must have as many texts as images, one at least, and a row for each in every tensor, but the "
            f"rows of its images are {images} and those of its texts {texts}."
        )
    return images[0]


def _rows(leaf: Any) -> int | None:
    """Count the rows of a tensor.

    Returns:
        None for something without rows.
    """
    return len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None


def checked_order(order: Tensor, rows: int) -> Tensor:
    """Check that an order of texts is a permutation of 0..rows-1 on the host, and return it.

    Raises:
        UserError: it is not.
    """
    if (
        order.shape != (rows,)
        or order.dtype != torch.int64
        or not torch.equal(order.sort().values, torch.arange(rows))
    ):
        raise UserError(
            f"text_order must hold each of 0..{rows - 1} once, as int64, but is {tuple(order.shape)} of {order.dtype}."
        )
    return order


class DeviceInputs:
    """A step's inputs on the model's device.

    Those of replayed micro-batches stay there between the passes if together they take at most `room_bytes`. Else each is
    copied again for its replay. Images as bytes are small:
    16,384 of 224 x 224 take 2.5 GB, 1.7 % of an H200's memory.

    Args:
        micro_batches: the step's.
        prepare: makes the model's inputs from those on the device, in each pass.
        replayed: indices of the micro-batches that are forwarded twice.
        room_bytes: see `input_room`.
    """

    def __init__(
        self,
        micro_batches: Sequence[Sequence[Any]],
        prepare: Callable[..., Sequence[Any]] | None,
        replayed: Collection[int],
        device: torch.device,
        room_bytes: float,
    ) -> None:
        self._micro_batches = micro_batches
        self._prepare = prepare
        self._device = device
        leaves = (leaf for k in replayed for part in micro_batches[k][:2] for leaf in _leaves(part))
        stay = sum(leaf.nbytes for leaf in leaves if leaf.device != device) <= room_bytes
        self._to_keep = set(replayed) if stay else set()
        self._inputs: dict[int, Any] = {}

    def take(self, k: int) -> tuple[Any, ...]:
        """Take the model's inputs for micro-batch k, in the first pass or the replay, and its further parts."""
        first, second, *others = self._micro_batches[k]
        inputs = (
            self._inputs.pop(k) if k in self._inputs else on_device((first, second), self._device)
        )
        if k in self._to_keep:
            self._to_keep.remove(k)
            self._inputs[k] = inputs
        images, texts = inputs if self._prepare is None else self._prepare(*inputs, *others)
        return images, texts, *others


def input_room(device: torch.device) -> float:
    """Return the bytes of a device's memory that inputs may take between the passes."""
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    return INPUT_SHARE * memory


def on_device(part: Any, device: torch.device) -> Any:
    """Copy nested tensors to a device.

    Containers are copied, so that the caller's input does not change.
    """
    if isinstance(part, Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, MutableMapping):
        moved = copy.copy(part)
        for key, value in part.items():
            moved[key] = on_device(value, device)
        return moved
    if isinstance(part, Mapping):
        return {key: on_device(value, device) for key, value in part.items()}
    values = [on_device(value, device) for value in part]
    return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)


def _leaves(part: Any) -> Iterator[Any]:
    if isinstance(part, Mapping):
        for value in part.values():
            yield from _leaves(value)
    elif isinstance(part, tuple | list):
        for value in part:
            yield from _leaves(value)
    else:
        yield part
