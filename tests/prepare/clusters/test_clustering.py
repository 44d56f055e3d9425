"""One source as many: features, k-means, clusters as sources, from the pictures to the batches."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.cli import program as cli
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.clusters import Clustering, load_clustering
from open_clip_zerovl.data.reading import Reading
from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.embeddings.fingerprint import describe_source
from open_clip_zerovl.prepare.cluster_flags import ClusterSettings
from open_clip_zerovl.prepare.clusters.folders import train_data, write_clusters
from open_clip_zerovl.prepare.clusters.kmeans import (
    dissolve_small,
    size_report,
    spherical_kmeans,
)
from open_clip_zerovl.prepare.clusters.splitting import cluster_source
from open_clip_zerovl.prepare.public.index import check_shards
from open_clip_zerovl.shards.marks import file_mark
from open_clip_zerovl.shards.members import read_samples
from support.tars import write_source, write_tar
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, random_model, register, write_run

SETTINGS = {field.name for field in fields(ClusterSettings)}


def cluster(data: str, model: str, out: Path, *, progress: bool = False, **values):
    """`cluster_source` with the values of its two records side by side."""
    settings = ClusterSettings(
        **{name: value for name, value in values.items() if name in SETTINGS}
    )
    encoder = Encoder(
        model, **{name: value for name, value in values.items() if name not in SETTINGS}
    )
    return cluster_source(data, encoder, out, settings, progress=progress)


COLOURS = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]


def picture(colour: tuple[int, int, int], number: int) -> bytes:
    noise = np.random.default_rng(number).integers(-9, 10, size=(32, 32, 3))
    content = io.BytesIO()
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A training checkpoint of a tiny model; random weights separate three colours well."""
    folder = tmp_path_factory.mktemp("model")
    name = register(folder, "cluster-tiny", NATIVE_VISION, CLIP_TEXT)
    return str(write_run(folder / "run", random_model(name), {"model": name}))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    """45 pictures of three colours, 9 a shard; the caption names the colour."""
    folder = tmp_path_factory.mktemp("source") / "cc"
    for shard in range(5):
        members = []
        for i in range(9 * shard, 9 * shard + 9):
            members += [
                (f"k{i}.png", picture(COLOURS[i % 3], i)),
                (f"k{i}.txt", f"colour {i % 3} number {i}".encode()),
            ]
        write_tar(folder / f"{shard:05d}.tar", members)
    (folder / "sizes.json").write_text(json.dumps({f"{shard:05d}.tar": 9 for shard in range(5)}))
    return f"cc={folder}"


@pytest.fixture(scope="module")
def clustered(model, source, tmp_path_factory):
    out = tmp_path_factory.mktemp("clusters")
    arguments = dict(
        clusters=3,
        reshard=True,
        shard_size=10,
        preview=4,
        batch_size=8,
        device="cpu",
        progress=False,
    )
    return out, cluster(source, model, out, **arguments), arguments


def test_clusters_become_sources_without_a_sample_lost_or_doubled(clustered):
    out, result, _ = clustered
    sources = parse_sources(train_data(out))
    assert [s.name for s in sources] == ["cc-000", "cc-001", "cc-002"]
    assert sorted(s.num_samples for s in sources) == [15, 15, 15] == sorted(result.counts.tolist())
    seen = []
    for entry in sources:
        captions = [s.files["txt"].decode() for shard in entry.shards for s in read_samples(shard)]
        assert len({caption.split()[1] for caption in captions}) == 1  # one colour a cluster
        assert entry.sizes == (10, 5)
        seen += captions
        assert not check_shards(
            out / f"cluster-{entry.name[-3:]}", decode=True, progress=False
        ).faults
    assert sorted(seen) == sorted(f"colour {i % 3} number {i}" for i in range(45))


def test_the_assignment_report_and_previews_are_written(clustered):
    out, result, _ = clustered
    loaded = load_clustering(out)
    assert loaded.source == "cc" and np.array_equal(loaded.labels, result.labels)
    for shard, mark in zip(loaded.shards, loaded.marks, strict=True):
        path = Path(shard)
        assert path.is_absolute() and file_mark(shard, {}) == mark
        assert (
            path.parent / ".zerovl-index" / f"{path.name}.npz"
        ).is_file()  # for training, built in passing
    assert [len(set(loaded.labels[9 * k : 9 * k + 9])) for k in range(5)] == [3] * 5
    assert json.loads((out / "report.json").read_text())["effective_clusters"] == pytest.approx(3)
    for cluster in range(3):
        with Image.open(out / "preview" / f"{cluster:03d}.png") as sheet:
            assert sheet.size == (192, 192)
            # All four pictures have the cluster's colour.
            found = {int(np.argmax(sheet.getpixel((x, y)))) for x in (48, 144) for y in (48, 144)}
        first = int(np.flatnonzero(result.labels == cluster)[0])
        assert found == {first % 3}


