"""Heads on two frozen encoders: a retrieval model from stored features, in the time of some epochs of matrix products.

    encoders --features--> rows (embedded once) --pairs, order--> train (heads, loss) --heads--> export (open_clip's folder)

Only the heads, the temperature and SigLIP's bias are trained, as in SAIL (CVPR 2025), ShareLock (2024) and FuseMix (CVPR 2024).
"""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.align.alignment": ["run_align"],
        "open_clip_zerovl.align.request": ["AlignFlags", "AlignRequest"],
    },
)
