"""Dual encoders (sections 2.2 and A.9): BERT and timm ViT as open_clip model configs, checked before they are built.

Importing this package makes the configs and their text towers known to open_clip.
"""

from open_clip_zerovl.models.build import create_model_and_transforms
from open_clip_zerovl.models.configs import register_model_configs

register_model_configs()

__all__ = ["create_model_and_transforms", "register_model_configs"]
