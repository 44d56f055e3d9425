"""The linear probe: features before the projection, LARS, logistic regression, resuming, and the sets it reads."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torchvision.transforms import ToTensor

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.cli import program as cli
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.indexed import IndexedSample, IndexedSet
from open_clip_zerovl.data.labelled import class_list, open_probe_set
from open_clip_zerovl.data.transforms import image_transform_train
from open_clip_zerovl.embeddings import reading
from open_clip_zerovl.embeddings.encoder import tower_before_projection
from open_clip_zerovl.evaluate.accuracy import accuracies, confusion_counts, most_confused
from open_clip_zerovl.evaluate.probe.features import TowerSettings, cached_features
from open_clip_zerovl.evaluate.probe.lars import (
    LarsSettings,
    head_scores,
    lars,
    learning_rate,
    linear_head,
    train_lars,
)
from open_clip_zerovl.evaluate.probe.linear_probe import _write, confusion_picture
from open_clip_zerovl.evaluate.probe.logistic import fit_logistic, middle_of_best, stratified_fifth
from support.tars import png, write_tar

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@dataclass(frozen=True)
class Drawn(IndexedSet):
    """Pictures that a function makes."""

    read: Callable[[int], Image.Image] | None = None

    def image(self, index: int) -> Image.Image:
        return self.read(index)


def drawn(path: str, labels: list[str], read: Callable[[int], Image.Image]) -> Drawn:
    return Drawn(path, [IndexedSample("", "", label=label) for label in labels], read=read)


def colour_set(count: int, *, seed: int = 0, mixed_up: bool = False, px: int = 40) -> IndexedSet:
    """Noisy pictures of three colours; the mean colour separates the classes. Shuffled labels carry no information."""
    rng = np.random.default_rng(seed)
    names = list(COLOURS)
    labels = [names[i % 3] for i in range(count)]
    pictures = []
    for label in labels:
        pixels = np.array(COLOURS[label]) + rng.integers(-30, 31, size=(px, px, 3))
        pictures.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    shown = rng.permutation(labels).tolist() if mixed_up else labels
    return drawn(f"colours-{seed}", shown, lambda index: pictures[index])


class MeanColour(nn.Module):
    """A frozen tower whose features are the three mean colours."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3))


def fit_colours(
    tmp_path: Path, train: IndexedSet, settings: LarsSettings, **options: object
) -> tuple:
    options = {
        "tower": MeanColour(),
        "transform": ToTensor(),
        "evaluate": lambda head: 0.0,
        **options,
    }
    tower, transform = options.pop("tower"), options.pop("transform")
    return train_lars(
        tower,
        train,
        transform,
        list(COLOURS),
        settings,
        state_file=tmp_path / "state.pt",
        **options,
    )


