"""Decoupled gradient accumulation in one process against one graph over the whole batch.

Random steps of every kind of model are in test_random_steps.py, several ranks there and in test_ranks.py. The bounds are
invariant 1's: 1e-10 in fp64, 5e-5 in fp32, by the error that support/dga_reference.py defines, the worst parameter.
"""

import itertools
import math
import re
from collections import Counter
from contextlib import nullcontext

import open_clip
import pytest
import torch
from open_clip.loss import ClipLoss
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga import retain as retain_module
from open_clip_zerovl.dga.replay import ReplayCheck
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation, ReplayError
from open_clip_zerovl.losses import ContrastiveLoss
from scripts.bench.harness import PeakBytes
from support import documented
from support.dga_reference import (
    SEED,
    TOLERANCE,
    accumulated,
    batches,
    bert_clip,
    error,
    gradients,
    one_graph,
    reference,
)
from support.two_towers import Own, noisy, seeded, stock_clip

EXACT = TOLERANCE[torch.float64]
# ------------------------------------------------------------------------------------------------- what models may hold


@pytest.mark.parametrize("kind", ["bert", "clip"])
@pytest.mark.parametrize("frozen", [{"image"}, {"text"}, {"image", "text"}])
def test_a_frozen_tower_runs_once(frozen, kind):
    """Dropout and token drop stay on in it: the other tower's masks must not move when it is skipped."""
    model, calls = bert_clip() if kind == "bert" else stock_clip(), Counter()
    model.visual.requires_grad_("image" not in frozen)
    for name, parameter in model.named_parameters():
        if not name.startswith(("visual", "logit_scale")):
            parameter.requires_grad_("text" not in frozen)
    model.visual.register_forward_hook(lambda *_: calls.update(["image"]))
    text = model.text if kind == "bert" else model.transformer
    text.register_forward_hook(lambda *_: calls.update(["text"]))
    _, wanted = reference(model, ClipLoss(), batches([3, 2, 2]))
    calls.clear()
    _, found = accumulated(model, ClipLoss(), batches([3, 2, 2]), retain=1)
    assert error(found, wanted) <= EXACT
    assert calls == {tower: 3 if tower in frozen else 3 + 2 for tower in ("image", "text")}


@pytest.mark.parametrize(
    ("frozen", "fullgraph"),
    [(None, False), ("text", True), pytest.param("visual", False, marks=pytest.mark.slow)],
)
def test_a_compiled_step_is_the_eager_one(frozen, fullgraph):
    """Same masks, so the same gradient to rounding; nothing is traced after the first step."""
    torch._dynamo.reset()
    model, traced, counts = stock_clip(open_clip.CustomTextCLIP).float(), [], []
    micro_batches = batches([4, 4, 4], torch.float32)
    if frozen:
        getattr(model, frozen).requires_grad_(False)
    _, wanted = reference(model, ClipLoss(), micro_batches)
    backend = lambda module, inputs: traced.append(module) or module.forward  # noqa: E731
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    step = DecoupledGradientAccumulation(compiled, ContrastiveLoss(), retain=1, check="always")
    for _ in range(2):
        torch.manual_seed(SEED)
        step.backward(micro_batches)
        assert error(gradients(model), wanted) <= TOLERANCE[torch.float32]
        counts.append(len(traced))
    assert counts[0] == counts[1]
    _, redrawn = accumulated(compiled, ContrastiveLoss(), micro_batches, replay_rng=False)
    draws_masks = frozen != "visual"  # the text tower has no dropout
    assert (error(redrawn, wanted) > 0.1) == draws_masks


