"""--train-data with names: parsing, sizes, weights, and the sentences for mistakes."""

from __future__ import annotations

import json

import fsspec
import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import check_paths, is_named
from open_clip_zerovl.data.reader import ShardReader
from open_clip_zerovl.data.sources import count_tar_samples, parse_sources
from support.tars import write_source, write_tar


def test_names_braces_folders_and_sizes(tmp_path):
    a = write_source(tmp_path / "a", 0, 25, 10)
    write_source(tmp_path / "b", 100, 7, 4)
    write_source(tmp_path / "c", 200, 5, 5, sizes=False)
    sources = parse_sources(f"first={a}::{tmp_path}/b/{{00000..00001}}.tar::third={tmp_path}/c")
    assert [(source.name, source.sizes) for source in sources] == [
        ("first", (10, 10, 5)),
        ("b", (4, 3)),
        ("third", (5,)),
    ]
    assert [source.weight for source in sources] == [1, 1, 1]


def test_sizes_come_from_each_shards_own_folder(tmp_path):
    """open_clip looks into the first shard's folder only, where the second folder's shard is miscounted."""
    write_source(tmp_path / "x", 0, 3, 3)
    write_source(tmp_path / "y", 10, 5, 5)
    (source,) = parse_sources(f"both={tmp_path}/{{x,y}}/00000.tar")
    assert source.sizes == (3, 5)


def test_keys_with_dots_give_a_warning(tmp_path, caplog):
    dotted = write_tar(tmp_path / "0.tar", [(f"a.{number}.png", b"x") for number in range(3)])
    assert count_tar_samples(dotted) == 1
    assert "so a.0.png is of the sample 'a', which has no picture then" in caplog.text
    caplog.clear()
    count_tar_samples(write_tar(tmp_path / "1.tar", [("a.png", b"x"), ("a.seg.png", b"x")]))
    assert not caplog.records


def test_a_quick_look_at_paths_knows_home_and_patterns(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photos").mkdir()
    check_paths("a=~/photos::b=/gone/{0..3}.tar::c=https://h/x.tar")
    with pytest.raises(UserError, match="source 'a': ~/gone does not exist"):
        check_paths("a=~/gone")


def test_is_named():
    assert is_named("a=/d/0.tar::/e/0.tar")
    assert not is_named("/d/{0..3}.tar::/e/0.tar")
    assert not is_named("pipe:aws s3 cp --profile=x s3://b/0.tar -")
    assert not is_named(None)


@pytest.mark.parametrize(
    "data, weights, words",
    [
        ("a=", None, "source 1 .* has no shards"),
        ("a={tmp}/a/00000.tar::", None, "source 2 .* has no shards"),
        (
            "a={tmp}/a/{{00000..00007}}.tar",
            None,
            "7 of 8 shards of source 'a' do not exist, first .*00001.tar",
        ),
        ("a={tmp}/mix.yaml", None, "a manifest of open_clip 4: name its sources"),
        ("a={tmp}/mix.json", None, "a manifest of open_clip 4: name its sources"),
        ("a={tmp}/a::a={tmp}/a", None, "two sources are called 'a'"),
        ("a={tmp}/a:b={tmp}/a", None, "a:b={tmp}/a does not exist; correct the path"),
        ("a={tmp}/a/{{0000", None, "braces .* do not match|do not exist"),
        (
            "a={tmp}/empty",
            None,
            "holds no [*].tar shards; .* `zerovl data pack .*/empty --out DIR`",
        ),
        (
            "a={tmp}/x.csv",
            None,
            "is not shards: make them with `zerovl data pack .*x.csv --out DIR`",
        ),
        (
            "a={tmp}/p/*.parquet",
            None,
            "no file is named like {tmp}/p/.*.parquet; correct the pattern",
        ),
        ("a={tmp}/a", "1::2", "gives 2 weights for 1 sources"),
        ("a={tmp}/a", "0", "is not a positive number"),
        ("a={tmp}/a", "x", "is not a positive number"),
        ("a={tmp}/a", "vg=2", "unknown source 'vg'; the sources are a"),
        ("a={tmp}/a::b={tmp}/a", "a=2::1", "names the unknown source '1'"),
        (
            "a=s3://bucket/{{0..3}}.tar",
            None,
            "shard s3://bucket/0.tar cannot be opened .* 'pipe:aws s3 cp",
        ),
        ("a=pipe:cat /nowhere/{{0..3}}.tar", None, "4 remote shards of source 'a' have no size"),
        ("a={tmp}/broken", None, "cannot be read as a tar file"),
        ("a={tmp}/badsizes", None, "sizes.json cannot be read .*to have the shards counted"),
        ("a={tmp}/none", None, "holds no samples"),
    ],
)
def test_a_mistake_gives_one_sentence(tmp_path, data, weights, words):
    write_source(tmp_path / "a", 0, 4, 4)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.tar").write_bytes(b"no tar at all" * 100)
    write_source(tmp_path / "badsizes", 0, 4, 4)
    (tmp_path / "badsizes" / "sizes.json").write_text(json.dumps(["00000.tar"]))
    write_tar(tmp_path / "none" / "0.tar", [])
    (tmp_path / "mix.yaml").write_text("version: 1\nsources:\n- {name: a, shards: a.tar}\n")
    (tmp_path / "mix.json").write_text(
        '{"version": 1, "sources": [{"name": "a", "shards": "a.tar"}]}'
    )
    with pytest.raises(UserError, match=words.replace("{tmp}", str(tmp_path))) as raised:
        parse_sources(data.format(tmp=tmp_path), weights)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["pipe", "memory", "file"])
def test_remote_shards_are_sized_and_read(tmp_path, kind, monkeypatch):
    """pipe: a command, memory: (as s3:, gs:, hdfs: ...) through fsspec, file: as the local path it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_source(tmp_path / "a", 0, 7, 4)
    data = f"{kind}://{tmp_path}/a/{{00000..00001}}.tar"
    if kind == "pipe":
        data = f"pipe:cat '{tmp_path}/a/{{00000..00001}}.tar' | cat"
    elif kind == "memory":
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