# ---------------------------------------------------------------------------------------------------------------------
# A closed form: separable features
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed_up", [False, True])
def test_separable_features_reach_all_and_meaningless_labels_chance(tmp_path: Path, mixed_up: bool):
    train, test = colour_set(90, mixed_up=mixed_up), colour_set(60, seed=1)
    tower, classes = MeanColour(), list(COLOURS)
    features = {
        name: cached_features(tower, images, ToTensor(), classes, tmp_path / "cache", name=name)
        for name, images in (("train", train), ("test", test))
    }
    settings = LarsSettings(epochs=60, batch_size=30, lr=6.4, batch_norm=True)
    head, history = fit_colours(
        tmp_path, train, settings, tower_settings=TowerSettings(micro_batch=30)
    )
    test_features, targets = features["test"]
    by_lars = accuracies(head_scores(head, test_features), targets)["top1"]
    by_logistic = accuracies(fit_logistic(*features["train"]).scores(test_features), targets)[
        "top1"
    ]
    assert len(history) == 60
    if mixed_up:
        assert history[-1]["train_accuracy"] < 0.7 and by_lars < 0.8 and by_logistic < 0.8
    else:
        assert history[-1]["train_accuracy"] == by_lars == by_logistic == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# LARS
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_norm", [False, True])
def test_lars_step_equals_one_by_hand(batch_norm):
    """As in the released code, features as they are and both parameters adapted; or standardised, the bias by plain SGD."""
    settings = LarsSettings(
        momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, batch_norm=batch_norm
    )
    head = linear_head(4, 3, batch_norm=batch_norm).double()
    generator = torch.Generator().manual_seed(1)
    optimizer = lars(head, settings)
    for group in optimizer.param_groups:
        group["lr"] = 6.4
    weight, bias = head[1].weight.detach().clone(), head[1].bias.detach().clone()
    velocity_w, velocity_b = torch.zeros_like(weight), torch.zeros_like(bias)
    for _ in range(3):
        x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (10,), generator=generator)
        F.cross_entropy(head(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        # The gradient of softmax regression in closed form, on features standardised over the batch.
        z = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-6).sqrt() if batch_norm else x
        error = ((z @ weight.T + bias).softmax(1) - F.one_hot(y, 3)) / 10
        gradient_w, gradient_b = error.T @ z, error.sum(0)
        velocity_w = 0.9 * velocity_w + 0.001 * weight.norm() / gradient_w.norm() * gradient_w
        velocity_b = (
            0.9 * velocity_b
            + (1.0 if batch_norm else 0.001 * bias.norm() / gradient_b.norm()) * gradient_b
        )
        weight, bias = weight - 6.4 * velocity_w, bias - 6.4 * velocity_b
    # timm adds eps = 1e-8 to the gradient's norm.
    torch.testing.assert_close(head[1].weight.detach(), weight, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(head[1].bias.detach(), bias, rtol=1e-6, atol=1e-9)


def test_the_head_begins_as_torchs_linear_layer_does():
    """The released code's; the other one is the control. Both follow from the seed alone."""
    torch.manual_seed(5)
    linear = linear_head(400, 300)[-1]
    bound = 1 / math.sqrt(400)
    for parameter in linear.parameters():
        assert parameter.abs().max() <= bound and parameter.abs().max() > 0.95 * bound
        assert parameter.std().item() == pytest.approx(
            nn.Linear(400, 300).weight.std().item(), rel=0.1
        )
    assert torch.equal(linear_head(400, 300)[-1].weight, linear.weight)
    other = linear_head(400, 300, batch_norm=True)
    assert isinstance(other[0], nn.BatchNorm1d) and other[1].weight.std().item() == pytest.approx(
        0.01, rel=0.05
    )
    assert not other[1].bias.any()


def test_learning_rate_warms_up_then_falls_to_zero():
    rates = [learning_rate(step, 90, 6.4, 1 / 9) for step in range(90)]
    assert rates[:10] == pytest.approx([0.64 * (i + 1) for i in range(10)])
    assert rates[10] == 6.4 and rates[50] == pytest.approx(3.2)
    assert all(np.diff(rates[10:]) < 0) and rates[-1] < 0.01
    assert learning_rate(0, 5, 1.0, 0.0) == 1.0


def test_micro_batches_do_not_change_the_step(tmp_path: Path):
    heads = []
    for micro_batch in (48, 7):
        folder = tmp_path / str(micro_batch)
        settings, by = (
            LarsSettings(epochs=3, batch_size=48, lr=1.0),
            TowerSettings(micro_batch=micro_batch),
        )
        heads.append(
            fit_colours(folder, colour_set(96), settings, tower_settings=by)[0].state_dict()
        )
    for name in heads[0]:
        torch.testing.assert_close(heads[0][name], heads[1][name], rtol=1e-5, atol=1e-7)


def test_the_defaults_are_the_papers_and_a_batch_is_at_most_the_set(tmp_path: Path):
    settings = LarsSettings()
    assert (settings.epochs, settings.batch_size, settings.lr, settings.weight_decay) == (
        90,
        16384,
        6.4,
        0.0,
    )
    large = fit_colours(tmp_path / "a", colour_set(64), LarsSettings(epochs=2))[0]
    whole = fit_colours(tmp_path / "b", colour_set(64), LarsSettings(epochs=2, batch_size=64))[0]
    assert torch.equal(large[1].weight, whole[1].weight)


# ---------------------------------------------------------------------------------------------------------------------
# Resuming
# ---------------------------------------------------------------------------------------------------------------------


class PowerCut(Exception):
    pass


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, clip_runs):
    """Bit for bit, with a real tower and AutoAugment; cut in the middle of the third epoch."""
    tower = tower_before_projection(load_model(clip_runs[0])[0].visual)
    options = {
        "tower": tower,
        "transform": image_transform_train(32, area=(0.08, 1.0), auto_augment="imagenet"),
        "tower_settings": TowerSettings(micro_batch=5),
    }
    settings = LarsSettings(epochs=5, batch_size=12, lr=3.0)
    train = colour_set(30)
    whole, history = fit_colours(tmp_path / "whole", train, settings, **options)

    reads = 0

    def failing_read(index: int) -> Image.Image:
        nonlocal reads
        reads += 1
        if (
            reads == 1 + 2 * 24 + 10
        ):  # one for the width of the features, two epochs of two batches, a part of one
            raise PowerCut
        return train.read(index)

    cut = drawn(train.path, train.labels, failing_read)
    with pytest.raises(PowerCut):
        fit_colours(tmp_path / "cut", cut, settings, **options)
    torch.randn(17)  # the process's own generator must not matter
    resumed, resumed_history = fit_colours(tmp_path / "cut", train, settings, **options)
    assert resumed_history == history
    for key, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[key]), key

    other = fit_colours(tmp_path / "other", train, replace(settings, seed=1), **options)[0]
    assert not torch.equal(other[1].weight, whole[1].weight)
    for changed, more, words in (
        (replace(settings, lr=2.0), {}, "this call has lr 2.0"),
        (settings, {"tower_settings": TowerSettings(micro_batch=4)}, "has micro_batch 4"),
    ):
        with pytest.raises(UserError, match=words):
            fit_colours(tmp_path / "cut", train, changed, **{**options, **more})


