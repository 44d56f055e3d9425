"""Mistakes that people make with their data: each gets one sentence, and bad rows are counted by file and line."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import open_clip_zerovl.api as zerovl
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.report import TEXT
from open_clip_zerovl.prepare.settings import Columns
from support.pairs import (
    as_csv,
    as_folder,
    as_jsonl,
    as_tars,
    make_pairs,
    picture,
    samples_of,
    write_pictures,
)


def table(folder: Path, text: str, name: str = "pairs.csv") -> Path:
    """Six pictures, 0.png to 5.png, and a table with this text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        (folder / f"{number}.png").write_bytes(picture(number))
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder / name


def folder_and_table(folder: Path) -> Path:
    return as_csv(as_folder(folder, make_pairs(4)), make_pairs(4)).parent


def tars_and_pictures(folder: Path) -> Path:
    write_pictures(as_tars(folder, make_pairs(4)), make_pairs(4))
    return folder


def two_pairs(folder: Path) -> Path:
    return as_folder(folder, make_pairs(2))


def files(**contents: bytes) -> Callable[[Path], Path]:
    """Files in a folder (`pairs_csv=b"..."`); the input is the file, or the folder of several."""

    def make(folder: Path) -> Path:
        folder.mkdir()
        paths = [folder / name.replace("_", ".") for name in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            path.write_bytes(content)
        return paths[0] if len(paths) == 1 else folder

    return make


def classes(folder: Path, *, only: str = "hat") -> Path:
    """One class of four pictures, and beside it two of another one."""
    for number in range(6):
        file = folder / (only if number < 4 else "shoe") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    return folder


def uneven_classes(folder: Path) -> Path:
    (classes(folder) / "hat/0.png").rename(folder / "0.png")
    return folder


def classes_in_splits(folder: Path) -> Path:
    for split in ("train", "test"):
        classes(folder / split)
    return folder


def classes_of_other_numbers(folder: Path) -> Path:
    """Two parquet files whose classes differ behind those that a sentence lists."""
    folder.mkdir()
    for number, last in enumerate("yz"):
        label = {"_type": "ClassLabel", "names": [*"abcdefghijklm", last]}
        about = {b"huggingface": json.dumps({"info": {"features": {"label": label}}}).encode()}
        rows = pyarrow.table({"image": [picture(number)], "label": [13]})
        pyarrow.parquet.write_table(rows.replace_schema_metadata(about), folder / f"{last}.parquet")
    return folder


#: The input (a text: a table with it), the sentence, settings.
MISTAKES: dict[
    str, tuple[str | Callable[[Path], Any], str] | tuple[str | Callable[[Path], Any], str, dict]
] = {
    "nothing there": (
        lambda folder: folder / "none.csv",
        r"none.csv does not exist: correct the path",
    ),
    "empty folder": (
        lambda folder: folder.mkdir() or folder,
        r"contains no pictures, table, parquet files or tars \(found: nothing\)",
    ),
    "unknown file": (
        files(pairs_xlsx=b"PK"),
        r"has no known ending: name its form with --format .*save a spreadsheet as CSV in UTF-8",
    ),
    "column misspelt": (
        "filepath,title\n0.png,x\n",
        r"has no column 'titel', given with --caption-column; its columns are 'filepath', 'title'$",
        {"columns": Columns(captions=("titel",))},
    ),
    "no header": (
        "0.png,x,3\n1.png,y,4\n",
        r"has no header line \(its first line is '0.png', 'x', '3'\): number its columns, as --picture-column 1 "
        r"--caption-column 2",
    ),
    "lines that end in a carriage return": (
        "image,caption\r0.png,a cat\r1.png,a dog\r",
        "pairs.csv cannot be read .*; save it as CSV with line ends of Unix",
    ),
    "utf-16 without a mark": (
        files(pairs_csv="image,caption\n0.png,x\n".encode("utf-16-le")),
        r"is not UTF-8 text \(UTF-16 without its mark\?\)",
    ),
    "pictures nowhere": (
        "image,caption\nz/7.png,x\n",
        r"relative paths start at .*: if the pictures are elsewhere, give their folder with --pictures-in",
    ),
    "captions are numbers": (
        lambda folder: table(
            folder, '{"image": "0.png", "text": 3}\n{"image": "1.png", "text": 4}\n', "pairs.jsonl"
        ),
        r"none of the 2 rows can be used: caption not text in 2 \(first pairs.jsonl line 1\); check the input, and which "
        r"columns are read \(picture 'image', caption 'text'",
    ),
    "only a header": ("image,caption\n", r"pairs.csv has no rows: check the input"),
    "no json": (files(pairs_jsonl=b"<html>\n"), r"holds no JSON objects.*it begins with '<html>"),
    "texts and a table": (
        folder_and_table,
        "holds data of several forms: choose with --format table or folder, or give the file",
    ),
    "tars and pictures": (
        tars_and_pictures,
        "holds data of several forms: choose with --format webdataset or folder",
    ),
    "two tables": (
        files(a_csv=b"x", b_csv=b"x"),
        r"holds 2 tables \(a.csv, b.csv ...\): give the table or",
    ),
    "wrong format": (two_pairs, r"holds no file of --format parquet", {"form": "parquet"}),
    "no tar": (
        files(**{"0_tar": b"<html>no such file</html>"}),
        r"holds no pairs: it cannot be read as a tar to its end",
    ),
    "no such dataset": (
        files(state_json=b"{}", x_arrow=b""),
        "state.json cannot be read .*; save the dataset again",
        {"form": "arrow"},
    ),
    "classes of other numbers": (
        classes_of_other_numbers,
        r"z.parquet has other columns or classes \(.*\) than .*y.parquet",
    ),
    "no parquet": (
        files(x_parquet=b"PAR"),
        r"x.parquet cannot be read .*; write or fetch it again",
    ),
    "too small a source": (
        "image,caption,kind\n0.png,x,a\n1.png,y,b\n",
        r"source 'a' has 1 picture, and --test-share 0.1 holds at least one of each source out",
        {"columns": Columns(source="kind"), "test_share": 0.1},
    ),
    "pictures alone": (
        lambda folder: classes(folder) / "hat",
        r"has 4 pictures and no captions: .* give a table .* write the caption of 0.png into 0.txt, or .*CLASS/PICTURE",
    ),
    "a picture beside classes": (uneven_classes, r"has 6 pictures and no captions"),
    "one class": (
        lambda folder: classes(folder, only="shoe"),
        r"has no pictures of two classes or more",
        {"form": "classes"},
    ),
    "a template without a place": (
        classes,
        r"--template 'a hat' has no place for the class.*: write \{\} once",
        {"templates": ("a hat",)},
    ),
    "templates without classes": (
        two_pairs,
        "--template needs a folder of classes",
        {"templates": ("a {}",)},
    ),
    "sources of one level": (
        classes,
        r"no column 'folder': sort the pictures into SOURCE/CLASS/",
        {"columns": Columns(source="folder")},
    ),
    "a split is no source": (
        classes_in_splits,
        "folders of splits are no sources",
        {"columns": Columns(source="folder")},
    ),
    "sources of one name": (
        "image,caption,kind\n0.png,x,a b\n1.png,y,a/b\n",
        r"the sources 'a b' and 'a/b' \(column 'kind'\) would both be called 'a-b'",
        {"columns": Columns(source="kind")},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake, packed, tmp_path):
    make, sentence, *changes = MISTAKES[mistake]
    given = table(tmp_path / "in", make) if isinstance(make, str) else make(tmp_path / "in")
    with pytest.raises(UserError, match=sentence) as caught:
        packed(given, **(changes[0] if changes else {}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not list((tmp_path / "out").rglob("*.tar"))


def test_bad_rows_are_counted_and_named_by_file_and_line(packed, tmp_path):
    text = (
        "image,caption\n"
        "0.png,a dog\n"
        "1.png,\n"  # 3: no caption
        '2.png,"a stray quote\n'  # 4: read as it stands
        "3.png,a cat, on a mat\n"  # 5: a comma without quotes
        "gone.png,a picture that is gone\n"  # 6
        "broken.png,half a picture\n"  # 7
        "4.png,caf\udce9\n"  # 8: Latin-1
        "5.png\n"  # 9: one field
        ",a caption alone\n"  # 10
        "page.png,a web page\n"  # 11
        "0.png,the dog again\n"
    )
    given = table(tmp_path / "in", text)
    (tmp_path / "in/broken.png").write_bytes(picture(9)[:-100])
    (tmp_path / "in/page.png").write_bytes(b"<html>no such picture</html>")
    found = packed(given)
    got = {
        reason: [e["at"] for e in entry["examples"]] for reason, entry in found["refused"].items()
    }
    assert got == {
        "empty caption": ["pairs.csv line 3"],
        "more fields than the header": ["pairs.csv line 5"],
        "picture missing": ["pairs.csv line 6"],
        "broken picture": ["pairs.csv line 7"],
        "caption not UTF-8": ["pairs.csv line 8"],
        "fewer fields than the header": ["pairs.csv line 9"],
        "no picture named": ["pairs.csv line 10"],
        "not a picture": ["pairs.csv line 11"],
    }
    with open(tmp_path / "out/refused.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["line"]) for row in rows] == [3, 5, 6, 7, 8, 9, 10, 11]
    assert (
        rows[2]["picture"] == str(tmp_path / "in/gone.png")
        and rows[2]["reason"] == "picture missing"
    )
    captions = {sample.files["txt"].decode() for sample in samples_of(tmp_path / "out/train")}
    assert captions == {"a dog\nthe dog again", '"a stray quote'}


def of_lines(name: str, *lines: str) -> Callable[[Path], Path]:
    return lambda folder: table(folder, "\n".join([*lines, ""]), name)


def torn_tar(folder: Path) -> Path:
    content = (as_tars(folder, make_pairs(12)) / "00000.tar").read_bytes()
    (folder / "00000.tar").write_bytes(content[: len(content) // 2])
    return folder


def pipes_and_devices(folder: Path) -> Path:
    given = as_folder(folder, make_pairs(5))
    for name in ("a/000.txt", "b/001.txt", "a/002.txt", "b/003.png"):
        (given / name).unlink()
    os.mkfifo(given / "a/000.txt")
    (given / "b/001.txt").symlink_to("/dev/zero")
    (given / "a/002.txt").write_bytes(b"a" * (2 << 20))
    (given / "b/003.png").symlink_to(given / "nowhere.png")
    return given


def pictures_that_are_none(folder: Path) -> Path:
    """A pipe and a device do not hang."""
    rows = ["0.png,x", "pipe.png,x", "/dev/zero,x", "\0.png,x", "rotten.png,x", "gone.png,x"]
    given = table(folder, "\n".join(["image,caption", *rows]) + "\n")
    os.mkfifo(folder / "pipe.png")
    (folder / "rotten.png").write_bytes(b"rotten")
    return given


def paths_with_umlauts(folder: Path, first: str, second: str) -> Path:
    """A table of two pictures, the rows in these encodings."""
    given = table(folder, "")
    for number in range(2):
        (folder / f"{number}.png").rename(folder / f"gr\u00f6\u00dfe{number}.png")
    rows = "image,caption\ngr\u00f6\u00dfe0.png,x\n".encode(
        first
    ) + "gr\u00f6\u00dfe1.png,y\n".encode(second)
    given.write_bytes(rows)
    return given


def names_of_another_case(folder: Path) -> Path:
    """The table means one of two files, and nobody knows which."""
    given = table(folder, "image,caption\na.png,x\n1.png,y\n")
    for number, name in enumerate(("A.png", "a.PNG")):
        (folder / name).write_bytes(picture(9 + number))
    return given


def class_in_latin_1(folder: Path) -> Path:
    os.rename(classes(folder) / "shoe", os.fsencode(folder) + b"/caf\xe9")
    return folder


#: The input, the number of packed pictures, refused rows by reason.
REFUSED: dict[str, tuple[Callable[[Path], Path], int, dict[str, int]]] = {
    "lines that are no objects": (
        of_lines(
            "pairs.jsonl",
            '{"image": "0.png", "caption": "x"}',
            "[1]",
            "no json",
            '{"image": 3, "caption": "y"}',
            '{"caption": "z"}',
            "",
        ),
        1,
        {"no JSON object": 2, "no picture named": 2},
    ),
    "a name of two files": (names_of_another_case, 1, {"picture missing": 1}),
    "a torn tar": (torn_tar, 9, {"truncated shard": 1}),
    "stray quotes around rows": (
        of_lines("pairs.csv", "image,caption", '0.png,"a', "1.png,b", '2.png,c"', "3.png,d"),
        4,
        {},
    ),
    "ids that are lists": (
        of_lines(
            "captions.json",
            '{"images": [{"id": 1, "file_name": "0.png"}, {"id": [2], "file_name": "1.png"}], "annotations": [',
            '{"image_id": 1, "caption": "x"}, {"image_id": [2], "caption": "x"}, {"image_id": {}, "caption": "x"}]}',
        ),
        1,
        {"no picture named": 2},
    ),
    "pipes, devices, dangling links": (
        pipes_and_devices,
        1,
        {
            "text cannot be read": 1,
            "text too large": 1,
            "picture missing": 1,
            "no text of its name": 1,  # beside a link that leaves the folder
        },
    ),
    "pictures that are none": (
        pictures_that_are_none,
        1,
        {"picture cannot be read": 2, "picture missing": 2, "not a picture": 1},
    ),
    "paths in UTF-16": (lambda folder: paths_with_umlauts(folder, "utf-16", "utf-16-le"), 2, {}),
    "a path in Latin-1": (
        lambda folder: paths_with_umlauts(folder, "utf-8", "latin-1"),
        1,
        {"path not UTF-8": 1},
    ),
    "a caption in Latin-1": (
        of_lines("pairs.csv", "image,caption", "0.png,caf\udce9", "1.png,tea"),
        1,
        {"caption not UTF-8": 1},
    ),
    "lone surrogates": (  # which JSON can write, and no file can be called
        of_lines(
            "pairs.jsonl",
            r'{"image": "\ud800.png", "caption": "x"}',
            r'{"image": "0.png", "caption": "\udfff"}',
            '{"image": "1.png", "caption": "y"}',
        ),
        1,
        {"path not UTF-8": 1, "caption not UTF-8": 1},
    ),
    "a class in Latin-1": (class_in_latin_1, 4, {"caption not UTF-8": 2}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_row_that_cannot_be_used_is_refused_and_the_rest_packed(kind, packed, tmp_path):
    make, pictures, refused = REFUSED[kind]
    found = packed(make(tmp_path / "in"))
    assert {reason: entry["rows"] for reason, entry in found["refused"].items()} == refused
    assert found["pictures"] == pictures


def test_a_folder_of_other_inputs_or_settings_is_refused(packed, tmp_path):
    given, out = as_folder(tmp_path / "in", make_pairs(6)), tmp_path / "out"
    other = as_csv(tmp_path / "other", make_pairs(6))
    packed(given, seed=1)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for sentence, path, seed in (
        ("with seed 1, and this call has seed 2; repeat", given, 2),
        ("with inputs in, and this call has inputs pairs.csv; repeat", other, 1),
    ):
        with pytest.raises(UserError, match=f"out was begun {sentence}"):
            packed(path, seed=seed)
    (given / "new.png").write_bytes(picture(99))
    with pytest.raises(UserError, match="out was begun before the content of inputs changed"):
        packed(given, seed=1)
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match="no pack.json, so this program did not begin it"):
        packed(given, out="other")
    with pytest.raises(UserError, match="in, which is read: give a folder elsewhere with --out"):
        packed(given, out="in/out")


@pytest.mark.parametrize("form", [as_folder, as_csv, as_tars])
def test_inputs_that_changed_at_the_same_size_are_refused_and_touched_ones_are_not(
    form, packed, tmp_path
):
    given = form(tmp_path / "in", make_pairs(4))
    first = packed(given)
    for file in (tmp_path / "in").rglob("*"):
        os.utime(file, ns=(5, 5))
    assert packed(given) == first
    changed = (
        tmp_path / "in" / {as_folder: "a/000.txt", as_csv: "a/000.png", as_tars: "00000.tar"}[form]
    )
    content = changed.read_bytes()
    other = content.replace(b"picture 0", b"drawing 0")
    changed.write_bytes(content[:-1] + b"x" if form is as_csv else other)
    os.utime(changed, ns=(5, 5))
    what = "pictures" if form is as_csv else "inputs"
    with pytest.raises(UserError, match=f"was begun before the content of {what} changed"):
        packed(given)


def test_after_a_mistake_the_same_folder_is_taken(packed, tmp_path):
    """Other columns if nothing could be used; another split if no shard was written, without reading pictures again."""
    given = table(tmp_path / "in", "image,caption,text\n0.png,,x\n1.png,,y\n")
    with pytest.raises(UserError, match="none of the 2 rows can be used"):
        packed(given)
    chosen = Columns(captions=("text",), source="text")
    with pytest.raises(UserError, match="source 'x' has 1 picture, and --test-share 0.5"):
        packed(given, columns=chosen, test_share=0.5)
    (spool,) = (tmp_path / "out/.pack").glob("*.spool")
    assert spool.stat().st_size
    assert packed(given, columns=chosen)["pictures"] == 2


def test_the_command_line_ends_in_the_command_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for repository, mark in (
        ("timm--small.in1k", "config.json"),
        ("me--clip", "open_clip_config.json"),
    ):
        snapshot = tmp_path / f"hub/models--{repository}/snapshots/0"
        snapshot.mkdir(parents=True)
        (snapshot / mark).write_text("{}")
    as_jsonl(tmp_path / "my pets", make_pairs(8))
    command = ["data", "pack", "my pets", "--out", "my out", "--test-share", "0.3"]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    commands = [
        "zerovl finetune --from hf-hub:me/clip --data 'my out' --out 'my out-tuned'",
        f"zerovl align --image timm:small.in1k --text {TEXT} --data 'my out' --out 'my out-aligned'",
    ]  # models that lie on this disk
    assert printed[-3:] == [*commands, "zerovl retrieval hf-hub:me/clip --data 'my-out=my out'"]
    zerovl.pack("my pets", out="my out", test_share=0.3)
    again = capsys.readouterr().out.splitlines()  # without commands to type
    assert "is complete: nothing was done" in again[0] and again[1:] == printed[:-5]
    monkeypatch.setattr("open_clip_zerovl.prepare.report.FEWEST", 5)
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        *commands,
        "zerovl train --model ViT-B-32 --train-data 'my-out=my out/train' --retrieval-data 'my-out=my out' "
        "--warmup-share 0.025 --batch-size 1",
    ]
    assert main([*command, "--caption-column", "captoin", "texts"]) == 2


def test_source_names_in_any_script_and_those_of_the_outputs_own_files(packed, tmp_path):
    # the last in Latin-1
    kinds = ["report.html", "pack.json", "\u5317\u4eac", "\u4e0a\u6d77", "train", "gr\udce9s"]
    rows = "".join(f"{number}.png,x,{kind}\n" for number, kind in enumerate(kinds))
    given = table(tmp_path / "in", f"image,caption,kind\n{rows}")
    found = packed(given, columns=Columns(source="kind"))
    names = {"report.html-source", "pack.json-source", "train-source", *kinds[2:4]}
    assert {one["folder"] for one in found["written"]} == {f"{name}/train" for name in names}
    assert found["refused"]["source not UTF-8"]["rows"] == 1
    data = "::".join(f"{name}={tmp_path}/out/{name}/train" for name in kinds[2:4])
    assert [source.num_samples for source in parse_sources(data)] == [1, 1]


def test_each_row_has_an_end(packed, tmp_path):
    """A row with picture and captions of an earlier one is counted, so that the report's numbers add up."""
    given = as_csv(tmp_path / "in", make_pairs(4))
    header, first, *rest = given.read_text(encoding="utf-8").splitlines()
    for repeated, rows in enumerate(([first, *rest], [first, *rest, first])):
        given.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        found = packed(given, out=f"out{repeated}")
        refused = sum(entry["rows"] for entry in found["refused"].values())
        assert found["rows"] == found["captions"] + found["repeated_rows"] + refused
        assert found["repeated_rows"] == repeated
