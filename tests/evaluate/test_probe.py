"""The linear probe: features before the projection, logistic regression, and the sets it reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torchvision.transforms import ToTensor

from open_clip_zerovl import cli
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import class_list, open_probe_set
from open_clip_zerovl.evaluate.metrics import (
    accuracies,
    distinct_names,
)
from open_clip_zerovl.evaluate.probe import (
    fit_logistic,
    middle_of_best,
    probed_model,
    stratified_fifth,
)
from open_clip_zerovl.features.embed import picture_features
from support.colours import MeanColour, colour_set, drawn, write_folder
from support.tars import png, write_tar


def test_quick_way_agrees_with_scikit_learn_on_the_same_features():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 12))
    targets = rng.integers(4, size=400)
    features = (
        torch.tensor(centres[targets] + 1.5 * rng.normal(size=(400, 12)), dtype=torch.float32) * 7
        + 3
    )
    features[:, 5] = 1.25  # a feature that never changes
    fit = fit_logistic(features[:300], torch.tensor(targets[:300]))
    own = make_pipeline(StandardScaler(), LogisticRegression(C=fit.chosen_c, max_iter=1000))
    own.fit(features[:300].double().numpy(), targets[:300])
    scores = fit.scores(features[300:])
    np.testing.assert_allclose(
        scores.exp(), own.predict_proba(features[300:].double().numpy()), atol=1e-6
    )
    assert fit.converged and 0.6 < accuracies(scores, torch.tensor(targets[300:]))["top1"] < 1
    held, rest = stratified_fifth(targets[:300], 0)
    own.fit(features[rest].double().numpy(), targets[rest])
    wanted = own.score(features[held].double().numpy(), targets[held])
    assert fit.split_accuracy[fit.chosen_c] == max(fit.split_accuracy.values())
    assert fit.split_accuracy[fit.chosen_c] == pytest.approx(wanted, abs=0.02) and wanted < 1


def test_the_fifth_that_chooses_c_holds_a_fifth_of_each_class():
    targets = np.repeat([0, 1, 2], [50, 20, 5])
    for seed in range(5):
        held, rest = stratified_fifth(targets, seed)
        assert np.bincount(targets[held]).tolist() == [10, 4, 1]
        assert sorted([*held, *rest]) == list(range(75))
    held, rest = stratified_fifth(np.arange(20) // 2, 0)  # ten classes of two: each keeps one
    assert (
        len(held) == 4
        and set(targets[rest].tolist()) >= {0}
        and len(np.unique((np.arange(20) // 2)[rest])) == 10
    )
    with pytest.raises(UserError, match="leave none to choose C"):
        stratified_fifth(np.arange(8), 0)


def test_classes_of_one_name_are_written_apart():
    names = distinct_names({"7": "crane", "8": "crane", "9": "cat"})
    report = accuracies(torch.eye(3)[torch.tensor([0, 0, 2])], torch.arange(3), names)
    tops = {name: own["top1"] for name, own in report["per_class"].items()}
    assert tops == {"crane (7)": 1.0, "crane (8)": 0.0, "cat": 1.0}
    assert [(one["class"], one["guess"]) for one in report["most_confused"]] == [
        ("crane (8)", "crane (7)")
    ]


def test_confusions_of_a_small_table():
    scores = torch.eye(6)[torch.tensor([0, 0, 1, 1, 1, 2])]
    found = accuracies(scores, torch.tensor([0, 0, 1, 2, 2, 2]), list("abcdef"))
    assert found["most_confused"] == [{"class": "c", "guess": "b", "count": 2, "of": 3}]


def test_the_middle_of_equally_good_cs_is_taken():
    """Any C separates the classes; with the smallest the fit itself is next to nothing."""
    assert middle_of_best({1e-5: 1.0, 1.0: 1.0}) == 1e-5
    targets = torch.arange(40) % 2
    features = torch.stack([10.0 * targets, torch.arange(40) % 7], 1)
    fit = fit_logistic(features, targets)
    assert set(fit.split_accuracy.values()) == {1.0} and 1e-3 < fit.chosen_c < 10


def test_shards_with_numbers_and_with_json(tmp_path: Path):
    for shard, numbers in enumerate(([10, 2], [2, 0])):
        members = []
        for i, number in enumerate(numbers):
            members += [(f"{i}.png", png((number * 20, 0, 0))), (f"{i}.cls", str(number).encode())]
            members.append((f"{i}.json", json.dumps({"group": f"g{number}", "list": []}).encode()))
        write_tar(tmp_path / "set" / "train" / f"{shard}.tar", members)
    (tmp_path / "set" / "classnames.txt").write_text("zero\none\ntwo\n")
    images = open_probe_set(f"{tmp_path}/set/train/{{0..1}}.tar", "train")
    assert images.labels == ["10", "2", "2", "0"] and class_list(images, images) == ["0", "2", "10"]
    reds = [images.image(i).getpixel((0, 0))[0] for i in range(4)]
    assert reds == [200, 40, 40, 0] and images.names["2"] == "two"
    grouped = open_probe_set(tmp_path / "set" / "train", "test", label="json:group")
    assert grouped.labels == ["g10", "g2", "g2", "g0"]


def test_classes_that_do_not_fit_and_what_cannot_be_read(tmp_path: Path):
    three, two = colour_set(6), drawn("two", ["red", "green"], colour_set(2).read)
    assert class_list(three, two) == ["blue", "green", "red"]
    members = [("a.png", b"x"), ("a.cls", b"0"), ("a.json", b'{"list": []}')]
    write_tar(tmp_path / "0.tar", [*members, ("b.png", png((0, 0, 0))), ("b.cls", b"1")])
    write_tar(tmp_path / "bare" / "0.tar", members[:1])
    probed = probed_model(MeanColour(), ToTensor())
    for words, refused in {
        "first 'blue'": lambda: class_list(two, three),
        "one class 'red'": lambda: class_list(drawn("one", ["red"], two.read), two),
        "does not exist": lambda: open_probe_set(tmp_path / "nowhere", "train"),
        "'a' has no .cls": lambda: open_probe_set(tmp_path / "bare", "train"),
        "field 'class'": lambda: open_probe_set(tmp_path, "train", label="json:class"),
        "is a word": lambda: open_probe_set(tmp_path, "train", label="json:list"),
        "no .txt; if the class is elsewhere": lambda: open_probe_set(
            tmp_path, "train", label="txt"
        ),
        "the image of sample 'a' cannot be read": lambda: picture_features(
            probed, open_probe_set(tmp_path, "train"), None, batch_size=2
        ),
    }.items():
        with pytest.raises(UserError, match=words):
            refused()


def test_the_command(tmp_path: Path, clip_runs, capsys: pytest.CaptureFixture[str]):
    train, test = (
        write_folder(tmp_path / f"set{seed}", colour_set(n, seed=seed))
        for seed, n in enumerate((30, 12))
    )
    words = f"--train {train} --test {test} --out {tmp_path / 'out'} --device cpu".split()
    results = []
    for _ in range(2):  # again: the features are there, with the same result
        assert cli.main(["linear-probe", clip_runs[0], *words]) == 0
        results.append(json.loads((tmp_path / "out" / "linear_probe.json").read_text()))
    result, again = results
    assert result == again and result["feature_width"] == 32 and result["test"]["images"] == 12
    assert result["top1"] == 1.0 and result["converged"]
    assert (
        "linear probe, 3 classes, 12 test images: top-1 100.0 [75.7 to 100.0] %, mean per class 100.0 %, chance 33.3 %"
        in capsys.readouterr().out
    )
