"""One pairing of encoders with its result, as a row of a table and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from open_clip_zerovl.align.encoders import Tower
from open_clip_zerovl.align.request import Recipe
from open_clip_zerovl.align.train import Outcome, Task
from open_clip_zerovl.evaluate.metrics import DIRECTIONS, Measure, hit_probabilities, mean_over
from open_clip_zerovl.report.tables import duration
from open_clip_zerovl.report.verdicts import RECALL_KS

OF_SEEDS = "RSUM of seeds"  # a column where there are several


@dataclass
class Pairing:
    """One pairing of encoders, with the best of its seeds.

    Attributes:
        names: of both encoders, as tables show them.
        of_seeds: held-out RSUM of each seed.
        seconds: duration of the trainings of all seeds.
        of_sources: metrics of each source's held-out pictures among themselves; {} for one source.
        top1: share of the held-out pictures whose best caption of all is one of their own, if captions are of classes.
        interval: interval of the RSUM that holds 95 % of the draws of held-out pictures.
    """

    image: Tower
    text: Tower
    names: tuple[str, str]
    task: Task
    recipe: Recipe
    outcome: Outcome
    of_seeds: list[float]
    seconds: float
    of_sources: dict[str, dict[str, float]]
    top1: float | None = None
    interval: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        """Join the names of both encoders."""
        return " + ".join(self.names)

    @property
    def rsum(self) -> float:
        """Return the held-out RSUM of the best seed."""
        return self.outcome.metrics["rsum"]

    def measure(self) -> Measure:
        """Take the RSUM as a measure over held-out pictures, with which their captions are drawn."""
        held, ranks = self.task.pairs.held_out, self.outcome.ranks
        units = (torch.arange(len(held.images)), torch.from_numpy(held.text_to_image))
        hits = [hit_probabilities(ranks[way], RECALL_KS).sum(dim=0) for way in DIRECTIONS]
        return mean_over(list(zip(units, hits, strict=True)), len(held.images), 100.0)

    def row(self) -> dict[str, str]:
        """Return the cells of a table by their columns."""
        metrics, (low, high) = self.outcome.metrics, self.interval
        recalls = [f"{100 * metrics[f'{way}_R@1']:.1f}" for way in DIRECTIONS]
        row = dict(zip(("image", "text"), self.names, strict=True))
        row["widths"] = f"{self.image.width}, {self.text.width}"
        row |= zip(("I2T R@1", "T2I R@1"), recalls, strict=True)
        row |= {"RSUM": f"{self.rsum:.1f}", "95 %": f"{low:.1f} to {high:.1f}"}
        if len(self.of_seeds) > 1:
            row[OF_SEEDS] = " ".join(f"{score:.0f}" for score in self.of_seeds)
        row |= {"epoch": str(self.outcome.best_epoch), "train": duration(self.seconds)}
        return row if self.top1 is None else {**row, "top-1": f"{100 * self.top1:.1f}"}

    def record(self) -> dict[str, Any]:
        """Describe the pairing as JSON."""
        named = {
            "image": self.image.name,
            "text": self.text.name,
            "widths": [self.image.width, self.text.width],
        }
        scores = {
            "metrics": self.outcome.metrics,
            "interval": self.interval,
            "rsum of seeds": self.of_seeds,
            "sources": self.of_sources,
            "top1": self.top1,
        }
        training = {
            "best epoch": self.outcome.best_epoch,
            "checks": self.outcome.scores,
            "seconds": self.seconds,
        }
        return {**named, **scores, **training, "settings": vars(self.recipe)}


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Shorten names by the folders with which all begin and end, unless this leaves nothing of one."""
    parts = [name.split("/") for name in names]
    begin, end = (
        sum(
            1
            for _ in itertools.takewhile(
                lambda level: len(set(level)) == 1, zip(*of_all, strict=False)
            )
        )
        for of_all in (parts, [part[::-1] for part in parts])
    )
    short = ["/".join(part[begin : len(part) - end]) for part in parts]
    return dict(zip(names, short if all(short) else names, strict=True))
