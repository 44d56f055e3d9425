"""Heads trained on stored features: the gradient of a step with frozen towers, and the same bits after an interruption."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from open_clip_zerovl.align import train as train_module
from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.align.export import export_aligned
from open_clip_zerovl.align.request import Recipe
from open_clip_zerovl.align.rows import HeldOut, Pairs, epoch_order
from open_clip_zerovl.align.train import (
    Heads,
    Task,
    chunk_rows,
    default_batch,
    default_epochs,
    take_step,
    train_heads,
)
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.towers import freeze
from open_clip_zerovl.report.verdicts import student
from support import ROOT

CPU = torch.device("cpu")
RECIPE = Recipe(
    embed_dim=12, positives="pair",
    batch_size=8, epochs=8, lr=1e-2, wd=1e-4, warmup_share=0.1, patience=0, seed=3,
)  # fmt: skip
TEXTS = [
    "a red house",
    "the blue cat",
    "a red house",
    "green sun of the moon",
    "a big tree",
    "the small dog",
]
SCALES = (0.5, 2.0)  # powers of two: folding them into the weights rounds nothing


@pytest.mark.parametrize("positives", ["pair", "both", "caption", "image"])
def test_the_heads_gradient_is_that_of_a_step_with_frozen_towers(home, tmp_path, positives):
    """In fp64: towers once and heads on their features, against DGA with two micro-batches through the exported model."""
    batch = epoch_order((7, 6), 6, seed=3, epoch=0)[0]
    image, text = (
        open_tower(f"timm:{home / 'timm'}", "image"),
        open_tower(f"hf:{home / 'bert'}", "text"),
    )
    heads = Heads((image.width, text.width), 12, seed=1)
    assert heads.logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    folder = export_aligned(tmp_path / "m", image, text, heads, SCALES, metrics={})
    criterion = ContrastiveLoss(positives=positives)
    pixels = torch.randn(
        13, 3, 160, 160, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )[batch]
    tokens = text.tokenizer([TEXTS[number % 6] for number in batch])
    of_sample = {
        "caption": np.arange(13) % 6 % 5,
        "image": np.arange(13) // 2,
    }
    ids = {name: torch.from_numpy(numbers[batch]).long() for name, numbers in of_sample.items()}
    assert all(
        len(ids[name].unique()) < 6 for name in ("caption", "image")
    )  # with positives to find
    heads.double()
    with torch.no_grad():
        features = (
            image.module.double()(pixels) * SCALES[0],
            text.module.double()(tokens) * SCALES[1],
        )
    resting = torch.optim.SGD(heads.parameters(), lr=0.0)
    value = take_step(heads, resting, criterion, features, ids)

    model, _, _ = load_model(folder)
    model.double().train()
    model.output_dict = True
    freeze(model, ["image", "text"], projection=False)
    step = DecoupledGradientAccumulation(model, criterion)
    losses = step.backward([(pixels[:4], tokens[:4]), (pixels[4:], tokens[4:])], ids=ids)
    assert float(
        losses["contrastive_loss"] if isinstance(losses, dict) else losses
    ) == pytest.approx(float(value), abs=1e-6)

    towers = {"image": model.visual.head, "text": model.text.proj}
    for side, scale in zip(towers, SCALES, strict=True):
        (other,) = [p.grad for p in towers[side].parameters()]
        own = getattr(heads, side).weight.grad / scale  # the matrix holds the scale
        assert (own - other).norm() / other.norm() < 1e-10
    own, other = heads.logit_scale.grad, model.logit_scale.grad
    assert float((own - other).abs() / own.abs()) < 1e-10
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert all(name.startswith(("visual.head", "text.proj", "logit")) for name in trained)


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


class MadeUp:
    """Features in memory, as `rows.Features`."""

    scale = 1.0

    def __init__(self, rows):
        self.rows, self.width = rows, rows.shape[1]

    def __getitem__(self, index):
        return self.rows[index]


@pytest.fixture
def task():
    """Two sources, 48 and 32 pairs whose two features are linear in eight common numbers, and 20 held-out ones."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(100, 8, generator=generator)
    sides = [common @ torch.randn(8, width, generator=generator) for width in (16, 10)]
    texts = torch.cat(
        [sides[1], sides[1] + 0.1 * torch.randn(100, 10, generator=generator)]
    )  # two captions each
    rows = np.stack([np.arange(80), np.arange(80) + 100], axis=1).ravel()
    held = HeldOut(np.arange(80, 100), np.arange(80, 100), np.arange(20))
    pairs = Pairs(np.arange(80), rows, np.arange(0, 161, 2), [48, 32], ["a", "b"], held, 0, 0)
    return Task(
        pairs, MadeUp(sides[0]), MadeUp(texts), np.arange(1, 101), np.arange(1, 201), CPU, "made up"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positives": "both", "patience": 3},
    ],
)
def test_a_training_that_was_killed_goes_on_to_the_same_bits(task, tmp_path, monkeypatch, changes):
    recipe = replace(RECIPE, **changes)
    monkeypatch.setattr(train_module, "CHECKS", 5)  # four of 8 epochs, so that the kill loses one
    whole = train_heads(task, recipe, tmp_path / "whole")
    stock, calls = train_module.take_step, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 37:  # in the fourth epoch of ten steps
            raise KeyboardInterrupt
        return stock(*arguments)

    monkeypatch.setattr(train_module, "take_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train_heads(task, recipe, tmp_path / "killed")
    resumed = train_heads(task, recipe, tmp_path / "killed")
    assert len(calls) < 37 + 80  # two epochs are not trained again
    assert resumed.scores == whole.scores and resumed.best_epoch == whole.best_epoch
    for name, tensor in whole.heads.state_dict().items():
        assert torch.equal(resumed.heads.state_dict()[name], tensor), name
    finished = len(calls)
    again = train_heads(task, recipe, tmp_path / "killed")
    assert len(calls) == finished and again.metrics == whole.metrics
    other = train_heads(
        task, replace(recipe, seed=4), tmp_path / "killed"
    )  # the state of another training is not taken
    assert len(calls) > finished and other.scores != whole.scores


@pytest.mark.parametrize(
    ("before", "after", "taken"), [(3, None, 3), (3, 5, 3), (None, 3, 3), (5, 3, 3)]
)
def test_a_resumed_training_keeps_its_chunk_where_memory_allows(
    task, tmp_path, monkeypatch, before, after, taken
):
    """Chunks of another size add up in another order, so that the free memory of the day would change bits."""
    chunks = []

    def noted(**settings):
        chunks.append(settings["chunk_size"])
        return ContrastiveLoss(**settings)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "ContrastiveLoss", noted)
    monkeypatch.setattr(train_module, "chunk_rows", lambda *_: before)
    with pytest.raises(KeyboardInterrupt):
        train_heads(task, RECIPE, tmp_path, checked=killed)
    monkeypatch.setattr(train_module, "chunk_rows", lambda *_: after)
    train_heads(task, RECIPE, tmp_path)
    assert chunks == [before, taken]


