"""The linear probe: features before the projection, logistic regression, and the sets it reads."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torchvision.transforms import ToTensor

from open_clip_zerovl import cli
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import IndexedSet, class_list, open_probe_set
from open_clip_zerovl.evaluate.metrics import (
    accuracies,
    confusion_counts,
    distinct_names,
    most_confused,
)
from open_clip_zerovl.evaluate.probe import (
    fit_logistic,
    middle_of_best,
    probe_report,
    probed_model,
    stored_features,
    stratified_fifth,
)
from open_clip_zerovl.features import embed
from support.colours import COLOURS, MeanColour, colour_set, drawn, write_folder
from support.tars import png, write_tar


def features_of(images: IndexedSet, folder: Path, classes=tuple(COLOURS), tower=None):
    """Features of mean colours, which a later call reads from the folder."""
    return stored_features(probed_model(tower or MeanColour(), ToTensor()), images, classes, folder)


class PowerCut(Exception):
    pass


def test_stored_features_go_on_with_the_missing_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(embed, "LONGEST_RUN", 4)
    images, read, power_fails = colour_set(10), [], True

    def counting(index: int) -> Image.Image:
        if power_fails and index == 9:
            raise PowerCut
        read.append(index)
        return images.read(index)

    counted = drawn(images.path, images.labels, counting)
    with pytest.raises(PowerCut):
        features_of(counted, tmp_path)
    power_fails = False
    read.clear()
    features, targets = features_of(counted, tmp_path)
    assert (
        read == [8, 9]
        and features.shape == (10, 3)
        and targets.tolist() == [i % 3 for i in range(10)]
    )
    read.clear()
    assert torch.equal(features_of(counted, tmp_path)[0], features) and read == []
    # Another tower must not be given these features.
    other = nn.Sequential(MeanColour(), nn.Linear(3, 2))
    assert features_of(counted, tmp_path, tower=other)[0].shape == (10, 2)


def write_colours(folder: Path, turn: int) -> IndexedSet:
    """Class folders of pictures whose names and sizes in bytes do not depend on their colours."""
    for number in range(12):
        place = folder / list(COLOURS)[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        colour = COLOURS[list(COLOURS)[(number + turn) % 3]]
        Image.new("RGB", (8, 8), colour).save(place / f"{number}.bmp")
    return open_probe_set(folder, "train")


def test_changed_pictures_of_the_same_names_and_sizes_are_noticed(tmp_path):
    """Stored features were those of the former pictures."""
    features = []
    for turn in (0, 1, 1):
        images = write_colours(tmp_path / "pictures", turn)
        features.append(features_of(images, tmp_path / "cache")[0])
    assert not torch.equal(*features[:2]) and torch.equal(*features[1:])


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


def test_the_middle_of_equally_good_cs_is_taken():
    assert middle_of_best({1e-5: 0.5, 1e-3: 0.7, 1e-2: 0.7, 1e-1: 0.7, 10.0: 0.6}) == 1e-2
    assert middle_of_best({1e-5: 1.0, 1.0: 1.0}) == 1e-5
    # Far apart, so that any C separates them on the fifth; with the smallest C the fit itself is next to nothing.
    targets = torch.arange(40) % 2
    features = torch.stack(
        [10.0 * targets, torch.randn(40, generator=torch.Generator().manual_seed(0))], 1
    )
    fit = fit_logistic(features, targets)
    assert set(fit.split_accuracy.values()) == {1.0}
    assert 1e-3 < fit.chosen_c < 10


def test_classes_of_one_name_are_written_apart():
    names = distinct_names({"7": "crane", "8": "crane", "9": "cat"})
    report = probe_report(torch.eye(3)[torch.tensor([0, 0, 2])], torch.arange(3), names, {})
    tops = {name: own["top1"] for name, own in report["per_class"].items()}
    assert tops == {"crane (7)": 1.0, "crane (8)": 0.0, "cat": 1.0}
    assert [(one["class"], one["guess"]) for one in report["most_confused"]] == [
        ("crane (8)", "crane (7)")
    ]


def test_confusions_of_a_small_table():
    scores = torch.eye(6)[torch.tensor([0, 0, 1, 1, 1, 2])]
    counts = confusion_counts(scores, torch.tensor([0, 0, 1, 2, 2, 2]))
    assert counts[2].tolist() == [0, 2, 1, 0, 0, 0]
    assert most_confused(counts, list("abcdef")) == [
        {"class": "c", "guess": "b", "count": 2, "of": 3}
    ]


def test_folder_of_classes(tmp_path: Path):
    images = open_probe_set(write_folder(tmp_path / "a", colour_set(6)), "train")
    assert images.labels == ["blue", "blue", "green", "green", "red", "red"]
    assert images.image(5).getpixel((0, 0))[0] > 150
    assert class_list(images, images) == ["blue", "green", "red"]
    with pytest.raises(UserError, match="not a folder of class folders"):
        (tmp_path / "empty").mkdir()
        open_probe_set(tmp_path / "empty", "train")
    with pytest.raises(UserError, match="does not exist"):
        open_probe_set(tmp_path / "nowhere", "train")


def test_features_of_other_pictures_under_the_same_names_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = []
    for seed in range(2):  # two sets at one relative path, of one form
        write_folder(tmp_path / str(seed) / "set", colour_set(6, seed=seed))
        monkeypatch.chdir(tmp_path / str(seed))
        found.append(features_of(open_probe_set("set", "train"), tmp_path / "cache")[0])
    assert not torch.equal(*found)
    for seed in (5, 6):  # two pictures of one size in bytes
        colour_set(6, seed=seed).image(0).save("set/red/000.png", "BMP")
        found.append(features_of(open_probe_set("set", "train"), tmp_path / "cache")[0])
    for before, after in pairwise(found[1:]):
        assert [torch.equal(*pair) for pair in zip(after, before, strict=True)] == [True] * 4 + [
            False,
            True,
        ]


@pytest.mark.timeout(60)
def test_a_pipe_among_the_pictures_is_refused_without_a_wait(tmp_path: Path):
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        os.mkfifo(tmp_path / label / "0.png")
    with pytest.raises(UserError, match="it is not a regular file but a pipe"):
        open_probe_set(tmp_path, "train").image(0)


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
    assert [images.image(i).getpixel((0, 0))[0] for i in range(4)] == [
        200,
        40,
        40,
        0,
    ] and images.names["2"] == "two"
    assert open_probe_set(tmp_path / "set" / "train", "test", label="json:group").labels == [
        "g10",
        "g2",
        "g2",
        "g0",
    ]
    for label, reason in (
        ("json:class", "field 'class'"),
        ("json:list", "is a word"),
        ("txt", "has no .txt; if the class is elsewhere"),
    ):
        with pytest.raises(UserError, match=reason):
            open_probe_set(tmp_path / "set" / "train", "train", label=label)
    write_tar(tmp_path / "bare" / "0.tar", [("a.png", png((0, 0, 0)))])
    with pytest.raises(UserError, match="'a' has no .cls"):
        open_probe_set(tmp_path / "bare", "train")
    # Silent losses: a class without its image, samples with equal keys, a tar cut off between samples.
    write_tar(
        tmp_path / "bare" / "0.tar", [("a.cls", b"1"), ("b.png", png((0, 0, 0))), ("b.cls", b"2")]
    )
    with pytest.raises(UserError, match="'a' has no image"):
        open_probe_set(tmp_path / "bare", "train")
    twice = [
        member
        for i in range(2)
        for member in (("a.png", png((i * 9, 0, 0))), ("a.cls", str(i).encode()))
    ]
    write_tar(tmp_path / "bare" / "0.tar", twice)
    same = open_probe_set(tmp_path / "bare", "train")
    assert same.labels == ["0", "1"] and [same.image(i).getpixel((0, 0))[0] for i in range(2)] == [
        0,
        9,
    ]
    (tmp_path / "bare" / "0.tar").write_bytes((tmp_path / "bare" / "0.tar").read_bytes()[: 4 * 512])
    with pytest.raises(
        UserError,
        match=r"0\.tar is not a readable, uncompressed tar .it is cut off after 2048 bytes",
    ):
        open_probe_set(tmp_path / "bare", "train")


def test_classes_that_do_not_fit_and_broken_images(tmp_path: Path):
    three, two = colour_set(6), drawn("two", ["red", "green"], colour_set(2).read)
    assert class_list(three, two) == ["blue", "green", "red"]
    with pytest.raises(UserError, match="first 'blue'"):
        class_list(two, three)
    with pytest.raises(UserError, match="one class 'red'"):
        class_list(drawn("one", ["red"], two.read), two)
    write_tar(
        tmp_path / "0.tar",
        [("a.png", b"no picture"), ("a.cls", b"0"), ("b.png", png((0, 0, 0))), ("b.cls", b"1")],
    )
    broken = open_probe_set(tmp_path, "train")
    with pytest.raises(UserError, match="the image of sample 'a' cannot be read"):
        features_of(broken, tmp_path / "cache", ["0", "1"])


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
