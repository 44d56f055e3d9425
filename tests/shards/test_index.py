"""One rule groups members into samples, for counting, index and reading; an index is built once, and checked."""

from __future__ import annotations

import gzip
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from open_clip_zerovl.data.reading import Reading
from open_clip_zerovl.data.sources import Source, count_tar_samples
from open_clip_zerovl.shards import index as tar_index
from open_clip_zerovl.shards.index import open_index
from open_clip_zerovl.shards.members import META, ShardError, group, stream_samples
from support.tars import png, write_source, write_tar

MEMBERS = [
    "a.jpg",
    "a.txt",
    "b.txt",
    "b.png",
    "b.json",
    "c.JPG",
    "c.txt",
    "__meta__",
    "noext",
    "d/a.jpg",
    "d/a.txt",
]


def by_streaming(source: Source, start: int) -> list:
    """Samples read through a pipe, which always begins at the tar's first byte."""
    return list(Reading(compressed(source), 0).samples(0, start, start))


def compressed(source: Source) -> Source:
    """The source with a compressed copy of its shard, which is read as a stream."""
    copy = Path(f"{source.shards[0]}.gz")
    copy.write_bytes(gzip.compress(Path(source.shards[0]).read_bytes(), 1))
    return Source(source.name, (str(copy),), source.sizes, captions=source.captions)


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=24), data=st.data())
def test_counting_index_streaming_and_direct_access_agree(tmp_path_factory, names, data):
    path = str(
        write_tar(
            tmp_path_factory.mktemp("tar") / "0.tar",
            [(n, f"{i}".encode()) for i, n in enumerate(names)],
        )
    )
    count = count_tar_samples(path)
    with_keys = [key for key, _ in stream_samples(path)]
    assert len(with_keys) == count == len(open_index(path))
    assert [open_index(path).key(number) for number in range(count)] == with_keys
    source = Source("s", (path,), (count,))
    whole = list(Reading(source, 0).samples(0, 0, 0)) if count else []
    assert [sample.key for sample in whole] == with_keys
    start = data.draw(st.integers(0, max(0, count - 1)))
    for others in (
        (list(Reading(source, 0).samples(0, start, start)), by_streaming(source, start))
        if count
        else ()
    ):
        assert [(s.image, s.caption, s.fault, s.position) for s in others] == [
            (s.image, s.caption, s.fault, s.position) for s in whole[start:]
        ]


def test_a_sample_ends_where_the_key_changes_or_a_suffix_repeats():
    def keys(*names: str) -> list:
        return [(key, sorted(sample)) for key, sample in group((name, None) for name in names)]

    assert keys("a.jpg", "a.txt", "b.jpg", "b.TXT") == [
        ("a", ["jpg", "txt"]),
        ("b", ["jpg", "txt"]),
    ]
    assert keys("a.jpg", "a.txt", "a.jpg", "a.txt") == [("a", ["jpg", "txt"])] * 2
    assert keys("a.jpg", "__x__/a.txt", "noext", "a.txt") == [("a", ["jpg", "txt"])]
    assert keys("x/a.jpg", "y/a.txt") == [("x/a", ["jpg"]), ("y/a", ["txt"])]
    assert keys() == []


@settings(max_examples=300, deadline=None)
@given(name=st.text(alphabet="ab._/\n", max_size=12))
def test_names_are_split_as_webdataset_splits_them(name):
    key, suffix = base_plus_ext(name)
    hidden = name.rpartition("/")[2].startswith(
        "."
    )  # of which webdataset makes samples without a picture
    expected = [] if META.match(name) or key is None or hidden else [(key, [suffix])]
    assert [(key, list(sample)) for key, sample in group([(name, None)])] == expected


@pytest.fixture
def shard(tmp_path):
    write_source(tmp_path / "s", 0, 30, 30)
    return tmp_path / "s" / "00000.tar"


