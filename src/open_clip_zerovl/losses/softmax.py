"""Both softmaxes of a matrix, one chunk of rows in memory at a time: over each image's texts, and over each text's images.

Shapes: `b` local rows, `N` rows of all ranks.
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