def test_cached_features_go_on_with_the_missing_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reading, "UNIT_SAMPLES", 4)
    images, read, power_fails = colour_set(10), [], True

    def counting(index: int) -> Image.Image:
        if power_fails and index == 9:
            raise PowerCut
        read.append(index)
        return images.read(index)

    counted = drawn(images.path, images.labels, counting)
    arguments = (ToTensor(), list(COLOURS), tmp_path)
    with pytest.raises(PowerCut):
        cached_features(MeanColour(), counted, *arguments)
    power_fails = False
    read.clear()
    features, targets = cached_features(MeanColour(), counted, *arguments)
    assert (
        read == [8, 9]
        and features.shape == (10, 3)
        and targets.tolist() == [i % 3 for i in range(10)]
    )
    read.clear()
    assert (
        torch.equal(cached_features(MeanColour(), counted, *arguments)[0], features) and read == []
    )
    # Another tower must not be given these features.
    other = nn.Sequential(MeanColour(), nn.Linear(3, 2))
    assert cached_features(other, counted, *arguments)[0].shape == (10, 2)


def write_colours(folder: Path, turn: int) -> IndexedSet:
    """Class folders of pictures whose names and sizes in bytes do not depend on their colours."""
    for number in range(12):
        place = folder / list(COLOURS)[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        colour = COLOURS[list(COLOURS)[(number + turn) % 3]]
        Image.new("RGB", (8, 8), colour).save(place / f"{number}.bmp")
    return open_probe_set(folder, "train")


def test_changed_pictures_of_the_same_names_and_sizes_are_noticed(tmp_path):
    """A finished probe gave its old result for them, and stored features were those of the former pictures."""
    settings = LarsSettings(epochs=1, batch_size=6)
    features = []
    for turn in (0, 1):
        images = write_colours(tmp_path / "pictures", turn)
        arguments = (ToTensor(), list(COLOURS), tmp_path / "cache")
        features.append(cached_features(MeanColour(), images, *arguments)[0])
        if turn == 0:
            first = fit_colours(tmp_path, images, settings)[1]
            shutil.copytree(tmp_path / "pictures", tmp_path / "copy")
            assert fit_colours(tmp_path, images, settings)[1] == first  # negative control
    assert not torch.equal(*features)
    with pytest.raises(
        UserError, match=r"state.pt was begun before the content of the data set changed"
    ):
        fit_colours(tmp_path, images, settings)
    shutil.rmtree(tmp_path / "pictures")
    shutil.copytree(tmp_path / "copy", tmp_path / "pictures", copy_function=shutil.copyfile)
    again = open_probe_set(tmp_path / "pictures", "train")  # with other times
    assert fit_colours(tmp_path, again, settings)[1] == first


# ---------------------------------------------------------------------------------------------------------------------
# The quick way, and scores
# ---------------------------------------------------------------------------------------------------------------------


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
    assert fit.split_accuracy[fit.chosen_c] == max(fit.split_accuracy.values())


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


def test_a_class_with_dollar_signs_is_a_name_and_no_formula():
    names = ["$\\frac{$ bill", "cat"]
    picture = confusion_picture(np.eye(2, dtype=int), names, title=r"model of $\frac{$")
    assert picture.startswith(b"\x89PNG")


def test_classes_of_one_name_are_written_apart(tmp_path: Path):
    facts = {"way": "quick", "model": "m", "test": {"images": 3}}
    named = {"7": "crane", "8": "crane", "9": "cat"}
    found = _write(
        tmp_path, facts, {}, named, torch.eye(3)[torch.tensor([0, 0, 2])], torch.arange(3)
    )
    tops = {name: own["top1"] for name, own in found["per_class"].items()}
    assert tops == {"crane (7)": 1.0, "crane (8)": 0.0, "cat": 1.0}
    assert [(one["class"], one["guess"]) for one in found["most_confused"]] == [
        ("crane (8)", "crane (7)")
    ]


def test_confusions_of_a_small_table():
    scores = torch.eye(6)[torch.tensor([0, 0, 1, 1, 1, 2])]
    counts = confusion_counts(scores, torch.tensor([0, 0, 1, 2, 2, 2]))
    assert counts[2].tolist() == [0, 2, 1, 0, 0, 0]
    assert most_confused(counts, list("abcdef")) == [
        {"class": "c", "guess": "b", "count": 2, "of": 3}
    ]
    picture = Image.open(io.BytesIO(confusion_picture(counts, list("abcdef"), title="small")))
    assert picture.format == "PNG" and picture.width > 500


# ---------------------------------------------------------------------------------------------------------------------
# Sets
# ---------------------------------------------------------------------------------------------------------------------


def write_folder(root: Path, images: IndexedSet) -> Path:
    for i, label in enumerate(images.labels):
        (root / label).mkdir(parents=True, exist_ok=True)
        images.image(i).save(root / label / f"{i:03d}.png")
    return root


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
    arguments = (ToTensor(), ["blue", "green", "red"], tmp_path / "cache")
    found = []
    for seed in range(2):  # two sets at one relative path, of one form
        write_folder(tmp_path / str(seed) / "set", colour_set(6, seed=seed))
        monkeypatch.chdir(tmp_path / str(seed))
        found.append(cached_features(MeanColour(), open_probe_set("set", "train"), *arguments)[0])
    assert not torch.equal(*found)
    for seed in (5, 6):  # two pictures of one size in bytes
        colour_set(6, seed=seed).image(0).save("set/red/000.png", "BMP")
        found.append(cached_features(MeanColour(), open_probe_set("set", "train"), *arguments)[0])
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
        cached_features(MeanColour(), broken, ToTensor(), ["0", "1"], tmp_path / "cache")


INAT = "00000_Animalia_Annelida_Clitellata_Haplotaxida_Lumbricidae_Lumbricus_terrestris"
BIRDS = [
    "001.Black_footed_Albatross/a.jpg",
    "001.Black_footed_Albatross/b.jpg",
    "002.Laysan_Albatross/c.jpg",
]
INAT17 = {
    "images": [{"id": 7, "file_name": "val/a.jpg"}],
    "annotations": [{"image_id": 7, "category_id": 3}],
    "categories": [{"id": 3, "name": "Pica pica"}],
}
# dataset -> split, labels wanted, files with their text, pictures
DATASETS = {
    "food101": ("train", ["pho"], {
        "food-101/meta/train.json": '{"pho": ["pho/1"], "waffles": []}',
        "food-101/meta/test.json": '{"pho": ["pho/2"], "waffles": []}',
    }, ["food-101/images/pho/1.jpg", "food-101/images/pho/2.jpg"]),
    "pets": ("test", ["New Pug", "Abyssinian"], {
        "oxford-iiit-pet/annotations/trainval.txt": "Abyssinian_1 1 1 1\nnew_pug_7 2 2 1\n",
        "oxford-iiit-pet/annotations/test.txt": "new_pug_8 2 2 1\nAbyssinian_2 1 1 1\n",
    }, ["oxford-iiit-pet/images/new_pug_8.jpg"]),
    "aircraft": ("train", ["727-200"], {
        "fgvc-aircraft-2013b/data/variants.txt": "707-320\n727-200\n",
        "fgvc-aircraft-2013b/data/images_variant_trainval.txt": "0000001 727-200\n",
    }, ["fgvc-aircraft-2013b/data/images/0000001.jpg"]),
    "inat2021": ("test", [INAT], {}, [f"2021_valid/{INAT}/a.jpg"]),
    "cub": ("train", ["001.Black_footed_Albatross", "002.Laysan_Albatross"], {
        "CUB_200_2011/images.txt": "".join(f"{i} {file}\n" for i, file in enumerate(BIRDS, start=1)),
        "CUB_200_2011/train_test_split.txt": "1 1\n2 0\n3 1\n",
    }, [f"CUB_200_2011/images/{file}" for file in BIRDS]),
    "inat17": ("test", ["Pica pica"], {"val2017.json": json.dumps(INAT17)}, ["val/a.jpg"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_that_bring_their_split(tmp_path: Path, kind: str):
    split, labels, texts, pictures = DATASETS[kind]
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    if kind in ("cub", "inat17"):
        with pytest.raises(UserError, match=r"/a\.jpg, its first image, is not there"):
            open_probe_set(f"{kind}:{tmp_path}", split)
    for red, file in enumerate(pictures):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (50 * red, 0, 0)).save(tmp_path / file)
    found = open_probe_set(f"{kind}:{tmp_path}", split)
    assert found.labels == labels and found.image(0).size == (8, 8)
    if kind == "cub":  # a folder's own path, and the other split: file b
        other = open_probe_set(f"cub:{tmp_path / 'CUB_200_2011'}", "test")
        assert other.image(0).getpixel((0, 0))[0] in range(45, 56) and len(other) == 1


@pytest.mark.parametrize(
    "kind", ["cub", "food101", "pets", "aircraft", "places365", "inat2021", "inat17"]
)
def test_a_dataset_that_is_not_there_is_a_sentence(tmp_path: Path, kind: str):
    with pytest.raises(
        UserError, match=f"{kind} is not complete under .*nothing is downloaded here"
    ):
        open_probe_set(f"{kind}:{tmp_path}", "train")
    with pytest.raises(UserError, match="unknown dataset 'cifar'"):
        open_probe_set(f"cifar:{tmp_path}", "train")


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def test_command_both_ways(tmp_path: Path, clip_runs, capsys: pytest.CaptureFixture[str]):
    train, test = (
        write_folder(tmp_path / f"set{seed}", colour_set(n, seed=seed))
        for seed, n in enumerate((30, 12))
    )
    common = ["linear-probe", clip_runs[0], *f"--train {train} --test {test} --device cpu".split()]
    options = {
        "quick": [],
        "paper": ["--epochs", "3", "--batch-size", "15", "--micro-batch", "8", "--lr", "5"],
    }
    for way, extra in options.items():
        out = tmp_path / way
        arguments = [*common, "--out", str(out), "--way", way, *extra]
        assert cli.main(arguments) == 0
        result = json.loads((out / "linear_probe.json").read_text())
        assert (
            result["way"] == way
            and result["feature_width"] == 32
            and result["test"]["images"] == 12
        )
        assert result["classes"] == 3 and Image.open(out / "confusion.png").width > 400
        if way == "paper":
            assert len(result["history"]) == 3 and result["settings"]["lr"] == 5
            assert result["history"][-1]["test_accuracy"] == result["top1"]
        else:
            assert result["top1"] == 1.0 and result["converged"]
        # Again: everything exists already, with the same result.
        assert cli.main(arguments) == 0
        assert json.loads((out / "linear_probe.json").read_text()) == result
    assert (
        "linear probe, 3 classes, 12 test images: top-1 100.0 [75.7 to 100.0] %, mean per class 100.0 %, chance 33.3 %"
        in (capsys.readouterr().out)
    )
    assert cli.main([*common, "--out", str(tmp_path / "paper"), "--epochs", "4"]) == 2
    assert "and this call has epochs 4; repeat the earlier call" in capsys.readouterr().err
