"""The request of a fine-tuning, and the inputs of its training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.evaluate.settings import CurveFlags
from open_clip_zerovl.finetune.flags import FinetuneFlags
from open_clip_zerovl.recipe.arguments import Settings

KEEP_SHARE = 0.2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request(FinetuneFlags, CurveFlags):
    """The arguments of `zerovl finetune`.

    Attributes:
        start: the model to start from; its device also trains, and its batch size and workers are those of evaluations.
        data: pairs, see `data`.
        out: folder to write.
        given: training flags that replace the chosen values.
    """

    start: Encoder
    data: str
    out: Path
    given: Settings = field(default_factory=dict, kw_only=True)

    @property
    def share_kept(self) -> float:
        """The share of --keep-data in an epoch."""
        return KEEP_SHARE if self.keep_share is None else self.keep_share

    def of_training(self) -> dict[str, Any]:
        """The arguments that decide the training; the other arguments may differ in a later call on the same folder."""
        return {
            "--from": self.start.model,
            "--data": self.data,
            "--retrieval-data": self.retrieval_data,
            "--context-length": self.context_length,
            "--seed": self.seed,
            **({"--keep-data": self.keep_data, "--keep-share": self.share_kept} if self.keep_data else {}),
            **({"--keep-teacher": True} if self.keep_teacher else {}),
            **{f"--set {flag}": value for flag, value in self.given.items()},
        }

    def of_curve(self) -> dict[str, Any]:
        """The arguments that decide the curve."""
        more = {} if self.zero_shot_data is None else {"zero-shot": self.zero_shot_data}
        return {**more, "kept": self.kept, "alphas": list(self.alphas), "rule": self.rule, "keep": self.kept_share}


@dataclass(frozen=True)
class Prepared:
    """Inputs of the training.

    Attributes:
        before: the model as a folder.
        train_data, new: for `--train-data` and `--retrieval-data`.
        sources: opened.
        notes: sentences for the report.
        factors: for `--train-data-upsampling-factors`: a weight for each source of old pairs.
    """

    before: str
    train_data: str
    new: str
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    factors: str | None = None
