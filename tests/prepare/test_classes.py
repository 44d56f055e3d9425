"""Folders of classes: captions from templates, sources from the upper level, each split a labelled set; trained and scored."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import open_clip
import pytest

from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import open_probe_set, open_retrieval_set
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.evaluate.zero_shot import open_labelled_set
from open_clip_zerovl.prepare.report import RELEASED, lines, next_lines, next_steps
from open_clip_zerovl.prepare.rows import ZERO_SHOT_TEMPLATES, class_caption
from open_clip_zerovl.prepare.settings import Columns
from support.pairs import picture, samples_of
from support.programs import COMMON, launch
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
    printed = "\n".join(lines(found, tmp_path / "out"))
    assert (
        "in: folders of classes, 3 classes ('hat', 'shoe', 'sun hat'; one level), captions 'a photo of a {}.'"
        in printed
    )
    assert "classes    3, of 6 pictures each" in printed
    assert next_lines(found, tmp_path / "out")[-1] == (
        f"zerovl zero-shot {RELEASED} --data out={tmp_path}/out"
    )
    names = (tmp_path / "out/classnames.txt").read_text().splitlines()
    assert names == ["hat", "shoe", "sun hat"]
    templates = (tmp_path / "out/zeroshot_classification_templates.txt").read_text().splitlines()
    assert templates == [template.replace("{}", "{c}") for template in ZERO_SHOT_TEMPLATES]
    assert (
        list(open_labelled_set(str(tmp_path / "out")).names) == names
    )  # as `zerovl zero-shot` reads it
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
    for where in ("out/train", "in"):
        assert list(open_labelled_set(str(tmp_path / where)).names) == names
    written = "b\x85cow\nc\x0bdog\r\nd\x0ceel\nf fox\ngoat\nt\u2028cat\n"
    (tmp_path / "out/classnames.txt").write_bytes(written.encode())
    assert list(open_labelled_set(str(tmp_path / "out/train")).names) == names
    for sample in samples_of(tmp_path / "out/train"):
        label = names[int(sample.files["cls"])]
        assert sample.files["txt"].decode() == f"a photo of a {label}."


def test_a_picture_of_two_classes_is_named_in_the_report(packed, tmp_path):
    given = class_folders(tmp_path / "in")
    assert packed(given, out="before")["inputs"][0]["notes"] == ["left out: 1 .md"]
    (given / "shoe/copy.png").write_bytes((given / "hat/0.png").read_bytes())
    _, note = packed(given)["inputs"][0]["notes"]
    assert note.startswith(
        f"pictures in several classes: 1 (one is {given}/hat/0.png); the first class counts"
    )


def test_the_upper_level_is_the_source_where_asked(packed, tmp_path):
    given = class_folders(tmp_path / "in", "shop", "web")
    one = packed(given, out="one", templates=("a {}", "the {}, for sale"))
    assert [(entry["source"], entry["pictures"]) for entry in one["written"]] == [("one", 36)]
    assert (
        "--source-column folder makes each folder of the upper level a source"
        in one["inputs"][0]["notes"][-1]
    )
    texts = {sample.files["txt"].decode() for sample in samples_of(tmp_path / "one/train")}
    assert texts == {f"a {name}\nthe {name}, for sale" for name in ("hat", "shoe", "sun hat")}
    assert (
        tmp_path / "one/zeroshot_classification_templates.txt"
    ).read_text() == "a {c}\nthe {c}, for sale\n"
    two = packed(given, out="two", columns=Columns(source="folder"), test_share=0.2)
    written = [(entry["folder"], entry["pictures"]) for entry in two["written"]]
    assert written == [("shop/train", 14), ("shop/test", 4), ("web/train", 16), ("web/test", 2)]
    labelled = open_probe_set(str(tmp_path / "two/web/test"), "test")
    assert len(labelled) == 2 and set(labelled.names.values()) == {"hat", "shoe", "sun hat"}


def in_splits(folder: Path, *splits: str, below: str = "{}") -> Path:
    """Class folders in folders of splits, each with pictures of its own."""
    for number, split in enumerate(splits):
        for picture_number in range(6):
            file = folder / below.format(split) / CLASSES[picture_number % 2] / f"{number}.png"
            file = file.with_stem(f"{number}-{picture_number}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture(10 * number + picture_number))
    return folder


@pytest.mark.parametrize("below", ["{}", "shop/{}"])
def test_folders_of_splits_are_not_trained_on(packed, tmp_path, below):
    given = in_splits(tmp_path / "in", "train", "Validation", "test", below=below)
    (at := given / below.format("train") / "hat/copy.png").write_bytes(picture(20))
    assert at.is_file()  # a picture of the test split in the training split, too: it is held out
    found = packed(given)
    written = {entry["split"]: entry["pictures"] for entry in found["written"]}
    assert written == {"train": 6, "val": 6, "test": 6} and list(found["classes"]) == [
        "hat",
        "sun hat",
    ]
    (note, *_) = found["inputs"][0]["notes"]
    assert note == "splits, by names of folders and files: train 7, val 6, test 6 rows"
    for split, number in (("train", "0"), ("val", "1"), ("test", "2")):
        files = [json.loads(s.files["json"])["file"] for s in samples_of(tmp_path / "out" / split)]
        assert {Path(file).stem[0] for file in files} <= {number, "c"}
    assert len(open_retrieval_set(tmp_path / "out", "val")) == 6


@pytest.mark.parametrize(("count", "share"), [(3, 0), (6, 0.4), (60, 0)])
def test_a_fine_tuning_is_proposed_where_it_can_run(packed, tmp_path, count, share):
    """Without a held-out set `zerovl finetune` needs pictures to hold some out."""
    found = packed(class_folders(tmp_path / "in", pictures=count // 3), test_share=share)
    heading, _, commands = next_steps(found, tmp_path / "out")
    proposed = [line for line in commands if "finetune" in line]
    assert bool(proposed) == (count != 3) == ("too few to train on" not in heading)


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


def test_a_split_is_no_source(packed, tmp_path):
    with pytest.raises(UserError, match="folders of splits are no sources"):
        packed(
            in_splits(tmp_path / "one", "train", "test"), out="o", columns=Columns(source="folder")
        )
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
    """A table beside class folders: as a source of its own, and in one source, where a picture keeps the class it has."""
    table = tmp_path / "table.csv"
    given = class_folders(tmp_path / "in")
    table.write_text(
        "image,caption\nin/hat/0.png,a hat in the sun\nloose.png,a picture of its own\n"
    )
    (tmp_path / "loose.png").write_bytes(picture(100))
    packed(f"t={table}", f"c={given}", out="two")
    assert (tmp_path / "two/c/classnames.txt").exists() and not (
        tmp_path / "two/t/classnames.txt"
    ).exists()
    assert not any("cls" in sample.files for sample in samples_of(tmp_path / "two/t/train"))
    assert all("cls" in sample.files for sample in samples_of(tmp_path / "two/c/train"))
    packed(table, given, out="one")
    labels = {
        sample.files["txt"].decode(): sample.files.get("cls")
        for sample in samples_of(tmp_path / "one/train")
    }
    assert (
        labels["a picture of its own"] is None
        and labels["a hat in the sun\na photo of a hat."] == b"0"
    )


def test_a_class_whose_name_is_not_utf8_is_refused_row_by_row(packed, tmp_path):
    given = class_folders(tmp_path / "in")
    os.rename(given / "shoe", os.fsencode(given) + b"/caf\xe9")
    found = packed(given)
    assert found["pictures"] == 12 and list(found["classes"]) == ["hat", "sun hat"]
    assert sum(entry["rows"] for entry in found["refused"].values()) == 6


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


# ------------------------------------------------------------------------------------------------- trained and scored


def packed_classes(folder: Path, capsys) -> Path:
    """Drawn pictures in CLASS/*.png as they lie, one of them broken, packed by the command; a quarter is held out."""
    given, out = write_classes(folder / "in", "cat house moon", each=12), folder / "out"
    (given / "cat" / "broken.png").write_bytes(b"no picture")
    assert main(["data", "pack", str(given), "--out", str(out), "--test-share", "0.25"]) == 0
    assert (
        "folders of classes, 3 classes ('cat', 'house', 'moon'; one level)"
        in capsys.readouterr().out
    )
    return out


def scored(checkpoint: Path, out: Path, capsys) -> float:
    """Top-1 of `zerovl zero-shot` on the held-out pictures, as it is printed."""
    assert main(["zero-shot", str(checkpoint), "--data", f"held={out}", "--device", "cpu"]) == 0
    row = re.search(r"^held +10 +3 +(\S+) \[", capsys.readouterr().out, re.MULTILINE)
    assert row is not None
    return float(row[1])


def test_packed_folders_of_classes_take_captions_as_positives_and_are_scored(
    tmp_path, capsys, caplog
):
    out = packed_classes(tmp_path, capsys)
    assert (out / "refused.csv").is_file() and len(
        open_retrieval_set(out)
    ) == 10  # the set, not the table of refusals
    caplog.set_level("INFO")
    args, config = parse(["--train-data", f"mine={out}/train", "--batch-size", "4"])
    assert with_positives(config, parse_sources(args.train_data)).positives == "caption"
    assert "Pictures of a class share its captions (source mine)" in caplog.text
    name = register(tmp_path, "classes", NATIVE_VISION, CLIP_TEXT)
    assert (
        0
        <= scored(write_run(tmp_path / "run", random_model(name), {"model": name}), out, capsys)
        <= 100
    )


@pytest.mark.slow  # a training process
def test_folders_of_classes_are_packed_trained_on_and_scored(tmp_path, capsys):
    out, config = packed_classes(tmp_path, capsys), tmp_path / "tiny.json"
    config.write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT})
    )
    words = f"--train-data mine={out}/train --zero-shot-data held={out} --batch-size 4 --dga-steps 3 --epochs 1 --workers 0"
    done = launch("ours", config, [*COMMON, *words.split(), "--name", "run"], cwd=tmp_path)
    assert "Pictures of a class share its captions (source mine)" in done.stderr + done.stdout
    log = (tmp_path / "logs/run/out.log").read_text()
    assert "positives: caption" in log
    assert "of 10 pictures, chance 33.3 %" in log and "Train Epoch: 0" in log
    open_clip.add_model_config(str(config))
    row = json.loads((tmp_path / "logs/run/checkpoints/results.jsonl").read_text())
    printed = scored(tmp_path / "logs/run/checkpoints/epoch_1.pt", out, capsys)
    assert printed == pytest.approx(100 * row["held_top1"], abs=0.05)
