"""Mistakes that people make with their data: each gets one sentence, and bad rows are counted by file and line."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import open_clip_zerovl.api as zerovl
from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare import pack as packing
from open_clip_zerovl.prepare.report import IMAGE, TEXT, lines
from open_clip_zerovl.prepare.settings import Columns, Work
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
from support.tars import write_tar


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


def pictures_elsewhere(folder: Path) -> Path:
    given = table(folder, "image,caption\n0.png,x\n1.png,y\n")
    (folder / "images").mkdir()
    for file in folder.glob("*.png"):
        file.rename(folder / "images" / file.name)
    return given


def json_without_captions(folder: Path) -> Path:
    write_pictures(folder, make_pairs(2))
    for pair in make_pairs(2):
        (folder / pair.name).with_suffix(".json").write_text('{"label": 3, "id": "x"}')
    return folder


def two_pairs(folder: Path) -> Path:
    return as_folder(folder, make_pairs(2))


def captions_in(folder: Path, encoding: str) -> Path:
    given = two_pairs(folder)
    for file in given.rglob("*.txt"):
        file.write_bytes("gr\u00f6\u00dfe".encode(encoding))
    return given


def tars_of(members: dict[str, bytes]) -> Callable[[Path], Path]:
    return lambda folder: write_tar(folder / "0.tar", list(members.items()))


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


def classes_of_other_numbers(folder: Path) -> Path:
    """Two parquet files whose classes differ behind those that a sentence lists."""
    folder.mkdir()
    for number, last in enumerate("yz"):
        label = {"_type": "ClassLabel", "names": [*"abcdefghijklm", last]}
        about = {b"huggingface": json.dumps({"info": {"features": {"label": label}}}).encode()}
        rows = pyarrow.table({"image": [picture(number)], "label": [13]})
        pyarrow.parquet.write_table(rows.replace_schema_metadata(about), folder / f"{last}.parquet")
    return folder


BOXES = (
    b'{"images": [{"id": 1, "file_name": "1.png"}], "annotations": [{"image_id": 1, "bbox": []}]}'
)

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
    "zip": (files(x_zip=b""), r"is a zip with .*unpack it"),
    "column misspelt": (
        "filepath,title\n0.png,x\n",
        r"has no column 'titel', given with --caption-column; its columns are 'filepath', 'title'; did you mean "
        r"--caption-column 'title'\?",
        {"columns": Columns(captions=("titel",))},
    ),
    "source column missing": (
        "filepath,title\n0.png,x\n",
        r"has no column 'kind', given with --source-column; its columns are 'filepath', 'title'$",
        {"columns": Columns(source="kind")},
    ),
    "columns of other names": (
        "a,b\n0,x\n",
        r"no column of .*pairs.csv is named like a picture \(.*\) or a caption \(.*\); its columns are 'a', 'b': name "
        r"them with --picture-column and --caption-column$",
    ),
    "no caption column": (
        "filepath,label\n0.png,3\n",
        r"no column of .* is named like a caption \(.*\); .* 'filepath', 'label': name it with --caption-column$",
    ),
    "heading misspelt": (
        "file,titel,site\n0.png,x,a\n",
        "its columns are 'file', 'titel', 'site': name .*did you mean --caption-column 'titel'",
    ),
    "columns of one name": (
        "image,caption,caption\n0.png,x,y\n",
        r"pairs.csv has 2 columns named 'caption': give each column its own name$",
    ),
    "no header": (
        "0.png,x,3\n1.png,y,4\n",
        r"has no header line \(its first line is '0.png', 'x', '3'\): number its columns, as --picture-column 1 "
        r"--caption-column 2",
    ),
    "lines that end in a carriage return": (
        "image,caption\r0.png,a cat\r1.png,a dog\r",
        "lines that end in a carriage return alone, .*: save it as CSV with line ends of Unix",
    ),
    "captions in Latin-1 alone": (
        lambda folder: captions_in(folder, "latin-1"),
        r"caption not UTF-8 in 2 \(first a.000.png\); probably Latin-1: convert the file to UTF-8 \(iconv -f CP1252 -t UTF-8",
    ),
    "captions in UTF-16 alone": (
        lambda folder: captions_in(folder, "utf-16-le"),
        r"NULs in the caption \(UTF-16 without its mark\?\) in 2 .*; convert the file to UTF-8 \(iconv -f UTF-16LE",
    ),
    "utf-16 without a mark": (
        files(pairs_csv="image,caption\n0.png,x\n".encode("utf-16-le")),
        r"is not UTF-8 text \(UTF-16 without its mark\?\)",
    ),
    "paths that do not exist": (
        "image,caption\nimages/0.png,x\nimages/1.png,y\n",
        r"none of the first 2 pictures of .*pairs.csv exists; that of line 2 should be "
        r"/.*/images/0.png; a file of that name lies in .*: give --pictures-in",
    ),
    "pictures elsewhere": (
        pictures_elsewhere,
        r"a file of that name lies in .*/images: give --pictures-in .*/images$",
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
    "all captions empty": (
        "image,caption\n0.png,\n1.png, \n",
        r"empty caption in 2 \(first pairs.csv line 2\)",
    ),
    "only a header": ("image,caption\n", r"pairs.csv has no rows: check the input"),
    "empty file": (files(pairs_csv=b""), r"is named like a picture .* or a caption"),
    "no json": (files(pairs_jsonl=b"<html>\n"), r"holds no JSON objects.*it begins with '<html>"),
    "one object": (files(pairs_json=b'{\n "a": 1\n}\n'), r"holds no JSON objects"),
    "boxes": (
        files(instances_json=BOXES),
        r"no column of .* is named like a caption .*its columns are 'id', 'file_name', 'image_id', 'bbox'",
    ),
    "texts and a table": (
        folder_and_table,
        r"holds pictures with texts beside them, and a table too: give --format folder",
    ),
    "tars and pictures": (
        tars_and_pictures,
        r"holds tars, and pictures too: choose with --format webdataset or --format folder",
    ),
    "two tables": (
        files(a_csv=b"x", b_csv=b"x"),
        r"holds 2 tables \(a.csv, b.csv ...\): give the table or",
    ),
    "wrong format": (two_pairs, r"holds no file of --format parquet", {"form": "parquet"}),
    "json without captions": (
        json_without_captions,
        r"no column of the JSON files of .* is named like a caption .*its columns are 'label', 'id'",
    ),
    "tars without pictures": (
        tars_of({"a.cls": b"3", "a.txt": b"x"}),
        r"holds no pairs: no member is a picture, its members are .cls, .txt",
    ),
    "tars without captions": (
        tars_of({"a.png": picture(0), "a.cls": b"3"}),
        r"no member is a caption \(.txt\), its members are .cls, .png",
    ),
    "no tar": (
        files(**{"0_tar": b"<html>no such file</html>"}),
        r"holds no pairs: it cannot be read as a tar to its end",
    ),
    "no such dataset": (
        files(state_json=b"{}", x_arrow=b""),
        r"state.json does not list the Arrow files",
        {"form": "arrow"},
    ),
    "classes of other numbers": (
        classes_of_other_numbers,
        r"z.parquet has other columns or classes \(.*\) than .*y.parquet",
    ),
    "no parquet": (files(x_parquet=b"PAR"), r"is not a parquet file, or a broken one"),
    "a source of a folder": (
        two_pairs,
        r"none of the 2 rows can be used: no source in 2",
        {"columns": Columns(source="kind")},
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
    "a table under a text's name": (
        lambda folder: table(folder, "image,caption\n0.png,x\n", "captions.txt").parent,
        r"has 6 pictures and no captions: .* give /.*/captions.txt \(with --pictures-in",
    ),
    "a picture beside classes": (uneven_classes, r"has 6 pictures and no captions"),
    "uneven classes": (
        uneven_classes,
        r"has no pictures of two classes or more, each in a folder CLASS/PICTURE or",
        {"form": "classes"},
    ),
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
    printed = "\n".join(lines(found, tmp_path / "out"))
    assert "a stray quote in 1 lines, which are read as they stand, quote included: 4" in printed
    assert (
        "8 rows, all of them in refused.csv" in printed
        and "1 empty caption: pairs.csv line 3" in printed
    )
    assert len(printed.splitlines()) <= 12
    page = (tmp_path / "out/report.html").read_text()
    assert "data:image/jpeg;base64," in page and "a dog / the dog again" in page
    assert "http" not in page.replace("http-equiv", "")


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
    "a torn tar": (torn_tar, 9, {"truncated shard": 1}),
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
    "a JSON line in Latin-1": (
        of_lines(
            "p.jsonl",
            '{"image": "0.png", "caption": "caf\udce9"}',
            '{"image": "1.png", "caption": "tea"}',
        ),
        1,
        {"caption not UTF-8": 1},
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_row_that_cannot_be_used_is_refused_and_the_rest_packed(kind, packed, tmp_path):
    make, pictures, refused = REFUSED[kind]
    found = packed(make(tmp_path / "in"))
    assert {reason: entry["rows"] for reason, entry in found["refused"].items()} == refused
    assert found["pictures"] == pictures
    if kind == "a caption in Latin-1":
        printed = "\n".join(lines(found, tmp_path / "out"))
        assert (
            "1 caption not UTF-8: pairs.csv line 2; probably Latin-1: convert the file to UTF-8 (iconv -f CP1252"
            in printed
        )
        for words in ("1 row, which is in refused.csv", "1 shard "):
            assert words in printed


def test_a_folder_of_other_inputs_or_settings_is_refused(packed, tmp_path):
    given, out = as_folder(tmp_path / "in", make_pairs(6)), tmp_path / "out"
    other = as_csv(tmp_path / "other", make_pairs(6))
    packed(given, seed=1)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(
        UserError,
        match=r"out was begun with seed 1, and this call has seed 2; repeat",
    ):
        packed(given, seed=2)
    with pytest.raises(
        UserError, match=r"out was begun with inputs in, and this call has inputs pairs.csv; repeat"
    ):
        packed(other, seed=1)
    (given / "a/000.txt").write_text("another caption")
    (given / "new.png").write_bytes(picture(99))
    with pytest.raises(UserError, match=r"out was begun before the content of inputs changed"):
        packed(given, seed=1)
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(
        UserError,
        match=r"other holds .* and no pack.json, so this program did not begin it",
    ):
        packed(given, out="other")
    with pytest.raises(
        UserError, match=r"lies in .*in, which is read: give a folder elsewhere with --out"
    ):
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
    # No picture was read here, so that nothing is lost by other columns or sizes.
    (tmp_path / "in/pairs.csv").rename(tmp_path / "pairs.csv")
    with pytest.raises(UserError, match="none of the first 2 pictures of .* exists"):
        packed(
            tmp_path / "pairs.csv", out="more", columns=Columns(captions=("text",)), test_share=0.1
        )
    chosen = Columns(captions=("text",), pictures_in=tmp_path / "in")
    assert packed(tmp_path / "pairs.csv", out="more", columns=chosen, seed=3)["pictures"] == 2


def test_the_command_line_ends_in_the_command_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = tmp_path / "hub/models--sentence-transformers--all-mpnet-base-v2/snapshots/1"
    cached.mkdir(parents=True)
    (cached / "modules.json").write_text("[]")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    fetched = (
        "(fetched from the hub: ViT-B-32/laion2b_s34b_b79k, timm:vit_base_patch14_dinov2.lvd142m; a model on this disk takes "
        "its place)"
    )
    as_jsonl(tmp_path / "my pets", make_pairs(8))
    assert (
        main(
            ["data", "pack", "my pets", "--out", "my out", "--test-share", "0.3", "--threads", "2"]
        )
        == 0
    )
    printed = capsys.readouterr().out.splitlines()
    finetune = (
        "zerovl finetune --from ViT-B-32/laion2b_s34b_b79k --data 'my out' --out 'my out-tuned'"
    )
    align = f"zerovl align --image {IMAGE} --text {TEXT} --data 'my out' --out 'my out-aligned'"
    assert printed[-5:] == [
        "next (with fewer than 10,000 pictures fine-tune or evaluate; a training from nothing needs more):",
        fetched,
        finetune,
        align,
        "zerovl retrieval ViT-B-32/laion2b_s34b_b79k --data 'my-out=my out'",
    ]
    zerovl.pack("my pets", out="my out", test_share=0.3)
    in_python = capsys.readouterr().out.splitlines()  # without commands to type
    assert in_python[1:] == printed[:-5]
    assert main(["data", "pack", "my pets", "--out", "my out", "--test-share", "0.3"]) == 0
    again = capsys.readouterr().out.splitlines()
    assert (
        again[0] == "my out is complete: nothing was done. Its contents:" and again[1:] == printed
    )
    monkeypatch.setattr("open_clip_zerovl.prepare.report.FEWEST", 5)
    assert main(["data", "pack", "my pets", "--out", "my out", "--test-share", "0.3"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        finetune,
        align,
        "zerovl train --model ViT-B-32 --train-data 'my-out=my out/train' --retrieval-data 'my-out=my out' "
        "--warmup-share 0.025 --batch-size 1",
    ]
    for repository, mark in (
        ("timm--small.in1k", "config.json"),
        ("me--clip", "open_clip_config.json"),
    ):
        snapshot = tmp_path / f"hub/models--{repository}/snapshots/0"
        snapshot.mkdir(parents=True)
        (snapshot / mark).write_text("{}")
    assert main(["data", "pack", "my pets", "--out", "my out", "--test-share", "0.3"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:-1] == [
        "next, a released model fine-tuned, or one from nothing:",
        finetune.replace("ViT-B-32/laion2b_s34b_b79k", "hf-hub:me/clip"),
        align.replace(IMAGE, "timm:small.in1k"),
    ]  # what lies on this disk, and nothing to fetch
    # A mistake is said before torch is loaded.
    program = "import open_clip_zerovl.prepare.pack, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_tables_columns_are_not_wanted_of_a_folder_with_texts(packed, tmp_path):
    """A folder beside a table whose caption column is named: only the table has columns."""
    given = table(tmp_path / "in", "image,titel\n0.png,x\n1.png,y\n")
    photos = as_folder(tmp_path / "photos", make_pairs(4))
    found = packed(photos, given, columns=Columns(captions=("titel",)))
    assert found["inputs"][0]["columns"] == "captions in .txt, one a line" and found["rows"] == 6


def test_the_progress_bar_counts_every_row(packed, tmp_path, capsys):
    """Rows without a picture to read, and rows of one picture, too: it ends full."""
    packed(
        table(tmp_path / "in", "image,caption\n0.png,x\n0.png,y\n1.png,\n2.png,z\n"),
        work=Work(threads=2),
    )
    bars = capsys.readouterr().err.replace("\r", "\n").rstrip().splitlines()
    assert any(" 4 pairs" in bar and "2 read; empty caption 1]" in bar for bar in bars)


def test_work_that_takes_long_is_announced(capsys, monkeypatch):
    for seconds, printed in ((0, "counting ...\n"), (1000, "")):
        monkeypatch.setattr(packing, "SILENT_SECONDS", seconds)
        with packing.announced("counting", True):
            timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
            for timer in timers * (seconds == 0):
                timer.join()
        assert capsys.readouterr().err == printed


def test_source_names_in_any_script_and_those_of_the_outputs_own_files(packed, tmp_path):
    kinds = [
        "report.html",
        "pack.json",
        "\u5317\u4eac",
        "\u4e0a\u6d77",
        "train",
        "gr\udce9s",
    ]  # the last in Latin-1
    given = table(
        tmp_path / "in",
        "image,caption,kind\n" + "".join(f"{i}.png,x,{k}\n" for i, k in enumerate(kinds)),
    )
    found = packed(given, columns=Columns(source="kind"))
    names = {"report.html-source", "pack.json-source", "train-source", *kinds[2:4]}
    assert {one["folder"] for one in found["written"]} == {f"{name}/train" for name in names}
    assert {reason: entry["rows"] for reason, entry in found["refused"].items()} == {
        "source not UTF-8": 1
    }
    data = "::".join(f"{name}={tmp_path}/out/{name}/train" for name in kinds[2:4])
    assert [(source.name, source.num_samples) for source in parse_sources(data)] == [
        (name, 1) for name in kinds[2:4]
    ]


@pytest.mark.parametrize("written", ["pack.json", "train/00000.tar", "refused.csv"])
def test_a_kill_in_a_write_leaves_a_folder_that_is_taken(written, packed, tmp_path):
    given, file = two_pairs(tmp_path / "in"), tmp_path / "out" / written
    if written != "pack.json":  # the first file
        with pytest.raises(UserError, match="source 'a' has 1 picture"):
            packed(given, columns=Columns(source="folder"), test_share=0.5)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_name(f".{file.name}.17.ab.part").write_text("{")
    assert packed(given, columns=Columns(source="folder"))["pictures"] == 2
    assert not list((tmp_path / "out").rglob("*.part"))


def test_each_row_has_an_end(packed, tmp_path):
    """A row with picture and captions of an earlier one is counted, so that the report's numbers add up."""
    pairs = make_pairs(4)
    given = as_csv(tmp_path / "in", pairs)
    table = given if given.is_file() else next(given.glob("*.csv"))
    header, first, *rest = table.read_text(encoding="utf-8").splitlines()
    printed = {}
    for name, rows in {"twice": [first, first, *rest, first], "once": [first, *rest]}.items():
        table.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        found = packed(table, out=name)
        refused = sum(entry["rows"] for entry in found["refused"].values())
        assert found["rows"] == found["captions"] + found["repeated_rows"] + refused
        printed[name] = "\n".join(lines(found, tmp_path / name))
    assert "left out   2 rows with picture and captions of earlier rows" in printed["twice"]
    assert "earlier rows" not in printed["once"]
