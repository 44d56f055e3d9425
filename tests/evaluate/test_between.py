"""Weights between two models: the ends bit for bit, each kind of tensor, and refusals by name."""

from __future__ import annotations

import math

import open_clip
import pytest
import torch

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.curve import check_same_tensors, open_ends, weights_between
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

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return register(tmp_path_factory.mktemp("config"), "between-tiny", NATIVE_VISION, CLIP_TEXT)


def checkpoint(folder, name: str, seed: int, **params):
    return write_run(folder, random_model(name, seed=seed), {"model": name, **params})


def encoder(path, **options) -> Encoder:
    return Encoder(str(path), device="cpu", **options)


def test_ends_are_bit_for_bit_and_the_middle_is_rounded_once(tmp_path, tiny):
    before, after = checkpoint(tmp_path / "a", tiny, 1), checkpoint(tmp_path / "b", tiny, 2)
    folder = export_local_dir(
        after, tmp_path / "exported"
    )  # the ends may be named in different ways
    ends = open_ends(encoder(before), encoder(folder))
    start, end = random_model(tiny, seed=1).state_dict(), random_model(tiny, seed=2).state_dict()
    for alpha, expected in ((0, start), (1, end)):
        found = ends.at(alpha).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    for key, tensor in ends.weights(0.3).items():
        if tensor.is_floating_point():
            exact = start[key].double() * 0.7 + end[key].double() * 0.3
            assert torch.allclose(tensor.double(), exact, rtol=1e-7, atol=1e-12), key
    assert ends.weights(0.25)["logit_scale"].exp().item() == pytest.approx(
        math.exp(0.75 * start["logit_scale"].item() + 0.25 * end["logit_scale"].item()), rel=1e-6
    )
    same = open_ends(encoder(before), encoder(before))
    assert all(torch.equal(tensor, start[key]) for key, tensor in same.weights(0.37).items())


def test_counts_of_batches_are_those_of_the_nearer_end_and_no_end_is_changed():
    before = {"w": torch.tensor([1.0]), "bn.num_batches_tracked": torch.tensor(3)}
    after = {"w": torch.tensor([2.0]), "bn.num_batches_tracked": torch.tensor(9)}
    check_same_tensors(NAMES, before, after)
    assert weights_between(before, after, 0.4)["bn.num_batches_tracked"] == 3
    assert weights_between(before, after, 0.6)["bn.num_batches_tracked"] == 9
    assert weights_between(before, after, 0.5)["w"] == 1.5 and before["w"] == 1 and after["w"] == 2


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            {"w": torch.ones(2)},
            {"w": torch.ones(3)},
            "w has two shapes",
        ),
        ({"w": torch.ones(2), "v": torch.ones(1)}, {"w": torch.ones(2)}, "only one has v"),
        ({"w": torch.ones(2)}, {"w": torch.tensor([1.0, math.nan])}, "w of b is not finite"),
        ({"ids": torch.arange(3)}, {"ids": torch.arange(3) + 1}, "whole numbers in ids differ"),
    ],
)
def test_other_tensors_are_refused_by_name(before, after, sentence):
    with pytest.raises(UserError, match=sentence):
        check_same_tensors(NAMES, before, after)


@pytest.mark.parametrize(
    ("vision", "text", "more", "sentence"),
    [
        (
            {"head_width": 8},
            {},
            {},
            "vision_cfg.head_width of model_cfg is 16 in the first and 8 in the second",
        ),
        ({}, {"heads": 4}, {}, "text_cfg.heads of model_cfg is 2 in the first and 4"),
        (
            {},
            {},
            {"quick_gelu": True},
            "quick_gelu of model_cfg is not given in the first and True",
        ),
    ],
)
def test_another_architecture_with_the_same_shapes_is_refused_by_its_key(
    tmp_path, tiny, vision, text, more, sentence
):
    # All tensors have the same names and shapes: only the config differs.
    other = register(
        tmp_path,
        f"between-other-{len(str(vision))}-{len(str(text))}",
        NATIVE_VISION | vision,
        CLIP_TEXT | text,
        **more,
    )
    before, after = checkpoint(tmp_path / "a", tiny, 1), checkpoint(tmp_path / "b", other, 2)
    with pytest.raises(UserError, match=sentence):
        open_ends(encoder(before), encoder(after))


def test_a_value_that_a_config_leaves_out_is_open_clips_own(tmp_path):
    """Without `timm_pool` a trunk pools by the mean, with "" as it was trained: one tensor for another, other features."""
    bare = {key: value for key, value in TIMM_VISION.items() if key != "timm_pool"}
    pools = ({}, {"timm_pool": "avg"}, {"timm_pool": ""})
    names = [
        register(tmp_path, f"between-pool-{i}", bare | own, CLIP_TEXT)
        for i, own in enumerate(pools)
    ]
    runs = [encoder(checkpoint(tmp_path / name, name, 1)) for name in names]
    open_ends(runs[0], runs[1])
    with pytest.raises(
        UserError,
        match="vision_cfg.timm_pool of model_cfg is avg in the first and empty in the second",
    ):
        open_ends(runs[0], runs[2])


def test_another_transform_is_refused_by_its_key(tmp_path, tiny):
    before = checkpoint(tmp_path / "a", tiny, 1)
    after = checkpoint(tmp_path / "b", tiny, 2, image_mean=[0.5, 0.5, 0.5])
    with pytest.raises(
        UserError, match=r"mean of preprocess_cfg is \[0.48.* in the first and \[0.5, 0.5, 0.5\]"
    ):
        open_ends(encoder(before), encoder(after))


def test_hugging_face_towers_in_two_folders_and_another_vocabulary(tmp_path):
    folders = [write_bert(tmp_path / "one"), write_bert(tmp_path / "two")]
    words = ["moon", "sun", *"xyz"]
    folders.append(write_bert(tmp_path / "three", words=words + [f"w{i}" for i in range(13)]))
    names = [
        register(tmp_path, f"between-bert-{i}", NATIVE_VISION, bert_text(folder))
        for i, folder in enumerate(folders)
    ]
    runs = [checkpoint(tmp_path / f"run{i}", name, i) for i, name in enumerate(names)]
    ends = open_ends(encoder(runs[0]), encoder(runs[1]))  # the folders are places, not architecture
    assert any(key.startswith("text.transformer") for key in ends.before)
    with pytest.raises(UserError, match="read .* differently|are different models"):
        open_ends(encoder(runs[0]), encoder(runs[2]))


def test_a_tag_of_open_clip_is_an_end(tmp_path, tiny, monkeypatch):
    model = random_model(tiny, seed=3)
    file = tmp_path / "weights.pt"
    torch.save(model.state_dict(), file)
    monkeypatch.setitem(
        open_clip.pretrained._PRETRAINED,
        tiny,
        {"mine": {"url": "", "mean": (0.5,) * 3, "std": (0.5,) * 3}},
    )
    monkeypatch.setattr("open_clip.factory.download_pretrained", lambda *_, **__: str(file))
    after = checkpoint(tmp_path / "b", tiny, 2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    ends = open_ends(encoder(f"{tiny}/mine"), encoder(after))
    assert (
        ends.spec.preprocess_cfg["mean"] == (0.5,) * 3
        or list(ends.spec.preprocess_cfg["mean"]) == [0.5] * 3
    )
    assert torch.equal(ends.before["visual.proj"], model.state_dict()["visual.proj"])
    with pytest.raises(UserError, match="cannot be read offline"):
        encoder("hf-hub:somebody/model").spec()
