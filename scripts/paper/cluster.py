"""The data of A.6: one source in K clusters of similar pictures, each of which serves as a source.

    python -m scripts.paper.cluster MODEL DATA/cc12m DATA/cc12m-clusters [--clusters 100] [--min-size 1024]

Spherical k-means on the model's image features; A.6 does not say which features the paper used. A call after an interruption
goes on with the features that are missing.

    OUT/features/                     float16 features of each shard by this model
    OUT/cluster-000/00000.tar ...     the samples of a cluster, with sizes.json: as much disk as the source
    OUT/train-data.txt                the value of --train-data that makes each cluster a source

`n` samples, `D` width of the features, `K` clusters.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated as A

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from tqdm import tqdm

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.core.processes import usable_cores
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.features.embed import embed_pictures
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.features.sources import SourceSamples
from open_clip_zerovl.shards.files import SIZES_FILE
from open_clip_zerovl.shards.tar import Sample, read_samples
from scripts.program import program

BATCH_SAMPLES = 256
PASSES = 10  # of k-means over the features
LEFT_OUT = -1  # label of a sample whose picture cannot be decoded


def spherical_kmeans(
    features: NDArray, clusters: int, *, seed: int = 0, chunk_samples: int = 65_536
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the labels (n,) and the centroids (K, D) of unit length.

    scikit-learn's mini-batch k-means begins on a random chunk of the samples and continues on all chunks in random order. A
    cluster may be empty where samples are alike.
    """
    rng = np.random.default_rng(seed)
    begins = np.arange(0, len(features), chunk_samples)
    count = min(len(features), max(chunk_samples, clusters))
    start = np.sort(rng.choice(len(features), count, replace=False))
    model = MiniBatchKMeans(clusters, random_state=seed, n_init=3, batch_size=4096, max_iter=PASSES)
    model.fit(np.asarray(features[start], np.float32))
    for _ in range(PASSES if len(begins) > 1 else 0):
        for begin in rng.permutation(begins):
            model.partial_fit(np.asarray(features[begin : begin + chunk_samples], np.float32))
    centroids = np.asarray(model.cluster_centers_, np.float32)
    centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    labels = np.empty(len(features), np.int32)
    for begin in begins:
        part = np.asarray(features[begin : begin + chunk_samples], np.float32)
        labels[begin : begin + chunk_samples] = (part @ centroids.T).argmax(axis=1)
    return labels, centroids


def dissolve_small(
    features: NDArray, labels: NDArray[np.int32], centroids: NDArray[np.float32], least: int
) -> NDArray[np.int32]:
    """Return the labels (n,) after clusters of fewer than `least` samples have moved to their neighbours.

    The smallest cluster is dissolved first: each of its samples goes to the nearest of the other centroids. A source must fill
    an effective batch to be drawn.

    Raises:
        UserError: fewer than two clusters would remain.
    """
    labels, left = labels.copy(), np.arange(len(centroids))
    counts = np.bincount(labels, minlength=len(centroids))
    while counts[left].min() < least:
        smallest = left[counts[left].argmin()]
        left = left[left != smallest]
        if len(left) < 2:
            raise UserError(
                f"{len(labels)} samples do not make two clusters of {least} samples; lower --min-size"
            )
        moved = np.flatnonzero(labels == smallest)
        cosines = np.asarray(features[moved], np.float32) @ centroids[left].T  # (moved, left)
        labels[moved] = left[cosines.argmax(axis=1)]
        counts = np.bincount(labels, minlength=len(centroids))
    return np.searchsorted(left, labels).astype(np.int32)


