"""The cluster of each sample of a source (A.6): spherical k-means, and how even the clusters are in size.

`n` samples, `D` width of the features, `K` clusters.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.clusters import Clustering


def spherical_kmeans(
    features: NDArray, clusters: int, *, passes: int = 10, seed: int = 0, chunk_samples: int = 65_536
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Spherical k-means: labels (n,), distances 1 - cosine (n,), centroids (K, D) of unit length.

    faiss is used where it is installed, else scikit-learn's mini-batch k-means over shuffled chunks. An empty cluster takes one
    sample, the one farthest from its centroid, so that there are always K clusters.

    Args:
        features: (n, D) of unit length; may be mapped from a file that does not fit into memory.
        clusters: K.
        passes: over the features (iterations, with faiss).
        seed: of the draws.
        chunk_samples: samples in memory at once.

    Raises:
        UserError: fewer samples than clusters, or neither faiss nor scikit-learn installed.
    """
    if len(features) < clusters:
        raise UserError(
            f"There are {len(features)} samples, fewer than {clusters} clusters: lower the number of clusters."
        )
    centroids = _fit(features, clusters, passes, seed, chunk_samples)
    centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    labels = np.empty(len(features), np.int32)
    distances = np.empty(len(features), np.float32)
    for begin in range(0, len(features), chunk_samples):
        cosines = np.asarray(features[begin : begin + chunk_samples], np.float32) @ centroids.T  # (chunk, K)
        best = cosines.argmax(axis=1)
        labels[begin : begin + len(best)] = best
        distances[begin : begin + len(best)] = 1 - cosines[np.arange(len(best)), best]
    _fill_empty(features, labels, distances, centroids)
    return labels, distances, centroids


def dissolve_small(
    features: NDArray,
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
        cosines = np.asarray(features[moved], np.float32) @ centroids[left].T  # (moved, clusters left)
        labels[moved], distances[moved] = left[cosines.argmax(axis=1)], 1 - cosines.max(axis=1)
        counts = np.bincount(labels, minlength=len(centroids))
    return np.searchsorted(left, labels).astype(np.int32), distances, centroids[left]


def _fit(features: NDArray, clusters: int, passes: int, seed: int, chunk_samples: int) -> NDArray[np.float32]:
    """(K, D) centroids, not yet of unit length."""
    rng = np.random.default_rng(seed)
    try:
        import faiss
    except ImportError:
        faiss = None
    if faiss is not None:
        # faiss trains on 256 samples a centroid. They are drawn here, so that a mapped file is not read as a whole.
        count = min(len(features), 256 * clusters)
        chosen = np.sort(rng.choice(len(features), count, replace=False))
        kmeans = faiss.Kmeans(
            features.shape[1], clusters, niter=passes, seed=seed, spherical=True, min_points_per_centroid=1
        )
        points = np.ascontiguousarray(features[chosen], np.float32)
        kmeans.train(points, init_centroids=_spread(points, clusters, rng))
        return np.array(kmeans.centroids, np.float32).reshape(clusters, -1)
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise UserError("Clustering needs scikit-learn or faiss: `pip install scikit-learn`.") from error
    start = np.sort(rng.choice(len(features), min(len(features), max(chunk_samples, clusters)), replace=False))
    model = MiniBatchKMeans(clusters, random_state=seed, n_init=3, batch_size=4096, max_iter=passes)
    model.fit(np.asarray(features[start], np.float32))
    if len(start) < len(features):
        # More samples than one chunk: further passes over all of them, in chunks in random order.
        begins = np.arange(0, len(features), chunk_samples)
        for _ in range(passes):
            for begin in rng.permutation(begins):
                model.partial_fit(np.asarray(features[begin : begin + chunk_samples], np.float32))
    return np.asarray(model.cluster_centers_, np.float32)


def _spread(points: NDArray[np.float32], clusters: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """(K, D) initial centroids far from each other (k-means++); faiss's random ones often lie in one cluster twice."""
    chosen = [int(rng.integers(len(points)))]
    distances = np.full(len(points), np.inf, np.float32)
    while len(chosen) < clusters:
        distances = np.minimum(
            distances, np.square(points - points[chosen[-1]]).sum(axis=1)
        )  # (n,) to the nearest chosen
        total = float(distances.sum())
        weights = distances.astype(np.float64) / total if total > 0 else None  # None where all points are the same
        chosen.append(int(rng.choice(len(points), p=None if weights is None else weights / weights.sum())))
    return points[chosen]


def _fill_empty(features: NDArray, labels: NDArray, distances: NDArray, centroids: NDArray) -> None:
    """Give each empty cluster the sample that is farthest from its centroid; changes the arrays."""
    for empty in np.flatnonzero(np.bincount(labels, minlength=len(centroids)) == 0):
        counts = np.bincount(labels, minlength=len(centroids))
        spare = counts[labels] > 1  # not the only sample of another cluster
        farthest = int(np.flatnonzero(spare)[distances[spare].argmax()])
        logging.info(f"Cluster {empty} was empty and takes the sample farthest from its centroid.")
        labels[farthest], distances[farthest] = empty, 0.0
        centroids[empty] = np.asarray(features[farthest], np.float32)


def size_report(counts: NDArray) -> dict[str, Any]:
    """Sizes of clusters with samples (K,), and how even they are.

    `effective_clusters` is exp(entropy of their shares): K where all have one size, 1 where one cluster holds all samples. A
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
