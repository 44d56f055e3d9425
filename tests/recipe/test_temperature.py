"""`--ablate temperature-parameter`: the steps that a plain torch parameter tau would take, in a stock model."""

from __future__ import annotations

import argparse
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.losses.names import TEMPERATURE_RANGE
from open_clip_zerovl.recipe.optimizer import (
    MARK,
    as_temperatures,
    optimizer_step,
    parameter_groups,
)
from open_clip_zerovl.recipe.step import RecipeStep
from support.dga_reference import batches, bert_clip
from training.resume import load_checkpoint

LOW, HIGH = TEMPERATURE_RANGE
LR = 3e-3  # large, so that the temperature moves by a multiple of itself


def start(tau: float, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny model without dice whose temperature is tau."""
    model = bert_clip(dtype, patch_dropout=0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    with torch.no_grad():
        model.logit_scale.fill_(-math.log(tau))
    return model


def adamw(groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=1e-6)


def groups_of(model: nn.Module, extra: list[nn.Parameter] | None = None) -> list[dict]:
    spared, decayed = parameter_groups(model, 1e-3)
    return [{**spared, "params": spared["params"] + (extra or [])}, decayed]


def by_torch(model: nn.Module, tau: float, steps: list, clip: float | None) -> list[float]:
    """tau after each step, where tau is the parameter: one graph of the whole batch, torch's AdamW, then the clamp."""
    model.logit_scale.requires_grad_(False)
    parameter = nn.Parameter(torch.tensor(tau, dtype=torch.float64))
    optimizer = adamw(groups_of(model, [parameter]))
    seen = []
    for micro_batches in steps:
        optimizer.zero_grad()
        images, texts = (torch.cat(part) for part in zip(*micro_batches, strict=True))
        logits = (
            model.encode_image(images, normalize=True)
            @ model.encode_text(texts, normalize=True).T
            / parameter
        )
        labels = torch.arange(len(images))
        ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([*model.parameters(), parameter], clip)
        optimizer.step()
        with torch.no_grad():
            parameter.clamp_(LOW, HIGH)
        seen.append(parameter.item())
    return seen


def by_the_recipe(
    model: nn.Module, steps: list, clip: float | None, parameter: bool
) -> list[float]:
    optimizer = adamw(groups_of(model))
    step = RecipeStep(
        model,
        ContrastiveLoss(),
        optimizer,
        precision="fp32",
        grad_clip_norm=clip,
        temperature_parameter=parameter,
    )
    seen = []
    for number, micro_batches in enumerate(steps):
        step.take(micro_batches, number)
        seen.append(math.exp(-model.logit_scale.item()))
    return seen


@pytest.mark.parametrize(
    ("tau", "clip"), [(0.05, None), (0.05, 0.5), (0.0035, None), (0.498, None)]
)
def test_steps_are_those_of_a_parameter_tau(tau, clip):
    """Inside the bounds, with clipped gradients, and driven against either bound; K = 2, fp64."""
    model = start(tau)
    steps = [batches((4, 4), seed=seed) for seed in range(6)]
    expected_model, other = copy.deepcopy(model), copy.deepcopy(model)
    expected = by_torch(expected_model, tau, steps, clip)
    found = by_the_recipe(model, steps, clip, True)
    assert found == pytest.approx(expected, rel=1e-11)
    for (name, weight), reference in zip(
        model.named_parameters(), expected_model.parameters(), strict=True
    ):
        if name != "logit_scale":
            torch.testing.assert_close(weight, reference, rtol=1e-9, atol=1e-11)
    # Negative control: Adam on the logit scale takes other steps.
    assert by_the_recipe(other, steps, clip, False) != pytest.approx(expected, rel=1e-2)
    assert max(abs(value - tau) for value in expected) > 1e-4
    if tau == 0.0035:
        assert min(expected) >= LOW
    if tau == 0.498:
        assert max(expected) == HIGH


@pytest.mark.parametrize(
    ("given", "expected"), [(7.2, math.log(1000)), (0.1, math.log(2)), (3.9, 3.9)]
)
def test_the_bounds_hold_and_a_skipped_step_moves_nothing(given, expected):
    model = start(0.02, torch.float32)
    with torch.no_grad():
        model.logit_scale.fill_(given)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    before = model.logit_scale.item()
    optimizer_step(model, optimizer, scaler=scaler, temperature_parameter=True)
    assert scaler.get_scale() == 4.0
    assert model.logit_scale.item() == pytest.approx(expected, abs=1e-6)
    if given == 3.9:
        assert model.logit_scale.item() == before  # to the bit


def test_a_step_that_changes_nothing_leaves_each_logit_scale_to_the_bit():
    values = torch.linspace(0.7, 6.9, 200)  # tau from 0.5 to 0.001
    scales = [torch.nn.Parameter(value.clone()) for value in values]
    with as_temperatures(scales):
        pass
    assert torch.equal(torch.stack([scale.detach() for scale in scales]), values)
    assert not torch.equal(-(-values).exp().log(), values)  # the control: there and back rounds


def test_the_scaled_gradient_is_that_of_tau():
    for scale in (None, 1024.0):
        model = start(0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
        if scaler is not None:
            scaler.scale(torch.zeros(()))
        model.logit_scale.grad = torch.tensor(0.5 * (scale or 1.0), dtype=torch.float64)
        optimizer_step(model, optimizer, scaler=scaler, temperature_parameter=True)
        # d loss / d tau = -0.5 / 0.02 = -25, so tau rises by 25e-4
        assert math.exp(-model.logit_scale.item()) == pytest.approx(0.02 + 25e-4, rel=1e-9)


def test_checkpoints_are_stock_and_resume_to_the_bit(tmp_path):
    """The model's state has open_clip's names alone; the optimizer's state names the parameter of its moments."""
    steps = [batches((4, 4), torch.float32, seed=seed) for seed in range(4)]
    whole, model = start(0.02, torch.float32), start(0.02, torch.float32)
    stock_names = set(model.state_dict())
    expected = by_the_recipe(whole, steps, None, True)

    def run(model: nn.Module, part: list, state: dict | None) -> torch.optim.Optimizer:
        optimizer = adamw(groups_of(model))
        if state is not None:
            optimizer.load_state_dict(state)
        step = RecipeStep(
            model, ContrastiveLoss(), optimizer, precision="fp32", temperature_parameter=True
        )  # fmt: skip
        for number, micro_batches in enumerate(part):
            step.take(micro_batches, number)
        return optimizer

    optimizer = run(model, steps[:2], None)
    file = tmp_path / "epoch_1.pt"
    torch.save(
        {"epoch": 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, file
    )
    resumed = start(0.5, torch.float32)
    args = argparse.Namespace(model="tiny", train_data="a=x", ablate=("temperature-parameter",))
    checkpoint = load_checkpoint(args, str(file))
    assert (
        set(checkpoint["state_dict"]) == stock_names
        and checkpoint["optimizer"]["param_groups"][0][MARK] == "temperature"
    )
    resumed.load_state_dict(checkpoint["state_dict"])
    run(resumed, steps[2:], checkpoint["optimizer"])
    assert math.exp(-resumed.logit_scale.item()) == expected[-1]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )

    # The other parameter is refused, both ways, and also by a run of open_clip's own flags, whose namespace has none of ours.
    for other in (argparse.Namespace(**{**vars(args), "ablate": ()}),
                  argparse.Namespace(model="tiny", train_data="a=x")):  # fmt: skip
        with pytest.raises(
            UserError,
            match="trained with --ablate temperature-parameter, and this run is without it",
        ):
            load_checkpoint(other, str(file))
    plain = start(0.02, torch.float32)
    by_log = adamw(groups_of(plain))
    RecipeStep(plain, ContrastiveLoss(), by_log, precision="fp32").take(steps[0], 0)
    assert MARK not in by_log.param_groups[0]
    torch.save(
        {"epoch": 1, "state_dict": plain.state_dict(), "optimizer": by_log.state_dict()}, file
    )
    with pytest.raises(
        UserError, match="trained without --ablate temperature-parameter, and this run is with it"
    ):
        load_checkpoint(args, str(file))
