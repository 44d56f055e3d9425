"""`zerovl zero-shot`: accuracies by hand and equal to CLIP_benchmark's, the layouts of sets, templates, the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset
from clip_benchmark.metrics import zeroshot_classification
from scipy.stats import binomtest
from torch.utils.data import DataLoader

from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.metrics import accuracies, is_above_chance, wilson
from open_clip_zerovl.evaluate.settings import ZeroShotSettings
from open_clip_zerovl.evaluate.zero_shot import (
    CLIP_TEMPLATES,
    class_features,
    classify,
    open_labelled_set,
)
from open_clip_zerovl.features.encoder import FrozenModel
from support.tars import png, write_tar
from support.tiny_clip import picture, write_classes

NAMES = ["red cat", "dog", "small house", "moon", "sun", "tree", "face"]
TEMPLATES = ["a {c}", "the big {c} of the moon"]


def write_labels(root: Path, labels: list[int], *, names: str | None, shards: int = 1) -> str:
    """CLIP_benchmark's layout with a random picture of each label, and classnames.txt if names are given."""
    rng = np.random.default_rng(3)
    for shard, part in enumerate(np.array_split(np.arange(len(labels)), shards)):
        members = []
        for i in part.tolist():
            members += [(f"{i:03d}.png", picture(rng)), (f"{i:03d}.cls", b"%d" % labels[i])]
        write_tar(root / "test" / f"{shard}.tar", members)
    (root / "test" / "nshards.txt").write_text(f"{shards}")
    if names is not None:
        (root / "classnames.txt").write_text(names)
    return str(root)


def test_accuracies_by_hand_with_ties_by_expectation():
    scores = torch.zeros(4, 6)
    scores[0, 1], scores[1, 0], scores[2, :3] = 1, 1, 1
    found = accuracies(
        scores, torch.tensor([1, 1, 2, 5])
    )  # first; tied behind one; one of three first; one of six
    assert found["top1"] == pytest.approx((1 + 0 + 1 / 3 + 1 / 6) / 4)
    assert found["top5"] == pytest.approx((1 + 4 / 5 + 1 + 5 / 6) / 4)
    assert (
        found["mean_per_class"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 6) / 3)
        and found["chance"] == 1 / 6
    )
    assert {index: one["images"] for index, one in found["per_class"].items()} == {1: 2, 2: 1, 5: 1}
    assert "top5" not in accuracies(scores[:, :5], torch.tensor([1, 1, 2, 4]))


@pytest.mark.parametrize(("guesses", "above"), [([0] * 100, False), ([0] * 80 + [1] * 20, True)])
def test_naming_the_commonest_class_is_no_more_than_chance(guesses, above):
    """80 of 100 pictures are of one class: top-1 is 80 % for a model that looks at none."""
    scores = torch.nn.functional.one_hot(torch.tensor(guesses), 2).float()
    assert is_above_chance(accuracies(scores, torch.tensor([0] * 80 + [1] * 20))) is above


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_refused(bad):
    """A class of NaN was always right: 100 % from NaN in the text projection."""
    scores = torch.eye(3)
    scores[:, 1] = bad
    with pytest.raises(UserError, match=r"1 of 3 classes \(first: number 1\) are NaN or infinite"):
        accuracies(scores, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(("right", "count"), [(0, 12), (3, 40), (40, 40), (1, 1)])
def test_intervals_are_wilsons(right, count):
    wanted = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right / count, count, 1.959964) == pytest.approx(
        (wanted.low, wanted.high), abs=1e-6
    )


