"""Sources as evaluation reads them: the samples of shards and tables alike, and which forms are refused by name."""

from __future__ import annotations

import json

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.samples import origin_of, samples_of
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.shards.members import Sample
from open_clip_zerovl.shards.writing import write_retrieval_set
from support.tars import png, write_source


def test_a_row_is_a_sample_with_its_columns_as_json(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "big dog.v2.PNG").write_bytes(png((1, 2, 3)))
    text = 'filepath,title,place\nin/big dog.v2.PNG,"a dog, running",Oslo\ngone.jpg,a cat,Rome\nin/big dog.v2.PNG\n'
    (tmp_path / "pairs.csv").write_text(text)
    (source,) = parse_sources(f"my={tmp_path}/pairs.csv")
    first, second, third = samples_of(source, 0)
    assert first.key == "00000001-big-dog-v2" and list(first.files) == ["png", "txt", "json"]
    assert first.files["png"] == png((1, 2, 3)) and first.files["txt"] == b"a dog, running"
    assert json.loads(first.files["json"])["place"] == "Oslo"
    assert list(second.files) == ["txt", "json"]  # its picture is gone
    assert list(third.files) == ["png", "json"] and json.loads(third.files["json"]) == {
        "filepath": "in/big dog.v2.PNG"
    }


@pytest.mark.parametrize(
    ("content", "origin"),
    [
        (b'{"width": 3, "url": "https://h/a.jpg"}', "https://h/a.jpg"), (b'{"file": "", "filename": "a b.jpg"}', "a b.jpg"),
        (b'{"url": 3}', ""), (b"[]", ""), (b"{", ""), (b"\xff", ""), (b"[" * 100_000, ""), (None, ""),
    ],
)  # fmt: skip
def test_a_sample_is_named_by_what_its_json_says_of_its_picture(content, origin):
    """`zerovl search` prints it beside the key, which is a hash or a number."""
    assert origin_of(Sample("000", {} if content is None else {"json": content})) == origin


def test_blocks_are_read_in_order(tmp_path):
    for number in range(150):
        (tmp_path / f"{number}.png").write_bytes(b"x")
    rows = "".join(f"{number}.png\tcaption {number}\n" for number in range(150))
    (tmp_path / "pairs.tsv").write_text("filepath\ttitle\n" + rows)
    (source,) = parse_sources(f"my={tmp_path}")
    assert source.sizes == (64, 64, 22)
    texts = [
        [sample.files["txt"].decode() for sample in samples_of(source, block)] for block in range(3)
    ]
    assert [text for block in texts for text in block] == [
        f"caption {number}" for number in range(150)
    ]


def test_a_retrieval_set_is_a_source_of_evaluation_alone(tmp_path):
    samples = [Sample(f"{i}", {"png": png((i, 0, 0)), "txt": b"a cat"}) for i in range(3)]
    write_retrieval_set(tmp_path / "coco", samples)
    (source,) = parse_sources(f"{tmp_path}/coco", evaluation=True)
    assert (source.name, source.num_samples) == ("coco", 3)
    with pytest.raises(
        UserError, match=r"coco is a retrieval set, .* name the shards to read: .*coco/test$"
    ):
        parse_sources(f"a={tmp_path}/coco")
    write_source(tmp_path / "coco" / "val", 0, 2, 2)
    (tmp_path / "coco" / "test" / "nshards.txt").unlink()
    with pytest.raises(UserError, match="is a retrieval set"):
        parse_sources(f"a={tmp_path}/coco", evaluation=True)
    for form in ("dataset_coco.json", f"dataset_coco.json@{tmp_path}"):
        with pytest.raises(UserError, match="which `zerovl retrieval` and --retrieval-data take"):
            parse_sources(f"a={tmp_path}/{form}", evaluation=True)
