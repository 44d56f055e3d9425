"""Tables of pairs as sources, and images with several captions in tables and tars."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.table import BLOCK_SAMPLES, CsvFormat, open_table
from open_clip_zerovl.shards import foreign
from support.loading import loader_of
from support.tars import png, write_source, write_tar


def captions_of_epochs(sources: tuple[Source, ...], epochs: int, **options) -> list[list[str]]:
    """Captions shown in each epoch; a tokenizer of bytes brings them through the loader."""

    def tokenizer(texts):
        return torch.tensor([list(text.encode().ljust(200, b"\0")[:200]) for text in texts])

    loader = loader_of(sources, options.pop("batch", 1), tokenizer=tokenizer, **options)
    shown = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        shown.append(
            [bytes(row.tolist()).rstrip(b"\0").decode() for _, texts in loader for row in texts]
        )
    captions_of_epochs.lost = loader.lost
    return shown


def write_pictures(folder: Path, count: int) -> None:
    (folder / "pictures").mkdir(parents=True)
    for number in range(count):
        (folder / "pictures" / f"{number}.png").write_bytes(png((number, 0, 0)))


def zerovl_table(folder: Path, images: int = 6, captions: int = 3) -> Path:
    write_pictures(folder, images)
    rows = ["image,image_id,caption,caption_id"]
    for caption in range(captions):  # an image's rows do not lie together
        rows += [
            f'pictures/{i}.png,id{i},"image {i}, caption {caption}",{i}_{caption}'
            for i in range(images)
        ]
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")
    return folder / "pairs.csv"


def test_open_clips_and_zerovls_tables(tmp_path):
    write_pictures(tmp_path / "a", 5)
    rows = [f"pictures/{i}.png\ttitle {i}" for i in range(5)]
    (tmp_path / "a" / "pairs.tsv").write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
    zerovl_table(tmp_path / "b")
    sources = parse_sources(f"one={tmp_path}/a/pairs.tsv::{tmp_path}/b", "b=0.5")
    assert [(source.name, source.num_samples, source.weight) for source in sources] == [
        ("one", 5, 1),
        ("b", 18, 0.5),
    ]
    assert [source.layout for source in sources] == ["table pairs.tsv", "table pairs.csv"]
    ((*shown,),) = captions_of_epochs((sources[0],), 1, workers=1)
    assert sorted(shown) == [f"title {i}" for i in range(5)]
    assert sorted(captions_of_epochs((sources[1],), 2)[0]) != sorted(
        captions_of_epochs((sources[1],), 2)[1]
    )


def test_columns_and_separator_by_flags(tmp_path):
    write_pictures(tmp_path, 2)
    (tmp_path / "x.csv").write_text("words;file\none;pictures/0.png\ntwo;pictures/1.png\n")
    style = CsvFormat("file", "words", ";")
    assert captions_of_epochs(parse_sources(f"x={tmp_path}/x.csv", table_format=style), 1)[0] in (
        ["one", "two"],
        ["two", "one"],
    )


@pytest.mark.parametrize("identity", ["7", ""])
def test_an_id_of_two_pictures_is_refused_where_the_rows_of_an_image_are_one_sample(
    tmp_path, identity
):
    """As in tables of two sets whose ids restart: the second picture would never be shown, and its captions for the first."""
    rows = [f"a.png,{identity},a cat,1", f"a.png,{identity},the cat,2", f"b.png,{identity},a dog,1"]
    (tmp_path / "t.csv").write_text("\n".join(["image,image_id,caption,caption_id", *rows]) + "\n")
    with pytest.raises(
        UserError,
        match=f"line 4: the image_id '{identity}' is of two pictures .'a.png' and 'b.png'",
    ):
        parse_sources(f"t={tmp_path}/t.csv", captions="one-per-epoch")
    assert parse_sources(f"t={tmp_path}/t.csv")[0].num_samples == 3


COLUMNS = {  # header: (flags, columns of the picture and of the captions, or words of the refusal)
    "file,title": (CsvFormat("file"), (0, 1)),  # one flag, and the other column by its usual name
    "image,text": (CsvFormat(None, "text"), (0, 1)),
    "image,text,caption": (CsvFormat(), (0, 2)),  # the likelier of two usual names, wherever it stands
    "title,filepath,a,b": (CsvFormat("a", "b"), (2, 3)),
    "image_path;text": (CsvFormat(), (0, 1)),
    "path|caption_0|caption_1": (CsvFormat(), (0, 1, 2)),
    "words;thing": (CsvFormat(), "like a picture .* or a caption .*; its columns are 'words', 'thing': name them"),
    "filepath,title": (CsvFormat("a", "b"), "has no column 'a', given with --csv-img-key; .* pack .*x.csv --out"),
    "image,caption,caption": (CsvFormat(), "has 2 columns named 'caption': give each column its own name"),
}  # fmt: skip


@pytest.mark.parametrize("header", COLUMNS)
def test_columns_are_the_given_ones_or_one_sentence_names_all_that_lack(tmp_path, header):
    """A flag that stood alone, or named no column, was passed over without a word."""
    style, columns = COLUMNS[header]
    (tmp_path / "x.csv").write_text(f"{header}\n{header}\n")
    if isinstance(columns, str):
        with pytest.raises(UserError, match=columns):
            open_table(str(tmp_path / "x.csv"), style)
    else:
        table = open_table(str(tmp_path / "x.csv"), style)
        assert (table.image_column, *table.caption_columns) == columns
        captions = [header.split(table.separator)[n].encode() for n in columns[1:]]
        assert next(table.samples()).captions == captions


def test_one_caption_of_an_image_an_epoch_and_all_in_turn(tmp_path):
    path = zerovl_table(tmp_path, 6, 3)
    sources = parse_sources(f"t={path}", captions="one-per-epoch")
    assert sources[0].num_samples == 6
    epochs = captions_of_epochs(sources, 3)
    for shown in epochs:
        assert sorted(text.split(",")[0] for text in shown) == [f"image {i}" for i in range(6)]
    assert (
        Counter(text for shown in epochs for text in shown).most_common(1)[0][1] == 1
    )  # three epochs show all 18
    assert len({text[-1] for text in epochs[0]}) > 1  # not caption 0 of every image in the first
    assert captions_of_epochs(sources, 3) == epochs
    every = parse_sources(f"t={path}", captions="all")
    assert every[0].num_samples == 18 and len(set(captions_of_epochs(every, 1)[0])) == 18


def test_captions_in_the_lines_of_a_tar(tmp_path):
    members = []
    for i in range(7):
        lines = "\n".join(f"image {i} line {line}" for line in range(i % 3 + 1))
        members += [(f"{i}.png", png((i, 0, 0))), (f"{i}.txt", (lines + "\n\n").encode())]
    write_tar(tmp_path / "s" / "0.tar", members)
    whole, one, every = (
        parse_sources(f"s={tmp_path}/s", captions=c) for c in (None, "one-per-epoch", "all")
    )
    assert [source.num_samples for (source,) in (whole, one, every)] == [7, 7, 13]
    assert "image 1 line 0 image 1 line 1" in captions_of_epochs(whole, 1)[0]
    epochs = captions_of_epochs(one, 6)
    assert all(len({text.split(" line")[0] for text in shown}) == 7 for shown in epochs)
    assert {text for shown in epochs for text in shown} == set(
        captions_of_epochs(every, 1)[0]
    ) and len(set(captions_of_epochs(every, 1)[0])) == 13
    assert (
        sorted(captions_of_epochs(every, 1, workers=2, batch=2)[0])[:5]
        == sorted(captions_of_epochs(every, 1)[0])[:5]
    )
    with pytest.raises(
        UserError,
        match="cannot count the captions of remote shards .*, first pipe:cat .*; copy or pack them here",
    ):
        parse_sources(f"s=pipe:cat {tmp_path}/s/0.tar", captions="all")


@pytest.mark.timeout(60)
def test_rotten_rows_are_replaced(tmp_path):
    """A pipe or a device as picture does not hang."""
    write_pictures(tmp_path, 11)
    (tmp_path / "pictures" / "3.png").unlink()
    (tmp_path / "pictures" / "4.png").write_bytes(b"rotten")
    (tmp_path / "pictures" / "9.png").unlink()
    os.mkfifo(tmp_path / "pictures" / "9.png")
    rows = [f"pictures/{i}.png\ttitle {i}".encode() for i in range(11)]
    rows[5], rows[6], rows[7] = (
        b"pictures/5.png",
        b"pictures/6.png\t\xff\xfe",
        b"pictures/\x007.png\tx",
    )
    rows[10] = b"/dev/zero\tdevice"
    (tmp_path / "pairs.tsv").write_bytes(
        b"\n".join([b"\xef\xbb\xbffilepath\ttitle", *rows]) + b"\n\n"
    )
    (shown,) = captions_of_epochs(parse_sources(f"t={tmp_path}"), 1)
    assert set(shown) == {f"title {i}" for i in (0, 1, 2, 8)} and len(shown) == 11
    assert captions_of_epochs.lost == {
        "t": {"no image": 4, "undecodable image": 1, "no caption": 1, "caption not UTF-8": 1}
    }


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12),
        min_size=1,
        max_size=150,
    )
)
def test_rows_are_found_again_whatever_is_quoted_in_them(tmp_path_factory, captions):
    import csv

    path = tmp_path_factory.mktemp("table") / "t.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", "caption"])
        writer.writerows((f"{number}.png", caption) for number, caption in enumerate(captions))
    rows = [(sample.image, sample.captions) for sample in open_table(str(path)).samples()]
    assert rows == [
        (f"{number}.png", [" ".join(caption.split()).encode()])
        for number, caption in enumerate(captions)
    ]


@pytest.mark.parametrize(
    "files, words",
    [
        ({"a.csv": "filepath,title\n"}, "holds no rows below its header"),
        ({"a.csv": ""}, "no column of .* is named like a picture"),
        (
            {"a.csv": "filepath,title\n", "b.tsv": "x"},
            "holds 2 tables .a.csv, b.tsv ....; name the one",
        ),
        ({"a.txt": ""}, "holds no [*].tar shards"),
        (
            {"pack.json": "{}", "refused.csv": "file\n"},
            "was packed without pictures of the split 'train'",
        ),
        (
            {"a.csv": 'filepath,title\na.png,"' + "x" * 200_000 + '"\n'},
            "cannot be read as CSV .field larger",
        ),
    ],
)
def test_a_mistake_gives_one_sentence(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        parse_sources(f"t={tmp_path}")
    with pytest.raises(UserError, match="cannot be read .No such file"):
        parse_sources(f"t={tmp_path}/gone.csv")


STRAY = {
    "stray quotes, tabs": (
        ["filepath\ttitle", 'pictures/0.png\t"hello world', "pictures/1.png\ttitle 1", 'pictures/2.png\tthe 6" pipe',
         'pictures/3.png\t"great" they said', 'pictures/4.png\t"a ""quoted"" one"', 'pictures/5.png\t"over\ntwo lines"'],
        {'"hello world', "title 1", 'the 6" pipe', '"great" they said', 'a "quoted" one', "over two lines"},
        r"a stray quote, lines 2, 5\b",
    ),
    "a stray quote that the next one closes": (
        ["filepath\ttitle", 'pictures/0.png\t"hello', 'pictures/1.png\tthe 6"', "pictures/2.png\tlast"],
        {'"hello', 'the 6"', "last"},
        r"a stray quote, line 2\b",
    ),
    "a stray quote that nothing closes": (
        ["filepath,title", 'pictures/0.png,"hello', *(f"pictures/{i % 6}.png,title {i}" for i in range(1, 300))],
        {'"hello', *(f"title {i}" for i in range(1, 300))},
        r"a stray quote, line 2\b",
    ),
    "commas without quotes": (
        ["filepath,title", "pictures/0.png,a dog, running", 'pictures/1.png,"a cat, asleep"', "pictures/2.png,a bird,,"],
        {"a cat, asleep", "a bird"},
        r"more fields than the header, line 2\b",
    ),
    "a field of more than 128 KiB": (
        ["filepath,title", "pictures/0.png," + "x" * 200_000, "pictures/1.png,one", "pictures/2.png,two"],
        {"one", "two"},
        r"field larger than field limit \(131072\), line 2\b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRAY)
def test_odd_quoting_is_reported_by_line_and_loses_no_row(tmp_path, caplog, kind):
    """A stray quote at the start of a caption swallowed the rows after it; a comma without quotes cut the caption."""
    lines, expected, words = STRAY[kind]
    write_pictures(tmp_path, 6)
    ending = ".tsv" if "\t" in lines[0] else ".csv"
    (tmp_path / f"t{ending}").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=rf"t\{ending} cannot be read as CSV \({words}"):
        parse_sources(f"t={tmp_path}/t{ending}", on_bad_sample="fail")
    sources = parse_sources(f"t={tmp_path}/t{ending}")
    assert re.search(words, caplog.text)
    (shown,) = captions_of_epochs(sources, 1)
    assert set(shown) == expected
    unreadable = captions_of_epochs.lost.get("t", {})
    assert unreadable == (
        {"unreadable row": 1}
        if kind in ("commas without quotes", "a field of more than 128 KiB")
        else {}
    )


@pytest.fixture
def three_rows(tmp_path) -> Path:
    write_pictures(tmp_path, 3)
    text = "filepath,title\n" + "".join(f"pictures/{i}.png,title {i}\n" for i in range(3))
    (tmp_path / "t.csv").write_text(text)
    return tmp_path / "t.csv"


def test_too_many_open_files_are_no_fault_of_a_picture(three_rows, monkeypatch):
    """They would lose arbitrary samples, different ones in each run."""
    sources = parse_sources(f"t={three_rows}")

    def refused(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(foreign, "regular_file", refused)
    with pytest.raises(UserError, match="as many files open as it may"):
        captions_of_epochs(sources, 1)


def test_an_edit_while_training_ends_in_a_sentence(three_rows):
    """Rows were taken from where they had been."""
    sources = parse_sources(f"t={three_rows}")
    three_rows.write_text(three_rows.read_text().replace("title 0", "another title"))
    with pytest.raises(
        UserError, match=r"t\.csv has changed since the run began; start the run again"
    ):
        captions_of_epochs(sources, 1)


def test_a_table_beside_tars_is_ignored(tmp_path):
    write_source(tmp_path / "s", 0, 4, 4)
    (tmp_path / "s" / "notes.csv").write_text("anything")
    assert parse_sources(f"s={tmp_path}/s")[0].num_samples == 4


def test_a_long_table_is_shuffled_in_blocks(tmp_path):
    write_pictures(tmp_path, 1)
    (tmp_path / "t.csv").write_text(
        "filepath,title\n" + "".join(f"pictures/0.png,row {i}\n" for i in range(1000))
    )
    (source,) = parse_sources(f"t={tmp_path}/t.csv")
    assert set(source.sizes[:-1]) == {BLOCK_SAMPLES} and sum(source.sizes) == 1000
    (shown,) = captions_of_epochs((source,), 1, batch=10)
    assert sorted(shown) == sorted(f"row {i}" for i in range(1000)) and shown != sorted(shown)


def test_a_separator_of_two_characters_is_refused(tmp_path):
    r"""A shell passes '\\t' on as it stands."""
    (tmp_path / "a.tsv").write_text("filepath\ttitle\na.png\tone\n")
    with pytest.raises(UserError, match=r"--csv-separator '.*t' has 2 characters.*a tab as \$'"):
        open_table(str(tmp_path / "a.tsv"), CsvFormat(separator="\\t"))
