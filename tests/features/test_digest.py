"""Fingerprints: other weights, layers, tokenizers, transforms and files have other fingerprints; equal ones have the same."""

from __future__ import annotations

import copy

import pytest
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import image_transform

from open_clip_zerovl.features.digest import (
    module_digest,
    tower_digest,
)
from support.dga_reference import bert_clip
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, WORDS, random_model, register, write_bert


def test_the_fingerprint_changes_with_weights_tokenizer_data_and_precision(tmp_path):
    folder = write_bert(tmp_path / "bert")
    tokenizer = HFTokenizer(str(folder), context_length=12)
    model = bert_clip(torch.float32)
    first = tower_digest(model, "text", inputs=tokenizer)
    tokenizer(["a cat"])  # leaves a length to cut and to pad to in the tokenizer
    assert tower_digest(model, "text", inputs=tokenizer) == first
    assert (
        tower_digest(
            bert_clip(torch.float32), "text", inputs=HFTokenizer(str(folder), context_length=12)
        )
        == first
    )
    image_only = copy.deepcopy(model)
    with torch.no_grad():
        image_only.visual.proj.add_(1)
        image_only.logit_scale.add_(1)
    assert tower_digest(image_only, "text", inputs=tokenizer) == first
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.text.proj.weight[0, 0] += 1e-6
    smaller = write_bert(tmp_path / "smaller", words=WORDS[:-1])
    others = [
        tower_digest(changed, "text", inputs=tokenizer),
        tower_digest(model, "image", inputs=tokenizer),
        tower_digest(model, "text", inputs=tokenizer, precision="amp_bf16"),
        tower_digest(model, "text", inputs=HFTokenizer(str(folder), context_length=11)),
        tower_digest(
            model, "text", inputs=HFTokenizer(str(folder), context_length=12, clean="lower")
        ),
        tower_digest(model, "text", inputs=HFTokenizer(str(smaller), context_length=12)),
        tower_digest(model, "image", inputs=image_transform(32, is_train=False)),
        tower_digest(model, "image", inputs=image_transform(40, is_train=False)),
    ]
    assert len({first, *others}) == 9


def test_the_fingerprint_of_clips_own_tokenizer_is_the_same_in_each_process():
    model = bert_clip(torch.float32)
    one, other = (
        tower_digest(model, "text", inputs=SimpleTokenizer(context_length=12)) for _ in range(2)
    )  # each its own object, as in another process
    assert one == other != tower_digest(model, "text", inputs=SimpleTokenizer(context_length=11))


def test_strides_and_buffers_that_no_checkpoint_holds_count():
    class Rotary(torch.nn.Module):
        def __init__(self, theta: float) -> None:
            super().__init__()
            self.register_buffer("frequencies", theta ** -torch.arange(4.0), persistent=False)

    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 4, 3, stride=1)
    strided = copy.deepcopy(convolution)
    strided.stride = (2, 2)
    for one, other in ((convolution, strided), (Rotary(10.0), Rotary(100.0))):
        assert module_digest(one, inputs=None) == module_digest(copy.deepcopy(one), inputs=None)
        assert module_digest(one, inputs=None) != module_digest(other, inputs=None)


@pytest.mark.parametrize("changed", ["quick_gelu", "head_width"])
def test_towers_of_the_same_tensors_and_another_function_have_digests_of_their_own(
    tmp_path, changed
):
    configs = {"plain": (NATIVE_VISION, False), "quick_gelu": (NATIVE_VISION, True)}
    configs["head_width"] = ({**NATIVE_VISION, "head_width": 8}, False)
    plain, quick = (
        random_model(
            register(
                tmp_path, f"digest-{kind}", configs[kind][0], CLIP_TEXT, quick_gelu=configs[kind][1]
            )
        )
        for kind in ("plain", changed)
    )
    quick.load_state_dict(plain.state_dict())
    transform = image_transform(32, is_train=False)
    for digest in (
        lambda m: tower_digest(m, "image", inputs=transform),
        lambda m: module_digest(m.visual, inputs=transform),
    ):
        assert digest(quick) != digest(plain)
        same = digest(plain)
        with torch.no_grad():
            plain.logit_scale.add_(1)
        assert digest(plain) == same
