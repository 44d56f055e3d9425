"""The cluster of each sample of a source (A.6): spherical k-means, and how even the clusters are in size.

`n` samples, `D` width of the features, `K` clusters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.clusters import Clustering

#: Features (n, D) of unit length: an array, or stored rows that are read in part. `features[index]` is an array.
Features = Any


def spherical_kmeans(
    features: Features,
    clusters: int,
    *,
    passes: int = 10,
    seed: int = 0,
    chunk_samples: int = 65_536,
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Spherical k-means: labels (n,), distances 1 - cosine (n,), centroids (K, D) of unit length.

    scikit-learn's mini-batch k-means, begun on a random chunk of the samples and continued on all chunks in random order. A
    cluster may be empty where samples are alike; `dissolve_small` takes it away.

    Args:
        features: of unit length.
        clusters: K.
        passes: over the features.
        seed: the seed of the draws.
        chunk_samples: samples in memory at once.
    """
    from sklearn.cluster import MiniBatchKMeans

    rng = np.random.default_rng(seed)
    begins = np.arange(0, len(features), chunk_samples)
    start = np.sort(
        rng.choice(len(features), min(len(features), max(chunk_samples, clusters)), replace=False)
    )
    model = MiniBatchKMeans(clusters, random_state=seed, n_init=3, batch_size=4096, max_iter=passes)
    model.fit(np.asarray(features[start], np.float32))
    for begin in (
        begin for _ in range(passes) for begin in rng.permutation(begins) if len(begins) > 1
    ):
        model.partial_fit(np.asarray(features[begin : begin + chunk_samples], np.float32))
    centroids = np.asarray(model.cluster_centers_, np.float32)
    centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    labels, distances = np.empty(len(features), np.int32), np.empty(len(features), np.float32)
    for begin in begins:
        part = slice(begin, begin + chunk_samples)
        cosines = np.asarray(features[part], np.float32) @ centroids.T  # (chunk, K)
        labels[part], distances[part] = cosines.argmax(axis=1), 1 - cosines.max(axis=1)
    return labels, distances, centroids


def dissolve_small(
    features: Features,
    labels: NDArray[np.int32],
    distances: NDArray[np.float32],
    centroids: NDArray[np.float32],
    least: int,
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Dissolve clusters of fewer than `least` samples; labels, distances and centroids of the K' <= K clusters that remain.

    The smallest cluster is dissolved first: each of its samples goes to the nearest of the other centroids. This is repeated
    until all clusters are large enough, since a source must fill an effective batch to be drawn. Other samples keep their
    cluster.

    Args:
        features: (n, D).
        labels, distances, centroids: of `spherical_kmeans`; not changed.
        least: samples of a cluster, at least.

    Raises:
        UserError: fewer than two clusters would remain.
    """
    labels, distances = labels.copy(), distances.copy()
    left = np.arange(len(centroids))
    counts = np.bincount(labels, minlength=len(centroids))
    while counts[left].min() < least:
        smallest = left[counts[left].argmin()]
        left = left[left != smallest]
        if len(left) < 2:
            raise UserError(
                f"{len(labels)} samples do not make two clusters of {least} samples: lower the least size of a cluster."
            )
        moved = np.flatnonzero(labels == smallest)
        # (moved, clusters left)
        cosines = np.asarray(features[moved], np.float32) @ centroids[left].T
        labels[moved], distances[moved] = left[cosines.argmax(axis=1)], 1 - cosines.max(axis=1)
        counts = np.bincount(labels, minlength=len(centroids))
    return np.searchsorted(left, labels).astype(np.int32), distances, centroids[left]


def size_report(counts: NDArray) -> dict[str, Any]:
    """Sizes of clusters with samples (K,), and how even they are.

    `effective_clusters` is exp(entropy of their shares): K if all have one size, 1 if one cluster holds all samples. A
    cluster smaller than the effective batch gives no batch; compare `smallest` with it.
    """
    shares = counts[counts > 0] / counts.sum()
    return {
        "clusters": len(counts),
        "samples": int(counts.sum()),
        "smallest": int(counts.min()),
        "median": float(np.median(counts)),
        "largest": int(counts.max()),
        "effective_clusters": float(np.exp(-(shares * np.log(shares)).sum())),
        "counts": [int(count) for count in counts],
    }


def size_text(clustering: Clustering) -> str:
    """The size report as a sentence."""
    sizes = size_report(clustering.counts)
    return (
        f"{clustering.source}: {sizes['samples']:,} samples in {sizes['clusters']} clusters of {sizes['smallest']:,} to "
        f"{sizes['largest']:,} (median {sizes['median']:,.0f}; as even as {sizes['effective_clusters']:.1f} equal ones). A "
        "cluster smaller than the effective batch gives no batch: --min-size dissolves it into its neighbours."
    )