def test_a_second_call_reads_the_features_it_has(clustered, model, source, monkeypatch):
    out, result, arguments = clustered
    seen, stock = [], FrozenModel.images
    monkeypatch.setattr(
        FrozenModel, "images", lambda self, pixels: seen.append(len(pixels)) or stock(self, pixels)
    )
    again = cluster(source, model, out, **{**arguments, "reshard": False})
    assert np.array_equal(again.labels, result.labels) and seen == [
        1
    ]  # one made-up picture, for the width


def test_features_of_other_shards_or_weights_are_not_used(model, source, tmp_path):
    arguments = dict(clusters=2, preview=0, batch_size=45, device="cpu", progress=False)
    own = tmp_path / "run" / "checkpoints" / "epoch_latest.pt"
    shutil.copytree(Path(model).parent.parent, tmp_path / "run")
    Path(own.parent / "epoch_1.pt").rename(own)
    shutil.copytree(source[3:], tmp_path / "a" / "cc")
    cluster(f"cc={tmp_path / 'a' / 'cc'}", str(own), tmp_path / "out", **arguments)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    cluster(
        f"cc={tmp_path / 'b' / 'cc'}", str(own), tmp_path / "out", **arguments
    )  # a copy is the same
    members = [(f"k{i}.png", picture(COLOURS[0], 99 + i) + b" " * i) for i in range(9)]
    write_tar(
        tmp_path / "b" / "cc" / "00000.tar",
        [pair for k, v in members for pair in ((k, v), (k[:-3] + "txt", b"x"))],
    )
    with pytest.raises(
        UserError, match=r"was begun with other data: .*shard 00000\.tar of 'cc' differs"
    ):
        cluster(f"cc={tmp_path / 'b' / 'cc'}", str(own), tmp_path / "out", **arguments)
    content = torch.load(own, weights_only=True)
    content["state_dict"]["visual.proj"].neg_()
    torch.save(content, own)
    with pytest.raises(UserError, match="was begun before the content of models changed"):
        cluster(f"cc={tmp_path / 'a' / 'cc'}", str(own), tmp_path / "out", **arguments)
    content["state_dict"]["visual.proj"].fill_(torch.nan)
    torch.save(content, own)
    with pytest.raises(UserError, match="makes NaN or infinite embeddings of a sample"):
        cluster(f"cc={tmp_path / 'a' / 'cc'}", str(own), tmp_path / "new", **arguments)
    assert not (tmp_path / "new" / "assignment.npz").exists()


def test_features_do_not_depend_on_batches_or_workers(clustered, model, source, tmp_path):
    out, _, arguments = clustered
    other = dict(arguments, reshard=False, preview=0, batch_size=45, workers=2)
    cluster(source, model, tmp_path, **other)
    first, second = (
        np.load(folder / "features-image/0.images.npy")[:, 0] for folder in (out, tmp_path)
    )
    # float16 storage of unit vectors: 2^-11 relative; batches of other sizes round differently in float32
    assert first.shape == (45, 24) and np.abs(first.astype(np.float32) - second).max() < 1e-3
    assert np.allclose(np.linalg.norm(first.astype(np.float32), axis=1), 1, atol=2e-3)
    for kind in ("text", "both"):
        cluster(source, model, tmp_path, **dict(other, features=kind, workers=0))
        assert np.load(tmp_path / f"features-{kind}/0.texts.npy").shape == (45, 24)
    with pytest.raises(
        UserError, match="was begun with sources cc, and this call has sources other"
    ):
        cluster(source.replace("cc=", "other="), model, tmp_path, **dict(other, features="text"))


