"""What a fine-tuning is asked for, and what its training needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.evaluate.interpolation.interpolate import CurveSettings
from open_clip_zerovl.finetune.names import PATIENCE
from open_clip_zerovl.recipe.arguments import Settings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked of a fine-tuning.

    Attributes:
        start: the model to start from; its device also trains, and its batch size and workers are those of evaluations.
        data: pairs, see `data`.
        out: folder to write.
        retrieval_data: held-out sets of the new pairs; None for those that come with the data, or a part of it.
        kept: retrieval sets of the ability to keep.
        given: training flags that replace the chosen ones.
        patience: epochs without a better score after which training ends; 0 for never.
        seed: of the split and of the training.
        compare_pictures: refuse held-out pictures that are trained on.
        alphas, rule, kept_share: of the curve, see `CurveSettings`.
    """

    start: Encoder
    data: str
    out: Path
    retrieval_data: str | None = None
    kept: str | None = None
    given: Settings = field(default_factory=dict)
    patience: int = PATIENCE
    seed: int = 0
    compare_pictures: bool = True
    alphas: Sequence[float] = CurveSettings.alphas
    rule: str | None = None
    kept_share: float = CurveSettings.kept_share

    def of_training(self) -> dict[str, Any]:
        """What a folder's training was asked with; the rest may differ in a later call."""
        return {
            "--from": self.start.model,
            "--data": self.data,
            "--retrieval-data": self.retrieval_data,
            "--seed": self.seed,
            **{f"--set {flag}": value for flag, value in self.given.items()},
        }

    def of_curve(self) -> dict[str, Any]:
        """What the curve was asked with."""
        return {"kept": self.kept, "alphas": list(self.alphas), "rule": self.rule, "keep": self.kept_share}


@dataclass(frozen=True)
class Prepared:
    """What training needs.

    Attributes:
        before: the model as a folder.
        train_data, new: for `--train-data` and `--retrieval-data`.
        sources: opened.
        notes: sentences for the report.
    """

    before: str
    train_data: str
    new: str
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
