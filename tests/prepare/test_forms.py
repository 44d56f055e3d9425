"""Every form of input gives the same pairs; the rules for pictures, captions and held-out sets."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from typing import Any

import pyarrow.parquet
import pytest
from PIL import Image

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import open_retrieval_set
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.finetune.data import FinetuneData, find_data
from open_clip_zerovl.prepare.check import check_shards
from open_clip_zerovl.prepare.columns import texts_of
from open_clip_zerovl.prepare.rows import public_name
from open_clip_zerovl.prepare.settings import Columns, Work
from open_clip_zerovl.shards.tar import image_of, read_samples
from support.pairs import (
    FORMS,
    as_csv,
    as_folder,
    make_pairs,
    picture,
    samples_of,
    shards_of,
)
from support.servers import HostileServer, ShardServer, photo
from support.tars import encoded

#: Settings of most calls.
SPLIT: dict[str, Any] = {"test_share": 0.25, "shard_size": 4}


@pytest.fixture
def reference(packed, tmp_path):
    """The shards of the folder form."""
    packed(f"x={as_folder(tmp_path / 'texts', make_pairs())}", out="reference", **SPLIT)
    return tmp_path / "reference"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pairs(form, reference, packed, tmp_path):
    found = packed(f"x={FORMS[form](tmp_path / 'in', make_pairs())}", **SPLIT)
    assert found["pictures"] == 12 and found["captions"] == 20 and found["refused"] == {}
    for split in ("train", "test"):
        assert pairs_of(tmp_path / "out/x" / split) == pairs_of(reference / "x" / split)
    assert not (tmp_path / "out/.pack").exists()


def pairs_of(folder):
    """Shards of samples without the name of the file, which is the form's own."""
    return [
        [
            (s.key, {name: content for name, content in s.files.items() if name != "json"})
            for s in read_samples(shard)
        ]
        for shard in sorted(folder.glob("*.tar"))
    ]


def test_the_shards_hold_the_pairs(reference):
    wanted = {pair.content: pair.captions for pair in make_pairs()}
    names = {pair.content: pair.name for pair in make_pairs()}
    train, test = samples_of(reference / "x/train"), samples_of(reference / "x/test")
    got = {
        s.files["jpg" if "jpg" in s.files else "png"]: s.files["txt"].decode().split("\n")
        for s in (*train, *test)
    }
    assert got == wanted and len(train) == 11 and len(test) == 1
    assert {image_of(s.files): json.loads(s.files["json"]) for s in (*train, *test)} == {
        content: {"file": name} for content, name in names.items()
    }
    sizes = json.loads((reference / "x/train/sizes.json").read_text())
    assert sizes == {"00000.tar": 3, "00001.tar": 4, "00002.tar": 4}
    assert [source.num_samples for source in parse_sources(f"x={reference / 'x/train'}")] == [11]
    assert not check_shards(reference / "x/train", hashes=True, decode=True, progress=False).faults
    retrieval = open_retrieval_set(reference / "x")
    assert {one.captions for one in retrieval.samples} == {
        tuple(wanted[image_of(s.files)]) for s in test
    }


@pytest.mark.parametrize(
    "form", ["csv", "folder of json", "coco", "tars", "parquet", "saved dataset"]
)
def test_a_source_for_each_value_of_a_column(form, packed, tmp_path):
    packed(FORMS[form](tmp_path / "in", make_pairs()), columns=Columns(source="kind"), **SPLIT)
    for letter in "ab":
        captions = {pair.captions[0] for pair in make_pairs() if pair.source == f"source-{letter}"}
        folder = tmp_path / f"out/source-{letter}"
        samples = samples_of(folder / "train") + samples_of(folder / "test")
        assert {sample.files["txt"].decode().split("\n")[0] for sample in samples} == captions
        assert open_retrieval_set(folder).samples  # each source has a held-out set


def test_folders_and_inputs_are_sources_too(packed, tmp_path):
    given = as_folder(tmp_path / "in", make_pairs())
    found = packed(given, columns=Columns(source="folder"), **SPLIT)
    written = [(one["source"], one["split"]) for one in found["written"]]
    assert written == [("a", "train"), ("a", "test"), ("b", "train"), ("b", "test")]
    named = packed(f"one={given}", f"two={as_csv(tmp_path / 'csv', make_pairs(4))}", out="both")
    assert [(one["folder"], one["pictures"]) for one in named["written"]] == [
        ("one/train", 12),
        ("two/train", 4),
    ]
    # An input without a name is a source that is called as the output.
    alone = packed(given, out="pets")
    assert [(one["source"], one["folder"]) for one in alone["written"]] == [("pets", "train")]
    # The tables of an output are not taken for sources.
    for out, train in (
        ("both", "one={0}/one/train::two={0}/two/train"),
        ("pets", "pets={0}/train"),
    ):
        folder = tmp_path / out
        assert find_data(str(folder)) == FinetuneData(train.format(folder), "")


