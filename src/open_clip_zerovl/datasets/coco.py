"""MS-COCO with Karpathy's splits (section 2.1, table 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from open_clip_zerovl.datasets.karpathy import prepare_karpathy
from open_clip_zerovl.datasets.pairs import SHARD_SIZE, Work

JSON_NAME = "dataset_coco.json"


def prepare_coco(
    out: str | Path,
    *,
    source: list[str] | None = None,
    seed: int = 0,
    shard_size: int = SHARD_SIZE,
    work: Work | None = None,
) -> dict[str, dict[str, Any]]:
    """Make, or go on making, MS-COCO: train (train and restval), val and test; return the manifests by split.

    See `prepare_karpathy`.
    """
    return prepare_karpathy("coco", JSON_NAME, out, source=source, seed=seed, shard_size=shard_size, work=work)