class ClusterWriter:
    """The shards of one cluster, of which one is open at a time. Samples go straight to disk."""

    def __init__(self, folder: Path, shard_size: int) -> None:
        self.folder, self.shard_size = folder, shard_size
        self.sizes: dict[str, int] = {}
        self._tar: tarfile.TarFile | None = None
        folder.mkdir(parents=True)

    def add(self, key: str, sample: Sample) -> None:
        """Append a sample, to a new shard where the last one is full."""
        name = f"{sum(self.sizes.values()) // self.shard_size:05d}.tar"
        if name not in self.sizes:
            self.close()
            self._tar = tarfile.open(self.folder / name, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # see close
        assert self._tar is not None
        for extension, content in sample.files.items():
            member = tarfile.TarInfo(f"{key}.{extension}")
            member.size = len(content)
            self._tar.addfile(member, io.BytesIO(content))
        self.sizes[name] = self.sizes.get(name, 0) + 1

    def close(self) -> None:
        """Close the open tar."""
        if self._tar is not None:
            self._tar.close()


def write_clusters(
    shards: Sequence[Path], labels: Sequence[NDArray[np.int32]], out: Path, shard_size: int
) -> list[Path]:
    """Write every cluster as a source of its own in one pass over the shards, and return the folders.

    The folders are written aside and moved into place when whole. The number of the old shard is put before a sample's key,
    since keys are unique within a shard only. Slashes and dots in a key become dashes.

    Raises:
        UserError: a shard that does not hold as many samples as have labels.
    """
    staging = out / ".writing"
    shutil.rmtree(staging, ignore_errors=True)
    count = 1 + max(int(of_shard.max(initial=LEFT_OUT)) for of_shard in labels)
    writers = [
        ClusterWriter(staging / f"cluster-{number:03d}", shard_size) for number in range(count)
    ]
    try:
        for number, shard in enumerate(tqdm(shards, desc="clusters", unit="shard")):
            samples = list(read_samples(shard))
            if len(samples) != len(labels[number]):
                raise UserError(
                    f"{shard} holds {len(samples)} samples and held {len(labels[number])} when it was clustered; cluster again"
                )
            for label, sample in zip(labels[number], samples, strict=True):
                if label != LEFT_OUT:
                    writers[label].add(f"{number:05d}-{re.sub('[/.]', '-', sample.key)}", sample)
    finally:
        for writer in writers:
            writer.close()
    for old in out.glob("cluster-*"):
        shutil.rmtree(old)
    folders = []
    for writer in writers:
        write_atomically(writer.folder / SIZES_FILE, json.dumps(writer.sizes, indent=1) + "\n")
        folders.append(writer.folder.rename(out / writer.folder.name))
    staging.rmdir()
    return folders


def cluster(
    model: FrozenModel,
    source: Path,
    out: Path,
    *,
    clusters: int,
    min_size: int = 1,
    seed: int = 0,
    shard_size: int = 10_000,
) -> str:
    """Cluster a source and write its clusters, and return the `--train-data` of these.

    Raises:
        UserError: no shards, a shard that cannot be read, or fewer pictures than clusters.
    """
    (given,) = parse_sources(f"{source.name}={source}")
    store, _ = embed_pictures(
        model,
        SourceSamples([given], "image"),
        out / "features",
        dtype=torch.float16,
        batch_size=BATCH_SAMPLES,
        workers=usable_cores(),
    )
    features = np.concatenate([block.numpy() for block in store.blocks()])
    decoded = store.ids != 0
    if decoded.sum() < clusters:
        raise UserError(
            f"{source} holds {decoded.sum()} pictures, fewer than {clusters} clusters; lower --clusters"
        )
    found, centroids = spherical_kmeans(features[decoded], clusters, seed=seed)
    labels = np.full(len(features), LEFT_OUT, np.int32)
    labels[decoded] = dissolve_small(features[decoded], found, centroids, max(1, min_size))
    bounds = np.cumsum(given.sizes)[:-1]
    shards = [Path(shard) for shard in given.shards]
    folders = write_clusters(shards, np.split(labels, bounds), out, shard_size)
    train_data = "::".join(
        f"{source.name}-{folder.name.removeprefix('cluster-')}={folder.absolute()}"
        for folder in folders
    )
    write_atomically(out / "train-data.txt", train_data + "\n")
    counts = np.sort(np.bincount(labels[decoded]))
    print(
        f"{source.name}: {decoded.sum():,} samples in {len(counts)} clusters of {counts[0]:,} to {counts[-1]:,} (median "
        f"{np.median(counts):,.0f}); {np.sum(~decoded):,} pictures could not be decoded and were left out.\n"
        f'Train on them as sources: --debiased-sampling --train-data "$(cat {out / "train-data.txt"})"'
    )
    return train_data


def cluster_source(
    model: A[str, "as for zerovl retrieval", "MODEL"],
    source: A[Path, "folder of the source's shards", "SOURCE"],
    out: A[Path, "folder to write", "OUT"],
    /,
    *,
    clusters: A[int, "clusters", "K"] = 100,
    min_size: A[
        int,
        "move the samples of clusters below N samples to the nearest other ones; N is the effective batch",
        "N",
    ] = 1,
    seed: A[int, "of k-means"] = 0,
) -> None:
    """Cluster a source by the features of a model."""
    loaded = FrozenModel.load(Encoder(model))
    cluster(loaded, source, out, clusters=clusters, min_size=min_size, seed=seed)


if __name__ == "__main__":
    sys.exit(program(cluster_source))
