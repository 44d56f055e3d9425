"""Decoupled gradient accumulation (section 4.1, A.2): the gradient of a large batch, computed micro-batch by micro-batch."""

from open_clip_zerovl.dga.extras import CaptionTerm
from open_clip_zerovl.dga.replay import ReplayError
from open_clip_zerovl.dga.retain import Decision, Retention
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation

__all__ = [
    "CaptionTerm",
    "Decision",
    "DecoupledGradientAccumulation",
    "ReplayError",
    "Retention",
]
