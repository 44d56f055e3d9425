"""`DecoupledGradientAccumulation.loss`, whose backward pass a trainer calls (every kind of model: test_random_steps.py)."""

import re

import pytest
import torch
from open_clip.loss import ClipLoss

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from support.dga_reference import (
    SEED,
    TOLERANCE,
    batches,
    bert_clip,
    error,
    gradients,
    one_graph,
)
from support.two_towers import noisy

EXACT = TOLERANCE[torch.float64]


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


def test_the_replay_runs_in_the_precision_of_the_first_pass():
    """A trainer computes the loss in an autocast region and calls backward outside of it; the check would see bf16 and fp32."""
    model, micro_batches = bert_clip(torch.float32), batches([3, 2, 2], torch.float32)
    step = DecoupledGradientAccumulation(model, ContrastiveLoss(), check="always", retain=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(SEED)
        loss = step.loss(micro_batches)
        torch.manual_seed(SEED)
        step.backward(micro_batches)
        inside = gradients(model)
    loss.backward()
    assert error(gradients(model), inside) <= 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step.loss(micro_batches)
    seen = []
    model.visual.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    loss.backward()
    assert seen == [True] * 3 and not torch.is_autocast_enabled("cpu")


def test_without_grad_mode_it_is_the_loss_alone():
    """Evaluation: nothing waits for a backward pass."""
    model, micro_batches = bert_clip().eval(), batches([3, 2])
    value, _ = one_graph(model, ClipLoss(), micro_batches)
    step = DecoupledGradientAccumulation(model, ContrastiveLoss())
    with torch.no_grad():
        loss = step.loss(micro_batches)
    assert not loss.requires_grad and abs(loss.item() - value.item()) < 1e-12


def test_what_is_refused():
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
