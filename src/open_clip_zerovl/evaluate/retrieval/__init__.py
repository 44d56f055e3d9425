"""Image-text retrieval (sections 5.1 and 5.2): sets, recall@K both ways, RSUM."""

from open_clip_zerovl.core.lazy import lazy_exports

PUBLIC_NAMES = {
    "open_clip_zerovl.evaluate.retrieval.metrics": [
        "recalls",
        "retrieval_metrics",
        "retrieval_ranks",
    ],
    "open_clip_zerovl.evaluate.retrieval.encode": ["encode_retrieval"],
    "open_clip_zerovl.data.retrieval": [
        "open_retrieval_set",
        "parse_retrieval_data",
    ],
    "open_clip_zerovl.evaluate.retrieval.score": ["run_retrieval"],
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, PUBLIC_NAMES)
