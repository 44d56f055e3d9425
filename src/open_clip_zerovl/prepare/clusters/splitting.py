"""One source as many (A.6): k-means on a model's features divides it into clusters, each a source of its own.

Debiased sampling over 100 clusters of CC12M raises the paper's RSUM on COCO / F30K from 370.8 / 502.5 to 384.4 / 511.1. A.6
does not say which features were used; image features are the default here.

Results are kept on disk; a repeated call reuses the features:

    OUT/features-image/       embeddings (`embeddings.store`): 0.images (n, 1, D), 0.texts (n, D), float16, unit length
    OUT/assignment.npz        labels (n,), distances (n,), centroids (K, D), shards and their sizes: what `--train-data` reads
    OUT/report.json           sizes of the clusters and how even they are
    OUT/preview/000.png ...   the pictures nearest to each centroid
    OUT/cluster-000/ ...      with --reshard: shards and sizes.json of each cluster

`n` samples, `D` width of the features, `K` clusters.
"""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.claim import ADVICE
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.clusters import Clustering, save_clustering
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.embeddings.embed import embed
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.embeddings.fingerprint import describe_source
from open_clip_zerovl.embeddings.sources import SourceSamples
from open_clip_zerovl.embeddings.store import (
    WEIGHTS,
    ArraySpec,
    Manifest,
    Rows,
    Store,
    difference,
    read_manifest,
)
from open_clip_zerovl.prepare.cluster_flags import ClusterSettings
from open_clip_zerovl.prepare.clusters.folders import train_data, write_clusters, write_previews
from open_clip_zerovl.prepare.clusters.kmeans import (
    dissolve_small,
    size_report,
    size_text,
    spherical_kmeans,
)
from open_clip_zerovl.shards.index import open_index
from open_clip_zerovl.shards.marks import Mark, digests_of, file_marks
from open_clip_zerovl.shards.members import ShardError
from open_clip_zerovl.shards.urls import local_path


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
    table, known = _embedded(
        source, encoder, out / f"features-{settings.features}", settings.features, progress=progress
    )
    clusters = spherical_kmeans(
        table, settings.clusters, passes=settings.passes, seed=settings.seed
    )
    labels, distances, centroids = dissolve_small(table, *clusters, settings.min_size)
    if progress and len(centroids) < settings.clusters:
        print(
            f"{settings.clusters - len(centroids)} clusters below {settings.min_size:,} samples were dissolved into their "
            "neighbours."
        )
    # The blocks of a table are one file.
    shards, sizes = source.shards, source.sizes
    if source.table is not None:
        shards, sizes = (source.table.path,), (source.num_samples,)
    shard_marks = tuple(file_marks(shards, digests_of(known), f"checking {source.name}").values())
    clustering = Clustering(source.name, shards, sizes, labels, distances, centroids, shard_marks)
    save_clustering(clustering, out)
    write_atomically(
        out / "report.json", json.dumps(size_report(clustering.counts), indent=1) + "\n"
    )
    if settings.preview:
        write_previews(clustering, out / "preview", pictures=settings.preview, progress=progress)
    if settings.reshard:
        write_clusters(clustering, out, shard_size=settings.shard_size, progress=progress)
    if progress:
        print(size_text(clustering))
        print(
            f"Train on the clusters as sources with --debiased-sampling --train-data '{train_data(out)}'"
        )
    return clustering


def _absolute(source: Source) -> Source:
    """The source with the absolute paths of its shards or its table. UserError for remote shards and parquet."""
    if remote := [shard for shard in source.shards if local_path(shard) is None]:
        raise UserError(
            f"shards of {source.name} are remote, first {remote[0]}: clustering reads local shards. Copy them here; the shards "
            "that --reshard writes may lie anywhere."
        )
    if source.columns is not None:
        raise UserError(
            f"{source.name} is parquet, whose rows have no index for clusters: make shards of them with `zerovl data pack`"
        )
    shards = tuple(os.path.abspath(local_path(shard) or shard) for shard in source.shards)
    table = None if source.table is None else replace(source.table, path=shards[0])
    return replace(source, shards=shards, table=table)


class _Features:
    """Stored rows as `kmeans.Features`: those of pictures, of captions, or both side by side, of unit length."""

    def __init__(self, *rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        parts = [rows[index].float().flatten(1) for rows in self.rows]
        return F.normalize(torch.cat(parts, dim=1), dim=1).numpy()


def _embedded(
    source: Source, encoder: Encoder, folder: Path, kind: str, *, progress: bool
) -> tuple[_Features, list[Mark]]:
    """The features of every sample of a source, of an earlier call or computed now, and the marks of its shards.

    Raises:
        UserError: a model that cannot be loaded, a sample that cannot be read, shards that hold another number of samples than
            `sizes.json` says, or a folder with features of other data or another model.
    """
    model = FrozenModel.load(encoder)
    samples = SourceSamples([source], images=kind != "text", captions=kind != "image")
    arrays: dict[str, ArraySpec] = {}
    if samples.images:
        arrays["0.images"] = ("float16", (source.num_samples, 1, model.image_width()))
    if samples.captions:
        arrays["0.texts"] = ("float16", (source.num_samples, model.texts(["a"]).shape[1]))
    facts = {
        "use": "clusters",
        "model": [model.name],
        WEIGHTS: list(model.fingerprints.values()),
    }
    # Of pictures, of captions: the folder's clusters are of one model and source.
    earlier = {
        other: stored
        for other in folder.parent.glob("features-*")
        if (stored := read_manifest(other))
    }
    known = [mark for stored in earlier.values() for mark in stored.marks]
    manifest = Manifest(facts, [describe_source(source, known)], arrays)
    for other, stored in earlier.items():
        changed = difference(replace(stored, arrays=arrays), manifest)
        if changed is not None:
            raise UserError(f"{other} {changed}; {ADVICE}")
    store = Store.create(folder, manifest)
    embed(
        store,
        [model],
        samples,
        batch_size=encoder.batch_size,
        workers=encoder.workers,
        progress=progress,
    )
    for shard in dict.fromkeys(source.shards) if source.table is None else ():
        try:
            # for training on the clusters, which finds its samples by the indexes
            open_index(shard)
        except (ShardError, tarfile.ReadError) as error:
            raise UserError(
                f"shard {shard} cannot be read as a plain tar ({error}): write it again."
            ) from error
    return _Features(*store.rows.values()), manifest.marks
