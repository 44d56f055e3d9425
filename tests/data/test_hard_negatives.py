"""Hard negatives: near samples in each batch, each sample once an epoch, copies left out, for any readers and steps."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.clusters import Clustering, save_clustering
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.sampling.schedule import Batching, Sampling
from open_clip_zerovl.shards.marks import file_mark
from support.loading import epoch_of, loader_of, steps_of
from support.tars import png, write_source

SAMPLES, CLUSTERS = 96, 16
LABELS = (
    np.random.default_rng(3).permutation(np.arange(SAMPLES) % CLUSTERS).astype(np.int32)
)  # six samples a cluster
NONE = np.zeros(SAMPLES, bool)
NEAR = Sampling("debiased", hard_negatives=0.5)
BATCHINGS = [
    Batching(12),
    Batching(3, 4),
    Batching(3, 2, 2, 3),
    Batching(2, 3, 2, 2),
]  # 12 samples a step


def clustered(folder: Path, copies: np.ndarray | None = NONE) -> str:
    """A clustering of numbered samples in shards of 14."""
    write_source(folder / "cc", 0, SAMPLES, 14)
    return clustering_of(folder, f"cc={folder}/cc", copies)


def clustering_of(folder: Path, data: str, copies: np.ndarray | None = NONE) -> str:
    (source,) = parse_sources(data)
    shards, sizes = (
        tuple(dict.fromkeys(source.shards)),
        source.sizes if source.table is None else (SAMPLES,),
    )
    zeros = np.zeros(SAMPLES, np.float32), np.zeros((CLUSTERS, 1), np.float32)
    marks = tuple(file_mark(shard, {}) for shard in shards)
    (folder / "clusters").mkdir(parents=True, exist_ok=True)
    save_clustering(
        Clustering("cc", shards, sizes, LABELS, *zeros, marks, copies), folder / "clusters"
    )
    return f"{folder}/clusters"


def opened(data: str, weights: str | None = None) -> tuple[Source, ...]:
    return parse_sources(data, weights, neighbours=True)


def largest_clusters(steps: list[list[int]]) -> list[int]:
    """The samples of the most frequent cluster of each step."""
    return [int(np.bincount(LABELS[ids]).max()) for ids in steps]


def test_half_of_each_batch_is_one_cluster_and_each_sample_comes_once(tmp_path):
    sources = opened(clustered(tmp_path))
    found = []
    for batching in BATCHINGS:
        how = {"strategy": NEAR, "workers": batching.workers if batching.workers > 1 else 0}
        ranks = [epoch_of(sources, batching, epoch, **how) for epoch in (0, 1)]
        assert all(
            (images[:, 0, 0, 0] == ids % 256).all() for rank in ranks[0] for images, ids in rank
        )
        epochs = [steps_of(one, batching.dga_steps) for one in ranks]
        for steps in epochs:
            assert sorted(itertools.chain(*steps)) == list(range(SAMPLES))
            assert largest_clusters(steps) == [6] * 8
        assert {frozenset(ids) for ids in epochs[0]}.isdisjoint(map(frozenset, epochs[1]))
        found.append([sorted(ids) for ids in epochs[0]])
    assert all(steps == found[0] for steps in found)  # however the batch is divided among readers
    plain = steps_of(epoch_of(sources, Batching(12)))
    assert max(largest_clusters(plain)) < 6  # negative control


@pytest.mark.parametrize("batching", BATCHINGS[:3])
def test_an_epoch_is_entered_at_any_step(tmp_path, batching):
    sources = opened(clustered(tmp_path))
    how = {"strategy": NEAR, "workers": batching.workers if batching.workers > 1 else 0}
    whole = epoch_of(sources, batching, 1, **how)
    for step in (1, 5, 8):
        rest = epoch_of(sources, batching, 1, start_step=step, **how)
        for rank, of_rank in enumerate(whole):
            expected = [ids.tolist() for _, ids in of_rank[step * batching.dga_steps :]]
            assert [ids.tolist() for _, ids in rest[rank]] == expected


def test_copies_are_in_no_run(tmp_path):
    copies = LABELS < 8  # half of all samples: the runs need the other half
    steps = steps_of(epoch_of(opened(clustered(tmp_path, copies)), Batching(12), strategy=NEAR))
    assert [int(copies[ids].sum()) for ids in steps] == [6] * 8
    assert sorted(itertools.chain(*steps)) == list(range(SAMPLES))
    unmarked = steps_of(epoch_of(opened(clustered(tmp_path / "b")), Batching(12), strategy=NEAR))
    assert {int(copies[ids].sum()) for ids in unmarked} != {6}  # negative control


def test_several_sources_tables_and_half_weights(tmp_path):
    clustered(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/0.png").write_bytes(png((0, 0, 0)))
    rows = [f"0.png,sample {number}" for number in range(1000, 1000 + SAMPLES)]
    (tmp_path / "b/pairs.csv").write_text("\n".join(["filepath,title", *rows]) + "\n")
    clustering_of(tmp_path / "b", f"cc={tmp_path}/b/pairs.csv")
    sources = opened(f"a={tmp_path}/a/clusters::b={tmp_path}/b/clusters", "1::0.5")
    assert [(source.name, source.num_samples) for source in sources] == [
        ("a", SAMPLES),
        ("b", SAMPLES),
    ]
    seen: Counter[int] = Counter()
    for epoch in (0, 1):
        steps = steps_of(epoch_of(sources, Batching(6, 2), epoch, strategy=NEAR), 2)
        assert all(len({number // 1000 for number in ids}) == 1 for ids in steps)
        assert len(steps) == 12 and all(len(set(ids)) == 12 for ids in steps)
        seen.update(itertools.chain(*steps))
    assert set(seen) == {*range(SAMPLES), *range(1000, 1000 + SAMPLES)}
    assert {seen[number] for number in range(SAMPLES)} == {2}
    assert {seen[number] for number in range(1000, 1000 + SAMPLES)} == {1}


def test_a_bad_sample_is_replaced(tmp_path):
    data = clustered(tmp_path)
    shard = tmp_path / "cc/00002.tar"
    content, times = bytearray(shard.read_bytes()), shard.stat()
    at = content.index(b"\x89PNG")
    content[at : at + 8] = b"not a px"
    shard.write_bytes(bytes(content))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk damages it
    lost: Counter[str] = Counter()
    steps = steps_of(epoch_of(opened(data), Batching(12), strategy=NEAR, lost=lost))
    assert lost == {"cc: undecodable image": 1} and sum(map(len, steps)) == SAMPLES
    with pytest.raises(UserError, match="sample .* has an image that cannot be decoded"):
        epoch_of(opened(data), Batching(12), strategy=NEAR)


@pytest.mark.parametrize(
    ("sampling", "weights", "copies", "words"),
    [
        (NEAR, "2", NONE, "takes 192 of the 96 samples of source 'cc'"),
        (replace(NEAR, epoch_samples=120), None, NONE, "takes 120 of the 96 samples"),
        (replace(NEAR, hard_negatives=0.1), None, NONE, "is 1 sample; give a share of at least 0.167"),
        (replace(NEAR, hard_negatives=0.75), None, LABELS < 8, "48 of the 96 samples .* are copies.*leaves room for 24"),
        (NEAR, None, np.arange(SAMPLES) < 49, "leaves room for 48 of them; give a smaller share, or"),
        (NEAR, None, None, "does not list the copies of cc.*--same-above 0.95"),
    ],
)  # fmt: skip
def test_what_hard_negatives_refuse(tmp_path, sampling, weights, copies, words):
    data = clustered(tmp_path, copies)
    with pytest.raises(UserError, match=words):
        loader_of(opened(data, weights), 12, strategy=sampling)


def test_sources_without_clusters_and_mixed_steps_are_refused(tmp_path):
    data = clustered(tmp_path)
    for others, sampling, words in (
        (
            f"x={tmp_path}/cc",
            NEAR,
            "needs the clusters of each source, and 'x' is not a clustering; run `zerovl cluster",
        ),
        (
            f"x={data}",
            replace(NEAR, strategy="random"),
            "steps of one source; give --debiased-sampling",
        ),
    ):
        with pytest.raises(UserError, match=words):
            loader_of(opened(f"cc={data}::{others}"), 12, strategy=sampling)
    alone = steps_of(
        epoch_of(opened(data), Batching(12), strategy=replace(NEAR, strategy="random"))
    )
    assert largest_clusters(alone) == [6] * 8
