"""Steps whose gradient would be wrong without a word: each is refused with a sentence, or made right (issue 33, 1 to 5)."""

import sys

import pytest
import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.objective import Objective
from open_clip_zerovl.dga.replay import GradientHooks, ReplayCheck
from open_clip_zerovl.dga.retain import Retention
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation, ReplayError
from open_clip_zerovl.losses import ContrastiveLoss
from support.dga_reference import (
    TOLERANCE,
    batches,
    bert_clip,
    error,
    gradients,
    one_graph,
)
from support.programs import run_ranks
from support.two_towers import Own, seeded

EXACT = TOLERANCE[torch.float64]


def step_of(model, loss=None, **options):
    return DecoupledGradientAccumulation(model, loss or ContrastiveLoss(), **options)


# --------------------------------------------------------------------------------------------------- before any gradient


def with_total(name, part):
    """A loss that returns the part and, by a name, their sum."""
    return lambda output_dict, **values: {"contrastive_loss": part(**values), name: part(**values)}


class Returning(Own):
    """Outputs in place of the towers' own."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, image, text):
        return super().forward(image, text) | self.outputs


def returning(**outputs):
    return {"model": seeded(lambda: Returning(outputs))}


TWO, OUTSIDE = batches([2, 2]), nn.Parameter(torch.ones(8, 1, dtype=torch.float64))
IMAGES, TEXTS = TWO[0]
TUPLE = bert_clip()
TUPLE.output_dict = False
# the sentence -> what is given in place of two towers, our loss, and two micro-batches of two; or a micro-batch
REFUSED = {
    "made for world_size=2": {"loss": ContrastiveLoss(rank=0, world_size=2)},
    "check must be .* 'sometimes'": {"check": "sometimes"},
    **{f"retain must be .* {retain!r}": {"retain": retain} for retain in (-1, 1.5, "all", True)},
    "retain=3 graphs .* 2 micro-batches .* at most 2": {"retain": 3},
    "No parameter of the model is trainable": {"model": seeded(Own).requires_grad_(False)},
    "Micro-batch 0 must be a pair .* is a Tensor of 0": {"micro_batches": [IMAGES]},
    "is a tuple of 1; parts after": (IMAGES,),
    "is a tuple of 3; parts after": (IMAGES, TEXTS, TEXTS),
    r"images are \[2\] and those of its texts \[1\]": (IMAGES, TEXTS[:1]),
    r"its texts \[2, 1\]": (IMAGES, {"a": TEXTS, "b": TEXTS[:1]}),
    r"its texts \[2, None\]": (IMAGES, {"input_ids": TEXTS, "words": ["a", "b"]}),
    "returned labels, logits, which would get no gradient": returning(logits=0, labels=0),
    r"image_features of 2 samples .* \(3, 4\)": returning(image_features=torch.ones(3, 4)),
    r"must be .*, but is torch\.int64": returning(text_features=torch.ones(2, 4).long()),
    "logit_scale must be a floating point tensor, but is a float": returning(logit_scale=20.0),
    "returned tuple; create open_clip models with output_dict=True": {"model": TUPLE},
    **{
        f"'{name}' beside contrastive_loss.*summed twice": {"loss": with_total(name, ClipLoss())}
        for name in ("loss", "total_loss")
    },
    r"learns a tensor of shape \(8, 1\) that is not its own": {
        "loss": lambda image_features, **_: (image_features @ OUTSIDE).sum()
    },
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_exact_is_refused(sentence):
    given = REFUSED[sentence]
    if isinstance(given, tuple):  # a micro-batch
        given = {"micro_batches": [given]}
    given = {"model": seeded(Own), "micro_batches": TWO, **given}
    model, micro_batches = given.pop("model"), given.pop("micro_batches")
    with pytest.raises(UserError, match=sentence):
        step_of(model, **given).backward(micro_batches)


def test_a_total_alone_and_a_bias_of_none_are_taken():
    loss = lambda **values: {"total": with_total("total", ClipLoss())(**values)["total"]}  # noqa: E731
    assert step_of(seeded(Own), loss).backward(TWO)["loss"] > 0
    assert step_of(**returning(logit_bias=None)).backward(TWO)["loss"] > 0


# ------------------------------------------------------------------------------------ 1: a scalar for each micro-batch


class PredictedScale(Own):
    def forward(self, image, text):
        outputs = super().forward(image, text)
        return outputs | {"logit_scale": outputs["logit_scale"] + image.mean()}


@pytest.mark.parametrize("retain", [0, 1, 2, 4])
def test_a_logit_scale_that_depends_on_the_micro_batch_is_refused(retain):
    with pytest.raises(
        ReplayError, match="logit_scale of micro-batch [0-3] is another than that of the last one"
    ):
        step_of(seeded(PredictedScale), retain=retain).backward(batches([3, 2, 2, 4]))
    step_of(seeded(PredictedScale), retain=min(retain, 1)).backward(
        batches([5])
    )  # which has one scale


# ------------------------------------------------------------------------------------- 2: weights that change in a step


@pytest.mark.parametrize("retain", [1, 2, 3])
def test_an_optimizer_in_a_gradient_hook_is_refused(retain):
    model = seeded(Own)
    optimizer = torch.optim.SGD([model.text[0].weight], lr=0.1)
    # Hooks on gradients are refused by themselves; this one cannot be seen there.
    model.image.register_full_backward_hook(
        lambda *_: optimizer.step() if model.text[0].weight.grad is not None else None
    )
    with pytest.raises(UserError, match=r"text\.0\.weight was changed within the step"):
        step_of(model, retain=retain, check="never").backward(batches([3, 2, 2]))


class Momentum(Own):
    """A frozen copy that follows the trained tower in each forward pass."""

    def __init__(self, follow):
        super().__init__()
        self.copy, self.follow = nn.Linear(3 * 32 * 32, 8).requires_grad_(False), follow

    def forward(self, image, text):
        with torch.no_grad():
            self.follow(self.copy.weight, self.image[2].weight)
        return super().forward(image.to(self.copy.weight.dtype), text)


WAYS = {  # as published momentum encoders are written; the first alone raises the version of the parameter
    "its version": lambda old, new: old.lerp_(new, 0.1),
    "another tensor": lambda old, new: setattr(old, "data", old.data * 0.9 + new.data * 0.1),
    "in place": lambda old, new: old.data.mul_(0.9).add_(new.data, alpha=0.1),
    "the same values": lambda old, new: setattr(old, "data", old.data.clone()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_forward_changes_is_refused(way, dtype):
    step = step_of(seeded(lambda: Momentum(WAYS[way])).to(dtype))
    if way == "the same values":  # a clamp within bounds changes nothing
        step.backward(batches([3, 2, 2]))
        return
    through = "" if way == "its version" else r", through \.data"
    with pytest.raises(UserError, match=rf"^copy\.weight was changed within the step{through}"):
        step.backward(batches([3, 2, 2]))
    if through:
        step_of(step._inner, retain=3).backward(batches([3, 2, 2]))  # nothing is forwarded twice


def test_parameters_without_plain_bits_are_left_out_and_no_bits_are_read_without_a_replay():
    model = seeded(Own)
    model.wide = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex128), requires_grad=False)
    model.sparse = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    step = step_of(model)
    step.backward(batches([3, 2, 2]))
    step._check._due.add("weights")
    assert step._check.bits_of(model).keys() == dict(seeded(Own).named_parameters()).keys()
    whole = step_of(model, retain=3)
    whole._check.bits_of = None  # not called
    whole.backward(batches([3, 2, 2]))


# ------------------------------------------------------------------ 3: what differs after the first step, such as a new head


@pytest.mark.parametrize("compiled", [False, True])
def test_when_the_first_check_looks_again(compiled):
    """A new head's weights are zero at first, a module may switch later: steps 10, 100 and each 500th; compiled always."""
    check, one, looked = ReplayCheck("first"), torch.ones(1, 2), {"logit_scale": [], "features": []}
    for step in range(1001):
        check.start(compiled=compiled)
        for name, of in looked.items():
            before = len(check._seen)
            check.compare(name, 0, one, one)
            of += [step] * (len(check._seen) - before)
        check.verdict(0.0, torch.device("cpu"))
    again = [0, 10, 100, 500, 1000]
    assert looked == {"logit_scale": again, "features": [*range(1001)] if compiled else again}
    check.start()
    check.start()
    check.compare("features", 0, 2 * one, one)  # not looked at
    check.verdict(0.0, torch.device("cpu"))


