"""The optimizer: groups, learning rates by part and layer, the schedule, clipping, the temperature's bounds."""

from __future__ import annotations

import math
from functools import partial

import open_clip
import pytest
import torch
from open_clip_train.scheduler import cosine_lr as stock_cosine_lr
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.build import apply_methods
from open_clip_zerovl.recipe.flags import RecipeConfig
from open_clip_zerovl.recipe.optimizer import (
    Rates,
    optimizer_step,
    parameter_groups,
)
from open_clip_zerovl.recipe.towers import freeze, layers_of
from support.dga_reference import VOCABULARY, batches, bert_clip
from support.tiny_clip import CLIP_TEXT, TIMM_VISION
from support.two_towers import stock_clip
from training.model import cosine_lr, create_adamw


def timm_clip():
    """timm's ViT of 6 blocks and open_clip's text transformer of 2."""
    return open_clip.CustomTextCLIP(24, TIMM_VISION, {**CLIP_TEXT, "vocab_size": VOCABULARY})


plain_clip = partial(stock_clip, vision={"layers": 4}, layers=3)
# model, parameter -> number of layers above it; None for a parameter without layers
LAYERS = [
    (timm_clip, "visual.trunk.cls_token", 7),
    (timm_clip, "visual.trunk.patch_embed.proj.weight", 7),
    (timm_clip, "visual.trunk.blocks.0.attn.qkv.weight", 6),
    (timm_clip, "visual.trunk.blocks.5.mlp.fc2.bias", 1),
    (timm_clip, "visual.trunk.norm.weight", 1),
    (timm_clip, "visual.head.proj.weight", None),
    (timm_clip, "text.token_embedding.weight", 3),
    (timm_clip, "text.transformer.resblocks.1.attn.in_proj_weight", 1),
    (timm_clip, "text.text_projection", None),
    (plain_clip, "visual.conv1.weight", 5),
    (plain_clip, "visual.transformer.resblocks.3.mlp.c_fc.weight", 1),
    (plain_clip, "transformer.resblocks.0.ln_1.weight", 3),
    (plain_clip, "positional_embedding", 4),
    (plain_clip, "ln_final.weight", 1),
    (plain_clip, "logit_scale", None),
    (bert_clip, "text.transformer.embeddings.word_embeddings.weight", 3),
    (bert_clip, "text.transformer.encoder.layer.0.output.dense.weight", 2),
    (bert_clip, "text.transformer.encoder.layer.1.attention.self.query.bias", 1),
]


@pytest.mark.parametrize("make", [timm_clip, plain_clip, bert_clip])
def test_layer_decay_of_each_layer(make):
    model = make()
    scales = {name: scale for name, (*_, scale) in Rates(1e-4, layer_decay=0.5).of(model).items()}
    assert scales.keys() == dict(model.named_parameters()).keys()
    cases = [(name, above) for one, name, above in LAYERS if one is make]
    assert len(cases) >= 3
    for name, above in cases:
        assert scales[name] == 0.5 ** (above or 0), name
        assert (name in layers_of(model)) == (above is not None)


def test_groups_have_the_rates_of_their_parts_and_hold_each_parameter_once():
    model = bert_clip()
    groups = parameter_groups(model, 0.1, rates=Rates(1e-4, image=1e-5, head=1e-3))
    assert [(group["part"], round(group["rate_scale"], 9)) for group in groups[::2]] == [
        ("image tower", 0.1), ("text tower", 1.0), ("heads", 10.0),
    ]  # fmt: skip
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    spared = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    assert spared == {id(p) for p in parameter_groups(model, 0.1)[0]["params"]}
    model.visual.requires_grad_(False)
    with pytest.raises(
        UserError,
        match="--lr-image 1e-05 has no effect, since nothing of the image tower is trained",
    ):
        parameter_groups(model, 0.1, rates=Rates(1e-4, image=1e-5))
    resnet = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32}
    convolutions = open_clip.CLIP(16, resnet, {**CLIP_TEXT, "vocab_size": VOCABULARY})
    with pytest.raises(
        UserError, match="--layer-decay does not find the layers of the image tower"
    ):
        parameter_groups(convolutions, 0.1, rates=Rates(1e-4, layer_decay=0.5))


def adamw(model, lr=1e-2, **flags):
    return create_adamw(model, RecipeConfig(**flags), 0.1, lr=lr, betas=(0.9, 0.98), eps=1e-6)


