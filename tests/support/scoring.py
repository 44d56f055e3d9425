"""`run_retrieval` with the values of its records side by side."""

from __future__ import annotations

from pathlib import Path

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.evaluate.retrieval import (
    RetrievalFiles,
    RetrievalSettings,
    run_retrieval,
)


def score_checkpoint(
    model: str, data: str, *, output: Path | None = None, gallery: Path | None = None, **settings
):
    """Score a checkpoint on the CPU."""
    files = RetrievalFiles(json=output, gallery=gallery)
    return run_retrieval(Encoder(model, device="cpu"), data, RetrievalSettings(**settings), files)
