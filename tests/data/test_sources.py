"""Sources as they are written: their names, shards, sizes, and samples as evaluation reads them."""

from __future__ import annotations

import fsspec
import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.collection import origin_of
from open_clip_zerovl.data.components import listed_sizes
from open_clip_zerovl.data.names import is_named
from open_clip_zerovl.data.reader import ShardReader
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.check import check_shards
from open_clip_zerovl.shards.files import parse_sizes, read_sizes, write_retrieval_set
from open_clip_zerovl.shards.tar import Sample
from support.tars import png, write_source, write_tar


def test_names_braces_folders_and_sizes(tmp_path):
    """Sizes come from each shard's own folder; open_clip looks into the first shard's alone."""
    a = write_source(tmp_path / "a", 0, 25, 10)
    write_source(tmp_path / "b", 100, 7, 4)
    write_source(tmp_path / "c", 200, 5, 5, sizes=False)
    sources = parse_sources(
        f"first={a}::{tmp_path}/b/{{00000..00001}}.tar::third={tmp_path}/c::two={tmp_path}/{{a,b}}/00000.tar"
    )
    assert [(source.name, source.sizes, source.weight) for source in sources] == [
        ("first", (10, 10, 5), 1),
        ("b", (4, 3), 1),
        ("third", (5,), 1),
        ("two", (10, 4), 1),
    ]


def test_is_named():
    assert is_named("a=/d/0.tar::/e/0.tar")
    assert not is_named("/d/{0..3}.tar::/e/0.tar")
    assert not is_named("pipe:aws s3 cp --profile=x s3://b/0.tar -")
    assert not is_named(None)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_remote_shards_are_sized_and_read(tmp_path, kind, monkeypatch):
    """memory: (as s3:, gs:, hdfs: ...) through fsspec, file: as the local path it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_source(tmp_path / "a", 0, 7, 4)
    data = f"{kind}://{tmp_path}/a/{{00000..00001}}.tar"
    if kind == "memory":
        store = fsspec.filesystem("memory")
        for path in (tmp_path / "a").iterdir():
            store.pipe_file(str(path), path.read_bytes())
    (source,) = parse_sources(f"a={data}")
    assert source.sizes == (4, 3)
    for start in (0, 2):
        samples = list(ShardReader(source).samples(0, start))
        assert [sample.captions for sample in samples] == [
            [f"sample {number}"] for number in range(start, 4)
        ]
        assert all(sample.image for sample in samples)


WRONG = {
    "a list": "[1]",
    "no JSON": "{",
    "negative": '{"0.tar": -1}',
    "more than a float holds": '{"0.tar": 1e999}',
    "not a number": '{"0.tar": NaN}',
    "huge": '{"0.tar": 100000000000000000000}',
    "a fraction": '{"0.tar": 1.5}',
    "true": '{"0.tar": true}',
    "nested deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_numbers_are_one_sentence_wherever_sizes_are_read(tmp_path, kind):
    write_tar(tmp_path / "0.tar", [("a.png", b"x")])
    (tmp_path / "sizes.json").write_text(WRONG[kind])
    for read in (
        lambda: parse_sources(f"a={tmp_path}"),
        lambda: parse_sources(f"a={tmp_path}/0.tar"),
        lambda: check_shards(tmp_path, progress=False),
    ):
        with pytest.raises(UserError, match=r"sizes\.json cannot be read"):
            read()


def test_numbers_that_open_clip_takes_are_taken(tmp_path):
    assert parse_sizes('{"0.tar": 3, "1.tar": 4.0, "2.tar": "5", "3.tar": 0}', "here") == {
        "0.tar": 3, "1.tar": 4, "2.tar": 5, "3.tar": 0,
    }  # fmt: skip
    assert read_sizes(tmp_path) is None


def test_the_sizes_of_a_commands_output_are_named(tmp_path):
    write_source(tmp_path / "d", 0, 7, 4)
    marker = tmp_path / "ran"
    for command in (
        f"touch {marker}; cat d/00000.tar",
        f"cat {tmp_path}/d/00000.tar > b.tar",
        "cat '",
    ):
        assert listed_sizes([f"pipe:{command}"]) == {} and not marker.exists()
    pattern = f"pipe:cd {tmp_path}; cat d/{{00000..00001}}.tar"
    (named,) = parse_sources(f"a={pattern}@{tmp_path}/d/sizes.json")
    assert named.sizes == (4, 3) and named.shards[1] == f"pipe:cd {tmp_path}; cat d/00001.tar"


@pytest.mark.parametrize("shards", ["", "/{00000..00002}.tar"])
def test_a_folder_and_a_range_miss_the_shards_that_sizes_list(tmp_path, caplog, shards):
    """Those of a folder were dropped without a word, with `--on-bad-sample fail` too."""
    write_source(tmp_path, 0, 12, 4)
    (tmp_path / "00001.tar").unlink()
    (source,) = parse_sources(f"a={tmp_path}{shards}")
    assert (
        source.sizes == (4, 4, 4)
        and "other samples of the source replace their 4 samples" in caplog.text
    )


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


def test_a_retrieval_set_is_a_source_of_evaluation_alone(tmp_path):
    samples = [Sample(f"{i}", {"png": png((i, 0, 0)), "txt": b"a cat"}) for i in range(3)]
    write_retrieval_set(tmp_path / "coco", samples)
    (source,) = parse_sources(f"{tmp_path}/coco", evaluation=True)
    assert (source.name, source.num_samples) == ("coco", 3)
