"""Features of a collection by one model, stored part by part: a part is a shard, or a run of pictures.

    FOLDER/CONTENT.safetensors     rows (n, F), ids (n,) int64, and a digest of both

A file is named by the digest of its part's content, and written whole; an absent or damaged file means that the part is to do.
A copy of the data thus has its features already, and changed data has none. Files are mapped, not loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from open_clip_zerovl.core.errors import first_line
from open_clip_zerovl.core.files import digest_of, write_atomically

log = logging.getLogger(__name__)

_BLOCK_ROWS = 8192


class FeatureStore:
    """The features of a collection by one model.

    Args:
        folder: of the features by this model, of any collection; None holds them in memory.
        contents: digest of each part.
        counts: rows of each part.

    Attributes:
        begins: (parts + 1,) rows before each part; the last entry is the rows of all parts.
    """

    def __init__(self, folder: Path | None, contents: Sequence[str], counts: Sequence[int]) -> None:
        self.folder, self.contents, self.counts = folder, contents, counts
        self.begins = np.cumsum([0, *counts])
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}
        for number in range(len(contents) if folder else 0):
            self._open(number)

    @property
    def missing(self) -> list[int]:
        """List the parts to do, of several with one content the first."""
        first: dict[str, int] = {}
        for number, content in enumerate(self.contents):
            first.setdefault(content, number)
        return [number for content, number in first.items() if content not in self._parts]

    def write(self, number: int, rows: Tensor, ids: Tensor) -> None:
        """Store a part.

        Args:
            rows: (n, F).
            ids: (n,) identity of each row, 0 of one that could not be made.

        Raises:
            UserError: the file cannot be written.
        """
        if self.folder is None:
            self._parts[self.contents[number]] = rows, ids
            return
        metadata = {"digest": _digest(rows, ids)}
        write_atomically(self._file(number), save({"rows": rows, "ids": ids}, metadata))
        self._open(number)

    @property
    def digest(self) -> str:
        """Digest model and contents."""
        return digest_of(self.folder and self.folder.name, list(self.contents))[:16]

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.contents[number]}.safetensors"

    def _open(self, number: int) -> None:
        """Map a part whose file is there and intact."""
        file = self._file(number)
        if not file.is_file():
            return
        try:
            with safe_open(file, "pt") as opened:
                rows, ids = opened.get_tensor("rows"), opened.get_tensor("ids")
                intact = opened.metadata()["digest"] == _digest(rows, ids)
            if not intact or len(rows) != self.counts[number]:
                raise ValueError("its content is not what was written")
        except Exception as error:
            log.warning("%s is damaged (%s); its features are made again.", file, first_line(error))
            return
        self._parts[self.contents[number]] = rows, ids

    # -----------------------------------------------------------------------------------------------------------------
    # Of a store that lacks no part
    # -----------------------------------------------------------------------------------------------------------------

    def _rows(self, number: int) -> Tensor:
        return self._parts[self.contents[number]][0]

    @property
    def width(self) -> int:
        """F."""
        return self._rows(0).shape[1]

    @property
    def size_bytes(self) -> int:
        """Count the bytes of all rows."""
        return int(self.begins[-1]) * self.width * self._rows(0).element_size()

    @cached_property
    def ids(self) -> np.ndarray:
        """Return the identity of each row (n,), 0 of one that could not be made, whose features are zeros."""
        return np.concatenate([self._parts[content][1].numpy() for content in self.contents])

    def blocks(self) -> Iterator[Tensor]:
        """Iterate over all rows in order, some thousand at a time."""
        for number in range(len(self.contents)):
            yield from self._rows(number).split(_BLOCK_ROWS)

    def take(self, rows: np.ndarray) -> Tensor:
        """Copy rows (b, F) by their ascending numbers (b,)."""
        ends = np.searchsorted(rows, self.begins)
        parts = [
            # By numpy: torch starts its threads for each part.
            self._rows(number).numpy()[rows[ends[number] : ends[number + 1]] - self.begins[number]]
            for number in np.flatnonzero(np.diff(ends)).tolist()
        ]
        return torch.from_numpy(np.concatenate(parts))


def _digest(rows: Tensor, ids: Tensor) -> str:
    flat = (tensor.contiguous().view(torch.uint8).reshape(-1) for tensor in (rows, ids))
    return digest_of(str(rows.dtype), list(rows.shape), *(tensor.numpy().data for tensor in flat))
