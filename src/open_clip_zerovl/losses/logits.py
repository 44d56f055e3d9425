"""The logits s <I_i, T_j> + o_ij, a chunk of rows at a time; rows are images or texts.

Shapes: `b` local rows, `N` rows of all ranks, `D` width of the features. Side 0: rows are images, columns are texts; side 1:
rows are texts, columns are images. A mask of pairs (i, j) is symmetric, so that it serves both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from open_clip_zerovl.losses.gathering import Ranks

# A logit of probability zero. It is finite because a chunk may hold no other logit of a column, and inf - inf is NaN.
NO_PAIR = -1e30
_WIDENED_ROWS = (
    16384  # rows of half-precision features that are cast to the products' precision at once
)


class CrossSource:
    """The offset o_ij = log w of pairs from two sources: their negatives count w times in the softmax.

    Args:
        weight: w; 0 leaves them out, 1 gives an offset of 0.
        sources: (N,) the source of each sample of all ranks.
        mine: the local rows among all.
        positives: local rows -> (rows, N) bool, pairs that are positives and get no offset; None: no positive is of two
            sources.
    """

    def __init__(
        self,
        weight: float,
        sources: Tensor,
        mine: slice,
        positives: Callable[[slice], Tensor] | None = None,
    ) -> None:
        self.weight = weight
        self._sources = sources
        self._local_sources = sources[mine]
        self._positives = positives

    def crossing(self, rows: slice) -> Tensor:
        """Mask of the negatives from another source, (rows, N) bool."""
        crossing = self._local_sources[rows][:, None] != self._sources
        if self._positives is not None:
            crossing &= ~self._positives(rows)
        return crossing

    def add_to(self, logits: Tensor, rows: slice) -> None:
        """Add the offsets to the logits of these local rows."""
        crossing = self.crossing(rows)
        if self.weight == 0:
            logits.masked_fill_(crossing, NO_PAIR)
        else:
            logits.add_(crossing.to(logits.dtype), alpha=math.log(self.weight))


class Logits:
    """s <I_i, T_j> of local rows against all ranks' rows.

    Args:
        image_features, text_features: (b, D), without graph.
        scale: s, shape ().
        offset: o_ij, or None.
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
        offset: CrossSource | None = None,
        precision: torch.dtype,
        widen_at_once: bool = True,
    ) -> None:
        self.precision = precision
        self.scale = scale
        self._offset = offset
        held = precision if widen_at_once else image_features.dtype
        self.local = [features.to(held) for features in (image_features, text_features)]
        self.all = [ranks.gather(features).to(held) for features in (image_features, text_features)]

    def chunk(self, rows: slice, side: int, *, offset: bool = True) -> Tensor:
        """The logits of these local rows, with o_ij or s <I_i, T_j> alone: (rows, N), new memory."""
        logits = self._products(
            self.local[side][rows].to(self.precision) * self.scale, self.all[1 - side]
        )
        if offset and self._offset is not None:
            self._offset.add_to(logits, rows)
        return logits

    def _products(self, rows: Tensor, others: Tensor) -> Tensor:
        if others.dtype == rows.dtype:
            return rows @ others.T
        products = rows.new_empty(len(rows), len(others))
        for start in range(0, len(others), _WIDENED_ROWS):
            columns = slice(start, start + _WIDENED_ROWS)
            products[:, columns] = rows @ others[columns].to(rows.dtype).T
        return products