def test_results_equal_clip_benchmarks(tmp_path, export, capsys):
    """The same folder by both programs: their reader, classifier and metrics, in full precision."""
    labels = np.random.default_rng(0).integers(0, 6, 40).tolist()  # the last class has no picture
    root = write_labels(tmp_path / "set", labels, names="\n".join(NAMES) + "\n", shards=2)
    Path(root, "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{export}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{export}")
    theirs = build_wds_dataset("wds/set", transform, data_dir=root)
    loader = DataLoader(theirs.batched(16), batch_size=None)
    weights = zeroshot_classification.zero_shot_classifier(
        model.eval(), tokenizer, theirs.classes, theirs.templates, "cpu", amp=False
    )
    logits, target = zeroshot_classification.run_classification(
        model, weights, loader, "cpu", amp=False
    )
    accuracy1, accuracy5 = zeroshot_classification.accuracy(logits, target, topk=(1, 5))
    recall = zeroshot_classification.balanced_accuracy_score(target, logits.argmax(1))

    output = tmp_path / "ours.json"
    assert main(f"zero-shot {export} --data s={root} --device cpu --output {output}".split()) == 0
    written = json.loads(output.read_text())
    ours = written["results"]["s"]
    assert written["templates"]["s"] == TEMPLATES and ours["classes"] == 7
    for key, value in {"top1": accuracy1, "top5": accuracy5, "mean_per_class": recall}.items():
        assert ours[key] == pytest.approx(value, abs=1e-9), key
    assert 0 < accuracy1 < accuracy5 < 1
    assert list(ours["per_class"]) == NAMES[:6]
    assert "s is not above chance: top-1" in capsys.readouterr().out
    # And score by score.
    opened, frozen = (
        open_labelled_set(root),
        FrozenModel("m", model.encode_image, model.encode_text, tokenizer),
    )
    images = frozen.images(torch.stack([transform(opened.images.image(i)) for i in range(40)]))
    scores = classify(images, class_features(opened.captions(), frozen.texts))
    torch.testing.assert_close(100 * scores, logits, rtol=0, atol=1e-4)
    # Negative control: other templates give other scores.
    other = class_features([["x"]] * 7, frozen.texts)
    assert (100 * classify(images, other) - logits).abs().max() > 1e-3


def test_layouts(tmp_path):
    flat = open_labelled_set(str(write_classes(tmp_path / "flat", "b_c 001.A_bird")))
    assert flat.images.labels == ["001.A_bird"] * 2 + ["b_c"] * 2 and flat.names == [
        "A bird",
        "b c",
    ]
    assert flat.templates == CLIP_TEMPLATES and len(CLIP_TEMPLATES) == 7
    write_classes(tmp_path / "split" / "test", "a b")
    write_classes(tmp_path / "split" / "train", "a b", each=5)
    splits = {
        split: open_labelled_set(f"{tmp_path}/split", ZeroShotSettings(split=split))
        for split in ("test", "train")
    }
    assert {split: len(one.images) for split, one in splits.items()} == {"test": 4, "train": 10}
    with pytest.raises(
        UserError,
        match="no folder .val., but test, train: name one of these folders as the set, or choose one",
    ):
        open_labelled_set(
            f"{tmp_path}/split", ZeroShotSettings(split="val")
        )  # not both as if they were sources
    for source, classes in (("shop", "a b"), ("web", "b c")):
        write_classes(tmp_path / "two" / source, classes)
    two = open_labelled_set(f"{tmp_path}/two")
    assert two.images.labels == [*"aabb", *"bbcc"] and (
        [one.source for one in two.images.samples] == ["shop"] * 4 + ["web"] * 4
    )
    assert list(two.classes) == ["a", "b", "c"]
    files = [("0.png", png((1, 2, 3))), ("0.json", b'{"kind": "cat"}'), ("1.png", png((9, 2, 3)))]
    write_tar(tmp_path / "shards" / "0.tar", [*files, ("1.json", b'{"kind": "dog"}')])
    assert open_labelled_set(f"{tmp_path}/shards", ZeroShotSettings(label="json:kind")).names == [
        "cat",
        "dog",
    ]


def test_imagenets_folders_have_their_names(tmp_path):
    digits = open_labelled_set(write_labels(tmp_path / "digits", [0, 1], names="0\n1\n"))
    assert digits.names == ["0", "1"]  # as CLIP_benchmark names MNIST's
    part = open_labelled_set(str(write_classes(tmp_path / "some", "n01440764 n02102040", each=1)))
    assert part.names == ["tench", "English Springer Spaniel"]


@pytest.mark.parametrize(
    ("labels", "names", "sentence"),
    [
        (
            [1, 2, 3],
            "cat\ndog\nsun\n",
            "classnames.txt names the classes 0 to 2, .* has the label '3'",
        ),  # shifted
        ([0, 1, 2], "cat\ndog\n", "classnames.txt names the classes 0 to 1, .* has the label '2'"),
        (
            [0, 1, 2],
            "cat\n\nsun\n",
            r"1 of 3 classes of .* have no words for captions \(first: '1'\)",
        ),
        (
            [0, 1],
            None,
            r"2 of 2 classes of .* have no words for captions \(first: '0'\): name them by their folders, .* --class-names",
        ),
    ],
)
def test_labels_without_words_are_refused_and_can_be_named(tmp_path, labels, names, sentence):
    where = write_labels(tmp_path / "set", labels, names=names)
    with pytest.raises(UserError, match=sentence):
        open_labelled_set(where)
    (tmp_path / "names.json").write_text(
        json.dumps({str(label): f"word {label}" for label in labels})
    )
    named = open_labelled_set(where, ZeroShotSettings(class_names=tmp_path / "names.json"))
    assert dict(zip(named.classes, named.names, strict=True)) == {
        str(label): f"word {label}" for label in labels
    }


