"""Clusters as sources out of the shards that were clustered: all invariants of the mixture, by random access."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from torchvision import transforms

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.clusters import (
    Clustering,
    cluster_folders,
    find_clustering,
    load_clustering,
    save_clustering,
)
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.reading import Reading
from open_clip_zerovl.data.sample_stream import SliceReader
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.clusters.folders import train_data, write_clusters
from open_clip_zerovl.sampling.schedule import Batching
from open_clip_zerovl.sampling.slices import epoch_slices
from open_clip_zerovl.shards import members as tar_members
from open_clip_zerovl.shards.marks import file_mark
from support.loading import epoch_of, steps_of
from support.tars import ids_of, png, write_source, write_tar

SAMPLES, PER_SHARD, CLUSTERS = 240, 30, 3
#: Cluster of each sample: of unequal size and scattered over all shards.
LABELS = np.random.default_rng(5).choice(CLUSTERS, SAMPLES, p=[0.5, 0.3, 0.2]).astype(np.int32)
LABELS[:PER_SHARD][LABELS[:PER_SHARD] == 2] = 0  # none of the last one in the first shard


def cluster(out: Path, data: str, labels: np.ndarray = LABELS) -> Path:
    """The output of `zerovl cluster`, with given labels."""
    (source,) = parse_sources(data)
    out.mkdir(exist_ok=True)
    count = int(labels.max()) + 1
    marks = tuple(file_mark(shard, {}) for shard in source.shards)
    zeros = np.zeros(len(labels), np.float32), np.zeros((count, 1), np.float32)
    save_clustering(Clustering("cc", source.shards, source.sizes, labels, *zeros, marks), out)
    return out


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with `cc`, shards of numbered samples, and `clusters`, their assignment."""
    write_source(tmp_path / "cc", 0, SAMPLES, PER_SHARD)
    cluster(tmp_path / "clusters", f"cc={tmp_path}/cc")
    return tmp_path


def clusters_of(ids: list[int]) -> set[int]:
    """The clusters of samples."""
    return set(LABELS[ids].tolist())


def is_pure(steps: list[list[int]]) -> bool:
    """True if each step's samples are of one cluster."""
    return all(len(clusters_of(ids)) == 1 for ids in steps)


def test_a_clustering_is_a_source_a_cluster(place):
    sources = parse_sources(f"cc12m={place}/clusters")
    assert [source.name for source in sources] == ["cc12m-000", "cc12m-001", "cc12m-002"]
    assert [source.num_samples for source in sources] == np.bincount(LABELS).tolist()
    assert [len(source.shards) for source in sources] == [8, 8, 7]
    for number, source in enumerate(sources):
        found = []
        for shard in range(len(source.shards)):
            samples = list(Reading(source, 0).samples(shard, 0, int(source.starts[shard])))
            found += [int(sample.caption.split()[-1]) for sample in samples]
            for start in (1, len(samples) - 1, len(samples)):  # entered in the middle
                assert (
                    list(
                        Reading(source, 0).samples(shard, start, int(source.starts[shard]) + start)
                    )
                    == samples[start:]
                )
        assert found == np.flatnonzero(number == LABELS).tolist()
    assert [source.name for source in parse_sources(f"{place}/clusters")] == [
        "cc-000",
        "cc-001",
        "cc-002",
    ]


@pytest.mark.parametrize("workers, world_size, dga_steps", [(0, 1, 1), (2, 2, 2)])
def test_every_step_is_one_cluster_and_every_sample_comes_once(
    place, workers, world_size, dga_steps
):
    sources = parse_sources(f"cc={place}/clusters")
    batching = Batching(3, dga_steps, world_size, max(1, workers))
    seen: list[int] = []
    for epoch in range(2):
        ranks = epoch_of(sources, batching, epoch, workers=workers)
        assert all(
            (images[:, 0, 0, 0] == ids % 256).all() for rank in ranks for images, ids in rank
        )  # of one sample
        steps = steps_of(ranks, dga_steps)
        assert is_pure(steps)
        numbers = [number for ids in steps for number in ids]
        assert len(numbers) == len(set(numbers))
        whole = np.bincount(LABELS) // batching.effective_batch * batching.effective_batch
        assert np.bincount(LABELS[numbers]).tolist() == whole.tolist()
        if epoch == 1:  # samples left over by the first epoch come in the second
            assert set(range(SAMPLES)) - set(seen) <= set(numbers)
        seen += numbers
    # Negative controls: steps of the shards as one source are not pure, nor are these by other labels.
    assert not is_pure(steps_of(epoch_of(f"cc={place}/cc", batching, workers=workers), dga_steps))
    assert any(len(set(np.roll(LABELS, 1)[ids])) > 1 for ids in steps)