def test_both_passes_of_a_compiled_step_have_the_same_graphs():
    """Also beyond dynamo's limit, where both run eagerly and keep the graphs that there are."""
    torch._dynamo.reset()
    model, alike = seeded(Own).float(), []

    def backend(module, inputs):
        alike.append(torch.is_grad_enabled())
        # a number more than eager code draws, as generated code draws others
        return lambda *args: torch.rand(1) is not None and module.forward(*args)

    step = DecoupledGradientAccumulation(
        torch.compile(model, backend=backend, dynamic=False),
        ContrastiveLoss(),
        retain=0,
        check="always",
    )
    with torch._dynamo.config.patch(cache_size_limit=1):  # its name in all releases
        for sizes in ([4, 4], [5, 5], [4, 5]):
            step.backward(batches(sizes, torch.float32))
    assert alike == [True]


@pytest.mark.slow  # the code generator needs a C++ compiler and a minute
@pytest.mark.parametrize("frozen", [None, "text"])
def test_compiled_by_inductor(frozen):
    """With torch's own random numbers against the eager gradient; with the generated code's against the compiled one."""
    micro_batches = batches([4, 4, 4], torch.float32)
    for own_numbers in (False, True):
        torch._dynamo.reset()
        with torch._inductor.config.patch(fallback_random=not own_numbers):
            model = bert_clip(torch.float32)
            if frozen:
                model.text.requires_grad_(False)
            compiled = torch.compile(model)
            _, wanted = reference(compiled if own_numbers else model, ClipLoss(), micro_batches)
            for retain in (0, 1):
                _, found = accumulated(
                    compiled, ClipLoss(), micro_batches, retain=retain, check="always"
                )
                assert error(found, wanted) <= TOLERANCE[torch.float32]
            _, redrawn = accumulated(compiled, ClipLoss(), micro_batches, replay_rng=False)
            assert error(redrawn, wanted) > 0.1


# ---------------------------------------------------------------------------------------------------------- self-check


@pytest.mark.parametrize(
    "passed", [[2, 2], None], ids=["scalars alone were compared", "the first check failed"]
)
def test_the_check_is_done_only_when_replayed_features_have_passed(passed):
    """A step that keeps all graphs compares no features; after a failed comparison the next replay is compared again."""
    model, calls = bert_clip(), itertools.count(1)
    unsteady = lambda images, texts: (images * next(calls), texts)  # noqa: E731
    step = DecoupledGradientAccumulation(model, ClipLoss(), retain=2)
    if passed:
        step.backward(batches(passed))
    words = "image_features of micro-batch 0 .*relative difference .*random masks"
    for _ in range(2):
        with pytest.raises(ReplayError, match=words):
            step.backward(batches([2, 2, 2]), prepare=unsteady)
    terms = lambda outputs, *_: {"drift": outputs["image_features"].sum() + next(calls)}  # noqa: E731
    with pytest.raises(ReplayError, match="Replayed sum of drift of micro-batch 0 differ"):
        accumulated(model, ClipLoss(), batches([3, 2]), terms=terms)
    model.zero_grad()
    accumulated(model, ClipLoss(), batches([2, 2]), prepare=unsteady, check="never")


@pytest.mark.parametrize(
    ("cached", "replayed", "seen"),
    [
        (torch.ones(2, 3), torch.full((2, 3), math.nan), "relative difference nan"),
        # the worst row counts, and not the mean: a module may draw other masks for one sample of many
        (torch.ones(64, 4), torch.ones(64, 4) + 0.01 * (torch.arange(64) == 5)[:, None], "0.01 "),
        # an overflow is the loss scaler's business
        (torch.full((2, 3), math.nan), torch.full((2, 3), math.nan), None),
    ],
)
def test_what_is_a_difference(cached, replayed, seen):
    check = ReplayCheck("always")
    for tolerance in (0.005, 0.02):
        check.start()
        check.compare("image_features", 0, replayed, cached)
        differs = seen is not None and (tolerance < 0.01 or "nan" in seen)
        with pytest.raises(ReplayError, match=seen) if differs else nullcontext():
            check.verdict(tolerance, torch.device("cpu"))


# ------------------------------------------------------ `loss`, whose backward pass a trainer calls (every kind: random steps)