def test_kmeans_finds_known_clusters_in_chunks_and_the_same_ones_again():
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    truth = rng.integers(0, 8, size=2000)
    points = centres[truth] + 0.1 * rng.normal(size=(2000, 8))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float16)
    labels, distances, centroids = spherical_kmeans(points, 8, chunk_samples=300, seed=1)
    for cluster in range(8):
        assert len(set(truth[labels == cluster])) == 1
    assert distances.max() < 0.5 and np.allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)
    again = spherical_kmeans(points, 8, chunk_samples=300, seed=1)
    assert np.array_equal(labels, again[0])
    same = np.repeat(np.eye(4, dtype=np.float32)[:2], 10, axis=0)  # two points, five clusters
    labels, _, left = dissolve_small(same, *spherical_kmeans(same, 5), 1)
    assert (
        sorted(np.bincount(labels)) == [10, 10] and len(left) == 2
    )  # empty clusters are taken away


def test_small_clusters_go_to_their_neighbours():
    """By hand: directions at 0, 10, 90 and 180 degrees; the single sample at 80 leaves for 90, and those at 10 for 0."""
    degrees = np.array([0, 0, 0, 0, 9, 11, 90, 90, 90, 90, 80, 180, 180, 180, 180], np.float64)
    points = np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], axis=1).astype(
        np.float32
    )
    at = np.radians([0, 10, 80, 90, 180])
    centroids = np.stack([np.cos(at), np.sin(at)], axis=1).astype(np.float32)
    given = np.array([0] * 4 + [1] * 2 + [3] * 4 + [2] + [4] * 4, np.int32)
    away = (1 - (points * centroids[given]).sum(axis=1)).astype(np.float32)
    labels, distances, left = dissolve_small(points, given, away, centroids, least=4)
    assert labels.tolist() == [0] * 6 + [1] * 5 + [2] * 4  # numbered anew, without gaps
    assert np.allclose(left, centroids[[0, 3, 4]])
    assert np.allclose(distances, 1 - (points * left[labels]).sum(axis=1), atol=1e-6)
    same = dissolve_small(points, given, away, centroids, least=1)
    assert np.array_equal(same[0], given) and len(same[2]) == 5  # nothing is small: nothing moves
    with pytest.raises(UserError, match="15 samples do not make two clusters of 12"):
        dissolve_small(points, given, away, centroids, least=12)


def test_every_cluster_fills_the_batch_that_was_named(model, source, tmp_path, capsys):
    command = f"cluster {model} --data {source} --out {tmp_path} --clusters 9 --preview 0".split()
    assert cli.main([*command, "--device", "cpu"]) == 0
    assert (
        min(s.num_samples for s in parse_sources(f"cc={tmp_path}")) < 10
    )  # or there is nothing to dissolve
    assert cli.main([*command, "--device", "cpu", "--min-size", "10"]) == 0
    assert (
        "clusters below 10 samples were dissolved into their neighbours" in capsys.readouterr().out
    )
    sizes = [s.num_samples for s in parse_sources(f"cc={tmp_path}")]
    assert sum(sizes) == 45 and min(sizes) >= 10 and len(sizes) < 9
    assert cli.main([*command, "--min-size", "23"]) == 2
    assert "45 samples, too few for two clusters of 23: lower --min-size" in capsys.readouterr().err


def test_size_report_tells_even_from_uneven():
    assert size_report(np.array([10, 10, 10, 10]))["effective_clusters"] == pytest.approx(4)
    uneven = size_report(np.array([997, 1, 1, 1]))
    assert uneven["effective_clusters"] < 1.1 and (uneven["smallest"], uneven["largest"]) == (
        1,
        997,
    )


@pytest.mark.parametrize(
    ("data", "settings", "sentence"),
    [
        ("{source}", {}, "45 samples, fewer than 100 clusters"),
        ("{source}::b={folder}", {}, "names 2 sources"),
        (
            "cc=pipe:cat {folder}/00000.tar",
            {"clusters": 2},
            "shards of cc are remote, first pipe:cat .* Copy them here",
        ),
        ("broken=broken", {"clusters": 2}, "sample 'k' in .* has an image that cannot be decoded"),
    ],
)
def test_refusals(data, settings, sentence, model, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path / "broken", 0, 12, 12)
    write_tar(tmp_path / "broken/00000.tar", [("k.png", b"no picture"), ("k.txt", b"x")])
    with pytest.raises(UserError, match=sentence):
        cluster(
            data.format(source=source, folder=source[3:]),
            model,
            tmp_path / "out",
            device="cpu",
            **settings,
        )
    with pytest.raises(UserError, match="make it with `zerovl cluster`"):
        load_clustering(tmp_path)