# --------------------------------------------------------------------------------------------- 4: nothing would be trained


class WithoutGraph(Own):
    """The features come without graph, or all outputs."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, image, text):
        outputs = super().forward(image, text)
        return outputs | {name: outputs[name].detach() for name in self.of}


FEATURES = ("image_features", "text_features")


@pytest.mark.parametrize("retain", [0, 1, 3])
@pytest.mark.parametrize("of", [FEATURES, (*FEATURES, "logit_scale")])
def test_a_forward_without_gradient_is_refused(of, retain):
    with pytest.raises(UserError, match=r"computes no gradient for (image\.2\.weight|scale)"):
        step_of(seeded(lambda: WithoutGraph(of)), retain=retain).backward(batches([3, 2, 2]))


# ------------------------------------------------------------------------------------ 5: hooks, totals, process groups


def halve(parameter):
    """A hook after accumulation, which may not return anything."""
    parameter.grad.mul_(0.5)


def test_hooks_that_raise_and_that_remove_themselves_leave_the_others_in_place():
    model, micro_batches, calls = seeded(Own).eval(), batches([3, 2, 2]), []
    once = model.text[0].weight.register_hook(lambda gradient: once.remove())
    model.text[0].weight.register_hook(lambda gradient: calls.append("counted"))
    guard = model.text[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_of(model).backward(micro_batches)
    assert len(model.text[0].weight._backward_hooks) == 2 and calls == ["counted"]
    guard.remove()
    model.zero_grad()
    _, wanted = one_graph(model, ClipLoss(), micro_batches)
    step_of(model).backward(micro_batches)
    assert error(gradients(model), wanted) <= EXACT and len(calls) == 3


class Routed(Own):
    """A parameter that only some micro-batches use, as an expert does."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Parameter(torch.ones(8))

    def forward(self, image, text):
        outputs = super().forward(image, text)
        if len(image) == 3:
            outputs["image_features"] = outputs["image_features"] * self.expert
        return outputs


