"""Weights between two models: the curve against retrieval by hand, the rules, the folder, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import open_clip
import pytest
import torch

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.splits import trained_on, write_trained_on
from open_clip_zerovl.evaluate.curve import (
    CurveSettings,
    Point,
    choose,
    open_ends,
    score_curve,
    write_between,
)
from support.scoring import score_checkpoint
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    random_model,
    register,
    write_retrieval_set,
    write_run,
)


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
    asked = CurveSettings(
        f"new={made / 'new'}", f"kept={made / 'kept'}", alphas=(0.2, 0.4, 0.7), kept_share=0.0
    )
    encoders = [Encoder(path, device="cpu", batch_size=5) for path in ends(made)]
    loaded, lines = open_ends(*encoders), []
    curve = score_curve(loaded, encoders[0], asked, say=lines.append)
    write_between(loaded, curve, out)
    said = "\n".join([*lines, curve.table()])
    result = json.loads((out / "interpolation.json").read_text())
    points = {point["alpha"]: point["results"] for point in result["points"]}
    assert sorted(points) == [0, 0.2, 0.4, 0.7, 1]

    by_hand = score_checkpoint(ends(made)[0], f"new={made / 'new'}::kept={made / 'kept'}")
    for name in ("new", "kept"):
        for key, value in by_hand[name].items():
            assert points[0][name][key] == pytest.approx(value, abs=1e-9), key
        # (1 - 2 alpha) x the same features: before 0.5 they are A's but for their length, after it B's
        assert points[0.2][name] == points[0.4][name] == points[0][name]
        assert points[0.7][name] == points[1][name]
        assert f"{points[0][name]['rsum']:.1f}" in said

    best = max((points[alpha]["new"]["rsum"], -alpha) for alpha in points)
    assert result["chosen"]["alpha"] == -best[1] and -best[1] in (0, 0.7)
    chosen, _, _ = load_model(out)
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{out}")
    start, end = (load_model(path)[0].state_dict() for path in ends(made))
    alpha = result["chosen"]["alpha"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, chosen.state_dict()[key])
        assert torch.allclose(tensor, (1 - alpha) * start[key] + alpha * end[key], atol=1e-6)
    assert "alpha" in (out / "README.md").read_text() and trained_on([out]) is None


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
    assert "n (new, top-1 %)" in lines[0] and "k (kept)" in lines[0]
    assert lines[1].split()[:3] == ["0", "20.0", "300.0"] and lines[-1].split()[1] == "10.0"
    assert curve.measures == {
        "RSUM",
        "top-1 %",
    }  # two measures: the picture shows shares of the score before
    classes = [
        replace(
            one, accuracies={name: {"top1": 0.3 + 0.1 * one.alpha, "chance": 0.1} for name in "nk"}
        )
        for one in rows
    ]
    curve = choose(classes, ["n"], ["k"], "mean", kept_share=0.99)
    assert (
        curve.measures == {"top-1 %"} and "the zero-shot top-1 on new and on kept" in curve.reason
    )


ROWS = ((0, 100, 300), (0.25, 180, 299), (0.5, 240, 290), (0.75, 260, 250), (1, 260, 200))


@pytest.mark.parametrize(
    ("rule", "share", "alpha"),
    [("kept", 0.99, 0.25), ("kept", 0.95, 0.5), ("kept", 1.0, 0), ("kept", 0.0, 0.75), ("mean", 0.99, 0.5), ("new", 0.99, 0.75),
     (None, 0.99, 0.25)],
)  # fmt: skip
def test_rules(rule, share, alpha):
    curve = choose(points(*ROWS), ["n"], ["k"], rule, kept_share=share)
    assert curve.chosen.alpha == alpha
    assert curve.reason.startswith(f"alpha {alpha:g} has the best")
    line = next(line for line in curve.table().splitlines() if line.endswith("chosen"))
    assert line.split()[0] == f"{alpha:g}"


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
    with pytest.raises(UserError, match="--rule mean needs retrieval sets of the ability to keep"):
        choose(points(*ROWS), ["n"], [], "mean", kept_share=0.9)


def test_sets_that_cannot_choose_are_refused(made):
    new = f"n={made / 'new'}"
    with pytest.raises(UserError, match="both new and kept"):
        CurveSettings(new, new).open()
    with pytest.raises(UserError, match="needs retrieval sets of the ability to keep; give --kept"):
        CurveSettings(new, rule="kept")
    with pytest.raises(UserError, match="nowhere does not exist"):
        CurveSettings("n=/nowhere").open()
