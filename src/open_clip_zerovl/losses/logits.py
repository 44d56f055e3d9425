"""The logits s <I_i, T_j>, a chunk of rows at a time; rows are images or texts.

Shapes: `b` local rows, `N` rows of all ranks, `D` width of the features. Side 0: rows are images, columns are texts; side 1:
rows are texts, columns are images. A mask of pairs (i, j) is symmetric, so that it serves both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from open_clip_zerovl.losses.gathering import Ranks


class Logits:
    """s <I_i, T_j> of local rows against all ranks' rows.

    Args:
        image_features, text_features: (b, D), without graph.
        scale: s, shape ().
        precision: dtype of the products. Features of lower precision are gathered as they are (half the traffic in
            bf16) and then cast, which is exact.

    Attributes:
        local: images and texts of this rank, (b, D) each.
        all: images and texts of all ranks, (N, D) each.
    """

    def __init__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        scale: Tensor,
        ranks: Ranks,
        *,
        precision: torch.dtype,
    ) -> None:
        self.scale = scale
        sides = (image_features, text_features)
        self.local = [features.to(precision) for features in sides]
        self.all = [ranks.gather(features).to(precision) for features in sides]

    def chunk(self, rows: slice, side: int) -> Tensor:
        """Return the logits of these local rows, (rows, N), in new memory."""
        return (self.local[side][rows] * self.scale) @ self.all[1 - side].T
