"""Mistakes that people make with their data: each gets one sentence, and bad rows are counted by file and line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from open_clip_zerovl.cli import main
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.pack.report import lines
from open_clip_zerovl.prepare.pack.rows import Columns
from open_clip_zerovl.prepare.pack.run import PackSettings, pack
from open_clip_zerovl.prepare.public.gather import Work
from support.pairs import as_csv, as_folder, as_jsonl, as_tars, make_pairs, picture, samples_of, write_pictures
from support.tars import write_tar

WORK = Work(threads=4, progress=False)


def table(folder: Path, text: str, name: str = "pairs.csv") -> Path:
    """Six pictures, 0.png to 5.png, and a table with this text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        (folder / f"{number}.png").write_bytes(picture(number))
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder / name


def pictures_alone(folder: Path) -> Path:
    write_pictures(folder, make_pairs(4))
    return folder


def folder_and_table(folder: Path) -> Path:
    as_csv(as_folder(folder, make_pairs(4)), make_pairs(4))
    return folder


def tars_and_pictures(folder: Path) -> Path:
    write_pictures(as_tars(folder, make_pairs(4)), make_pairs(4))
    return folder


def two_tables(folder: Path) -> Path:
    (folder).mkdir()
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text("image,caption\n1.png,x\n")
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


def tars_of(members: dict[str, bytes]) -> Callable[[Path], Path]:
    return lambda folder: write_tar(folder / "0.tar", list(members.items()))


def file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        (folder / name).write_bytes(content)
        return folder / name

    return make


