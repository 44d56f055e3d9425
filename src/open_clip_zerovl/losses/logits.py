"""The logits s <I_i, T_j>, a chunk of rows at a time; rows are images or texts.

Shapes: `b` local rows, `N` rows of all ranks, `D` width of the features. Side 0: rows are images, columns are texts; side 1:
rows are texts, columns are images. A mask of pairs (i, j) is symmetric, so that it serves both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from open_clip_zerovl.losses.gathering import Ranks

_WIDENED_ROWS = (
    16384  # rows of half-precision features that are cast to the products' precision at once
)


class Logits:
    """s <I_i, T_j> of local rows against all ranks' rows.

    Args:
        image_features, text_features: (b, D), without graph.
        scale: s, shape ().
        precision: dtype of the products. Features of lower precision are gathered as they are (half the traffic in
            bf16) and then cast, which is exact.
        widen_at_once: cast all features at once, (N, D); False: those of a chunk of columns at a time.

    Attributes:
        own: images and texts of this rank, (b, D) each.
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
        widen_at_once: bool = True,
    ) -> None:
        self.precision = precision
        self.scale = scale
        held = precision if widen_at_once else image_features.dtype
        self.local = [features.to(held) for features in (image_features, text_features)]
        self.all = [ranks.gather(features).to(held) for features in (image_features, text_features)]

    def chunk(self, chunk: slice, side: int) -> Tensor:
        """Return the logits of these local rows, (rows, N), in new memory."""
        rows = self.local[side][chunk].to(self.precision) * self.scale
        others = self.all[1 - side]
        if others.dtype == rows.dtype:
            return rows @ others.T
        products = rows.new_empty(len(rows), len(others))
        for start in range(0, len(others), _WIDENED_ROWS):
            columns = slice(start, start + _WIDENED_ROWS)
            products[:, columns] = rows @ others[columns].to(rows.dtype).T
        return products
