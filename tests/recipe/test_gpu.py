"""A step on a GPU: replacements of what waits or copies compute the same values; torch.compile by blocks, and settings that
hold within the step alone.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import timm
import torch
from open_clip.transformer import PatchDropout
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.profiler import profile
from torchvision.models import resnet18

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.dga.model import is_compiled
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe import gpu
from open_clip_zerovl.recipe.gpu import (
    DevicePatchDropout,
    SplitAttention,
    compile_blocks,
    without_gpu_syncs,
)
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.recipe.step import RecipeStep
from support.dga_reference import CONTEXT, batches, bert_clip, error, gradients, one_graph
from support.tiny_coca import tiny_coca


@pytest.mark.parametrize("exclude", [True, False])
def test_patch_dropout_keeps_the_same_tokens(exclude):
    tokens = torch.randn(3, 17, 8)
    for training in (True, False):
        stock, ours = (
            kind(0.25, exclude_first_token=exclude).train(training)
            for kind in (PatchDropout, PatchDropout)
        )
        without_gpu_syncs(ours)
        assert type(ours) is DevicePatchDropout
        results = []
        for module in (stock, ours):
            torch.manual_seed(0)
            results.append(module(tokens))
        assert torch.equal(*results) and results[0].shape[1] == (
            13 if training and exclude else 12 if training else 17
        )


@pytest.mark.parametrize("padded", [True, False])
def test_bert_sees_the_same_tokens(padded):
    """With padding bit for bit; without, transformers takes another kernel."""
    stock, ours = bert_clip().eval(), bert_clip().eval()
    without_gpu_syncs(ours)
    without_gpu_syncs(ours)  # once is enough
    assert len(ours.text.transformer._forward_pre_hooks) == 1
    texts = torch.randint(1, 60, (4, CONTEXT))
    if padded:
        texts[1, 5:] = stock.text.config.pad_token_id
    features = [model.encode_text(texts) for model in (stock, ours)]
    if padded:
        assert torch.equal(*features)
    torch.testing.assert_close(*features, rtol=1e-12, atol=1e-13)
    if padded:  # a token that takes a padding's place counts, one in a longer text's own place too
        longer = texts.clone()
        longer[1, 5] = 9
        assert not torch.equal(ours.encode_text(longer)[1], features[1][1])


@pytest.mark.parametrize("mode", ["train", "eval", "bf16", "norms", "plain products"])
def test_timms_attention_has_the_same_gradients_bit_for_bit(mode):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    dropout = {"attn_drop_rate": 0.1, "proj_drop_rate": 0.1, "qk_norm": mode == "norms"}
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        tower = VisionTransformer(**sizes, **dropout).train(mode != "eval")
        attentions = [block.attn for block in tower.blocks]
        if mode == "plain products":
            for attention in attentions:
                attention.fused_attn = False
        if ours:
            without_gpu_syncs(tower)
        assert {type(each) for each in attentions} == {SplitAttention if ours else Attention}
        images = torch.randn(3, 3, 16, 16, requires_grad=True)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16) if mode == "bf16" else nullcontext():
            tower(images).float().square().sum().backward()
        results.append([images.grad, *(each.grad for each in tower.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_timms_attention_with_a_mask_is_timms_own():
    torch.manual_seed(0)
    attention = Attention(16, num_heads=2).double()
    tokens, mask = torch.randn(2, 5, 16).double(), torch.ones(5, 5, dtype=torch.bool).tril()
    masked, free = attention(tokens, attn_mask=mask), attention(tokens)
    without_gpu_syncs(attention)
    assert torch.equal(attention(tokens, attn_mask=mask), masked)
    assert torch.equal(attention(tokens), free) and not torch.equal(masked, free)


# --- torch.compile --------------------------------------------------------------------------------------------------


def compiled_step(model, backend):
    """A step of the recipe on a compiled model."""
    return RecipeStep(
        torch.compile(model, backend=backend),
        ContrastiveLoss(),
        torch.optim.AdamW(parameter_groups(model, 1e-3), lr=1e-4),
        precision="amp_bf16",
        check="always",
    )


def test_a_step_has_room_for_its_graphs_and_ends_beyond(monkeypatch):
    """torch's own limit, which a user may have lowered, does not hold in a step."""
    micro_batches = batches([4, 5], torch.float32)  # of two forms
    with torch._dynamo.config.patch(cache_size_limit=1):
        for limit in (gpu.RECOMPILE_LIMIT, 1):
            monkeypatch.setattr(gpu, "RECOMPILE_LIMIT", limit)
            torch._dynamo.reset()
            step = compiled_step(bert_clip(torch.float32), CompileCounter())
            if limit > 1:
                step.take(micro_batches, 0)
                continue
            with pytest.raises(UserError, match="torch.compile needs more than 1 graphs"):
                step.take(micro_batches, 0)
        assert torch._dynamo.config.cache_size_limit == 1
        assert not torch._dynamo.config.fail_on_cache_limit_hit


