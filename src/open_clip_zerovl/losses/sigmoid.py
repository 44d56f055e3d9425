"""The sigmoid loss (SigLIP, Zhai et al., ICCV 2023): a term for each pair (i, j), without a normaliser.

Shapes: `N` rows of all ranks, rows of local rows. With z_ij = s <I_i, T_j> + b, and y_ij = 1 for positives and -1 else:

    L = 1/N sum_ij softplus(-y_ij z_ij)        dL/dz_ij = -1/N y_ij sigmoid(-y_ij z_ij)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from open_clip_zerovl.losses.targets import SharedTargets


@dataclass(frozen=True)
class Sigmoid:
    """Values and derivatives for a chunk of logits.

    Args:
        bias: b, shape ().
        mine: the local rows among all.
        shared: samples that are positives in addition to the pair itself; None for none.
    """

    bias: Tensor
    mine: slice
    shared: SharedTargets | None

    def losses(self, missed: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Sum N times the loss over the texts for each image row (rows,), and over the rows for each text (N,).

        Args:
            missed: values for these local image rows; it is not changed.
        """
        each = logsigmoid(missed.neg_()).neg_()
        missed.neg_()
        return each.sum(dim=1), each.sum(dim=0)

    def derivative(self, missed: Tensor, rows: slice) -> Tensor:
        """Compute N times the derivative of the loss by the logits (rows, N), in the memory of `missed`.

        It is the same for both sides.
        """
        each = missed.sigmoid_()
        self._negate_positives(each, rows)
        return each

    def missed(self, logits: Tensor, rows: slice) -> Tensor:
        """Compute -y z of s <I_i, T_j> (rows, N), positive where a pair is classified wrongly, in the logits' memory."""
        missed = logits.add_(self.bias)
        self._negate_positives(missed, rows)
        return missed

    def _negate_positives(self, values: Tensor, rows: slice) -> None:
        if self.shared is not None:
            torch.where(self.shared.related(rows), -values, values, out=values)
            return
        index = torch.arange(len(values), device=values.device)
        positive_columns = self.mine.start + rows.start + index
        values[index, positive_columns] = -values[index, positive_columns]
