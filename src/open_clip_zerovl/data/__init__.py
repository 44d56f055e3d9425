"""The data engine (section 3.1, A.4): sources of webdataset shards or tables in, micro-batches of one source out."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.data.sources": ["Source", "parse_sources"],
        "open_clip_zerovl.sampling.schedule": ["Batching", "Schedule", "source_schedule"],
        "open_clip_zerovl.data.mixture": ["Mixture", "Preprocessing", "Sampling"],
        "open_clip_zerovl.data.loader": ["MixtureLoader"],
        "open_clip_zerovl.data.transforms": ["image_transform_train", "paper_eval_transform"],
        "open_clip_zerovl.data.words": ["WordAugment"],
    },
)
