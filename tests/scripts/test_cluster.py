"""A.6's clusters of a source: from the pictures to sources of which no sample is lost or doubled."""

from __future__ import annotations

import io
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.shards.tar import read_samples
from scripts.paper.cluster import (
    LEFT_OUT,
    cluster,
    cluster_source,
    dissolve_small,
    spherical_kmeans,
    write_clusters,
)
from scripts.program import program
from support.tars import write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, register, write_run

COLOURS = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]


def picture(colour: tuple[int, int, int], number: int) -> bytes:
    noise = np.random.default_rng(number).integers(-9, 10, size=(32, 32, 3))
    content = io.BytesIO()
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny model; random weights separate three colours well."""
    folder = tmp_path_factory.mktemp("model")
    name = register(folder, "cluster-tiny", NATIVE_VISION, CLIP_TEXT)
    return str(write_run(folder / "run", random_model(name), {"model": name}))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """45 pictures of three colours, 9 a shard, and one that cannot be decoded; the caption names the colour."""
    folder = tmp_path_factory.mktemp("source") / "cc"
    for shard in range(5):
        members = []
        for i in range(9 * shard, 9 * shard + 9):
            members += [
                (f"k{i}.png", picture(COLOURS[i % 3], i)),
                (f"k{i}.txt", f"colour {i % 3} number {i}".encode()),
            ]
        write_tar(
            folder / f"{shard:05d}.tar",
            members + [("bad.png", b"?"), ("bad.txt", b"bad")][: 2 * (shard == 2)],
        )
    return folder


def captions_of(train_data: str) -> list[list[str]]:
    return [
        [sample.files["txt"].decode() for shard in entry.shards for sample in read_samples(shard)]
        for entry in parse_sources(train_data)
    ]


def test_clusters_become_sources_without_a_sample_lost_or_doubled(checkpoint, source, tmp_path):
    model = FrozenModel.load(Encoder(checkpoint, device="cpu"))
    train_data = cluster(model, source, tmp_path, clusters=3, shard_size=10)
    assert (tmp_path / "train-data.txt").read_text().strip() == train_data
    entries = parse_sources(train_data)
    assert [(e.name, e.sizes) for e in entries] == [(f"cc-00{n}", (10, 5)) for n in range(3)]
    clusters = captions_of(train_data)
    assert [len({caption.split()[1] for caption in captions}) for captions in clusters] == [1, 1, 1]
    whole = sorted(f"colour {i % 3} number {i}" for i in range(45))
    assert sorted(chain.from_iterable(clusters)) == whole


def test_every_cluster_fills_the_batch_that_was_named(checkpoint, source, tmp_path):
    command = [checkpoint, str(source), str(tmp_path), "--clusters", "9"]
    for min_size, least in ((1, 1), (10, 10)):
        assert program(cluster_source, [*command, "--min-size", str(min_size)]) == 0
        train_data = (tmp_path / "train-data.txt").read_text().strip()
        sizes = [entry.num_samples for entry in parse_sources(train_data)]
        assert sum(sizes) == 45 and min(sizes) >= least
        assert (min(sizes) < 10) == (min_size == 1)
    assert program(cluster_source, [*command, "--min-size", "23"]) == 2


def test_kmeans_finds_known_clusters_in_chunks_and_the_same_ones_again():
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    truth = rng.integers(0, 8, size=2000)
    points = centres[truth] + 0.1 * rng.normal(size=(2000, 8))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float16)
    labels, centroids = spherical_kmeans(points, 8, chunk_samples=300, seed=1)
    for number in range(8):
        assert len(set(truth[labels == number])) == 1
    assert np.allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)
    assert np.array_equal(labels, spherical_kmeans(points, 8, chunk_samples=300, seed=1)[0])
    same = np.repeat(np.eye(4, dtype=np.float32)[:2], 10, axis=0)  # two points, five clusters
    labels = dissolve_small(same, *spherical_kmeans(same, 5), 1)
    assert np.bincount(labels).tolist() == [10, 10]  # empty clusters are taken away


@pytest.mark.parametrize("prefix", ["./", "v1.2/photos/", "a_folder/" * 11, "k" * 110])
def test_samples_stay_whole_whatever_their_keys(tmp_path, prefix):
    """A key ends at the first dot behind the last slash, which a new key does not have."""
    members = [
        (f"{prefix}{n:03d}.{e}", f"{e} {n}".encode()) for n in range(7) for e in ("png", "txt")
    ]
    shard = write_tar(tmp_path / "a" / "00000.tar", members)
    labels = np.array([0, 1, 0, 1, 0, 1, LEFT_OUT], np.int32)
    for number, folder in enumerate(write_clusters([shard], [labels], tmp_path, 10)):
        found = [sample.files for sample in read_samples(folder / "00000.tar")]
        assert found == [
            {e: f"{e} {n}".encode() for e in ("png", "txt")} for n in range(number, 6, 2)
        ]
    with pytest.raises(UserError, match="holds 7 samples and held 6"):
        write_clusters([shard], [labels[:6]], tmp_path, 10)
    assert len(list(tmp_path.glob("cluster-*"))) == 2  # those of the call before
