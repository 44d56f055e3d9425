"""Both softmaxes of a matrix and their targets Y, one chunk of rows in memory at a time.

Shapes: `b` local rows, `N` rows of all ranks. `rows` are some of the local rows; `side` is 0 for images, 1 for texts. One
softmax is over each image's texts, the other over each text's images. Y_rows (N, N) is the target of each image's softmax
over the texts; its rows sum to one. Y_columns is the target of each text's softmax over the images; its columns sum to one.

    PairTargets     a row's own pair; with mixup lambda of it and 1 - lambda of its partner's; Y_rows = Y_columns
    SharedTargets   all samples with the same caption or picture, evenly (UniCL, CVPR 2022)

Each has `inner`, its part of the loss, and `subtract_from`, its part of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from open_clip_zerovl.losses.gathering import Ranks


@dataclass(frozen=True)
class Normaliser:
    """The normaliser of a softmax over each row, in two parts: `maximum` and `total`, both (rows,).

        softmax(logits)[i, j] = exp(logits[i, j] - maximum[i]) / total[i]

    The two are not joined to a log-sum-exp: near a maximum of 100 that has five decimal digits in fp32, and the softmax would
    sum to one only to 1e-5.
    """

    maximum: Tensor
    total: Tensor

    @classmethod
    def of(cls, logits: Tensor, dim: int, out: Tensor | None = None) -> tuple[Normaliser, Tensor]:
        """Compute the normaliser, and the softmax before its division by `total`, in `out` (which may be the logits) or new
        memory.
        """
        maximum = logits.amax(dim=dim)
        exponentials = torch.sub(logits, maximum.unsqueeze(dim), out=out).exp_()
        return cls(maximum, exponentials.sum(dim=dim)), exponentials

    @classmethod
    def merged(cls, parts: Sequence[Normaliser]) -> Normaliser:
        """Merge the normalisers of rows whose columns were seen in parts."""
        maximum = torch.stack([part.maximum for part in parts]).amax(dim=0)
        total = torch.stack([part.total * (part.maximum - maximum).exp() for part in parts]).sum(
            dim=0
        )
        return cls(maximum, total)

    def logsumexp(self) -> Tensor:
        return self.maximum + self.total.log()

    def __getitem__(self, rows: slice) -> Normaliser:
        return Normaliser(self.maximum[rows], self.total[rows])

    def unsqueezed(self) -> Normaliser:
        """Add a dimension, (rows, 1), which divides the rows of a matrix.

        (rows,) divides its columns.
        """
        return Normaliser(self.maximum[:, None], self.total[:, None])

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute the softmax, in the logits' memory."""
        return logits.sub_(self.maximum).exp_().div_(self.total)


class Normalisers:
    """The normalisers of both softmaxes, from chunks of this rank's image rows seen one after another.

    Attributes:
        over_texts: (N,) for the softmax of each image; after `gather`.
        over_images: (N,) for the softmax of each text; after `gather`.
    """

    def __init__(self) -> None:
        self._whole_batch: tuple[Tensor, Tensor] | None = None
        self._over_texts: list[Normaliser] = []
        self._over_images: Normaliser | None = None

    def see(self, logits: Tensor, *, keep: bool = False) -> None:
        """Add the next chunk (rows, N) of this rank.

        Args:
            logits: the chunk; with `keep` it is overwritten.
            keep: the chunk holds all rows of all ranks: both softmaxes are kept for `both`, one of them in the logits' memory.
        """
        rows, of_texts = Normaliser.of(logits, dim=1)
        columns, of_images = Normaliser.of(logits, dim=0, out=logits if keep else None)
        if keep:
            self._whole_batch = of_texts, of_images
        self._over_texts.append(rows)
        self._over_images = (
            columns
            if self._over_images is None
            else Normaliser.merged([self._over_images, columns])
        )

    def gather(
        self, ranks: Ranks, *, rows: Sequence[Tensor] = (), columns: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Gather both over the ranks, in two collectives that also carry the given tensors.

        Without chunks only these are gathered.

        Args:
            rows: each (b,), a number for each of this rank's images: gathered.
            columns: each (N,), a number for each text, summed over this rank's images: summed over ranks.

        Returns:
            `rows` and `columns`, each (N,).
        """
        mine, seen = [*rows], [*columns]
        if self._over_images is not None:
            both = Normaliser(
                *map(
                    torch.cat,
                    zip(*((part.maximum, part.total) for part in self._over_texts), strict=True),
                )
            )
            mine = [both.maximum, both.total, *rows]
            seen = [self._over_images.maximum, self._over_images.total, *columns]
        # This rank has seen its own images' rows of the columns; all ranks' parts are (W, ..., N).
        parts = ranks.stack(torch.stack(seen))
        whole = list(ranks.gather(torch.stack(mine, dim=1)).unbind(dim=1))
        if self._over_images is not None:
            self.over_images = Normaliser.merged([Normaliser(part[0], part[1]) for part in parts])
            self.over_texts = Normaliser(*whole[:2])
            self._mine = ranks.mine
        return [*whole[len(whole) - len(rows) :], *parts.sum(dim=0)[len(seen) - len(columns) :]]

    def both(self) -> tuple[Tensor, Tensor] | None:
        """Return P and Q (N, N) of the one chunk that was kept, once.

        Returns:
            None without.
        """
        if self._whole_batch is None:
            return None
        of_texts, of_images = self._whole_batch
        self._whole_batch = None
        return of_texts.div_(self.over_texts.total[:, None]), of_images.div_(self.over_images.total)

    def over_others(self, logits: Tensor, rows: slice, side: int) -> Tensor:
        """Compute P, the softmax of each of these local rows over the other side, (rows, N), in the logits' memory.

        Args:
            rows: the logits' local rows.
            side: 0 where rows are images, 1 where rows are texts.
        """
        normaliser = self.over_texts if side == 0 else self.over_images
        return normaliser[self._mine][rows].unsqueezed().probabilities(logits)

    def over_local(self, logits: Tensor, side: int) -> Tensor:
        """Compute Q, the softmaxes of the other side's rows at each of these rows, (rows, N), in the logits' memory."""
        return (self.over_images if side == 0 else self.over_texts).probabilities(logits)


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
        ids = [each.contiguous() for each in ids]  # torch warns of a column of a table
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
