"""Low-rank adapters: exact gradients, nothing else of a tower changes, merged on export, resumed bit for bit."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import open_clip
import peft
import pytest
import torch
from open_clip.loss import ClipLoss

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.checkpoints.weights import ENTRY, is_adapter
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.towers import (
    add_lora,
    checkpoint_without_reentry,
    group_of,
    lora_entry,
)
from support.dga_reference import (
    accumulated,
    batches,
    bert_clip,
    error,
    reference,
)  # fmt: skip
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    TIMM_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_run,
)
from support.two_towers import stock_clip

# open_clip 4 has its own attention in all native towers.
OWN_ATTENTION = not open_clip.__version__.startswith("3.")


# A model whose towers have open_clip's own attention, as all native ones of 4.x.
own_attention_clip = partial(stock_clip, vision={"scale_heads": True})


def adapted(make, rank=2, on="both"):
    """The model with adapters that have an effect."""
    torch.manual_seed(0)
    model = make()
    add_lora(model, rank, on)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("make", "on", "checkpointing"),
    [
        (bert_clip, "image", True),
        (bert_clip, "both", True),
        (stock_clip, "both", False),
        (stock_clip, "both", True),
        (own_attention_clip, "image", False),  # open_clip 3.3 cannot checkpoint its blocks
    ],
)
def test_gradients_under_decoupled_accumulation_are_exact(make, on, checkpointing):
    """fp64, dropout and token drop on; without replay it fails. Only the adapters of the towers have gradients."""
    model, micro_batches = adapted(make, on=on), batches([3, 2, 2])
    if checkpointing:
        checkpoint_without_reentry(model)
        model.set_grad_checkpointing()
    _, wanted = reference(model, ClipLoss(), micro_batches)
    assert all(is_adapter(name) or not group_of(name).endswith(" tower") for name in wanted)
    assert "logit_scale" in wanted and all(bool(gradient.any()) for gradient in wanted.values())
    for retain in (0, 1):
        _, found = accumulated(
            model, ContrastiveLoss(), micro_batches, retain=retain, check="always"
        )
        assert error(found, wanted) <= 1e-10
    _, redrawn = accumulated(model, ContrastiveLoss(), micro_batches, retain=0, replay_rng=False)
    assert error(redrawn, wanted) > 0.01


# model, tower with adapters -> its adapted layers
LAYERS = [
    (bert_clip, "both", 2 * (2 + 2) + 2 * 6),  # packed attention has two adapters
    (bert_clip, "image", 8),
    (bert_clip, "text", 12),
    (own_attention_clip, "image", 8),
    (stock_clip, "text", 4),  # whose layers have the image tower's names without their prefix
    (
        lambda: open_clip.CustomTextCLIP(24, TIMM_VISION, {**CLIP_TEXT, "vocab_size": 64}),
        "image",
        6 * 4,
    ),
]


@pytest.mark.parametrize(("make", "on", "count"), LAYERS)
def test_adapters_lie_on_each_linear_layer_of_the_chosen_towers(make, on, count):
    torch.manual_seed(0)
    plain = make().eval()
    model = deepcopy(plain)
    add_lora(model, 4, on)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}
    assert len(shapes) == 2 * count and all(4 in shape for shape in shapes.values())
    assert on == "both" or {group_of(name) for name in shapes} == {f"{on} tower"}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (
            is_adapter(name) or not group_of(name).endswith(" tower")
        ), name
    side = model.visual.image_size
    images = torch.randn(
        2, 3, *(side if isinstance(side, tuple) else (side, side)), dtype=plain.logit_scale.dtype
    )
    torch.testing.assert_close(
        model.encode_image(images), plain.encode_image(images), rtol=1e-6, atol=1e-7
    )


def test_packed_attention_leaves_its_weights_alone():
    """peft's own adapter of nn.MultiheadAttention changes them by rounding in each pass (negative control)."""

    def moved(model) -> bool:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(3):
            model.encode_image(torch.randn(1, 3, 32, 32))
        return any(
            not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()
        )

    model = adapted(lambda: stock_clip().float())
    held = list(model.parameters())
    assert not moved(model) and all(a is b for a, b in zip(held, model.parameters(), strict=True))
    stock = stock_clip().float()
    config = peft.LoraConfig(r=2, target_modules=r"visual\..*\.attn", init_lora_weights=False)
    if OWN_ATTENTION:
        with pytest.raises(ValueError, match="Target module Attention"):  # by peft alone
            peft.inject_adapter_in_model(config, stock)
    else:
        assert moved(peft.inject_adapter_in_model(config, stock))


def lora_run(folder, name, make, **params):
    """A run's folder with a checkpoint of an adapted model; the model without adapters, the adapted one, the checkpoint."""
    base = make()
    model = adapted(lambda: deepcopy(base), rank=3)
    with torch.no_grad():
        model.logit_scale.add_(0.5)
    checkpoint = write_run(folder / "run", model.eval(), {"model": name, **params})
    torch.save(torch.load(checkpoint) | {ENTRY: lora_entry(3)}, checkpoint)
    return base, model, checkpoint


@pytest.mark.parametrize("kind", ["native", "timm and BERT"])
def test_a_merged_export_equals_the_adapted_model_and_stock_open_clip_loads_it(tmp_path, kind):
    if kind == "native":
        name = register(tmp_path / "configs", "lora-native", NATIVE_VISION, CLIP_TEXT)
    else:
        text = bert_text(write_bert(tmp_path / "bert"))
        name = register(tmp_path / "configs", "lora-bert", TIMM_VISION, text)
    base, model, checkpoint = lora_run(tmp_path, name, lambda: random_model(name))
    folder = export_local_dir(checkpoint, tmp_path / "exported")
    side = model.visual.image_size
    images = torch.randn(3, 3, *(side if isinstance(side, tuple) else (side, side)))
    texts = torch.randint(5, 20, (3, 12 if kind != "native" else 16))
    stock = open_clip.create_model_and_transforms(f"local-dir:{folder}")[0].eval()
    others = [stock, load_model(checkpoint)[0]]
    for encode, inputs in (("encode_image", images), ("encode_text", texts)):
        with torch.no_grad():
            wanted, before = (
                getattr(each, encode)(inputs, normalize=True) for each in (model, base)
            )
            for other in others:
                assert (getattr(other, encode)(inputs, normalize=True) - wanted).abs().max() <= 1e-6
        assert (before - wanted).abs().max() > 1e-3  # the adapters have an effect
    assert stock.logit_scale == model.logit_scale
    torch.save({"state_dict": model.state_dict()}, tmp_path / "bare.pt")
    with pytest.raises(
        UserError, match="bare.pt cannot be read .* a checkpoint that training wrote"
    ):
        load_model(tmp_path / "bare.pt", model_name=name)


def test_towers_that_adapters_would_not_reach_are_refused():
    with pytest.raises(
        UserError,
        match="--lora is for transformers of linear layers, and the image tower has visual.bn1",
    ):
        add_lora(stock_clip(vision={"layers": [1, 1, 1, 1], "width": 8}), 2, "image")
    model = bert_clip()
    layer = model.text.transformer.encoder.layer[0].output.dense
    layer.forward = None
    model.text.transformer.encoder.layer[0].output.forward = lambda hidden, inputs: (
        inputs + hidden @ layer.weight.T
    )
    with pytest.raises(
        UserError, match="--lora cannot train text.transformer.encoder.layer.0.output.dense"
    ):
        add_lora(model, 2, "text")
