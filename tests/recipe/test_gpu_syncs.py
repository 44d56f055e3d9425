"""The replacements of operations that make the host wait compute the same values."""

import pytest
import torch
from open_clip.transformer import PatchDropout

from open_clip_zerovl.recipe.gpu import DevicePatchDropout, without_gpu_syncs
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
