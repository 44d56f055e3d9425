"""The replacements of operations that make the host wait, or that copy, compute the same values."""

from contextlib import nullcontext

import pytest
import torch
from open_clip.transformer import PatchDropout
from timm.models.vision_transformer import Attention, VisionTransformer
from torch.profiler import profile

from open_clip_zerovl.recipe.gpu import DevicePatchDropout, SplitAttention, without_gpu_syncs
from support.dga_reference import CONTEXT, bert_clip


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
def test_timms_attention_has_the_same_gradients_without_the_copies(mode):
    """Bit for bit, and the backward pass stacks nothing, as timm's own does."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    dropout = {"attn_drop_rate": 0.1, "proj_drop_rate": 0.1, "qk_norm": mode == "norms"}
    results, stacks = [], []
    for replaced in (False, True):
        torch.manual_seed(0)
        tower = VisionTransformer(**sizes, **dropout).train(mode != "eval")
        attentions = [block.attn for block in tower.blocks]
        if mode == "plain products":
            for attention in attentions:
                attention.fused_attn = False
        if replaced:
            without_gpu_syncs(tower)
        assert {type(each) for each in attentions} == {SplitAttention if replaced else Attention}
        images = torch.randn(3, 3, 16, 16, requires_grad=True)
        torch.manual_seed(1)
        half = torch.autocast("cpu", torch.bfloat16) if mode == "bf16" else nullcontext()
        with half, profile() as log:
            tower(images).float().square().sum().backward()
        stacks.append(sum(each.count for each in log.key_averages() if each.key == "aten::stack"))
        results.append([images.grad, *(each.grad for each in tower.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert stacks[0] >= 2 and (stacks[1] == 0) == (mode != "plain products")


def test_timms_attention_with_a_mask_is_timms_own():
    torch.manual_seed(0)
    attention = Attention(16, num_heads=2).double()
    tokens, mask = torch.randn(2, 5, 16).double(), torch.ones(5, 5, dtype=torch.bool).tril()
    masked, free = attention(tokens, attn_mask=mask), attention(tokens)
    without_gpu_syncs(attention)
    assert torch.equal(attention(tokens, attn_mask=mask), masked)
    assert torch.equal(attention(tokens), free) and not torch.equal(masked, free)
