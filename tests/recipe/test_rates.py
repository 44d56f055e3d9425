"""Learning rates by part and layer (--lr-image, --lr-text, --lr-head, --layer-decay)."""

from __future__ import annotations

from functools import partial

import open_clip
import pytest
import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.recipe.flags import RecipeConfig
from open_clip_zerovl.recipe.optimizer import Rates, described_groups, parameter_groups
from open_clip_zerovl.recipe.towers import checkpoint_without_reentry, layers_of
from support.dga_reference import CONTEXT, VOCABULARY, bert_clip
from support.tiny_clip import CLIP_TEXT, TIMM_VISION
from support.two_towers import stock_clip
from training.checkpointing import keep_settings
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
    assert [
        (group["part"], round(group["rate_scale"], 9), group["weight_decay"]) for group in groups
    ] == [
        (part, scale, decay)
        for part, scale in (("image tower", 0.1), ("text tower", 1.0), ("heads", 10.0))
        for decay in (0.0, 0.1)
    ]
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(
        map(id, model.parameters())
    )
    stock = parameter_groups(model, 0.1)
    assert [set(group) for group in stock] == [
        {"params", "weight_decay"}
    ] * 2  # open_clip's, as ever
    spared = {id(p) for p in stock[0]["params"]}
    assert spared == {
        id(p) for group in groups if not group["weight_decay"] for p in group["params"]
    }
    model.visual.requires_grad_(False)
    assert [group["part"] for group in parameter_groups(model, 0.1, rates=Rates(1e-4, text=1e-5))[::2]] == [
        "text tower", "heads",
    ]  # fmt: skip
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


@pytest.mark.parametrize("taken", [True, False])
def test_a_resume_takes_the_rates_of_its_command_line(taken, caplog):
    """torch silently loads those of the checkpoint (the second case); a rate of another part is other groups to it."""
    saved = adamw(bert_clip(), lr_image=1e-3, layer_decay=0.5).state_dict()
    resumed = adamw(bert_clip(), lr_image=2e-3, layer_decay=0.5)
    wanted = described_groups(resumed)
    if taken:
        keep_settings(resumed, taken=True)
    resumed.load_state_dict(saved)
    assert (described_groups(resumed) == wanted) is taken
    assert ("takes rate_scale" in caplog.text) is taken
    for others in ({"lr_head": 1e-3}, {"no_embedding_decay": True}):
        with pytest.raises(ValueError, match="loaded state dict has a different number"):
            keep_settings(adamw(bert_clip(), **others), taken=True).load_state_dict(saved)


def test_checkpointed_layers_above_constant_embeddings_train():
    """Reentrant checkpoints, the default of transformers 4, give such layers no gradient."""
    model = bert_clip()
    model.text.transformer.embeddings.requires_grad_(False)
    checkpoint_without_reentry(model)
    model.set_grad_checkpointing()
    model.encode_text(torch.randint(3, VOCABULARY, (2, CONTEXT))).square().sum().backward()
    layers = model.text.transformer.encoder.layer
    assert layers[0].gradient_checkpointing
    assert all(parameter.grad is not None for parameter in layers.parameters())
