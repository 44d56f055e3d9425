"""Shards are written whole; one rule groups members into samples, for counting, index and reading; an index is built once."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.reader import ShardReader
from open_clip_zerovl.data.sources import Source, count_tar_samples, parse_sources
from open_clip_zerovl.shards import files as shard_files
from open_clip_zerovl.shards.files import open_index
from open_clip_zerovl.shards.tar import (
    META,
    Sample,
    ShardError,
    group,
    locate_samples,
    read_samples,
)
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


def read(source: Source, start: int) -> list:
    """(key, files) of the samples from a place on."""
    return [(sample.key, sample.files) for sample in ShardReader(source).samples(0, start)]


def compressed(source: Source) -> Source:
    """The source with a compressed copy of its shard, which is unpacked to be read."""
    copy = Path(f"{source.shards[0]}.gz")
    copy.write_bytes(gzip.compress(Path(source.shards[0]).read_bytes(), 1))
    return Source(source.name, (str(copy),), source.sizes, captions=source.captions)


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=24), data=st.data())
def test_counting_index_unpacking_and_direct_access_agree(tmp_path_factory, names, data):
    path = str(
        write_tar(
            tmp_path_factory.mktemp("tar") / "0.tar",
            [(n, f"{i}".encode()) for i, n in enumerate(names)],
        )
    )
    count = count_tar_samples(path)
    source = Source("s", (path,), (count,))
    whole = read(source, 0)
    assert [key for key, _ in whole] == [key for key, _ in locate_samples(path)]
    assert len(whole) == count == len(open_index(path))
    start = data.draw(st.integers(0, max(0, count - 1)))
    assert read(source, start) == read(compressed(source), start) == whole[start:]


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
    build = shard_files.build_index
    monkeypatch.setattr(
        shard_files, "build_index", lambda *args: built.append(args) or build(*args)
    )
    assert len(open_index(str(shard))) == 30
    shard_files._open.cache_clear()  # as in another process
    assert len(open_index(str(shard))) == 30 and len(built) == 1
    assert (shard.parent / ".zerovl-index" / "00000.tar.npz").is_file()
    write_tar(shard, [("a.png", png((1, 2, 3))), ("a.txt", b"two\n\nlines\n")])
    index = open_index(str(shard))
    assert len(index) == 1 and len(built) == 2 and index.captions.tolist() == [2]
    (shard.parent / ".zerovl-index" / "00000.tar.npz").write_bytes(b"half an index")
    shard_files._open.cache_clear()
    assert len(open_index(str(shard))) == 1 and len(built) == 3


def test_where_the_folder_is_not_writable_it_goes_into_the_cache(shard, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (shard.parent / ".zerovl-index").write_text("in the way, even for root")
    assert len(open_index(str(shard))) == 30
    assert len(list((tmp_path / "cache" / "open_clip_zerovl" / "index").iterdir())) == 1


def test_a_torn_tar_gives_the_same_samples_by_all_ways(shard):
    whole = shard.read_bytes()
    source = Source("s", (str(shard),), (30,))
    for size in (len(whole) // 3, len(whole) // 2 + 7, len(whole) // 2 + 512):
        shard.write_bytes(whole[:size])
        os.utime(shard, ns=(size, size))
        outcomes = []
        for of, start in ((source, 0), (source, 5), (compressed(source), 5), (source, 29)):
            *samples, fault = ShardReader(of).samples(0, start)
            assert isinstance(fault, ShardError) and fault.reason == "truncated shard"
            outcomes.append(([sample.key for sample in samples[-3:]], fault.readable))
        assert outcomes[0] == outcomes[1] == outcomes[2] and outcomes[0][1] > 5
        assert outcomes[3] == ([], outcomes[0][1])


def test_each_caption_is_a_sample_wherever_the_shard_is_entered(tmp_path, caplog):
    """With `--captions all`; a torn shard is counted to the tear, and a warning says so."""
    members = []
    for number in range(5):
        lines = "".join(f"{number} {line}\n" for line in range(number))
        members += [(f"{number}.png", b"a picture"), (f"{number}.txt", lines.encode())]
    shard = write_tar(tmp_path / "s" / "0.tar", members)
    captions = [[], ["1 0"], *([f"{n} {line}"] for n in (2, 3, 4) for line in range(n))]
    (source,) = parse_sources(f"s={tmp_path}/s", captions="all")
    assert source.sizes == (11,) and not caplog.records
    for start in range(11):
        samples = list(ShardReader(source).samples(0, start))
        assert [sample.captions for sample in samples] == captions[start:]
    shard.write_bytes(shard.read_bytes()[: 512 * 4 * 4 + 700])
    (torn,) = parse_sources(f"s={tmp_path}/s", captions="all")
    assert torn.sizes == (7,) and "is torn after 7 captions" in caplog.text
    with pytest.raises(UserError, match=r"0\.tar cannot be read as a tar file"):
        parse_sources(f"s={tmp_path}/s", captions="all", on_bad_sample="fail")


def test_a_link_leads_to_a_member_before_the_place_where_the_tar_is_entered(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number in range(5):
            for name, content in (("png", b"a picture"), ("txt", b"a dog")):
                member = tarfile.TarInfo(f"{number}.{name}")
                if name == "png" and number:
                    member.type, member.linkname = tarfile.LNKTYPE, "0.png"
                else:
                    member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    samples = ShardReader(Source("s", (str(tmp_path / "0.tar"),), (5,))).samples(0, 3)
    assert [sample.image for sample in samples] == [b"a picture"] * 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, b"Z"])
def test_a_tar_is_not_read_on_behind_its_end_for_what_a_header_claims(tmp_path, kind):
    """tarfile would go on to the next header, 8 EiB further."""
    member = tarfile.TarInfo("b.png")
    member.size, member.type = (1 << 63) - 1, kind
    write_tar(tmp_path / "0.tar", [("a.txt", b"x")])
    content = (
        (tmp_path / "0.tar").read_bytes()[:1024] + member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    )
    (tmp_path / "0.tar").write_bytes(content)
    with pytest.raises(ShardError, match="cut off after|size"):
        list(locate_samples(tmp_path / "0.tar"))


def test_shards_are_balanced_and_round_trip(tmp_path):
    samples = [Sample(f"k{i}", {"png": bytes([i]), "txt": b"a caption"}) for i in range(11)]
    sizes = shard_files.write_source(tmp_path, samples, shard_size=4)
    assert sizes == {"train-00000.tar": 3, "train-00001.tar": 4, "train-00002.tar": 4}
    assert [s for name in sizes for s in read_samples(tmp_path / name)] == samples


def test_a_shard_cut_off_in_writing_leaves_the_old_one(tmp_path):
    def cut_off():
        yield Sample("b", {"txt": b"new"})
        raise KeyboardInterrupt

    shard_files.write_shard(tmp_path / "0.tar", [Sample("a", {"txt": b"old"})])
    with pytest.raises(KeyboardInterrupt):
        shard_files.write_shard(tmp_path / "0.tar", cut_off())
    assert [path.name for path in tmp_path.iterdir()] == ["0.tar"]
    assert [s.key for s in read_samples(tmp_path / "0.tar")] == ["a"]


def test_samples_that_readers_would_lose_are_refused(tmp_path):
    for key in ("a.b", ""):
        with pytest.raises(UserError, match="holds a dot"):
            shard_files.write_shard(tmp_path / "0.tar", [Sample(key, {"txt": b"x"})])
    with pytest.raises(UserError, match="comes twice"):
        shard_files.write_shard(tmp_path / "0.tar", [Sample("a", {"txt": b"x"})] * 2)