def test_it_is_built_once_and_again_when_the_tar_changes(shard, monkeypatch):
    built = []
    build = tar_index.build_index
    monkeypatch.setattr(tar_index, "build_index", lambda *args: built.append(args) or build(*args))
    assert len(open_index(str(shard))) == 30
    tar_index._open.cache_clear()  # as in another process
    assert len(open_index(str(shard))) == 30 and len(built) == 1
    assert (shard.parent / ".zerovl-index" / "00000.tar.npz").is_file()
    write_tar(shard, [("a.png", png((1, 2, 3))), ("a.txt", b"two\n\nlines\n")])
    index = open_index(str(shard))
    assert len(index) == 1 and len(built) == 2 and index.captions.tolist() == [2]
    (shard.parent / ".zerovl-index" / "00000.tar.npz").write_bytes(b"half an index")
    tar_index._open.cache_clear()
    assert len(open_index(str(shard))) == 1 and len(built) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("captions", np.full(30, -1)), ("captions", np.array("x")), ("key_ends", np.zeros(0)), ("keys", np.zeros(3)),
        ("image", np.full((30, 2), 10**12)), ("text", np.zeros((2, 2, 2))), ("torn", np.array(1)),
    ],
)  # fmt: skip
def test_a_stored_index_that_does_not_add_up_is_built_again(shard, caplog, name, value):
    open_index(str(shard))
    stored = shard.parent / ".zerovl-index" / "00000.tar.npz"
    with np.load(stored) as arrays:
        changed = {**arrays, name: value}
    np.savez(stored, **changed)
    tar_index._open.cache_clear()
    index = open_index(str(shard))
    assert index.captions.tolist() == [1] * 30 and index.key(29) == "00000029"
    assert "cannot be read" in caplog.text and "built again" in caplog.text


def test_where_the_folder_is_not_writable_it_goes_into_the_cache(
    shard, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (shard.parent / ".zerovl-index").write_text("in the way, even for root")
    assert len(open_index(str(shard))) == 30
    (stored,) = (tmp_path / "cache" / "open_clip_zerovl" / "index").iterdir()
    assert stored.suffix == ".npz"
    monkeypatch.setenv("XDG_CACHE_HOME", str(shard.parent / ".zerovl-index"))
    tar_index._open.cache_clear()
    assert len(open_index(str(shard))) == 30 and "could not be stored anywhere" in caplog.text


def test_many_may_build_the_same_one(shard):
    def build(_: int) -> int:
        tar_index._open.cache_clear()
        return len(open_index(str(shard)))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(build, range(8))) == [30] * 8
    assert os.listdir(shard.parent / ".zerovl-index") == [
        "00000.tar.npz"
    ]  # nothing temporary is left


def test_a_torn_tar_gives_the_same_samples_by_all_ways(shard):
    whole = shard.read_bytes()
    source = Source("s", (str(shard),), (30,))
    for size in (len(whole) // 3, len(whole) // 2 + 7, len(whole) // 2 + 512):
        shard.write_bytes(whole[:size])
        os.utime(shard, ns=(size, size))
        outcomes = []
        for read, start in ((source, 0), (source, 5), (compressed(source), 5)):
            keys = []
            with pytest.raises(ShardError) as raised:
                for sample in Reading(read, 0).samples(0, start, start):
                    keys.append((sample.key, sample.fault))
            outcomes.append((keys[-3:], raised.value.readable))
        assert outcomes[0] == outcomes[1] == outcomes[2] and outcomes[0][1] > 5


def test_a_compressed_tar_has_no_index(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w:gz") as tar:
        tar.add(__file__, "a.txt")
    with pytest.raises(tarfile.ReadError):
        open_index(str(tmp_path / "0.tar"))
    assert count_tar_samples(tmp_path / "0.tar") == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, b"Z"])
def test_a_stream_is_not_read_on_behind_its_end_for_what_a_header_claims(tmp_path, kind):
    """tarfile would go on to the next header, 8 EiB further, a block of nothing at a time."""
    member = tarfile.TarInfo("b.png")
    member.size, member.type = (1 << 63) - 1, kind
    write_tar(tmp_path / "0.tar", [("a.txt", b"x")])
    content = (
        (tmp_path / "0.tar").read_bytes()[:1024] + member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    )
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ShardError, match="claims 9223372036854[0-9]+ bytes"):
        list(stream_samples(tmp_path / "0.tar.gz"))