def trained(scale: float, **flags) -> dict[str, torch.Tensor]:
    """The changes of weights after three steps of warm-up and cosine with the same gradients."""
    model = bert_clip()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, 1e-2 * scale, **flags)
    schedule = cosine_lr(optimizer, 1e-2 * scale, 1, 5, lr_min=1e-3 * scale)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
        schedule(step)
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_scale", 1.0)  # as the schedules of open_clip 4 do
        optimizer.step()
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def test_a_part_trains_as_a_whole_model_with_its_rate():
    """Every part follows the schedule, floor included, at its own rate; without the flag it would not (last lines)."""
    found = trained(1, lr_image=5e-3, lr_head=1e-2, no_embedding_decay=True)
    half, whole = trained(0.5, no_embedding_decay=True), trained(1, no_embedding_decay=True)
    for name, change in found.items():
        image = name.startswith("visual.") and name != "visual.proj"
        torch.testing.assert_close(change, (half if image else whole)[name], rtol=1e-12, atol=1e-15)
        assert not image or not torch.allclose(change, whole[name])


# open_clip_train.main's condition for a parameter without weight decay, in its words.
def spared_by_open_clip(n, p):
    return p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n


EMBEDDINGS = [
    (timm_clip, "cls_token pos_embed positional_embedding token_embedding"),
    (
        plain_clip,
        "class_embedding positional_embedding visual.positional_embedding token_embedding",
    ),
    (
        bert_clip,
        "class_embedding positional_embedding word_embeddings position_embeddings token_type_embeddings",
    ),
]


@pytest.mark.parametrize(("make", "embeddings"), EMBEDDINGS)
def test_the_default_groups_are_open_clips_and_embeddings_are_spared_on_request(make, embeddings):
    model = make()
    freeze(model, ["text"] if make is timm_clip else [], projection=False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    usual = parameter_groups(model, 0.2)
    assert [group["weight_decay"] for group in usual] == [0.0, 0.2]
    for group, spared in zip(usual, (True, False), strict=True):
        wanted = [p for name, p in trained.items() if spared_by_open_clip(name, p) == spared]
        assert list(map(id, group["params"])) == list(map(id, wanted))
    of = {id(p): name for name, p in trained.items()}
    spared, decayed = (
        {of[id(p)] for p in group["params"]}
        for group in parameter_groups(model, 0.2, exempt_embeddings=True)
    )
    moved = spared - {of[id(p)] for p in usual[0]["params"]}
    assert spared | decayed == trained.keys() and moved
    assert all(any(word in name for word in embeddings.split()) for name in moved), moved
    assert not any("embed" in name.split(".")[-1] or "_embeddings" in name for name in decayed)


def test_the_rate_rises_over_the_warm_up_and_falls_to_its_floor():
    """As open_clip's own where the floor is 0."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.0)
    floored = cosine_lr(optimizer, 1.0, 4, 12, lr_min=0.2)
    assert [floored(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert floored(8) == pytest.approx(0.6) and floored(12) == floored(20) == pytest.approx(0.2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    ours, stock = (
        cosine_lr(optimizer, 1.0, 4, 12, lr_min=0.0),
        stock_cosine_lr(optimizer, 1.0, 4, 12),
    )
    assert [ours(step) for step in range(12)] == pytest.approx([stock(step) for step in range(12)])


@pytest.mark.parametrize(("clip", "moved"), [(None, 5.0), (1.0, 1.0)])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_step_clips_unscaled_gradients_and_leaves_out_infinite_ones(clip, moved, scale):
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    if scaler is not None:
        scaler.scale(torch.zeros(()))  # as a loss would: the scaler starts here
    layer.weight.grad = (scale or 1.0) * torch.tensor([[3.0, 4.0]])
    optimizer_step(layer, optimizer, scaler=scaler, grad_clip_norm=clip)
    assert (layer.weight - before).norm().item() == pytest.approx(moved, rel=1e-5)
    if scaler is not None:
        after = layer.weight.detach().clone()
        layer.weight.grad = torch.tensor([[torch.inf, 1.0]])
        optimizer_step(layer, optimizer, scaler=scaler, grad_clip_norm=clip)
        assert torch.equal(layer.weight, after) and scaler.get_scale() == scale / 2


def test_a_step_keeps_the_temperature_in_its_bounds_in_whatever_the_model_is_wrapped():
    for wrap in (
        lambda model: model,
        torch.compile,
        lambda model: nn.ModuleDict({"module": model}),
    ):
        for given, expected in ((5.0, math.log(100)), (-0.5, 0.0), (1.5, 1.5)):
            model = plain_clip()
            with torch.no_grad():
                model.logit_scale.fill_(given)
            optimizer_step(wrap(model), torch.optim.SGD(model.parameters(), lr=1.0))
            assert model.logit_scale.item() == pytest.approx(expected)


def test_a_constant_temperature_stays_and_the_rest_learns():
    model = bert_clip()
    torch.nn.init.constant_(model.logit_scale, 4.7)  # above the bound of one that learns, ln 100
    apply_methods(model, None, RecipeConfig(temperature_constant=True), seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    DecoupledGradientAccumulation(model, ContrastiveLoss()).backward(batches([3, 2]))
    optimizer_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model.logit_scale, before["logit_scale"])
    assert not torch.equal(model.visual.proj, before["visual.proj"])