#: What is made (a text: a table with it), settings, the sentence.
MISTAKES = {
    "no captions": (
        pictures_alone,
        {},
        r"has 4 pictures and no captions: .* write the caption of a/000.png into a/000.txt, or give a table",
    ),
    "nothing there": (lambda folder: folder / "none.csv", {}, r"none.csv does not exist: correct the path"),
    "an address": (lambda folder: "https://host/x.csv", {}, r"https:/+host/x.csv is an address: fetch it first"),
    "empty folder": (
        lambda folder: folder.mkdir() or folder,
        {},
        r"holds neither pictures, a table, parquet files nor tars, but nothing",
    ),
    "spreadsheet": (file("pairs.xlsx", b"PK"), {}, r"is a spreadsheet: save it as CSV in UTF-8"),
    "unknown file": (file("pairs.dat", b"image,caption\n"), {}, r"has no known ending: name its form with --format"),
    "zip": (file("x.zip", b""), {}, r"is a zip with .*unpack it|is a zip"),
    "column misspelt": (
        "filepath,title\n0.png,x\n",
        {"columns": Columns(captions=("titel",))},
        r"has no column 'titel', given with --caption-column; its columns are 'filepath', 'title'; did you mean "
        r"--caption-column 'title'\?",
    ),
    "source column missing": (
        "filepath,title\n0.png,x\n",
        {"columns": Columns(source="kind")},
        r"has no column 'kind', given with --source-column; its columns are 'filepath', 'title'$",
    ),
    "columns of other names": (
        "a,b\n0,x\n",
        {},
        r"no column of .*pairs.csv is called as one with pictures is .* its columns are 'a', 'b': name the one with "
        r"--picture-column",
    ),
    "no caption column": (
        "filepath,label\n0.png,3\n",
        {},
        r"no column of .* is called as one with captions is .* 'filepath', 'label': name the one with --caption-column",
    ),
    "no header": (
        "0.png,x,3\n1.png,y,4\n",
        {},
        r"has no header line \(its first line is '0.png', 'x', '3'\): number its columns, as --picture-column 1 "
        r"--caption-column 2",
    ),
    "utf-16": (
        file("pairs.csv", "image,caption\n0.png,x\n".encode("utf-16")),
        {},
        r"is not UTF-8 text \(UTF-16, as some programs save it\?\)",
    ),
    "paths that do not exist": (
        "image,caption\nimages/0.png,x\nimages/1.png,y\n",
        {},
        r"none of the 2 pictures that .*pairs.csv names first exists; that of line 2 was looked for at "
        r"/.*/images/0.png; a file of that name lies in .*: give --pictures-in",
    ),
    "pictures elsewhere": (
        pictures_elsewhere,
        {},
        r"a file of that name lies in .*/images: give --pictures-in .*/images$",
    ),
    "pictures nowhere": (
        "image,caption\nz/7.png,x\n",
        {},
        r"paths are taken as relative to .*: give the folder that they are relative to with --pictures-in",
    ),
    "captions are numbers": (
        lambda folder: table(folder, '{"image": "0.png", "text": 3}\n{"image": "1.png", "text": 4}\n', "pairs.jsonl"),
        {},
        r"none of the 2 rows can be used: caption not text in 2 \(first pairs.jsonl line 1\); check the input, and which "
        r"columns are read \(picture 'image', caption 'text'",
    ),
    "all captions empty": ("image,caption\n0.png,\n1.png, \n", {}, r"empty caption in 2 \(first pairs.csv line 2\)"),
    "only a header": ("image,caption\n", {}, r"pairs.csv has no rows: check the input"),
    "empty file": (file("pairs.csv", b""), {}, r"has no first line with the names of its columns"),
    "no json": (file("pairs.jsonl", b"<html>\n"), {}, r"holds no JSON objects.*it begins with '<html>"),
    "one object": (file("pairs.json", b'{\n "a": 1\n}\n'), {}, r"holds no JSON objects"),
    "boxes": (
        file(
            "instances.json",
            b'{"images": [{"id": 1, "file_name": "1.png"}], "annotations": [{"image_id": 1, "bbox": []}]}',
        ),
        {},
        r"the annotations of .* hold no captions \(their keys are 'image_id', 'bbox'\): give the captions, as",
    ),
    "texts and a table": (
        folder_and_table,
        {},
        r"holds pictures with texts beside them, and a table too: give --format folder",
    ),
    "tars and pictures": (
        tars_and_pictures,
        {},
        r"holds tars, and pictures too: say which with --format webdataset or --format folder",
    ),
    "two tables": (two_tables, {}, r"holds 2 tables \(a.csv, b.csv ...\): give the one"),
    "wrong format": (
        lambda folder: as_folder(folder, make_pairs(2)),
        {"form": "parquet"},
        r"holds no file of --format parquet",
    ),
    "json without captions": (
        json_without_captions,
        {},
        r"no key of the JSON files of .* their keys are 'label', 'id'",
    ),
    "tars without pictures": (
        tars_of({"a.cls": b"3", "a.txt": b"x"}),
        {},
        r"hold no picture \(jpg, png, jpeg, webp\) but 'cls', 'txt'",
    ),
    "tars without captions": (
        tars_of({"a.png": picture(0), "a.cls": b"3"}),
        {},
        r"hold no captions, neither txt nor json but 'cls', 'png'",
    ),
    "no tar": (file("0.tar", b"<html>no such file</html>"), {}, r"cannot be read as a tar, or holds no samples"),
    "no such dataset": (
        file("state.json", b"{}"),
        {"at": "..", "form": "arrow"},
        r"state.json does not list the Arrow files|missing: `pip install",
    ),
    "no parquet": (file("x.parquet", b"PAR"), {}, r"is no parquet file, or a broken one|missing: `pip install"),
    "a source of a folder": (
        lambda folder: as_folder(folder, make_pairs(2)),
        {"columns": Columns(source="kind")},
        r"has no column 'kind': give --source-column folder",
    ),
    "too small a source": (
        "image,caption,kind\n0.png,x,a\n1.png,y,b\n",
        {"columns": Columns(source="kind"), "test_share": 0.1},
        r"source 'a' has 1 picture, and --test-share 0.1 holds at least one of each source out",
    ),
    "sources of one name": (
        "image,caption,kind\n0.png,x,a b\n1.png,y,a/b\n",
        {"columns": Columns(source="kind")},
        r"the sources 'a b' and 'a/b' \(column 'kind'\) would both be called 'a-b'",
    ),
    "test share": (
        lambda folder: as_folder(folder, make_pairs(2)),
        {"test_share": 5.0},
        r"--test-share is 5: it must be 0 or more, and less than 1",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake, tmp_path):
    make, changes, sentence = MISTAKES[mistake]
    given = table(tmp_path / "in", make) if isinstance(make, str) else make(tmp_path / "in")
    changes = dict(changes)
    if changes.pop("at", None):
        given = given.parent
    with pytest.raises(UserError, match=sentence) as caught:
        pack([str(given)], tmp_path / "out", PackSettings(**changes), work=WORK)
    print(f"{mistake}: {caught.value}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not list((tmp_path / "out").rglob("*.tar"))


def test_bad_rows_are_counted_and_named_by_file_and_line(tmp_path):
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
    found = pack([str(given)], tmp_path / "out", work=WORK)
    got = {reason: [e["at"] for e in entry["examples"]] for reason, entry in found["refused"].items()}
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
    assert rows[2]["picture"] == str(tmp_path / "in/gone.png") and rows[2]["reason"] == "picture missing"
    captions = {sample.files["txt"].decode() for sample in samples_of(tmp_path / "out/train")}
    assert captions == {"a dog\nthe dog again", '"a stray quote'}
    said = "\n".join(lines(found, tmp_path / "out"))
    assert "a stray quote in 1 lines, which are read as they stand, quote included: 4" in said
    assert "8 rows, all of them in refused.csv" in said and "1 empty caption: pairs.csv line 3" in said
    assert len(said.splitlines()) <= 15
    page = (tmp_path / "out/report.html").read_text()
    assert (
        "data:image/png;base64," in page
        and "a dog / the dog again" in page
        and "http" not in page.replace("http-equiv", "")
    )


def test_mixed_and_torn_inputs(tmp_path):
    lines_ = [
        '{"image": "0.png", "caption": "x"}',
        "[1]",
        "no json",
        '{"image": 3, "caption": "y"}',
        '{"caption": "z"}',
        "",
    ]
    given = table(tmp_path / "in", "\n".join(lines_) + "\n", "pairs.jsonl")
    found = pack([str(given)], tmp_path / "out", work=WORK)
    assert {reason: entry["rows"] for reason, entry in found["refused"].items()} == {
        "no JSON object": 2,
        "no picture named": 2,
    }
    tars = as_tars(tmp_path / "tars", make_pairs(12))
    torn = (tars / "00000.tar").read_bytes()
    (tars / "00000.tar").write_bytes(torn[: len(torn) // 2])
    found = pack([str(tars)], tmp_path / "tars-out", work=WORK)
    assert found["refused"]["truncated shard"]["examples"][0]["at"] == "00000.tar" and 6 < found["pictures"] < 12


def test_a_folder_of_other_inputs_or_settings_is_refused(tmp_path):
    given = as_folder(tmp_path / "in", make_pairs(6))
    out = tmp_path / "out"
    pack([str(given)], out, PackSettings(seed=1), work=WORK)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(
        UserError, match=r"out was made with seed 1, and now it is 2: give a new folder, or call it as before"
    ):
        pack([str(given)], out, PackSettings(seed=2), work=WORK)
    other = as_csv(tmp_path / "other", make_pairs(6))
    with pytest.raises(UserError, match=r"out was made from in, and now it is pairs.csv: give a new folder"):
        pack([str(other)], out, PackSettings(seed=1), work=WORK)
    (given / "a/000.txt").write_text("another caption")
    (given / "new.png").write_bytes(picture(99))
    with pytest.raises(UserError, match=r"out was made from in, whose files have changed since"):
        pack([str(given)], out, PackSettings(seed=1), work=WORK)
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"mine is not empty, and no pack.json in it says that this program wrote it"):
        pack([str(given)], tmp_path / "mine", work=WORK)
    with pytest.raises(UserError, match=r"lies in .*in, which is read: give a folder elsewhere with --out"):
        pack([str(given)], given / "out", work=WORK)


def test_after_a_mistake_the_same_folder_is_taken(tmp_path):
    """Other columns where nothing could be used; another split where no shard was written, without reading pictures again."""
    given = table(tmp_path / "in", "image,caption,text\n0.png,,x\n1.png,,y\n")
    with pytest.raises(UserError, match="none of the 2 rows can be used"):
        pack([str(given)], tmp_path / "out", work=WORK)
    chosen = Columns(captions=("text",), source="text")
    with pytest.raises(UserError, match="source 'x' has 1 picture, and --test-share 0.5"):
        pack([str(given)], tmp_path / "out", PackSettings(columns=chosen, test_share=0.5), work=WORK)
    (spool,) = (tmp_path / "out/.pack").glob("*.spool")
    assert spool.stat().st_size
    assert pack([str(given)], tmp_path / "out", PackSettings(columns=chosen), work=WORK)["pictures"] == 2


def test_after_paths_that_lead_nowhere_any_settings_are_taken(tmp_path):
    """No picture was read, so that nothing is lost by other columns or sizes."""
    given = table(tmp_path / "in/pictures", "image,text\n0.png,x\n1.png,x\n").rename(tmp_path / "in/pairs.csv")
    with pytest.raises(UserError, match="none of the 2 pictures that .* names first exists"):
        pack([str(given)], tmp_path / "out", PackSettings(test_share=0.1), work=WORK)
    chosen = PackSettings(columns=Columns(pictures_in=tmp_path / "in/pictures", source="text"), seed=3)
    assert pack([str(given)], tmp_path / "out", chosen, work=WORK)["pictures"] == 2


def test_pyarrow_missing_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        UserError, match=r"parquet and Arrow files are read by pyarrow, which is missing: `pip install pyarrow`"
    ):
        pack([str(tmp_path / "x.parquet")], tmp_path / "out", work=WORK)


def test_the_command_line_ends_in_the_command_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    as_jsonl(tmp_path / "my pets", make_pairs(8))
    assert main(["data", "pack", "my pets", "--out", "my out", "--test-share", "0.3", "--threads", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "zerovl finetune --from ViT-B-32/laion2b_s34b_b79k --data 'my out' --out 'my out-tuned'",
        "zerovl train --model ViT-B-32 --train-data 'my-out=my out/train' --retrieval-data 'my-out=my out' "
        "--captions one-per-epoch --warmup-share 0.025 --batch-size 1",
    ]
    assert main(["data", "pack", "my pets", "--out", "my out", "--test-share", "0.3"]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0] == "my out is complete: nothing was done. What it holds:" and again[1:] == said
    assert main(["data", "pack", "my pets", "--out", "my out", "--caption-column", "captoin", "texts"]) == 2
    assert "did you mean" not in capsys.readouterr().err  # nothing is near


def test_a_path_that_does_not_exist_is_told_before_torch_is_loaded(tmp_path, capsys, monkeypatch):
    """In a moment, then, and with the name that was meant."""
    as_folder(tmp_path / "photos", make_pairs(2))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "pack", "phtos", "--out", "out"]) == 2
    assert "phtos does not exist; did you mean photos?" in capsys.readouterr().err
    program = "import open_clip_zerovl.prepare.pack.run, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_misspelt_heading_is_offered(tmp_path):
    given = table(tmp_path / "in", "file,titel,site\n0.png,x,a\n")
    with pytest.raises(
        UserError, match="its columns are 'file', 'titel', 'site': name .*did you mean --caption-column 'titel'"
    ):
        pack([str(given)], tmp_path / "out", work=WORK)


def test_a_tables_columns_are_not_wanted_of_a_folder_with_texts(tmp_path):
    """A folder beside a table whose caption column is named: only the table has columns."""
    given = table(tmp_path / "in", "image,titel\n0.png,x\n1.png,y\n")
    photos = as_folder(tmp_path / "photos", make_pairs(4))
    found = pack(
        [str(photos), str(given)], tmp_path / "out", PackSettings(columns=Columns(captions=("titel",))), work=WORK
    )
    assert found["inputs"][0]["columns"] == "captions in .txt, one a line" and found["rows"] == 6


def test_captions_in_another_encoding_are_told_with_what_to_do(tmp_path):
    given = table(tmp_path / "in", "image,caption\n0.png,caf\udce9\n1.png,tea\n")  # a byte of Latin-1
    found = pack([str(given)], tmp_path / "out", work=WORK)
    said = "\n".join(lines(found, tmp_path / "out"))
    assert "1 caption not UTF-8: pairs.csv line 2; save the table as UTF-8 (iconv -f CP1252" in said
    assert (
        "1 row, which is in refused.csv" in said and "1 shard " in said and "repeated   no caption, no picture" in said
    )


def test_the_progress_bar_counts_every_row(tmp_path, capsys):
    """Rows without a picture to read, and rows of one picture, too: it ends full."""
    given = table(tmp_path / "in", "image,caption\n0.png,x\n0.png,y\n1.png,\n2.png,z\n")
    pack([str(given)], tmp_path / "out", work=Work(threads=2))
    bar = capsys.readouterr().err.replace("\r", "\n").rstrip().splitlines()[-1]
    assert " 4pair [" in bar and "2 came; empty caption 1]" in bar


def test_annotations_whose_ids_are_lists_are_refused_rows(tmp_path):
    given = table(tmp_path / "in", "").with_name("captions.json")
    images = [{"id": 1, "file_name": "0.png"}, {"id": [2], "file_name": "1.png"}]
    annotations = [{"image_id": image_id, "caption": "x"} for image_id in (1, [2], {})]
    given.write_text(json.dumps({"images": images, "annotations": annotations}))
    found = pack([str(given)], tmp_path / "out", work=WORK)
    assert found["pictures"] == 1 and found["refused"]["no picture named"]["rows"] == 2


def test_lines_that_end_in_a_carriage_return_alone_are_told(tmp_path):
    given = table(tmp_path / "in", "image,caption\r0.png,a cat\r1.png,a dog\r")
    with pytest.raises(
        UserError, match="lines that end in a carriage return alone, .*: save it as CSV with line ends of Unix"
    ):
        pack([str(given)], tmp_path / "out", work=WORK)