def test_a_damaged_state_is_a_sentence(task, tmp_path):
    train_heads(task, replace(RECIPE, epochs=1), tmp_path)
    (tmp_path / "state.pt").write_bytes(b"no state")
    with pytest.raises(UserError, match=r"state.pt cannot be read .*; remove it to train"):
        train_heads(task, RECIPE, tmp_path)


def test_training_ends_where_the_held_out_recall_has_not_risen(task, tmp_path, monkeypatch):
    scores = iter([100.0, 200.0, 150.0, 180.0, 190.0, 500.0, 120.0])
    checked = []

    def score(heads, task):
        checked.append({name: value.clone() for name, value in heads.state_dict().items()})
        return {}, {"rsum": next(scores)}

    monkeypatch.setattr(train_module, "held_out_scores", score)
    outcome = train_heads(task, replace(RECIPE, patience=3), tmp_path)
    assert [one[:2] for one in outcome.scores] == [
        (1, 100.0),
        (2, 200.0),
        (3, 150.0),
        (4, 180.0),
        (5, 190.0),
    ]
    assert outcome.best_epoch == 2
    for name, value in outcome.heads.state_dict().items():
        assert torch.equal(value, checked[1][name])


def test_each_seed_starts_from_heads_of_its_own():
    """Else the interval over seeds would be too narrow. Nothing else that draws is touched."""
    before = torch.get_rng_state()
    one, other = (Heads((16, 10), 12, seed=seed).image.weight for seed in (0, 1))
    assert not torch.equal(one, other) and torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_is_no_number_ends_with_a_sentence(task, tmp_path):
    task.images.rows[3] = torch.nan
    with pytest.raises(
        UserError, match=r"the loss is not finite after epoch 1; give a lower --lr than 0\.01"
    ):
        train_heads(task, RECIPE, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Chosen by data and device
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "weights", "samples", "batch"),
    [
        ("cpu", 2 * 768 * 512, 10**6, 1024),  # 1536 would cost as much as the heads
        ("cpu", 64 * 512, 10**6, 256),
        ("cuda", 64 * 512, 10**6, 32768),
        ("cuda", 64 * 512, 300, 256),
    ],
)
def test_the_batch_follows_from_device_heads_and_data(device, weights, samples, batch):
    assert default_batch(torch.device(device), weights, 512, samples) == batch


def test_smaller_batches_than_the_default_lost_on_few_photographs():
    """The page's numbers are those of the record, and the default is the batch of that record."""
    record = json.loads((ROOT / "docs/results/align/batches.json").read_text(encoding="utf-8"))
    usual, *smaller = record["rsum"].items()
    weights = 512 * (1280 + 384)  # of the record's encoders
    assert usual[0] == f"default ({default_batch(CPU, weights, 512, 800)})"
    page = " ".join((ROOT / "docs/align.md").read_text(encoding="utf-8").split())
    for batch, scores in smaller:
        changes = [(a - b) / 6 for a, b in zip(scores, usual[1], strict=True)]
        mean, low, high, _ = student(changes, 1 - 0.05 / len(smaller))
        assert high < 0 and f"{batch} {mean:.1f} ({low:.1f} to {high:.1f})" in page


def test_epochs_and_chunk_follow_from_steps_and_memory(monkeypatch):
    assert [default_epochs(*one) for one in ((1000, 256), (100_000, 1024), (12_000_000, 1024))] == [
        200,
        21,
        10,
    ]
    monkeypatch.setattr(train_module, "available_bytes", lambda device: 2**30)
    assert chunk_rows(2048, CPU) is None
    assert chunk_rows(32768, CPU) == 1024  # four matrices of 1024 x 32768 floats are half a GiB
    monkeypatch.setattr(train_module, "available_bytes", lambda device: None)
    assert chunk_rows(1 << 20, CPU) is None
