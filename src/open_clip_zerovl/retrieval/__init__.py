"""Image-text retrieval (sections 5.1 and 5.2): sets, recall@K both ways, RSUM."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.retrieval.metrics": [
            "recalls",
            "retrieval_metrics",
            "retrieval_metrics_from_scores",
            "retrieval_ranks",
        ],
        "open_clip_zerovl.retrieval.encode": ["encode_retrieval", "evaluate_retrieval"],
        "open_clip_zerovl.retrieval.sets": ["RetrievalSet", "open_retrieval_set", "parse_retrieval_data"],
        "open_clip_zerovl.retrieval.run": ["run_retrieval"],
    },
)
