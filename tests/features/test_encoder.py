"""A frozen model: features before the projection, padding, memory; and digests that tell models apart."""

from __future__ import annotations

import copy
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import image_transform
from torch.nn import functional as F

from open_clip_zerovl.evaluate.retrieval import encode_retrieval
from open_clip_zerovl.features.encoder import (
    FrozenModel,
    module_digest,
    tower_before_projection,
    tower_digest,
)
from support import tiny_clip
from support.dga_reference import bert_clip
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, WORDS, random_model, register, write_bert


@pytest.mark.parametrize("kind", ["native", "timm", "timm-classifier", "resnet"])
def test_features_are_those_before_the_projection(tmp_path: Path, kind: str):
    """Projected by the tower's own projection they are its output; and the given model stays as it was."""
    vision = {
        "native": tiny_clip.NATIVE_VISION,
        "timm": tiny_clip.TIMM_VISION,
        "timm-classifier": {**tiny_clip.TIMM_VISION, "timm_proj": ""},
        "resnet": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8},
    }[kind]
    name = tiny_clip.register(tmp_path, f"probe-{kind}", vision, tiny_clip.CLIP_TEXT)
    visual = tiny_clip.random_model(name).visual
    side = vision["image_size"]
    images = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = visual(images)
        features = tower_before_projection(visual)(images)
        projection = {
            "native": lambda x: x @ visual.proj,
            "timm": lambda x: visual.head(x),
            "timm-classifier": lambda x: visual.trunk.head(x),
            "resnet": lambda x: visual.attnpool.c_proj(x),
        }[kind]
        torch.testing.assert_close(projection(features), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(visual(images), expected)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "clip"])
def test_a_tower_that_masks_padding_gets_the_longest_of_its_texts_alone(tmp_path: Path, kind: str):
    """Its features are those of the whole context up to rounding; open_clip's own transformer gets its whole context."""
    write = {
        "bert": tiny_clip.write_bert,
        "xlm-roberta": tiny_clip.write_xlm_roberta,
        "modernbert": tiny_clip.write_modernbert,
    }
    text = {**tiny_clip.CLIP_TEXT, "context_length": 30}
    if kind in write:
        text = {**tiny_clip.bert_text(write[kind](tmp_path / kind)), "context_length": 30}
    name = tiny_clip.register(tmp_path, f"cut-{kind}", tiny_clip.NATIVE_VISION, text)
    model = tiny_clip.random_model(name, force_custom_text=True)
    tokenizer = open_clip.get_tokenizer(name, context_length=30)
    lengths: list[int] = []
    model.text.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    captions = ["a red cat", "the small dog with a big round face", "sun"]
    transform = image_transform(32, is_train=False)
    frozen = FrozenModel.of(name, (model, transform, tokenizer, torch.device("cpu")))
    batches = [(torch.zeros(1, 3, 32, 32), [captions])]
    given = [frozen.texts(captions), encode_retrieval(model, batches, tokenizer)[1]]
    with torch.no_grad():
        whole = F.normalize(model.encode_text(tokenizer(captions)), dim=-1)
    for features in given:
        torch.testing.assert_close(features, whole, rtol=0, atol=2e-6)
    *cut, last = lengths
    assert last == 30 and all(n == 30 if kind == "clip" else 8 < n < 20 for n in cut)


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
    clips = [
        tower_digest(model, "text", inputs=SimpleTokenizer(context_length=length))
        for length in (12, 12, 11)  # each its own object, as in another process
    ]
    assert len({first, *others, *clips}) == 11 and clips[0] == clips[1]


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
