"""Contrastive losses of a distributed batch, exact over ranks, in row chunks."""

from open_clip_zerovl.losses.contrastive import ContrastiveLoss, SigmoidLoss, reversed_partner
from open_clip_zerovl.losses.gathering import gathered_sizes

__all__ = [
    "ContrastiveLoss",
    "SigmoidLoss",
    "gathered_sizes",
    "reversed_partner",
]