def test_clusters_written_anew_hold_the_same_samples(place):
    through_index = parse_sources(f"cc={place}/clusters")
    write_clusters(
        load_clustering(place / "clusters"), place / "clusters", shard_size=20, progress=False
    )
    assert train_data(place / "clusters") == f"cc={place}/clusters"
    written = parse_sources(train_data(place / "clusters"))
    assert all(source.picked is None for source in written)
    assert [(s.name, s.num_samples) for s in written] == [
        (s.name, s.num_samples) for s in through_index
    ]
    steps = [
        steps_of(epoch_of(sources, Batching(4, 1, 2, 1))) for sources in (through_index, written)
    ]
    assert [*map(clusters_of, steps[0])] == [*map(clusters_of, steps[1])]  # the same schedule
    forced = parse_sources(f"cc={place}/clusters/assignment.npz")
    assert all(source.picked is not None for source in forced)
    shutil.rmtree(place / "clusters/cluster-001")
    with pytest.raises(UserError, match=r"the 2 cluster-\* folders of .* are not the 3 clusters"):
        parse_sources(f"cc={place}/clusters")
    (place / "clusters/cluster-002/sizes.json").unlink()
    with pytest.raises(UserError, match=r"are not the 3 clusters .*: write them again"):
        parse_sources(f"cc={place}/clusters")


