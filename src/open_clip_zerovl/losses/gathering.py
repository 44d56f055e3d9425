"""Rows of all ranks in one tensor, of which ranks may hold different numbers, and the logits s <I_i, T_j> of a chunk of rows.

Shapes: `W` ranks, `b` local rows (may differ from rank to rank), `N` rows of all ranks, `D` width of the features. Side 0: rows
are images, columns are texts; side 1: rows are texts, columns are images. A mask of pairs (i, j) is symmetric, so that it
serves both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gathered_sizes(
    size: int, world_size: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[int]:
    """Gather the `size` of each rank of a group, in rank order.

    This is one small collective, and none for one rank.
    """
    if world_size == 1:
        return [size]
    sizes = torch.empty(world_size, dtype=torch.long, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([size], device=device), group=group)
    return sizes.tolist()


class Ranks:
    """The position of this rank's b rows among the N rows of all ranks, in rank order.

    Attributes:
        sizes: rows of each rank.
        total: N.
        mine: this rank's rows of a tensor over all N.
    """

    def __init__(self, rank: int, world_size: int, b: int, device: torch.device) -> None:
        self.world_size = world_size
        self.sizes = gathered_sizes(b, world_size, device)
        self.total = sum(self.sizes)
        start = sum(self.sizes[:rank])
        self.mine = slice(start, start + b)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all ranks' rows: (b, ...) -> (N, ...)."""
        return _gather_rows(rows, self.sizes)

    def stack(self, value: Tensor) -> Tensor:
        """Stack each rank's tensor of one shape: (...) -> (W, ...)."""
        return _gather_rows(value[None], [1] * self.world_size)


def _gather_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Gather all ranks' rows, (sum(sizes), ...) in rank order.

    A rank with fewer rows pads them for the collective.
    """
    if len(sizes) == 1:
        return rows
    longest = max(sizes)
    padded = rows.contiguous()
    if len(rows) < longest:
        padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    gathered = rows.new_empty(len(sizes) * longest, *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, padded)
    if min(sizes) == longest:
        return gathered
    return torch.cat(
        [block[:size] for block, size in zip(gathered.split(longest), sizes, strict=True)]
    )


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
