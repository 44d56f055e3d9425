"""Weights between two models, scored on new and on kept abilities (WiSE-FT: Wortsman et al., CVPR 2022)."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.evaluate.interpolation.curve": ["Curve", "Point", "choose"],
        "open_clip_zerovl.evaluate.interpolation.run": ["CurveSettings", "run_interpolation", "score_curve"],
    },
)