def test_a_bad_sample_is_replaced_from_its_own_cluster(place):
    number = int(np.flatnonzero(LABELS[PER_SHARD:] == 2)[3]) + PER_SHARD
    shard = place / f"cc/{number // PER_SHARD:05d}.tar"
    members: list[tuple[str, bytes]] = []
    for i in range(number // PER_SHARD * PER_SHARD, (number // PER_SHARD + 1) * PER_SHARD):
        picture = b"rotten" if i == number else png((i, 0, 0))
        members += [(f"{i:08d}.png", picture), (f"{i:08d}.txt", f"sample {i}".encode())]
    write_tar(shard, members)
    sources = parse_sources(f"cc={cluster(place / 'rot', f'cc={place}/cc')}")
    lost = Counter()
    assert is_pure(steps_of(epoch_of(sources, Batching(2, 1, 2, 2), workers=2, lost=lost)))
    assert lost == {"cc-002: undecodable image": 1}
    with pytest.raises(
        UserError, match=rf"sample '{number:08d}' in .*{shard.name} .source 'cc-002'. has an image"
    ):
        epoch_of(sources, Batching(2))


def test_a_shard_torn_after_the_start_is_stood_in_for(place):
    sources = parse_sources(f"cc={place}/clusters")
    shard = place / "cc/00003.tar"
    shard.write_bytes(
        shard.read_bytes()[: 15 * 4 * 512 + 540]
    )  # in the picture of its sixteenth sample
    lost = Counter()
    assert is_pure(steps_of(epoch_of(sources, Batching(2, 1, 2, 1), lost=lost)))
    assert {entry.partition(": ")[2] for entry in lost} == {
        "truncated shard"
    } and 10 <= lost.total() <= 16
    with pytest.raises(UserError, match="00003.tar of source 'cc-00.' cannot be read"):
        epoch_of(sources, Batching(2))
    write_source(place / "cc", 0, 100, PER_SHARD)  # now with ten samples, and no tear
    with pytest.raises(
        UserError,
        match=r"00003.tar held \d+ samples of source 'cc-00.' when it was clustered and holds",
    ):
        epoch_of(sources, Batching(2))


def test_moved_shards_are_found_in_the_given_folder(place, caplog):
    (place / "elsewhere").mkdir()
    before = steps_of(epoch_of(f"cc={place}/clusters", Batching(4)))
    shutil.move(place / "cc", place / "elsewhere/m@de")
    with pytest.raises(
        UserError, match=rf"8 of 8 clustered shards .* write {place}/clusters@FOLDER"
    ):
        parse_sources(f"cc={place}/clusters")
    moved = f"cc={place}/clusters@{place}/elsewhere/m@de"
    assert steps_of(epoch_of(moved, Batching(4))) == before
    (place / "elsewhere/m@de/00002.tar").unlink()
    with pytest.raises(
        UserError, match="1 of 8 clustered shards of cc do not exist, first .*00002.tar"
    ):
        parse_sources(moved, on_bad_sample="fail")
    sources = parse_sources(moved)
    assert "1 of 8 clustered shards" in caplog.text
    assert is_pure(steps_of(epoch_of(sources, Batching(4), lost=Counter())))


def test_shards_of_several_folders_move_together(tmp_path):
    for name, first in (("a", 0), ("b", 120)):
        write_source(tmp_path / "old" / name, first, 120, PER_SHARD)
    pattern = f"cc={tmp_path}/old/{{a,b}}/{{00000..00003}}.tar"
    out = cluster(tmp_path / "clusters", pattern)
    (tmp_path / "old").rename(tmp_path / "new")
    sources = parse_sources(f"{out}@{tmp_path}/new")
    assert sources[0].shards[0] == f"{tmp_path}/new/a/00000.tar" and sources[0].shards[-1].endswith(
        "new/b/00003.tar"
    )
    assert is_pure(steps_of(epoch_of(sources, Batching(4))))


def test_shards_written_anew_since_are_refused_and_copies_are_not(place):
    shard = place / "cc/00001.tar"
    content = shard.read_bytes()
    caption = (
        content.index(b"sample 31"),
        content.index(b"sample 32"),
    )  # in the middle; the size stays
    shard.write_bytes(content[: caption[0]] + b"sample 32" + content[caption[0] + 9 :])
    os.utime(shard, ns=(0, 0))
    with pytest.raises(
        UserError,
        match=r"00001.tar of cc has changed since it was clustered \(from \d+ to \d+ bytes\)",
    ):
        parse_sources(f"cc={place}/clusters")
    shard.write_bytes(content)
    os.utime(shard, ns=(1, 1))
    assert len(parse_sources(f"cc={place}/clusters")) == CLUSTERS
    shard.write_bytes(content[:-512])
    with pytest.raises(UserError, match=r"00001.tar of cc has changed"):
        parse_sources(f"cc={place}/clusters")


def test_weights_of_all_clusters_and_of_one(place):
    write_source(place / "sbu", 1000, 20, 10)
    data = f"sbu={place}/sbu::cc={place}/clusters"

    def factors(weights: str | None) -> list[float]:
        return [source.weight for source in parse_sources(data, weights)]

    assert factors(None) == [1, 1, 1, 1]
    assert factors("2::0.5") == [2, 0.5, 0.5, 0.5]
    assert factors("cc=0.5") == [1, 0.5, 0.5, 0.5]
    assert factors("cc-001=3::cc=0.5") == [1, 0.5, 3, 0.5]
    for weights, words in (
        ("1::1::1::1", "4 weights for 2 sources"),
        ("cc-003=1", "unknown source 'cc-003'"),
    ):
        with pytest.raises(UserError, match=words):
            factors(weights)
    for taken in (f"cc-001={place}/sbu", f"cc={place}/sbu"):
        with pytest.raises(UserError, match="two sources are called 'cc"):
            parse_sources(f"{taken}::cc={place}/clusters")


def test_captions_of_clusters(place):
    sources = parse_sources(f"cc={place}/clusters", captions="one-per-epoch")
    assert is_pure(steps_of(epoch_of(sources, Batching(4))))
    with pytest.raises(
        UserError, match="cannot count the captions of source .*`zerovl cluster --reshard`"
    ):
        parse_sources(f"cc={place}/clusters", captions="all")
    write_clusters(load_clustering(place / "clusters"), place / "clusters", progress=False)
    assert (
        sum(source.num_samples for source in parse_sources(f"cc={place}/clusters", captions="all"))
        == SAMPLES
    )


def test_a_slice_opens_its_shard_once_and_reads_nothing_else(place, monkeypatch):
    source = parse_sources(f"cc={place}/clusters")[2]
    opened, bytes_read, announced = [], [], []
    for name, book in (("open", opened), ("pread", bytes_read)):
        stock = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, _stock=stock, _book=book: (_book.append(args), _stock(*args))[1]
        )
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: announced.append(args), raising=False)
    schedule = Mixture(
        (source,), Batching(1), Preprocessing(transforms.PILToTensor(), ids_of)
    ).schedule(0)
    slices = epoch_slices(source.sizes, schedule, 0)
    list(SliceReader(Reading(source, 0), slices, slices).samples())  # builds the indexes
    opened.clear(), bytes_read.clear(), announced.clear()
    samples = list(SliceReader(Reading(source, 0), slices, slices).samples())
    tars = [path for path, *_ in opened if str(path).endswith(".tar")]
    assert len(tars) == len(slices) == 7 and len(samples) > 5 * len(tars)
    assert sum(size for _, size, _ in bytes_read) == sum(
        len(s.image) + len(s.caption) for s in samples
    )
    willneed = [
        (offset, size) for _, offset, size, advice in announced if advice == os.POSIX_FADV_WILLNEED
    ]
    assert sorted(willneed) == sorted(
        (offset, size) for _, size, offset in bytes_read
    )  # each once, nothing besides