class SelfAttention(nn.Linear):
    """One head by torch's kernels."""

    def forward(self, tokens):
        parts = super().forward(tokens)[:, None].chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(*parts)


def test_graphs_on_disk_are_taken_where_the_same_attention_is_allowed(tmp_path, monkeypatch):
    """Of itself torch takes the graph with the kernel that is not allowed any more."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    block, tokens = SelfAttention(8, 24), torch.randn(2, 3, 8)
    block.compile()
    for flash in (True, False):
        torch._dynamo.reset()
        torch.backends.cuda.enable_flash_sdp(flash)
        try:
            with torch.no_grad(), gpu.same_masks(block, cut_texts=False):
                block(tokens)
                with profile() as seen:
                    block(tokens)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        assert any("flash_attention" in event.key for event in seen.key_averages()) is flash


@pytest.mark.parametrize("sort_text", [False, True])
def test_cudnns_attention_is_off_in_a_step_of_sorted_texts(sort_text):
    model, seen = bert_clip(torch.float32), []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    step = RecipeStep(
        model,
        ContrastiveLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        precision="fp32",
        sort_text=sort_text,
    )
    seen.clear()
    step.take(batches([4, 4, 4], torch.float32), 0)
    assert seen == [not sort_text] * 5 and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.skipif(
    not hasattr(torch._inductor.config, "align_random_eager"), reason="torch before 2.13"
)
def test_masks_do_not_depend_on_a_kernels_form_in_a_compiled_step():
    seen = []

    def backend(module, inputs):
        seen.append(torch._inductor.config.align_random_eager)
        return module.forward

    torch._dynamo.reset()
    compiled_step(bert_clip(torch.float32), backend).take(batches([4, 4], torch.float32), 0)
    assert seen == [True] and not torch._inductor.config.align_random_eager


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (bert_clip, 4),
        (tiny_coca, 4),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=3), 3),
        (lambda: timm.create_model("tf_efficientnet_lite0"), 16),
        (resnet18, 8),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0),
    ],
    ids=["ViT and BERT", "CoCa", "timm's ViT", "EfficientNet", "ResNet", "a perceptron"],
)
def test_blocks_of_architectures(make, blocks):
    model = make()
    assert compile_blocks(model) == blocks and is_compiled(model) == (blocks > 0)


def test_compiled_blocks_give_the_gradient_of_one_graph():
    torch._dynamo.reset()
    model = bert_clip()
    torch.manual_seed(3)
    _, wanted = one_graph(model, ContrastiveLoss(), batches([3, 3]))
    for block in (*model.visual.transformer.resblocks, *model.text.transformer.encoder.layer):
        block.compile(backend="eager")
    torch.manual_seed(3)
    DecoupledGradientAccumulation(model, ContrastiveLoss(), retain=0).backward(batches([3, 3]))
    assert error(gradients(model), wanted) <= 1e-10
