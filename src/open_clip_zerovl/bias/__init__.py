"""What models learned of their sources (section 3.1, figures 3 and 4, A.5)."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.bias.measures": ["mean_log_p_negatives", "source_probe_accuracy"],
        "open_clip_zerovl.bias.pools": ["SourceFeatures", "pool_metrics"],
        "open_clip_zerovl.bias.run": ["BiasSettings", "measure_bias", "run_bias"],
    },
)