def test_without_fadvise_the_samples_are_the_same(place, monkeypatch):
    before = steps_of(epoch_of(f"cc={place}/clusters", Batching(4)))
    monkeypatch.delattr(os, "posix_fadvise")
    assert steps_of(epoch_of(f"cc={place}/clusters", Batching(4))) == before


def test_too_many_open_files_are_not_taken_for_lost_shards(place, monkeypatch):
    sources = parse_sources(f"cc={place}/clusters")
    stock = os.open

    def full(path, *args):
        if str(path).endswith(".tar"):
            raise OSError(errno.EMFILE, "Too many open files")
        return stock(path, *args)

    monkeypatch.setattr(tar_members.os, "open", full)
    with pytest.raises(UserError, match="ulimit -n"):
        epoch_of(sources, Batching(4), lost=Counter())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("centroids", np.array(-1)), ("labels", np.zeros((2, 2))), ("labels", np.full(3, 7)), ("distances", np.zeros(1)),
        ("sizes", np.array([-5, 10**15])), ("shards", np.array("x")), ("marks", np.array("[[]]")), (None, np.zeros(0)),
    ],
)  # fmt: skip
def test_a_broken_assignment_or_one_whose_arrays_do_not_belong_together_is_refused(
    place, tmp_path, name, value
):
    with np.load(place / "clusters/assignment.npz") as arrays:
        np.savez(tmp_path / "assignment.npz", **{**arrays, name or "labels": value})
    if name is None:
        (tmp_path / "assignment.npz").write_bytes(b"PK half an archive")
    with pytest.raises(UserError, match="make it with `zerovl cluster`"):
        parse_sources(f"cc={place}/nowhere/assignment.npz")
    with pytest.raises(
        UserError, match="assignment.npz cannot be read .* write it again with `zerovl cluster`"
    ):
        parse_sources(f"cc={tmp_path}/assignment.npz")


def test_cluster_folders_come_in_their_numbers_order(tmp_path):
    for name in ("cluster-1000", "cluster-101", "cluster-002", "cluster-old", "clusters"):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in cluster_folders(tmp_path)] == [
        "cluster-002",
        "cluster-101",
        "cluster-1000",
    ]


def test_other_components_are_no_clusterings(place):
    for component in (
        f"{place}/cc",
        f"{place}/cc/{{00000..00007}}.tar",
        "pipe:cat a@b " + "x" * 5000,
        "s3://me@host/0.tar",
    ):
        assert find_clustering(component) is None
    assert find_clustering(f"{place}/clusters@/new@place") == (place / "clusters", "/new@place")
