"""Source bias of models (section 3.1, figures 3 and 4, A.5)."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.evaluate.bias.measures": ["mean_log_p_negatives", "source_probe_accuracy"],
        "open_clip_zerovl.evaluate.bias.pools": ["SourceFeatures", "pool_metrics"],
        "open_clip_zerovl.evaluate.bias.report": ["measure_bias"],
        "open_clip_zerovl.evaluate.bias.bias": ["BiasSettings", "run_bias"],
    },
)
