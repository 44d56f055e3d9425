"""The targets Y of the softmaxes over a batch, never held as a whole.

Shapes: `b` local rows, `N` rows of all ranks. Y_rows (N, N) is the target of each image's softmax over the texts; its rows sum
to one. Y_columns is the target of each text's softmax over the images; its columns sum to one. `rows` are some of the local
rows; `side` is 0 for images, 1 for texts.

    PairTargets     a row's own pair; with mixup lambda of it and 1 - lambda of its partner's; Y_rows = Y_columns
    SharedTargets   all samples with the same caption or picture, evenly (UniCL, CVPR 2022)

Each has `inner`, its part of the loss, and `subtract_from`, its part of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PairTargets:
    """The non-zeros of Y as (weight, local column of each local row).

    Y = lambda * identity + (1 - lambda) * permutation. The partner of a row's partner is the row itself, so the permutation is
    symmetric and one Y serves both directions of A.3 (image j with text partner(j), and text j with image partner(j)).

    Args:
        weighed: (weight, (b,) local column); the weights sum to one.
        start: the first local row among all.
        times: 2 for Y_rows + Y_columns; 1 where only the rows' own softmaxes have a gradient.
    """

    def __init__(
        self, weighed: Sequence[tuple[float, Tensor]], start: int, times: float = 2.0
    ) -> None:
        self._weighed = [(weight, start + column) for weight, column in weighed]
        self._times = times

    def inner(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Sum Y_rows z over j for image rows, (rows,), and this rank's part of Y_columns z over i, (N,)."""
        index = torch.arange(len(logits), device=logits.device)
        of_rows, of_columns = logits.new_zeros(len(logits)), logits.new_zeros(logits.shape[1])
        for weight, column in self._weighed:
            weighted_logits = weight * logits[index, column[rows]]
            of_rows += weighted_logits
            of_columns[column[rows]] += weighted_logits
        return of_rows, of_columns

    def subtract_from(self, weights: Tensor, rows: slice, side: int) -> None:
        """Subtract times * Y from the weights of these local rows.

        On the matrix itself nothing is lost to rounding where P is near Y.
        """
        index = torch.arange(len(weights), device=weights.device)
        for weight, column in self._weighed:
            weights[index, column[rows]] -= self._times * weight


class SharedTargets:
    """Y of samples that share a caption or a picture: i and j are each other's positives where any of their ids is the same.

    A row's target is even over its positives, its own pair among them. With captions and pictures this relation is not
    transitive: i may share its caption with j, and j its picture with k, while i and k share nothing.

    Args:
        ids: one or two tensors (N,) of all ranks: captions, pictures.
        mine: the local rows among all.
    """

    def __init__(self, ids: Sequence[Tensor], mine: slice, dtype: torch.dtype) -> None:
        self._ids, self._mine = ids, mine
        self.counts = _occurrences(ids[0])  # (N,) positives of each sample, itself among them
        if len(ids) == 2:  # a sample that shares both is counted once
            self.counts = self.counts + _occurrences(ids[1]) - _occurrences(_joined(ids[0], ids[1]))
        self._even = 1.0 / self.counts.to(dtype)

    def related(self, rows: slice) -> Tensor:
        """Mask of the positives of these local rows, (rows, N) bool."""
        first, *others = (ids[self._mine][rows][:, None] == ids for ids in self._ids)
        for other in others:
            first |= other
        return first

    def inner(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Sum Y_rows z over j for image rows, (rows,), and this rank's part of Y_columns z over i, (N,)."""
        wanted = logits.masked_fill(~self.related(rows), 0.0)
        return wanted.sum(dim=1) * self._even[self._mine][rows], wanted.sum(dim=0) * self._even

    def subtract_from(self, weights: Tensor, rows: slice, side: int) -> None:
        """Subtract Y_rows + Y_columns from the weights of these local rows."""
        # (rows, N), the same for images and texts
        even = self._even[self._mine][rows][:, None] + self._even
        weights.sub_(even.masked_fill_(~self.related(rows), 0.0))


def _occurrences(ids: Tensor) -> Tensor:
    """Count the ids equal to each of the ids, (N,) -> (N,).

    No shape depends on values: the host does not wait.
    """
    ordered = ids.sort().values
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Join two ids to one (N,), equal where both are equal."""
    # each below N
    place, other_place = (torch.searchsorted(ids.sort().values, ids) for ids in (first, second))
    return place * len(first) + other_place
