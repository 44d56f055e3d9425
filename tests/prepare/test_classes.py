"""Folders of classes: captions from templates, sources from the upper level, each split a labelled set; trained and scored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from open_clip_zerovl.cli import main
from open_clip_zerovl.data.sets import open_probe_set, open_retrieval_set
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.evaluate.zero_shot import open_labelled_set
from open_clip_zerovl.prepare.rows import ZERO_SHOT_TEMPLATES, class_caption
from open_clip_zerovl.prepare.settings import Columns
from support.pairs import picture, samples_of
from support.tiny_clip import (
    CLIP_TEXT,
    NATIVE_VISION,
    random_model,
    register,
    write_classes,
    write_run,
)
from training.data import with_positives
from training.params import parse

CLASSES = ("hat", "sun_hat", "shoe")


def class_folders(folder: Path, *sources: str, pictures: int = 6) -> Path:
    """`CLASS/NUMBER.png`, or `SOURCE/CLASS/NUMBER.png`, and a note that is not a picture."""
    for number in range(pictures * len(CLASSES) * max(1, len(sources))):
        at = folder / sources[number % len(sources)] if sources else folder
        file = at / CLASSES[number // max(1, len(sources)) % len(CLASSES)] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    (folder / "README.md").write_text("photographs")
    return folder


def test_classes_become_captions_and_both_splits_labelled_sets(packed, tmp_path):
    found = packed(class_folders(tmp_path / "in"), test_share=0.3)
    assert found["pictures"] == 18 and found["classes"] == {"hat": 6, "shoe": 6, "sun hat": 6}
    names = (tmp_path / "out/classnames.txt").read_text().splitlines()
    assert names == ["hat", "shoe", "sun hat"]
    templates = (tmp_path / "out/zeroshot_classification_templates.txt").read_text().splitlines()
    assert templates == [template.replace("{}", "{c}") for template in ZERO_SHOT_TEMPLATES]
    for split, role, count in (("train", "train", 13), ("test", "test", 5)):
        samples = samples_of(tmp_path / "out" / split)
        for sample in samples:
            label = names[int(sample.files["cls"])]
            file = json.loads(sample.files["json"])["file"]
            assert sample.files["txt"].decode() == f"a photo of a {label}."
            assert file.partition("/")[0].replace("_", " ") == label
            assert (tmp_path / "in" / file).read_bytes() == sample.files["png"]
        labelled = open_probe_set(str(tmp_path / "out" / split), role)
        assert [labelled.names[label] for label in labelled.labels] == [
            names[int(s.files["cls"])] for s in samples
        ]
        assert len(labelled) == count


def test_a_break_within_a_class_name_shifts_no_later_class(packed, tmp_path):
    """U+2028, U+0085, VT, FF and a line break ended a line of classnames.txt for its reader."""
    labels = ["t\u2028cat", "b\x85cow", "c\x0bdog", "d\x0ceel", "f\nfox", "goat"]
    for number, label in enumerate(labels):
        (tmp_path / "in" / label).mkdir(parents=True)
        (tmp_path / "in" / label / f"{number}.png").write_bytes(picture(number))
    packed(tmp_path / "in")
    names = ["b cow", "c dog", "d eel", "f fox", "goat", "t cat"]
    assert list(open_labelled_set(str(tmp_path / "in")).names) == names
    written = "b\x85cow\nc\x0bdog\r\nd\x0ceel\nf fox\ngoat\nt\u2028cat\n"
    for content in (None, written.encode()):
        if content is not None:
            (tmp_path / "out/classnames.txt").write_bytes(content)
        assert list(open_labelled_set(str(tmp_path / "out/train")).names) == names
    for sample in samples_of(tmp_path / "out/train"):
        label = names[int(sample.files["cls"])]
        assert sample.files["txt"].decode() == f"a photo of a {label}."


def test_the_upper_level_is_the_source_where_asked(packed, tmp_path):
    given = class_folders(tmp_path / "in", "shop", "web")
    one = packed(given, out="one", templates=("a {}", "the {}, for sale"))
    assert [(entry["source"], entry["pictures"]) for entry in one["written"]] == [("one", 36)]
    texts = {sample.files["txt"].decode() for sample in samples_of(tmp_path / "one/train")}
    assert texts == {f"a {name}\nthe {name}, for sale" for name in ("hat", "shoe", "sun hat")}
    two = packed(given, out="two", columns=Columns(source="folder"), test_share=0.2)
    written = [(entry["folder"], entry["pictures"]) for entry in two["written"]]
    assert written == [("shop/train", 14), ("shop/test", 4), ("web/train", 16), ("web/test", 2)]
    labelled = open_probe_set(str(tmp_path / "two/web/test"), "test")
    assert len(labelled) == 2 and set(labelled.names.values()) == {"hat", "shoe", "sun hat"}


def test_a_picture_of_two_splits_is_held_out(packed, tmp_path):
    for split, numbers in {"train": (0, 1, 2), "Validation": (1, 3), "test": (2, 3, 4)}.items():
        for number in numbers:
            file = tmp_path / "in" / split / CLASSES[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture(number))
    packed(tmp_path / "in")
    shown = {
        split: {s.files["png"] for s in samples_of(tmp_path / "out" / split)}
        for split in ("train", "val", "test")
    }
    wanted = {"train": (0,), "val": (1,), "test": (2, 3, 4)}
    assert shown == {split: set(map(picture, numbers)) for split, numbers in wanted.items()}


SOURCES = ["shop/train", "shop/test", "web/train", "web/test"]
#: Folders of two pictures each, the source column, the folders that are written, the classes.
LAYOUTS: dict[str, tuple[str, str | None, list[str], list[str]]] = {
    "a class called like a split": ("hat sun_hat train", None, ["train"], ["hat", "sun hat", "train"]),
    "a folder around the sources": (
        "all/shop/hat all/shop/shoe all/web/hat all/web/shoe", "folder",
        ["shop/train", "web/train"], ["hat", "shoe"],
    ),
    "splits in sources": (
        " ".join(f"{source}/{name}" for source in SOURCES for name in ("hat", "shoe")), "folder",
        SOURCES, ["hat", "shoe"],
    ),
    "three splits": (
        "train/hat train/shoe Validation/hat Validation/shoe test/hat test/shoe", None,
        ["train", "val", "test"], ["hat", "shoe"],
    ),
    "validation is the only held-out split": (
        "train/hat train/shoe dev/hat dev/shoe", None, ["train", "test"], ["hat", "shoe"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_are_splits_sources_and_classes(packed, tmp_path, layout):
    folders, source, written, classes = LAYOUTS[layout]
    for number, folder in enumerate(folders.split() * 2):
        file = tmp_path / "in" / folder / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    found = packed(tmp_path / "in", columns=Columns(source=source))
    assert [entry["folder"] for entry in found["written"]] == written
    assert list(found["classes"]) == classes and found["pictures"] == 2 * len(folders.split())
    if layout == "three splits":
        for split in written:
            files = [
                json.loads(s.files["json"])["file"] for s in samples_of(tmp_path / "out" / split)
            ]
            assert {file[:2].lower() for file in files} == {split[:2]}


def test_a_split_is_no_source(packed, tmp_path):
    texts = tmp_path / "texts"
    for number, split in enumerate(("train", "test")):
        (texts / split).mkdir(parents=True)
        (texts / split / f"{number}.png").write_bytes(picture(number))
        (texts / split / f"{number}.txt").write_text("a hat")
    found = packed(texts, out="t", columns=Columns(source="folder"))
    assert [entry["folder"] for entry in found["written"]] == ["texts/train", "texts/test"]


def test_clip_benchmark_reads_the_held_out_set_and_the_classes(packed, tmp_path):
    from clip_benchmark.datasets.builder import build_dataset

    packed(class_folders(tmp_path / "in"), test_share=0.3)
    options = {"root": str(tmp_path / "out"), "split": "test", "transform": None}
    samples = samples_of(tmp_path / "out/test")
    captioned = build_dataset("wds/mine", task="zeroshot_retrieval", **options)
    assert [texts for _, texts in captioned] == [[s.files["txt"].decode()] for s in samples]
    (tmp_path / "out/dataset_type.txt").write_text("classification\n")  # by hand
    dataset = build_dataset("wds/mine", task="zeroshot_classification", **options)
    assert dataset.classes == ["hat", "shoe", "sun hat"]
    assert len(dataset.templates) == len(ZERO_SHOT_TEMPLATES)
    assert [int(label) for _, label in dataset] == [int(s.files["cls"]) for s in samples]


def test_pictures_without_a_class_may_stand_beside_classes(packed, tmp_path):
    """A table beside class folders: as a source of its own, and in one source, where a picture keeps its first class."""
    table = tmp_path / "table.csv"
    given = class_folders(tmp_path / "in")
    table.write_text("image,caption\nin/hat/0.png,a hat\nloose.png,a picture of its own\n")
    (tmp_path / "loose.png").write_bytes(picture(100))
    (given / "shoe/copy.png").write_bytes(picture(0))
    packed(f"t={table}", f"c={given}", out="two")
    assert not (tmp_path / "two/t/classnames.txt").exists()
    assert not any("cls" in sample.files for sample in samples_of(tmp_path / "two/t/train"))
    assert all("cls" in sample.files for sample in samples_of(tmp_path / "two/c/train"))
    found = packed(table, given, out="one")
    labels = {
        sample.files["txt"].decode(): sample.files.get("cls")
        for sample in samples_of(tmp_path / "one/train")
    }
    assert labels["a picture of its own"] is None
    assert labels["a hat\na photo of a hat.\na photo of a shoe."] == b"0"
    assert "pictures in several classes: 1" in found["inputs"][1]["notes"][-1]


@pytest.mark.parametrize(
    ("template", "label", "caption"),
    [
        ("a photo of a {}.", "hour glass", "a photo of an hour glass."),
        ("a photo of a {}.", "unicycle", "a photo of a unicycle."),
        ("a photo of a {}.", "elephant", "a photo of an elephant."),
        ("A {} in a game", "Apple pie", "An Apple pie in a game"),
        ("a photo of a {}.", "hat", "a photo of a hat."),
        ("art of the {}.", "eagle", "art of the eagle."),
        ("alpha {}", "eagle", "alpha eagle"),
    ],
)
def test_the_article_fits_the_class(template, label, caption):
    assert class_caption(template, label) == caption


def test_a_training_shares_the_captions_of_packed_classes_and_the_held_out_set_is_scored(
    tmp_path, capsys
):
    """Drawn pictures in CLASS/*.png as they lie, one of them broken, packed by the command; a quarter is held out."""
    given, out = write_classes(tmp_path / "in", "cat house moon", each=12), tmp_path / "out"
    (given / "cat" / "broken.png").write_bytes(b"no picture")
    assert main(["data", "pack", str(given), "--out", str(out), "--test-share", "0.25"]) == 0
    # the set, not the table of refusals
    assert (out / "refused.csv").is_file() and len(open_retrieval_set(out)) == 10
    args, config = parse(["--train-data", f"mine={out}/train", "--batch-size", "4"])
    assert with_positives(config, parse_sources(args.train_data)).positives == "caption"
    name = register(tmp_path, "classes", NATIVE_VISION, CLIP_TEXT)
    checkpoint = write_run(tmp_path / "run", random_model(name), {"model": name})
    assert main(["zero-shot", str(checkpoint), "--data", f"held={out}", "--device", "cpu"]) == 0
    assert re.search(r"^held +10 +3 +\S+ \[", capsys.readouterr().out, re.MULTILINE)
