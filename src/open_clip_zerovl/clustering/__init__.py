"""One source as many (A.6): k-means on a model's features divides it into clusters, which are sources of their own."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.clustering.run": ["ClusterSettings", "cluster_source"],
        "open_clip_zerovl.clustering.kmeans": ["spherical_kmeans"],
    },
)