def test_two_losses_may_wait_for_one_backward_pass():
    model, one, two = bert_clip(), batches([3, 2], seed=1), batches([2, 2, 1], seed=2)
    step = DecoupledGradientAccumulation(model, noisy, check="always")
    torch.manual_seed(SEED)
    (step.loss(one) + 3 * step.loss(two)).backward()
    found = gradients(model)
    torch.manual_seed(SEED)
    _, first = one_graph(model, noisy, one)
    _, second = one_graph(model, noisy, two)
    assert error(found, {name: first[name] + 3 * second[name] for name in first}) <= EXACT


def test_a_loss_backpropagates_once_and_takes_no_scaler():
    model, micro_batches = bert_clip(), batches([2, 2])
    loss = DecoupledGradientAccumulation(model, ContrastiveLoss()).loss(micro_batches)
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="was backpropagated a second time"):
        loss.backward()
    scaled = DecoupledGradientAccumulation(
        model, ContrastiveLoss(), scaler=torch.amp.GradScaler("cpu")
    )
    with pytest.raises(UserError, match=re.escape("leave scaler= out and scale the returned loss")):
        scaled.loss(micro_batches)


@pytest.mark.parametrize("retain", [0, 2])
def test_weights_that_change_before_the_backward_pass_are_noticed(retain):
    """Also in later steps, of which the default check compares nothing, and in layers that a graph does not hold."""
    model, micro_batches = bert_clip(), batches([2, 2])
    step = DecoupledGradientAccumulation(model, ContrastiveLoss(), check="never", retain=retain)
    loss = step.loss(micro_batches)
    state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        model.visual.conv1.weight.mul_(1.1)
    with pytest.raises(UserError, match=r"conv1\.weight was changed within the step: after loss"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(now, before) for now, before in zip(model.buffers(), buffers, strict=True)
    )


# -------------------------------------------------------------------------------------------------------------- memory


def peak_bytes(k, retain=1):
    model, micro_batches = bert_clip(torch.float32), batches([8] * k, torch.float32)
    step = DecoupledGradientAccumulation(model, ContrastiveLoss(chunk_size=8), retain=retain)
    step.backward(micro_batches)  # gradients exist from here on, as in training
    with PeakBytes() as seen:
        step.backward(micro_batches)
    return seen.peak


def test_memory_does_not_grow_with_k():
    one = peak_bytes(1)
    assert peak_bytes(16) <= 1.10 * one
    assert peak_bytes(8, retain=4) >= 3 * one  # the measure sees graphs


