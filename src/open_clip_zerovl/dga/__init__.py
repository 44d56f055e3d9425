"""Decoupled gradient accumulation (section 4.1, A.2): the gradient of a large batch, computed micro-batch by micro-batch."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.dga.step": ["DecoupledGradientAccumulation"],
        "open_clip_zerovl.dga.extras": ["CaptionTerm"],
        "open_clip_zerovl.dga.replay": ["ReplayError"],
        "open_clip_zerovl.dga.retain": ["Decision", "Retention"],
    },
)
