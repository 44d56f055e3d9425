"""Decoupled gradient accumulation on every kind of model, against one graph (fp64, 1e-10), by `backward` and by `loss`."""

import copy

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from support.dga_reference import SEED, TOLERANCE, error, gradients, reference
from support.two_towers import MODELS, loss_for

EXACT = TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_exact(name):
    """Also of towers that only look frozen; two steps, since the second knows which towers are; buffers as after one pass."""
    make, make_batches = MODELS[name]
    model, once, micro_batches = make(), make(), make_batches([3, 2, 2])
    start = copy.deepcopy(model.state_dict())
    once.load_state_dict(start)
    value, wanted = reference(
        once, loss_for(model, SigLipLoss() if name == "with a bias" else ClipLoss()), micro_batches
    )
    drawn = torch.get_rng_state()
    kind = type(micro_batches[0][1])
    for retain in (0, 1, 3):
        loss = loss_for(model, SigLipLoss() if name == "with a bias" else ContrastiveLoss())
        step = DecoupledGradientAccumulation(model, loss, retain=retain, check="always")
        for deferred in (True, False):
            model.load_state_dict(start)
            torch.manual_seed(SEED)
            if deferred:
                found = step.loss(micro_batches)
                assert found.shape == () and abs(found.item() - value.item()) < 1e-12
                assert all(
                    parameter.grad is None for parameter in model.parameters()
                )  # nothing happens before its backward
                assert torch.equal(torch.get_rng_state(), drawn)
                torch.rand(
                    3
                )  # random numbers that a caller draws between the passes change nothing, and are not drawn again
                after = torch.get_rng_state()
                found.backward()
                assert torch.equal(torch.get_rng_state(), after)
            else:
                losses = step.backward(micro_batches)
                assert torch.equal(torch.get_rng_state(), drawn), (
                    "random numbers were not as if forwarded once"
                )
                assert not any(entry.requires_grad for entry in losses.values())
                assert (
                    {"contrastive_loss", "loss"}
                    <= losses.keys()
                    <= {"contrastive_loss", "loss", "logit_scale"}
                )
            assert error(gradients(model), wanted) <= EXACT
            assert all(
                torch.equal(found, expected)
                for found, expected in zip(model.buffers(), once.buffers(), strict=True)
            )
    assert type(micro_batches[0][1]) is kind  # the input is unchanged