@pytest.fixture
def kept(monkeypatch):
    """A CUDA device on which a graph takes 100 bytes of 1000 that may be filled: kept(retention) takes a step and returns R."""
    allocated, peak = [500], [10**9]  # of the model, and of loading it
    for name, value in {
        "memory_allocated": lambda device: allocated[0],
        "max_memory_allocated": lambda device: peak[0],
        "reset_peak_memory_stats": lambda device: peak.__setitem__(0, allocated[0]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    free = 1000 / retain_module.AUTO_SHARE
    monkeypatch.setattr(retain_module, "available_bytes", lambda device: free)

    def step(retention, transient=300):
        graphs = retention.graphs([1] * 8)
        with retention.measured(1):
            allocated[0] += 100
        allocated[0] -= 100
        peak[0] = allocated[0] + transient
        retention.step_done([1] * 8)
        return graphs

    return step


def auto(*parameters):
    return retain_module.Retention("auto", torch.device("cuda"), 1, parameters)


def test_on_cuda_auto_measures_the_second_step(kept):
    """cuDNN tries its kernels in the first step, and memory from before the first step is not the step's."""
    retention = auto()
    assert [kept(retention, transient) for transient in (900, 300, 0)] == [
        1,
        1,
        1 + 1000 // 100 - 3,
    ]


def test_auto_waits_for_an_optimizer_step(kept):
    """A GradScaler leaves the first steps out, and an optimizer parameters: one that has changed is enough, but no scalar."""
    weight, other, scale = (nn.Parameter(torch.ones(n)) for n in (2, 2, 1))
    for parameter in (weight, other, scale):
        parameter.grad = torch.ones_like(parameter)
    retention, decided = auto(weight, other, scale), []
    for number in range(5):
        decided.append((kept(retention), retention.decision() is not None))
        with torch.no_grad():
            (weight if number > 2 else scale).mul_(0.9)  # training clamps the scale in every step
    assert decided == [(1, False)] * 4 + [(8, True)]


def test_an_earlier_decision_of_auto_holds_while_it_fits(kept, monkeypatch, caplog):
    """A resumed run keeps the number of graphs, or warns that it cannot."""
    earlier = retain_module.Decision(graphs=5, graph_bytes=100, other_bytes=300)
    for free, graphs in ((700, 5), (699, 1)):
        retention = auto()
        retention.adopt(earlier)
        monkeypatch.setattr(retain_module, "available_bytes", lambda device, free=free: free)
        assert kept(retention) == graphs
        assert retention.decision() == (earlier if graphs == 5 else None)
        assert ("decided anew" in caplog.text) == (graphs == 1)


def test_auto_measures_a_graph_and_keeps_as_many_as_fit(monkeypatch):
    """On the CPU two graphs' worth is set aside for the step itself, and 90 % of the rest is filled."""
    model, micro_batches = bert_clip(), batches([4, 4, 4, 2])
    step = DecoupledGradientAccumulation(model, ClipLoss(), retain="auto")
    step.backward(micro_batches)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.untyped_storage()._cdata, t), lambda t: t
    ):
        outputs = model(*micro_batches[0])
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    graph = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in parameters)
    free = int(4.3 * graph / retain_module.AUTO_SHARE)
    monkeypatch.setattr(retain_module, "available_bytes", lambda device: free)
    decision = step.decision()
    assert decision.graphs == 3 and outputs
    assert 0.9 * graph <= decision.graph_bytes <= 1.1 * graph


@pytest.mark.parametrize("place", ["first pass", "loss", "second pass"])
def test_a_full_memory_costs_auto_a_graph_and_not_the_run(place, monkeypatch, caplog):
    """The step has the bits of one with a graph fewer; a number that the caller gave, and gradients in `.grad`, stay."""
    model, micro_batches, calls_left = bert_clip(), batches([4, 4, 4, 2]), [math.inf]
    monkeypatch.setattr(retain_module, "available_bytes", lambda device: 1e15)

    def full(*_):
        calls_left[0] -= 1
        if calls_left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def loss(**inputs):
        if place == "loss":
            full()
        return ClipLoss()(**inputs)

    def second_step(retain, calls):
        step = DecoupledGradientAccumulation(model, loss, retain=retain)
        calls_left[0] = math.inf
        step.backward(micro_batches)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
        calls_left[0] = calls
        torch.manual_seed(SEED)
        return step

    if place == "first pass":
        model.register_forward_pre_hook(full)
    elif place == "second pass":
        model.visual.register_full_backward_hook(full)
    second_step(3, math.inf).backward(micro_batches)
    wanted, calls = gradients(model), 1 if place == "loss" else 4
    step = second_step("auto", calls)
    step.backward(micro_batches)
    found = gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert step.decision().graphs == 3 and "3 are kept in this step" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        second_step(4, calls).backward(micro_batches)
    step = second_step("auto", calls)
    model.logit_scale.grad = torch.ones_like(model.logit_scale)
    with pytest.raises(torch.OutOfMemoryError):
        step.backward(micro_batches)


def test_the_loop_in_the_documentation_runs():
    """docs/dga.md's first Python block, on a tiny model."""
    code = documented("effective_batches")
    model = bert_clip(torch.float32)
    before = model.logit_scale.item()
    loader = [batches([4, 4], torch.float32, seed=number) for number in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exec(
        compile(code, "docs/dga.md", "exec"),
        {"model": model, "effective_batches": loader, "optimizer": optimizer},
    )
    assert model.logit_scale.item() != before