@pytest.fixture
def table(source, tmp_path) -> Path:
    """The source's pairs as a table with its pictures."""
    rows = ["filepath\ttitle"]
    for shard in sorted(Path(source.partition("=")[2]).glob("*.tar")):
        for sample in read_samples(shard):
            (tmp_path / f"{sample.key}.png").write_bytes(sample.files["png"])
            rows.append(f"{sample.key}.png\t{sample.files['txt'].decode()}")
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")
    return tmp_path / "pairs.tsv"


def test_a_table_is_clustered_as_shards_of_the_same_pairs_are(clustered, model, table, tmp_path):
    _, shards, arguments = clustered
    out = tmp_path / "clusters"
    result = cluster(f"cc={table}", model, out, **{**arguments, "reshard": False})
    assert np.array_equal(result.labels, shards.labels) and (out / "preview/002.png").is_file()
    assert result.shards == (str(table),) and result.sizes == (45,)
    whole = {text for _, text in table_rows(f"cc={table}")}
    for _ in range(2):  # out of the table, then as shards
        sources = parse_sources(train_data(out))
        assert [source.num_samples for source in sources] == shards.counts.tolist()
        seen = [
            [sample.files["txt"] for n in range(len(s.shards)) for sample in samples_of(s, n)]
            for s in sources
        ]
        assert [len({text.split()[1] for text in own}) for own in seen] == [
            1,
            1,
            1,
        ]  # one colour a cluster
        assert {text for own in seen for text in own} == whole
        write_clusters(load_clustering(out), out, shard_size=10, progress=False)
    in_table = f"cc={out}/assignment.npz"
    for source, own in zip(
        parse_sources(in_table), sources, strict=True
    ):  # what training reads is the same
        read = [
            raw.caption.encode()
            for n in range(len(source.shards))
            for raw in Reading(source, 0).samples(n, 0, 0)
        ]
        assert read == [s.files["txt"] for n in range(len(own.shards)) for s in samples_of(own, n)]
    assert len({str(describe_source(source)) for source in parse_sources(in_table)}) == 3
    with pytest.raises(UserError, match="makes one sample of all rows of an image"):
        parse_sources(in_table, captions="one-per-epoch")
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([header, *sorted(rows, reverse=True)]) + "\n")  # of the same size
    with pytest.raises(UserError, match="has changed since it was clustered"):
        parse_sources(in_table)


def table_rows(data: str) -> list[tuple[str, bytes]]:
    (source,) = parse_sources(data)
    return [
        (s.key, s.files["txt"]) for n in range(len(source.shards)) for s in samples_of(source, n)
    ]


@pytest.mark.parametrize("prefix", ["./", "v1.2/photos/", "a_folder/" * 11, "k" * 110])
def test_resharded_samples_stay_whole_whatever_their_keys(tmp_path, prefix):
    """`tar cf 0.tar .` writes ./000.png; a key ends at the first dot behind the last slash, which a new key does not have."""
    members = [
        (f"{prefix}{n:03d}.{e}", f"{e} {n}".encode()) for n in range(6) for e in ("png", "txt")
    ]
    shard = write_tar(tmp_path / "a" / "00000.tar", members)
    labels, unit = np.array([0, 1, 0, 1, 0, 1], np.int32), np.eye(2, dtype=np.float32)
    clusters = Clustering(
        "a", (str(shard),), (6,), labels, np.zeros(6, np.float32), unit, (file_mark(str(shard)),)
    )
    for number, folder in enumerate(write_clusters(clusters, tmp_path, progress=False)):
        found = [sample.files for sample in read_samples(folder / "00000.tar")]
        assert found == [
            {e: f"{e} {n}".encode() for e in ("png", "txt")} for n in range(number, 6, 2)
        ]


def test_a_source_that_changed_is_not_resharded(clustered, tmp_path):
    _, result, _ = clustered
    shards = write_source(tmp_path / "s", 0, 12, 12)
    few = result.labels[:13], result.distances[:13]
    other = Clustering("s", (shards,), (13,), *few, result.centroids, (["s", 0],))
    with pytest.raises(UserError, match="holds 12 samples and held 13"):
        write_clusters(other, tmp_path, progress=False)
    assert not list(tmp_path.glob("cluster-*"))
