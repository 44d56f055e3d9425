"""Zero-shot classification: labelled sets, classifiers of class names in templates, accuracy."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.evaluate.zero_shot.sets": ["LabelledSet", "open_labelled_set"],
        "open_clip_zerovl.evaluate.zero_shot.score": [
            "class_features",
            "classify",
            "run_zero_shot",
            "zero_shot_metrics",
        ],
    },
)
