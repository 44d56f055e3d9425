"""Clusters as sources (A.6): the assignment on disk, and the sources that a clustering in `--train-data` becomes.

    cc12m=/d/clusters                      sources cc12m-000, cc12m-001, ...: one for each of the K clusters
    cc12m=/d/clusters@/mnt/cc12m           the same, with the clustered shards now in /mnt/cc12m
    cc12m=/d/clusters/assignment.npz       the same, without the clusters that `--reshard` wrote

Where the folder holds clusters that `--reshard` wrote, these are read. Otherwise a cluster is a choice of samples of the shards
that were clustered. Each shard is opened once and gives those samples in its own order, by its index (`tar/index`), so that a
cluster has pieces of shards like any other source.

`n` samples, `D` width of the features, `K` clusters.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import atomic_file, read_arrays
from open_clip_zerovl.shards.marks import Mark, digests_of, file_marks, is_same
from open_clip_zerovl.shards.writing import read_sizes

_CLUSTER_FOLDER = re.compile(r"cluster-(\d+)")


@dataclass(frozen=True)
class Cluster:
    """One cluster as a source reads it.

    Attributes:
        shards: paths of its tars.
        sizes: its samples in each of them.
        picked: (n,) the numbers of its samples in their shards, shard after shard and ascending in each; None if the
            shards hold no other samples. Samples 0 and 7 of the first shard and 2 of the second: [0, 7, 2].
    """

    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    picked: np.ndarray | None = None


def find_clustering(component: str) -> tuple[Path, str | None] | None:
    """(path of the assignment or of its folder, new folder of the shards or None); None if the component names no clustering.

    An at sign separates the two; it may also be part of a path.
    """
    path = _clustering_at(component)
    if path is not None:
        return path, None
    for at in re.finditer("@", component):
        path = _clustering_at(component[: at.start()])
        if path is not None:
            return path, component[at.end() :]
    return None


def open_clusters(
    path: Path, moved_to: str | None = None, *, strict: bool = False
) -> tuple[str, list[Cluster]]:
    """The name of the source that was clustered, and its K clusters.

    Args:
        path: the path of an `assignment.npz`, or of the folder that holds it and perhaps the clusters of `--reshard`.
        moved_to: the folder that now holds the clustered shards; None if they have not moved.
        strict: a missing shard is an error. Without it a missing shard gives a warning, and other samples of the cluster
            replace its samples.

    Raises:
        UserError: no readable assignment, shards that are missing or have changed, or clusters of `--reshard` that do not
            belong to the assignment.
    """
    clustering = load_clustering(path)
    if moved_to is None and path.is_dir() and (folders := cluster_folders(path)):
        return clustering.source, _written(clustering, path, folders)
    shards = clustering.shards if moved_to is None else _moved(clustering, moved_to)
    _check_shards(clustering, shards, path, strict)
    return clustering.source, _picked(clustering, shards)


def cluster_folders(folder: Path) -> list[Path]:
    """The folders of the clusters that `--reshard` wrote, in the order of their numbers."""
    numbered = (
        (_CLUSTER_FOLDER.fullmatch(entry.name), entry) for entry in folder.glob("cluster-*")
    )
    return [
        entry for _, entry in sorted((int(match[1]), entry) for match, entry in numbered if match)
    ]


def _clustering_at(path: str) -> Path | None:
    """The path, if it is one of an assignment or of a folder with one."""
    expanded = os.path.expanduser(path)
    # By os.path and not pathlib: the text may be anything, such as a pipe's command.
    named = os.path.basename(expanded) == ASSIGNMENT_FILE
    return (
        Path(expanded) if named or os.path.isfile(os.path.join(expanded, ASSIGNMENT_FILE)) else None
    )


def _picked(clustering: Clustering, shards: Sequence[str]) -> list[Cluster]:
    """The clusters as choices of samples of the clustered shards."""
    starts = np.concatenate([[0], np.cumsum(clustering.sizes)])
    # (n,) all samples of cluster 0, then of cluster 1 ...
    by_cluster = np.argsort(clustering.labels, kind="stable")
    clusters = []
    for samples in np.split(by_cluster, np.cumsum(clustering.counts)[:-1]):
        shard_of = np.searchsorted(starts, samples, side="right") - 1
        counts = np.bincount(shard_of, minlength=len(shards))
        used = np.flatnonzero(counts)
        clusters.append(
            Cluster(
                tuple(shards[shard] for shard in used),
                tuple(counts[used].tolist()),
                (samples - starts[shard_of]).astype(np.int32),
            )
        )
    return clusters


def _written(clustering: Clustering, path: Path, folders: Sequence[Path]) -> list[Cluster]:
    """The clusters as `--reshard` wrote them."""
    clusters = []
    for folder in folders:
        table = dict(sorted((read_sizes(folder) or {}).items()))
        shards = tuple(str(folder / name) for name in table)
        clusters.append(Cluster(shards, tuple(table.values())))
    counts = [sum(cluster.sizes) for cluster in clusters]
    if counts != clustering.counts.tolist():
        raise UserError(
            f"the {len(counts)} cluster-* folders of {path} are not the {len(clustering.counts)} clusters of its "
            f"{ASSIGNMENT_FILE}: write them again with `zerovl cluster --reshard`, or name {path / ASSIGNMENT_FILE} to read "
            "the clusters out of the shards that were clustered."
        )
    return clusters


def _moved(clustering: Clustering, folder: str) -> tuple[str, ...]:
    """The shards' paths, with `folder` in place of the deepest folder that they have in common."""
    common = os.path.commonpath([os.path.dirname(shard) for shard in clustering.shards])
    new = os.path.abspath(os.path.expanduser(folder))
    return tuple(os.path.join(new, os.path.relpath(shard, common)) for shard in clustering.shards)