def test_a_hook_on_a_parameter_that_the_last_micro_batch_does_not_use():
    model, micro_batches = seeded(Routed).eval(), batches([3, 2, 2])
    model.expert.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.expert.register_post_accumulate_grad_hook(halve)
    _, wanted = one_graph(model, ClipLoss(), micro_batches)
    step_of(model).backward(micro_batches)
    assert error(gradients(model), wanted) <= EXACT
    hooks = GradientHooks(model, averaged=True)
    with (
        pytest.raises(UserError, match="expert has a gradient hook, and .* last micro-batch"),
        hooks,
    ):
        model.expert.sum().backward()


def test_collectives_of_a_step_are_those_of_the_models_process_group(monkeypatch):
    """The replay check's verdict, the number of graphs kept and the sizes of ClipLoss, in a group that is not the default."""
    group, cpu, groups = object(), torch.device("cpu"), []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, group=None: groups.append(group))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(
        dist,
        "all_gather_into_tensor",
        lambda out, mine, group=None: (out.copy_(mine.expand(2)), groups.append(group)),
    )
    check = ReplayCheck("always", 2, group)
    check.start()
    check.verdict(0.1, cpu)
    Retention("auto", cpu, 2, (), group)._smallest(3)
    objective = Objective(lambda image_features, **_: image_features.sum(), cpu, None, None)
    objective._module, objective._world_size, objective._group = ClipLoss(), 2, group
    objective.gradients({name: torch.ones(2, 3) for name in FEATURES}, {})
    assert groups == [group] * 3


@pytest.mark.slow  # three processes
def test_a_model_in_a_process_group_of_its_own_steps_while_other_ranks_do_not(tmp_path):
    run_ranks(3, __file__, str(tmp_path), timeout=120)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    losses = []
    model = seeded(Own).eval()
    for rank in range(2):  # each rank's own loss; DDP takes the mean
        _, grads = one_graph(model, ClipLoss(), batches([3, 2], seed=rank))
        losses.append(grads)
    wanted = {name: (losses[0][name] + losses[1][name]) / 2 for name in losses[0]}
    assert all(error(of_rank, wanted) <= EXACT for of_rank in found)


def step_in_a_group(folder):
    """Results of the first two of three ranks, each with a loss of its own rows."""
    group = dist.new_group([0, 1])
    if (rank := dist.get_rank()) < 2:
        model = nn.parallel.DistributedDataParallel(seeded(Own).eval(), process_group=group)
        loss = ClipLoss()
        step = step_of(model, lambda **values: loss(**values), retain="auto", check="always")
        step.backward(batches([3, 2], seed=rank))
        torch.save(gradients(model), f"{folder}/{rank}.pt")
        step.backward(batches([3, 2], seed=rank))  # decides on the graphs to keep
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step_in_a_group(sys.argv[1])
    dist.destroy_process_group()
