"""Dual encoders (sections 2.2 and A.9): BERT and timm ViT as open_clip model configs, checked before they are built."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"open_clip_zerovl.models.build": ["create_model_and_transforms"]}
)