def _check_shards(clustering: Clustering, shards: Sequence[str], path: Path, strict: bool) -> None:
    """UserError for shards that are missing or have changed; without `strict` a warning for some that are missing."""
    current_marks = file_marks(
        shards, digests_of(clustering.marks), f"checking {clustering.source}"
    )
    gone = []
    for shard, mark in zip(shards, clustering.marks, strict=True):
        current = current_marks[shard]
        if len(current) == 1:
            gone.append(shard)
        elif not is_same(mark, current):
            raise UserError(
                f"shard {shard} of {clustering.source} has changed since it was clustered (from {mark[1]} to {current[1]} "
                "bytes): its samples may differ. Fetch it again, or cluster again."
            )
    if gone and (strict or len(gone) == len(shards)):
        raise UserError(
            f"{len(gone)} of {len(shards)} clustered shards of {clustering.source} do not exist, first {gone[0]}: where they "
            f"have moved, write {path}@FOLDER."
        )
    if gone:
        logging.warning(
            f"Source {clustering.source}: {len(gone)} of {len(shards)} clustered shards do not exist, first {gone[0]}; other "
            "samples of the same clusters replace theirs."
        )


def _require_consistent(clustering: Clustering) -> None:
    """ValueError for arrays that do not belong together, as in a damaged or foreign file."""
    sizes = clustering.sizes
    labels = clustering.labels
    centroids = clustering.centroids
    alike = (
        len(clustering.shards) == len(sizes) == len(clustering.marks)
        and all(isinstance(mark, list) and len(mark) > 1 for mark in clustering.marks)
        and min(sizes, default=0) >= 0
        and labels.shape == clustering.distances.shape == (sum(sizes),)
        and np.issubdtype(labels.dtype, np.integer)
        and centroids.ndim == 2
    )
    if not alike or (len(labels) and not 0 <= labels.min() <= labels.max() < len(centroids)):
        raise ValueError("its arrays do not belong together")


ASSIGNMENT_FILE = "assignment.npz"


@dataclass(frozen=True)
class Clustering:
    """The assignment of a source's samples to clusters.

    Attributes:
        source: the source's name.
        shards, sizes: paths of its shards and the samples of each, in the order of the labels.
        labels: (n,) cluster of each sample.
        distances: (n,) 1 - cosine to the centroid.
        centroids: (K, D) of unit length.
        marks: `file_mark` of each shard, by which a changed shard is noticed.
    """

    source: str
    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    labels: NDArray[np.int32]
    distances: NDArray[np.float32]
    centroids: NDArray[np.float32]
    marks: tuple[Mark, ...]

    @property
    def counts(self) -> NDArray[np.int64]:
        """(K,) samples of each cluster."""
        return np.bincount(self.labels, minlength=len(self.centroids))


def save_clustering(clustering: Clustering, out: Path) -> Path:
    """Write `assignment.npz` into the folder `out`, without pickle; returns its path."""
    path = out / ASSIGNMENT_FILE
    with atomic_file(path) as file:
        np.savez_compressed(
            file,
            source=np.array(clustering.source),
            shards=np.array(clustering.shards),
            sizes=np.array(clustering.sizes),
            marks=np.array(json.dumps(clustering.marks)),
            labels=clustering.labels,
            distances=clustering.distances,
            centroids=clustering.centroids,
        )
    return path


def load_clustering(path: str | Path) -> Clustering:
    """Read an `assignment.npz`, named by its path or its folder's. UserError if it is missing or unreadable."""
    path = Path(path).expanduser()
    path = path / ASSIGNMENT_FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path} does not exist: make it with `zerovl cluster`.")
    try:
        content = read_arrays(path)
        shards = tuple(str(shard) for shard in content["shards"])
        clustering = Clustering(
            str(content["source"]),
            shards,
            tuple(int(size) for size in content["sizes"]),
            content["labels"],
            content["distances"],
            content["centroids"],
            tuple(json.loads(str(content["marks"]))),
        )
        _require_consistent(clustering)
        return clustering
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): write it again with `zerovl cluster`."
        ) from error
