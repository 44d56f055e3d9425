"""One source as many (A.6): k-means on a model's features divides it into clusters, each a source of its own.

Debiased sampling over 100 clusters of CC12M raises the paper's RSUM on COCO / F30K from 370.8 / 502.5 to 384.4 / 511.1. A.6
does not say which features were used; image features are the default here.

Results are kept on disk; a repeated call reuses the features:

    OUT/features-image.npy    (n, D) float16, unit length; n samples of the source in the order of their shards
    OUT/assignment.npz        labels (n,), distances (n,), centroids (K, D), shards and their sizes: what `--train-data` reads
    OUT/report.json           sizes of the clusters and how even they are
    OUT/preview/000.png ...   the pictures nearest to each centroid
    OUT/cluster-000/ ...      with --reshard: shards and sizes.json of each cluster

`n` samples, `D` width of the features, `K` clusters.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.checkpoints.weights import WEIGHTS_FILE
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.clusters import Clustering, load_clustering, save_clustering
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.models.local_dir import LOCAL_DIR
from open_clip_zerovl.prepare.clusters.features import extract_features
from open_clip_zerovl.prepare.clusters.folders import train_data, write_clusters, write_previews
from open_clip_zerovl.prepare.clusters.kmeans import dissolve_small, size_report, size_text, spherical_kmeans
from open_clip_zerovl.shards.urls import local_path
from open_clip_zerovl.shards.writing import shard_mark

__all__ = [
    "ClusterSettings",
    "Clustering",
    "cluster_source",
    "load_clustering",
    "spherical_kmeans",
    "train_data",
]

FEATURES = ("image", "text", "both")


@dataclass(frozen=True)
class ClusterSettings:
    """How a source is divided, and what is written.

    Attributes:
        clusters: K.
        min_size: samples that a cluster must hold: the effective batch to be trained with. Smaller clusters are dissolved, so
            that fewer than K remain.
        features: "image", "text", or "both" (side by side).
        passes: of k-means over the features.
        seed: of k-means.
        preview: pictures on a contact sheet; 0 for no sheets.
        reshard: also write each cluster as shards of its own, which are faster to read on a hard disk.
        shard_size: samples of such a shard, at most.

    Raises:
        UserError: a value out of range.
    """

    clusters: int = 100
    min_size: int = 1
    features: str = "image"
    passes: int = 10
    seed: int = 0
    preview: int = 25
    reshard: bool = False
    shard_size: int = 10_000

    def __post_init__(self) -> None:
        if self.features not in FEATURES:
            raise UserError(f"features is {self.features!r}: take one of {', '.join(FEATURES)}.")
        if min(self.clusters - 1, self.min_size, self.passes, self.shard_size) < 1 or self.preview < 0:
            raise UserError(
                "clusters must be 2 or more; min_size, passes and shard_size 1 or more; preview 0 or more: got "
                f"{self.clusters}, {self.min_size}, {self.passes}, {self.shard_size}, {self.preview}."
            )


def cluster_source(
    data: str,
    encoder: Encoder,
    out: str | Path,
    settings: ClusterSettings | None = None,
    *,
    progress: bool = True,
) -> Clustering:
    """Cluster one source; writes the assignment, a report, previews and, with `reshard`, shards of each cluster.

    Args:
        data: one source in `--train-data` syntax (`cc12m=/d/cc12m`, `my=/d/pairs.csv`).
        encoder: the model that makes the features.
        out: a folder for the results.

    Raises:
        UserError: several sources, remote shards, fewer samples than clusters, a picture that cannot be read, or an `out`
            that was made from other data or another model.
    """
    settings = settings or ClusterSettings()
    out = Path(out).expanduser()
    sources = parse_sources(data, on_bad_sample="fail", evaluation=True)
    if len(sources) != 1:
        raise UserError(f"{data!r} names {len(sources)} sources: cluster one at a time.")
    (source,) = sources
    if source.num_samples < settings.clusters:
        raise UserError(
            f"{source.name} holds {source.num_samples} samples, fewer than {settings.clusters} clusters: lower --clusters."
        )
    if source.num_samples < 2 * settings.min_size:
        raise UserError(
            f"{source.name} holds {source.num_samples} samples, too few for two clusters of {settings.min_size}: lower "
            "--min-size."
        )
    check_writable(out, folder=True)
    source = _absolute(source)
    _claim(out, source, encoder.model, settings.features)
    file = out / f"features-{settings.features}.npy"
    table = extract_features(source, encoder, file, kind=settings.features, progress=progress)
    found = spherical_kmeans(table, settings.clusters, passes=settings.passes, seed=settings.seed)
    labels, distances, centroids = dissolve_small(table, *found, settings.min_size)
    if progress and len(centroids) < settings.clusters:
        print(
            f"{settings.clusters - len(centroids)} clusters below {settings.min_size:,} samples were dissolved into their "
            "neighbours."
        )
    # The blocks of a table are one file.
    shards, sizes = source.shards, source.sizes
    if source.table is not None:
        shards, sizes = (source.table.path,), (source.num_samples,)
    shard_bytes = tuple(os.path.getsize(shard) for shard in shards)
    clustering = Clustering(source.name, shards, sizes, labels, distances, centroids, shard_bytes)
    save_clustering(clustering, out)
    write_atomically(out / "report.json", json.dumps(size_report(clustering.counts), indent=1) + "\n")
    if settings.preview:
        write_previews(clustering, out / "preview", pictures=settings.preview, progress=progress)
    if settings.reshard:
        write_clusters(clustering, out, shard_size=settings.shard_size, progress=progress)
    if progress:
        print(size_text(clustering))
        print(f"Train on the clusters as sources with --debiased-sampling --train-data '{train_data(out)}'")
    return clustering


def _absolute(source: Source) -> Source:
    """The source with the absolute paths of its shards or its table. UserError for remote shards."""
    if remote := [shard for shard in source.shards if local_path(shard) is None]:
        raise UserError(
            f"shards of {source.name} are remote, first {remote[0]}: clustering reads local shards. Copy them here; the shards "
            "that --reshard writes may lie anywhere."
        )
    shards = tuple(os.path.abspath(local_path(shard) or shard) for shard in source.shards)
    table = None if source.table is None else replace(source.table, path=shards[0])
    return replace(source, shards=shards, table=table)


def _claim(out: Path, source: Source, model: str, features: str) -> None:
    """Claim `out` for a source and a model. UserError where it holds the results of others."""
    made_of = [source.name, [Path(s).name for s in source.shards], source.sizes, str(model)]
    # Shards of other pictures often have the same names and counts, and a run overwrites its epoch_latest.pt.
    marks = [shard_mark(shard) for shard in dict.fromkeys(source.shards)]
    facts = {
        "source": source.name,
        "model": str(model),
        "made_of": hashlib.sha256(json.dumps(made_of).encode()).hexdigest(),
        "shards": hashlib.sha256(json.dumps(marks).encode()).hexdigest(),
        "weights": _digest_of_weights(str(model)),
    }
    file = out / "made-of.json"
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8"))
        # Earlier releases wrote fewer facts.
        if any(known.get(name, fact) != fact for name, fact in facts.items()):
            raise UserError(
                f"{out} holds the clusters of {known.get('source')} by {known.get('model')}, made of other shards or by "
                f"other weights than {source.name} by {model} has now: give a new folder."
            )
    else:
        write_atomically(file, json.dumps(facts, indent=1) + "\n")


def _digest_of_weights(model: str) -> str | None:
    """A hash of the file with a model's weights, of a checkpoint or an exported folder; None for a name, whose weights stay."""
    path = Path(model.removeprefix(LOCAL_DIR)).expanduser()
    file = path / WEIGHTS_FILE if path.is_dir() else path
    if not file.is_file():
        return None
    digest = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
