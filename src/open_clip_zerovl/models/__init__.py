"""Dual encoders (sections 2.2 and A.9): BERT and timm ViT as open_clip model configs, checked before they are built."""

from open_clip_zerovl.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "open_clip_zerovl.models.configs": ["logit_scale_of", "register_model_configs"],
        "open_clip_zerovl.models.build": [
            "check_model",
            "create_model_and_transforms",
            "with_text_model",
        ],
        "open_clip_zerovl.models.model_file": ["register_model_file"],
        "open_clip_zerovl.models.tower_weights": ["load_pretrained_tower"],
    },
)
