"""Weights between two models: the ends bit for bit, refusals by name, the curve against retrieval by hand, the rules."""

from __future__ import annotations

import json
import math

import numpy as np
import open_clip
import pytest
import torch

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import open_retrieval_set
from open_clip_zerovl.data.splits import trained_on, write_trained_on
from open_clip_zerovl.evaluate.curve import (
    Point,
    choose,
    open_ends,
    score_curve,
    write_between,
)
from open_clip_zerovl.evaluate.settings import CurveFlags
from support.scoring import score_checkpoint
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    TIMM_VISION,
    bert_text,
    random_model,
    register,
    write_bert,
    write_retrieval_set,
    write_run,
)


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
        found = ends.at(alpha)[0].state_dict()
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


def without(cfg: dict, key: str) -> dict:
    return {name: value for name, value in cfg.items() if name != key}


BARE = without(TIMM_VISION, "timm_pool")  # open_clip's own value pools by the mean
OTHER_MODELS = {  # sentence -> (vision and text of the first), of the second, entries of the whole model, of the run
    "vision_cfg.head_width of model_cfg is 16 in the first and 8 in the second": (
        ({}, {}), ({"head_width": 8}, {}), {}, {},
    ),
    "text_cfg.heads of model_cfg is 2 in the first and 4": (({}, {}), ({}, {"heads": 4}), {}, {}),
    "quick_gelu of model_cfg is not given in the first and True": (
        ({}, {}), ({}, {}), {"quick_gelu": True}, {},
    ),
    "vision_cfg.timm_pool of model_cfg is avg in the first and empty in the second": (
        (BARE, {}), ({**BARE, "timm_pool": ""}, {}), {}, {},
    ),
    r"mean of preprocess_cfg is \[0.48.* in the first and \[0.5, 0.5, 0.5\]": (
        ({}, {}), ({}, {}), {}, {"image_mean": [0.5, 0.5, 0.5]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", OTHER_MODELS)
def test_another_model_with_the_same_shapes_is_refused_by_its_key(tmp_path, sentence):
    *both, extra, params = OTHER_MODELS[sentence]
    ends = []
    for seed, (vision, text) in enumerate(both):
        vision = vision if "timm_model_name" in vision else NATIVE_VISION | vision
        name = f"between-{[*OTHER_MODELS].index(sentence)}-{seed}"
        register(tmp_path, name, vision, CLIP_TEXT | text, **(extra if seed else {}))
        ends.append(encoder(checkpoint(tmp_path / name, name, seed, **(params if seed else {}))))
    with pytest.raises(UserError, match=sentence):
        open_ends(*ends)


def test_a_value_that_a_config_leaves_out_is_open_clips_own(tmp_path):
    names = [
        register(tmp_path, f"between-pool-{i}", cfg, CLIP_TEXT)
        for i, cfg in enumerate((BARE, {**BARE, "timm_pool": "avg"}))
    ]
    open_ends(*(encoder(checkpoint(tmp_path / name, name, 1)) for name in names))


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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, the same with its image features turned round, and two sets."""
    folder = tmp_path_factory.mktemp("interpolation")
    name = register(folder, "interpolated-tiny", NATIVE_VISION, CLIP_TEXT)
    model = random_model(name, seed=4)
    write_run(folder / "a", model, {"model": name})
    with torch.no_grad():
        model.visual.proj.neg_()
        model.logit_scale.add_(0.5)
    write_run(folder / "b", model, {"model": name})
    write_retrieval_set(folder / "new", [2] * 12, seed=1)
    write_retrieval_set(folder / "kept", [1] * 9, seed=2)
    return folder


def ends(folder) -> list[str]:
    return [str(folder / end / "checkpoints" / "epoch_1.pt") for end in "ab"]


def test_the_curve_is_retrieval_by_hand_and_constant_where_it_must_be(made, tmp_path):
    out = tmp_path / "out"
    flags = CurveFlags(alphas=(0.2, 0.4, 0.7), kept_share=0.0)
    new, kept = ({name: open_retrieval_set(made / name)} for name in ("new", "kept"))
    encoders = [Encoder(path, device="cpu", batch_size=5) for path in ends(made)]
    loaded = open_ends(*encoders)
    write_between(loaded, score_curve(loaded, encoders[0], flags, new, kept), out)
    result = json.loads((out / "interpolation.json").read_text())
    points = {point["alpha"]: point["results"] for point in result["points"]}

    by_hand = score_checkpoint(ends(made)[0], f"new={made / 'new'}::kept={made / 'kept'}")
    for name in ("new", "kept"):
        for key, value in by_hand[name].items():
            assert points[0][name][key] == pytest.approx(value, abs=1e-9), key
        # (1 - 2 alpha) x the same features: before 0.5 they are A's but for their length, after it B's
        assert points[0.2][name] == points[0.4][name] == points[0][name]
        assert points[0.7][name] == points[1][name]

    best = max((points[alpha]["new"]["rsum"], -alpha) for alpha in points)
    assert result["chosen"]["alpha"] == -best[1] and -best[1] in (0, 0.7)
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{out}")
    start, end = (load_model(path)[0].state_dict() for path in ends(made))
    alpha = result["chosen"]["alpha"]
    for key, tensor in model.state_dict().items():
        assert torch.allclose(tensor, (1 - alpha) * start[key] + alpha * end[key], atol=1e-6)
    assert trained_on([out]) is None


def test_a_point_goes_with_the_pictures_of_both_ends(made, tmp_path):
    folders = [tmp_path / end for end in "ab"]
    for number, (folder, checkpoint) in enumerate(zip(folders, ends(made), strict=True)):
        export_local_dir(checkpoint, folder)
        write_trained_on(folder, np.array([number, number + 1]), None)
    both = open_ends(*(Encoder(str(folder)) for folder in folders))
    middle = choose(points((0.5, 1, 1)), ["n"], [], kept_share=1.0)
    out = write_between(both, middle, tmp_path / "out")
    assert trained_on([out]).tolist() == [1, 2]
    found = open_clip.create_model_and_transforms(f"local-dir:{out}")[0]
    assert found.visual.proj.abs().max() == 0  # halfway between a tensor and its opposite


def points(*rows: tuple[float, float, float]) -> list[Point]:
    return [Point(alpha, {"n": {"rsum": new}, "k": {"rsum": kept}}) for alpha, new, kept in rows]


def test_the_zero_shot_accuracy_of_classes_chooses():
    """RSUM of the new set falls here, as captions that pictures share may have it, while its accuracy rises."""
    rows = [Point(alpha, {"n": {"rsum": 9 - alpha}, "k": {"rsum": kept}}, {"n": {"top1": top1, "chance": 0.1}})
            for alpha, top1, kept in ((0, 0.2, 300), (0.5, 0.5, 298), (1, 0.6, 200))]  # fmt: skip
    for rule, alpha in (
        ("new", 1),
        ("kept", 0.5),
        ("mean", 0.5),
    ):  # mean: (6 * 50 + 298) / 2 > (6 * 60 + 200) / 2
        curve = choose(rows, ["n"], ["k"], rule, kept_share=0.99)
        assert curve.chosen.alpha == alpha and "top-1" in curve.reason
    lines = curve.table().splitlines()
    assert lines[1].split()[:3] == ["0", "20.0", "300.0"] and lines[-1].split()[1] == "10.0"


ROWS = ((0, 100, 300), (0.25, 180, 299), (0.5, 240, 290), (0.75, 260, 250), (1, 260, 200))


@pytest.mark.parametrize(
    ("rule", "share", "alpha"),
    [("kept", 0.99, 0.25), ("kept", 0.95, 0.5), ("kept", 1.0, 0), ("kept", 0.0, 0.75), ("mean", 0.99, 0.5), ("new", 0.99, 0.75),
     (None, 0.99, 0.25)],
)  # fmt: skip
def test_rules(rule, share, alpha):
    curve = choose(points(*ROWS), ["n"], ["k"], rule, kept_share=share)
    assert curve.chosen.alpha == alpha


@pytest.mark.parametrize(
    ("rows", "rule", "advice"),
    [
        (((0, 38.9, 100), (1, 44.4, 87.6)), None, "Alpha 1 gains 5.5 on the new sets and keeps 88 % of the old: --keep 0.87"),
        (((0, 38.9, 100), (1, 44.4, 87.6)), "new", None),
        (((0, 38.9, 100), (1, 44.4, 99.5)), None, None),
        (((0, 38.9, 100), (1, 38.9, 120)), None, "No point is better than the model before: more pairs, or another --set lr"),
        (((0, 38.9, 0), (1, 44.4, -1)), None, "Alpha 1 gains 5.5 on the new sets: --rule new takes it."),
    ],
)  # fmt: skip
def test_advice_where_the_rule_keeps_the_model_before(rows, rule, advice):
    """A better point was called "No point is better": its gain and its price are said instead."""
    found = choose(points(*rows), ["n"], ["k"], rule, kept_share=0.99).advice
    assert found == advice or (advice is not None and found.startswith(advice))


def test_rules_without_kept_sets():
    assert choose(points(*ROWS), ["n"], [], kept_share=0.9).chosen.alpha == 0.75
    for kept, rule, sentence in (
        ([], "mean", "--rule mean needs retrieval sets of the ability to keep; give --kept"),
        (["n", "k"], "kept", "the set n is both new and kept"),
    ):
        with pytest.raises(UserError, match=sentence):
            choose(points(*ROWS), ["n"], kept, rule, kept_share=0.9)
