"""`run_retrieval` with the values of its records side by side."""

from __future__ import annotations

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.evaluate.retrieval import RetrievalSettings, run_retrieval

COUNTS = [5, 7, 1, 5, 3, 6, 5, 2, 5, 5, 4, 5, 5]  # captions of the images of the fixture `sets`


def score_checkpoint(model: str, data: str, **settings):
    """Score a checkpoint on the CPU."""
    return run_retrieval(Encoder(model, device="cpu"), data, RetrievalSettings(**settings))