def test_templates_lie_where_class_names_do_and_a_split_must_exist(tmp_path):
    """A set and its split, named alone, are one: the split had the set's class names, and CLIP's templates."""
    root = tmp_path / "set"
    where = write_labels(root, [0, 1], names="cat\ndog\n")
    (root / "zeroshot_classification_templates.txt").write_text("my {c}\n")
    for place in (where, f"{where}/test", f"{where}/test/0.tar"):
        opened = open_labelled_set(place)
        assert (opened.names, opened.templates) == (["cat", "dog"], ("my {c}",)), place
    flat, train = (
        str(write_classes(tmp_path / "flat", "x y", each=1)),
        ZeroShotSettings(split="train"),
    )
    for place, settings, sentence in (
        (
            flat,
            ZeroShotSettings(split="nonsense"),
            "flat has no split 'nonsense'; leave --split out",
        ),
        (flat, train, "flat has no split 'train'; leave"),
        (where, train, "set has no split 'train'; leave"),
        (f"{where}/test/0.tar", train, "has no split 'train'; leave"),
    ):
        with pytest.raises(UserError, match=sentence):
            open_labelled_set(place, settings)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_templates_and_names_may_be_files(tmp_path, encoding):
    """The mark that an editor writes was a part of the first class' name and of the first caption."""
    root = str(write_classes(tmp_path / "set", "x y"))
    lines = "'ein {}',\n\nlambda c: f\"sch\u00f6n: {c}\",\n"  # as open_clip has them
    (tmp_path / "t.txt").write_bytes(lines.encode(encoding))
    (tmp_path / "names.txt").write_bytes("gr\u00fcn {} g\nyard\n".encode(encoding))
    (tmp_path / "names.json").write_text('{"y": "yard", "x": "gr\u00fcn {} g", "z": "no"}')
    templates = (str(tmp_path / "t.txt"), "my {}")
    for names in ("names.txt", "names.json"):
        settings = ZeroShotSettings(template=templates, class_names=tmp_path / names)
        first, second = open_labelled_set(root, settings).captions()
        assert first == ["ein gr\u00fcn {} g", "sch\u00f6n: gr\u00fcn {} g", "my gr\u00fcn {} g"]
        assert second[2] == "my yard"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"template": ("a photo",)},
            "'a photo' is no file and has no place for the class",
        ),
        ({"template": ("a {photo}",)}, "'a {photo}' is no file and has no place for the class"),
        ({"template": ("empty.txt",)}, "'' is no file and has no place"),
        (
            {"class_names": Path("empty.txt")},
            "names.* the 2 classes .*it has 0 lines.* order of the labels: x, y",
        ),
        (
            {"class_names": Path("gap.json")},
            "does not name the 2 classes .ValueError: the name of class 'y' is empty",
        ),
    ],
)
def test_what_does_not_fit_is_a_sentence(tmp_path, monkeypatch, given, sentence):
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "set", "x y")
    Path("empty.txt").write_text("")
    Path("gap.json").write_text('{"x": "a cat", "y": " "}')
    with pytest.raises(UserError, match=sentence.replace("{", r"\{")):
        open_labelled_set("set", ZeroShotSettings(**given))


def test_the_command_scores_sources_and_classes(tmp_path, clip_runs, capsys):
    for source in ("shop", "web"):
        write_classes(tmp_path / "set" / source, "cat dog", each=3)
    command = ["zero-shot", clip_runs[0], "--data", f"s={tmp_path / 'set'}", "--device", "cpu"]
    command += ["--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "o.json")]
    assert main(command) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines if line and line[0] in ("s", "shop", "web")][:3] == [
        ["s", "12", "2"], ["shop", "6", "2"], ["web", "6", "2"],
    ]  # fmt: skip
    assert [line[:2] for line in lines[-2:]] == [["cat", "6"], ["dog", "6"]]
    found = json.loads((tmp_path / "o.json").read_text())["results"]["s"]
    assert found["top1"] == pytest.approx(
        np.mean([one["top1"] for one in found["sources"].values()])
    )
    # Two classes of one name tie, and stay two.
    (tmp_path / "names.txt").write_text("pet\npet\n")
    command += ["--class-names", str(tmp_path / "names.txt"), "--template", "a {}"]
    assert main(command) == 0
    result = json.loads((tmp_path / "o.json").read_text())
    found = result["results"]["s"]
    assert result["templates"] == {"s": ["a {}"]}
    assert found["top1"] == 0.5 and list(found["per_class"]) == ["pet (cat)", "pet (dog)"]
