"""ZeroVL's recipe (Cui et al., ECCV 2022) for open_clip: strong contrastive image-text models on few GPUs.

Importing `open_clip_zerovl.models` makes the model configs (`zerovl-ViT-B-16-BERT-base` ...) known to open_clip. This package
imports neither open_clip nor torch by itself.
"""

from open_clip_zerovl.core.lazy import lazy_exports

__version__ = "0.1.0"  # the one place; pyproject.toml, CITATION.cff and CHANGELOG.md follow, and a test compares them

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.cli.api": ["pack", "search", "train"],
        "open_clip_zerovl.sampling.schedule": ["source_schedule"],
        "open_clip_zerovl.data.sources": ["parse_sources"],
        "open_clip_zerovl.dga.replay": ["ReplayError"],
        "open_clip_zerovl.dga.step": ["DecoupledGradientAccumulation"],
        "open_clip_zerovl.core.errors": ["UserError"],
        "open_clip_zerovl.losses": ["ContrastiveLoss", "reversed_partner"],
        "open_clip_zerovl.models.configs": ["register_model_configs"],
        "open_clip_zerovl.recipe.mixup": ["CoinFlipMixup"],
        "open_clip_zerovl.evaluate.metrics": ["retrieval_metrics"],
    },
    packages=("align", "evaluate", "finetune"),  # also called, as functions
)
