"""Results of the Python functions: folders, scores and curves, the model, and the page that a notebook shows."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from open_clip_zerovl.core.errors import UserError

if TYPE_CHECKING:
    from open_clip_zerovl.checkpoints.loading import Preprocess, Tokenizer
    from open_clip_zerovl.evaluate.search import Hit
    from open_clip_zerovl.models.configs import ClipModel

PAGE_PX = 600  # height of a page within a notebook


@dataclass(frozen=True)
class Page:
    """A page of a result: a self-contained HTML file, which a notebook shows and any browser opens."""

    path: Path

    def _repr_html_(self) -> str:
        content = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{content}" width="100%" height="{PAGE_PX}" sandbox></iframe>'


@dataclass(frozen=True)
class Result:
    """What a function has written.

    Attributes:
        folder: the output folder.
    """

    folder: Path
    page_name: ClassVar[str] = "report.html"

    def __fspath__(self) -> str:
        """Return the path that other functions take: `finetune(data=packed)`, `evaluate(aligned, ...)`."""
        return str(self.folder)

    def page(self) -> Page:
        """Open the report, for a notebook or a browser."""
        return Page(self.folder / self.page_name)

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()


@dataclass(frozen=True)
class Packed(Result):
    """Pairs that `pack` has written: shards, and held-out sets where a share was asked for.

    Attributes:
        report: the content of `report.json`: counts of samples, captions, refused rows and their reasons, by source.
        text: the commands to type next, which the command prints.
    """

    report: Mapping[str, Any] = field(repr=False)
    text: str = field(default="", repr=False)

    @property
    def train_data(self) -> str:
        """Return the sources as `train(train_data=...)` takes them."""
        return self._specification.train_data

    @property
    def held_out(self) -> str:
        """Return the held-out sets as `train(retrieval_data=...)` and `evaluate` take them, "" without any."""
        return self._specification.held_out

    @cached_property
    def _specification(self) -> Any:
        from open_clip_zerovl.finetune.data import find_data

        return find_data(str(self.folder))


class _HoldsModel(Result):
    """A result with a model, which stands for the result where a function takes a model."""

    @property
    def model_path(self) -> Path:
        """Return the exported folder, or the newest checkpoint of a run."""
        return self.folder / "model"

    def __fspath__(self) -> str:
        return str(self.model_path)

    def model(self, device: str = "cpu") -> tuple[ClipModel, Preprocess, Tokenizer]:
        """Load open_clip's model in eval mode, its evaluation transform and its tokenizer.

        Raises:
            UserError: there is no model yet, or it cannot be loaded.
        """
        from open_clip_zerovl.checkpoints.loading import load_model

        return load_model(self.model_path, device=device)


@dataclass(frozen=True)
class Run(_HoldsModel):
    """A training's folder, `logs/NAME`."""

    page_name = "run.html"

    @property
    def checkpoints(self) -> dict[int, Path]:
        """List epoch -> its checkpoint, of those that are kept."""
        from open_clip_zerovl.report.run import epoch_checkpoints

        return epoch_checkpoints(self.folder / "checkpoints")

    @property
    def model_path(self) -> Path:
        """Return the newest epoch's checkpoint.

        Raises:
            UserError: no epoch has ended.
        """
        saved = self.checkpoints
        if not saved:
            raise UserError(f"{self.folder} has no checkpoint of an epoch yet")
        return saved[max(saved)]

    @property
    def scores(self) -> dict[int, dict[str, float]]:
        """Read epoch -> its metrics (retrieval, zero-shot), {} if nothing was evaluated."""
        from open_clip_zerovl.checkpoints.card import read_results

        return dict(sorted(read_results(self.folder / "checkpoints" / "results.jsonl").items()))

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Read (position in epochs, loss) of each logged step.

        Raises:
            UserError: a run without flags of the recipe, whose loop is open_clip's own and keeps no record.
        """
        from open_clip_zerovl.report.run import read_record

        return [(step["at"], step["loss"]) for step in read_record(self.folder)["step"]]


@dataclass(frozen=True)
class Tuned(_HoldsModel):
    """A fine-tuned model with the model before it on the same scales.

    Attributes:
        record: the content of `finetune.json`.
    """

    record: Mapping[str, Any] = field(repr=False)

    @property
    def text(self) -> str:
        """Return the table of both models."""
        return self.record["table"]

    @property
    def scores(self) -> Mapping[str, Any]:
        """Return alpha and metrics of each scored point between the model before and the tuned one."""
        return self.record["curve"]

    @property
    def curve(self) -> list[tuple[int, float]]:
        """List (epoch, held-out score)."""
        return [(int(epoch), score) for epoch, score in self.record["epochs"].items()]


@dataclass(frozen=True)
class Aligned(_HoldsModel):
    """Aligned encoders with the best pairing as the model.

    Attributes:
        record: the content of `align.json`.
    """

    record: Mapping[str, Any] = field(repr=False)
    page_name = "align.html"

    @property
    def scores(self) -> Mapping[str, float]:
        """Return the held-out metrics of the best pairing."""
        return self.record["pairings"][0]["metrics"]

    @property
    def curve(self) -> list[tuple[float, ...]]:
        """List (epoch, held-out RSUM, loss) of each check of the best pairing."""
        return [tuple(check) for check in self.record["pairings"][0]["checks"]]


class Hits(list[Any]):
    """Pictures that were found, best first, shown as the command's list or by a notebook as pictures.

    Attributes:
        text: what the command prints.
    """

    def __init__(self, hits: Iterable[Hit], text: str) -> None:
        super().__init__(hits)
        self.text = text

    def __repr__(self) -> str:
        return self.text.rstrip()

    def _repr_html_(self) -> str:
        from open_clip_zerovl.evaluate.search import thumbnail_of
        from open_clip_zerovl.report.pages import render

        figures = [
            (thumbnail_of(hit), f"{hit.score:.3f} {hit.caption or os.path.basename(hit.picture)}")
            for hit in self
        ]
        return render("hits.html", figures=figures, note=repr(self).splitlines()[-1])