def test_no_picture_is_on_both_sides_whatever_its_file_and_source(packed, tmp_path):
    """Copies, other formats and repeated rows of a picture: one sample a source, on one side in all sources."""
    rows = ["image,caption,kind"]
    for number in range(40):
        for copy, ending in enumerate(("png", "bmp", "png")):
            name = f"{number}-{copy}.{ending}"
            (tmp_path / name).write_bytes(picture(number, {"png": "PNG", "bmp": "BMP"}[ending]))
            rows.append(f"{name},caption {number} {copy},{'ab'[copy // 2]}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows) + "\n")
    found = packed(
        tmp_path / "pairs.csv", columns=Columns(source="kind"), test_share=0.2, min_side_px=8
    )
    sides: dict[str, set] = {split: set() for split in ("train", "test")}
    for letter in "ab":
        for split in sides:
            samples = samples_of(tmp_path / "out" / letter / split)
            assert len({sample.key for sample in samples}) == len(samples) > 0
            sides[split] |= {opened(sample)[1].convert("RGB").tobytes() for sample in samples}
            for sample in samples:  # both files of source a are one sample
                assert len(sample.files["txt"].decode().split("\n")) == (2 if letter == "a" else 1)
    assert not sides["train"] & sides["test"] and len(sides["train"] | sides["test"]) == 40
    assert 2 <= len(sides["test"]) <= 16
    assert found["rows"] == 120 and found["pictures"] == 80


def opened(sample) -> tuple[str, Image.Image]:
    """The ending and the picture of a sample."""
    (ending,) = set(sample.files) - {"txt", "json"}
    return ending, Image.open(io.BytesIO(sample.files[ending]))


def test_another_seed_gives_another_order_and_held_out_set_and_more_data_keeps_it(packed, tmp_path):
    keys = {}
    for name, count, seed in (("one", 60, 0), ("two", 60, 1), ("more", 80, 0)):
        packed(
            f"x={as_folder(tmp_path / name, make_pairs(count))}",
            out=f"{name}-out",
            test_share=0.25,
            seed=seed,
        )
        keys[name] = {
            s: [x.key for x in samples_of(tmp_path / f"{name}-out/x" / s)]
            for s in ("train", "test")
        }
    assert sorted(keys["one"]["train"] + keys["one"]["test"]) == sorted(
        keys["two"]["train"] + keys["two"]["test"]
    )
    assert set(keys["one"]["test"]) != set(keys["two"]["test"])
    assert 5 < len(keys["one"]["test"]) < 25
    assert set(keys["one"]["test"]) < set(keys["more"]["test"])
    assert set(keys["one"]["train"]) < set(keys["more"]["train"])
    names = [sample.files["txt"].decode() for sample in samples_of(tmp_path / "one-out/x/train")]
    assert names != sorted(names)  # the order of the input is not that of the shards


def test_larger_pictures_are_made_smaller_and_turned_ones_upright(packed, tmp_path):
    (tmp_path / "in").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    glyph = Image.new("RGBA", (32, 32), (0, 0, 0, 255))
    glyph.paste((0, 0, 0, 0), (0, 0, 16, 32))  # a page shows it on white
    given = {
        "turned.jpg": encoded(Image.new("RGB", (80, 40), "red"), "JPEG", exif=exif),
        "large.png": picture(1, size=(200, 100)),
        "small.png": picture(2, size=(64, 30)),
        "tiny.png": picture(3, size=(15, 30)),
        "opaque.png": encoded(Image.new("RGBA", (32, 32), (0, 0, 0, 255))),  # whose bytes stay
        "glyph.png": encoded(glyph),
    }
    for name, content in given.items():
        (tmp_path / "in" / name).write_bytes(content)
        (tmp_path / "in" / name).with_suffix(".txt").write_text(name)
    found = packed(tmp_path / "in", max_side_px=64)
    sizes = {}
    for sample in samples_of(tmp_path / "out/train"):
        ending, image = opened(sample)
        sizes[sample.files["txt"].decode()] = (ending, *image.size)
    assert sizes == {
        "turned.jpg": ("jpg", 32, 64),
        "large.png": ("jpg", 64, 32),
        "small.png": ("png", 64, 30),
        "opaque.png": ("png", 32, 32),
        "glyph.png": ("jpg", 32, 32),
    }
    counts = found["sizes"]
    assert (counts["turned"], counts["shrunk"], counts["whitened"]) == (1, 2, 1)
    assert counts["longer_side"]["max"] == 64  # as stored, not as given
    assert found["refused"]["picture too small"]["rows"] == 1


def test_addresses_are_fetched_and_failures_counted_and_tried_again(packed, tmp_path):
    work = Work(threads=4, attempts=1, backoff_seconds=0.01, progress=False)
    given = tmp_path / "list.tsv"  # no header, as CC12M's
    with HostileServer() as server:
        kinds = enumerate(["good", "missing", "flaky", "html", "good", "good"])
        rows = [f"{server.url(kind, number)}\tcaption {number}\n" for number, kind in kinds]
        given.write_text("".join([*rows, f"{server.url('good', 0)}\tcaption 0 again\n"]))
        found = packed(given, work=work)
        refused = {reason: entry["rows"] for reason, entry in found["refused"].items()}
        assert refused == {"http 404": 1, "http 503": 1, "not a picture": 1}
        example = {"at": "list.tsv line 2", "picture": server.url("missing", 1)}
        assert found["refused"]["http 404"]["examples"] == [example]
        assert found["pictures"] == 3 and (tmp_path / "out/.pack").is_dir()
        before = server.requests.total()
        assert packed(given, work=replace(work, retry_failed=True))["pictures"] == 4
        assert server.requests.total() == before + 1  # the one that may come
    assert not (tmp_path / "out/.pack").exists()
    samples = samples_of(tmp_path / "out/train")
    captions = {sample.files["txt"].decode(): sample.files["jpg"] for sample in samples}
    assert captions["caption 0\ncaption 0 again"] == photo(0)


def test_shards_show_neither_folders_of_this_machine_nor_blanks(packed, tmp_path):
    for number, name in enumerate(("one.JPG", "two two.png")):
        (tmp_path / name).write_bytes(picture(number))
    rows = ["img;text", f"{tmp_path / 'one.JPG'};one", " two two.png ;two"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/list.csv").write_text("\n".join(rows) + "\n")
    packed(tmp_path / "in/list.csv", columns=Columns(pictures_in=tmp_path))
    shown = [json.loads(sample.files["json"]) for sample in samples_of(tmp_path / "out/train")]
    assert sorted(each["file"] for each in shown) == ["one.JPG", "two two.png"]


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("https://host/a/b.jpg?key=1", "https://host/a/b.jpg"),
        ("https://me:secret@host/a/b@c.jpg", "https://host/a/b@c.jpg"),
        ("https://host/a//b@c.jpg", "https://host/a//b@c.jpg"),
        ("~/c.png", "c.png"),
        (r"C:\Users\me\d.jpg", "d.jpg"),
        (r"train\e.jpg", r"train\e.jpg"),
    ],
)
def test_a_name_shows_neither_folders_of_this_machine_nor_keys(name, public):
    assert public_name(name) == public


