"""One source as many (A.6): k-means on a model's features divides it into clusters, which are sources of their own."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.prepare.clusters.splitting": ["ClusterSettings", "cluster_source"],
        "open_clip_zerovl.prepare.clusters.kmeans": ["spherical_kmeans"],
    },
)
