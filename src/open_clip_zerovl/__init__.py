"""ZeroVL's recipe (Cui et al., ECCV 2022) for open_clip: strong contrastive image-text models on few GPUs.

Importing the package registers its model configs (`zerovl-ViT-B-16-BERT-base` ...) with open_clip.
"""

from open_clip_zerovl.dga import DecoupledGradientAccumulation, ReplayError
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.losses import ContrastiveLoss, reversed_partner
from open_clip_zerovl.mixup import CoinFlipMixup
from open_clip_zerovl.models import register_model_configs
from open_clip_zerovl.retrieval import retrieval_metrics
from open_clip_zerovl.sampling import source_schedule
from open_clip_zerovl.sources import parse_sources

__all__ = [
    "CoinFlipMixup",
    "ContrastiveLoss",
    "DecoupledGradientAccumulation",
    "ReplayError",
    "UserError",
    "parse_sources",
    "register_model_configs",
    "retrieval_metrics",
    "reversed_partner",
    "source_schedule",
]

register_model_configs()