@pytest.mark.parametrize(
    ("cells", "texts", "problem"),
    [
        (["  a \n dog "], ["a dog"], ""),
        (["a dog", "", None, "a dog", "a cat"], ["a dog", "a cat"], ""),
        ([["a", "b"]], ["a", "b"], ""),
        (['["a", "b"]'], ["a", "b"], ""),
        (["['it''s', 'b']".replace("''", "")], ["its", "b"], ""),
        (["[a picture] of x]"], ["[a picture] of x]"], ""),
        (["[1, 2]"], ["[1, 2]"], ""),
        ([[{"raw": "a dog", "tokens": ["a"]}]], ["a dog"], ""),
        ([b"caf\xc3\xa9"], ["caf\u00e9"], ""),
        (["caf\udce9"], [], "caption not UTF-8"),
        ([""], [], "empty caption"),
        ([None, float("nan")], [], "empty caption"),
        ([3], [], "caption not text"),
        ([], [], "empty caption"),
    ],
)
def test_the_captions_in_a_cell(cells, texts, problem):
    assert texts_of(cells) == (texts, problem)


def test_parquet_at_an_address_packs_as_the_files_do(packed, tmp_path):
    """Pictures as Hugging Face stores them; a damaged row is refused and counted; a broken transfer is retried."""
    rows = [
        {"image": {"bytes": pair.content, "path": pair.name}, "caption": pair.captions[0]}
        for pair in make_pairs(10)
    ]
    rows[4]["image"]["bytes"] = b"no picture"
    (tmp_path / "here").mkdir()
    for number in range(2):
        table = pyarrow.Table.from_pylist(rows[5 * number : 5 * number + 5])
        pyarrow.parquet.write_table(table, tmp_path / f"here/{number}.parquet", row_group_size=2)
    found = packed(f"x={tmp_path / 'here'}", out="local", **SPLIT)
    assert found["pictures"] == 9 and found["refused"].keys() == {"not a picture"}

    def remote() -> dict[str, Any]:
        return packed(address, out="remote", **SPLIT)

    with ShardServer(tmp_path / "here") as server:
        address = f"x={server.url('{0..1}.parquet')}"
        server.faults["1.parquet"] = ["cut:100"]
        assert remote()["refused"].keys() == found["refused"].keys()
        assert {name: len(asked) for name, asked in server.requests.items()} == {
            "0.parquet": 1,
            "1.parquet": 2,
        }
        assert shards_of(tmp_path / "local") == shards_of(tmp_path / "remote")
        shutil.rmtree(tmp_path / "remote.parquet")
        assert remote()["pictures"] == 9  # fetched again it is the same input
        server.faults["1.parquet"] = ["changed"]  # the same bytes with another ETag
        with pytest.raises(UserError, match=r"1\.parquet has changed .*remove .*another --out"):
            remote()
    assert remote()["pictures"] == 9  # without the server
