"""Contrastive losses of a distributed batch, exact over ranks, in row chunks. The import of this package takes no torch."""

from open_clip_zerovl.core.lazy import lazy_exports

POSITIVES = ("pair", "caption", "image", "both")  # whose samples share a target

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.losses.contrastive": [
            "ContrastiveLoss",
            "SigmoidLoss",
            "reversed_partner",
        ],
        "open_clip_zerovl.losses.gathering": ["gathered_sizes", "require_process_group"],
    },
)
