"""Rows of all ranks in one tensor; ranks may hold different numbers of rows.

Shapes: `W` ranks, `b` local rows (may differ from rank to rank), `N` rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from open_clip_zerovl.core.errors import UserError


def require_process_group(world_size: int, who: str) -> None:
    """Raise `UserError` unless torch.distributed runs with exactly `world_size` ranks."""
    seen = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if seen != world_size:
        raise UserError(
            f"{who} was made for world_size={world_size}, but torch.distributed "
            + ("is not initialised" if seen is None else f"runs with {seen} ranks")
            + "; initialise the process group first and pass its rank and world_size."
        )


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
