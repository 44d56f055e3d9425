"""Weights between two models, scored on new and on kept abilities (WiSE-FT: Wortsman et al., CVPR 2022)."""

from open_clip_zerovl.late import handed_on

__getattr__, __dir__, __all__ = handed_on(
    __name__,
    {
        "open_clip_zerovl.interpolation.curve": ["Curve", "Point", "choose"],
        "open_clip_zerovl.interpolation.run": ["CurveSettings", "run_interpolation", "score_curve"],
    },
)
