"""The tables of a trial from the records of its runs: paired differences over seeds, and the verdict of `report.verdicts`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from open_clip_zerovl.report.pages import FAINT, INK, MODEL_COLOURS, Line, draw_levels, line_chart
from open_clip_zerovl.report.tables import text_table
from open_clip_zerovl.report.verdicts import (
    CONFIDENCE,
    HIGHER,
    MOST_SEEDS,
    OPEN,
    Estimate,
    Verdict,
    seeds_to_decide,
    sentence,
    student,
    verdict,
)

# Of a run: "arm", "rate", "seed", "samples", "seconds"; measure -> value in "scores", "chance", "above_chance", "commonest".
Record = Mapping[str, Any]
START = "start model"  # the arm of the record before training
EQUAL = 1.1  # times of arms that count as equal differ by no more than this factor


@dataclass(frozen=True)
class Row:
    """One measure of an arm compared with that of another, seed by seed.

    Attributes:
        of, over: arms.
        margin: the smallest difference that matters.
        differences: seed -> value of `of` minus value of `over`.
        confidence: of the interval.
        near_chance: neither arm is above chance, so that the difference decides nothing.
    """

    measure: str
    of: str
    over: str
    margin: float
    differences: Mapping[int, float]
    confidence: float = CONFIDENCE
    near_chance: bool = False

    HEADER = ("measure", "arms", "difference", "interval", "seeds", "sign", "size")

    @classmethod
    def from_records(
        cls,
        records: Sequence[Record],
        measure: str,
        of: str,
        over: str,
        margin: float,
        confidence: float = CONFIDENCE,
    ) -> Row:
        """Compare two arms over the seeds of which both have a record."""
        runs = {
            arm: {run["seed"]: run for run in records if run["arm"] == arm} for arm in (of, over)
        }
        seeds = sorted(runs[of].keys() & runs[over].keys())
        differences = {
            seed: runs[of][seed]["scores"][measure] - runs[over][seed]["scores"][measure]
            for seed in seeds
        }
        near = not any(is_above_chance([*of_arm.values()], measure) for of_arm in runs.values())
        return cls(measure, of, over, margin, differences, confidence, near)

    @cached_property
    def estimate(self) -> Estimate:
        return student([*self.differences.values()], self.confidence)

    @property
    def verdict(self) -> Verdict:
        """Decide sign and size of the difference."""
        return Verdict(OPEN, OPEN) if self.near_chance else verdict(self.estimate, self.margin)

    @property
    def cells(self) -> list[str]:
        """Fill the cells below HEADER."""
        mean, low, high, _ = self.estimate
        between = "" if self.estimate.interval is None else f"{low:+.2f} to {high:+.2f}"
        difference = f"{mean:+.2f}" if self.differences else "-"
        words = ["near chance", ""] if self.near_chance else [*self.verdict]
        seeds = str(len(self.differences))
        return [self.measure, f"{self.of} - {self.over}", difference, between, seeds, *words]

    def sentence(self, next_confidence: float) -> str:
        """Say the verdict, and the seeds that would decide at the confidence of the next look."""
        names = f"{self.of} over {self.over}"
        if self.near_chance:
            return f"{names}: both near chance in {self.measure}, which decides nothing."
        said = sentence(
            self.estimate, self.margin, of=names, measure=self.measure, over=f"{len(self.differences)} seeds"
        )  # fmt: skip
        if self.verdict != (OPEN, OPEN):
            return said
        needed = seeds_to_decide([*self.differences.values()], self.margin, next_confidence)
        return f"{said} At this scatter {needed or f'more than {MOST_SEEDS}'} seeds would decide."


def is_above_chance(runs: Sequence[Record], measure: str) -> bool:
    """Return whether most runs are above chance, or it is not known."""
    above = [run.get("above_chance", {}).get(measure, True) for run in runs]
    return 2 * sum(above) > len(above)


@dataclass(frozen=True)
class TrialResult:
    """A finished trial.

    Attributes:
        records: of all runs on the test sets.
        arms: compared; the first is the one that all others are compared with.
        margin: the smallest difference of the first measure, which decides, that matters.
        start: the record of the model before training.
        equal: what the arms' runs have the same amount of: "time" or "samples".
        looks: tables that were seen, with this one; each halves the error that its intervals are allowed.
    """

    records: Sequence[Record]
    arms: Sequence[str]
    margin: float
    start: Record
    equal: str = "time"
    looks: int = 1

    @property
    def measures(self) -> list[str]:
        """List all measures, of which the first decides."""
        return list(self.start["scores"])

    def confidence(self, comparisons: int, look: int | None = None) -> float:
        """Return the confidence of one of several intervals, which all hold together (Bonferroni), at a look."""
        return 1 - (1 - CONFIDENCE) / 2 ** ((look or self.looks) - 1) / comparisons

    @cached_property
    def rows(self) -> list[Row]:
        """Compare each arm with the first in each measure."""
        first, *others = self.arms
        return [
            Row.from_records(
                self.records, measure, arm, first, self.margin, self.confidence(len(others))
            )
            for measure in self.measures
            for arm in others
        ]

    @property
    def deciding(self) -> list[Row]:
        """Return the rows of the measure that decides."""
        return self.rows[: len(self.arms) - 1]

    @property
    def learned(self) -> bool:
        """Return whether an arm is above chance."""
        return any(is_above_chance(self.runs(arm), self.measures[0]) for arm in self.arms)

    @property
    def winner(self) -> str:
        """Find the arm with the largest sure gain, the first arm where none gains."""
        gains = {row.estimate.mean: row.of for row in self.deciding if row.verdict.sign == HIGHER}
        return gains[max(gains)] if gains else self.arms[0]

    @property
    def gain(self) -> Row:
        """Compare the winner with the model before training, at a confidence that holds for whichever arm wins."""
        start = [{**self.start, "arm": START, "seed": run["seed"]} for run in self.records]
        records, confidence = [*self.records, *start], self.confidence(len(self.arms))
        return Row.from_records(
            records, self.measures[0], self.winner, START, self.margin, confidence
        )

    @property
    def sentences(self) -> list[str]:
        """Say the verdicts, or in one sentence that no arm learned anything."""
        if not self.learned:
            samples = max(run["samples"] for run in self.records)
            return [f"No arm learned anything in {samples:,} samples: give more --minutes."]
        others = len(self.arms) - 1
        following = self.confidence(others, self.looks + 1)
        verdicts = [row.sentence(following) for row in self.deciding]
        return [
            *verdicts,
            self.gain.sentence(self.confidence(others + 1, self.looks + 1)),
            self.equality,
        ]

    @property
    def equality(self) -> str:
        """Say whether the runs of all arms took the same time, or saw the same samples."""
        if self.equal == "samples":
            return "All arms saw the same number of samples."
        seconds = {arm: self.mean_of(arm, "seconds") for arm in self.arms}
        ascending = sorted(seconds, key=seconds.__getitem__)
        fast, slow = ascending[0], ascending[-1]
        more = seconds[slow] / seconds[fast]
        if more <= EQUAL:
            return f"All arms took equal time, within {100 * (more - 1):.0f} %."
        return f"The arms did not take the same time: {slow} took {100 * (more - 1):.0f} % more than {fast}."

    def runs(self, arm: str) -> list[Record]:
        """List the records of an arm."""
        return [run for run in self.records if run["arm"] == arm]

    def mean_of(self, arm: str, key: str) -> float:
        """Compute the mean over the seeds of an entry or a measure."""
        return fmean(run["scores"].get(key, run.get(key)) for run in self.runs(arm))

    @property
    def header(self) -> list[str]:
        """Name the columns of `means`."""
        return ["mean over seeds", *self._levels, *self.arms]

    @property
    def _levels(self) -> dict[str, str]:
        """Map columns to entries of the start model's record."""
        classes = {"commonest class": "commonest"} if self.start["commonest"] else {}
        return {"chance": "chance", **classes, START: "scores"}

    def means(self) -> list[list[str]]:
        """Fill a column an arm (rate, samples and seconds of a run, each measure) after those of chance and the start model."""
        rates = [f"{self.runs(arm)[0]['rate']:g}" for arm in self.arms]
        counts = {
            key: [f"{self.mean_of(arm, key):,.0f}" for arm in self.arms]
            for key in ("samples", "seconds")
        }
        empty = [""] * len(self._levels)
        rows = [
            ["learning rate", *empty, *rates],
            ["samples of a run", *empty, *counts["samples"]],
            ["seconds of a run", *empty, *counts["seconds"]],
        ]
        for measure in self.measures:
            levels = [self.start[key].get(measure) for key in self._levels.values()]
            values = [*levels, *(self.mean_of(arm, measure) for arm in self.arms)]
            rows.append([measure, *("" if value is None else f"{value:.1f}" for value in values)])
        return rows

    def differences(self) -> list[list[str]]:
        """Fill the cells below `Row.HEADER` for each measure and arm, with a verdict for the first measure alone."""
        if not self.learned:
            return []
        first = [row.cells for row in self.deciding]
        return [*first, *([*row.cells[:-2], "", ""] for row in self.rows[len(first) :])]

    def table(self) -> str:
        """Write means, differences and verdicts for a terminal."""
        tables = [text_table(self.header, self.means())]
        if self.learned:
            tables.append(text_table(Row.HEADER, self.differences(), left=2))
        return "\n\n".join([*tables, "\n".join(self.sentences)])

    def picture(self) -> bytes:
        """Draw the deciding measure of each run, a column an arm, with chance and the start model."""
        measure, places = self.measures[0], range(len(self.arms))
        points = [
            (place, run["scores"][measure])
            for place, arm in zip(places, self.arms, strict=True)
            for run in self.runs(arm)
        ]
        x, y = zip(*points, strict=True)
        means = [self.mean_of(arm, measure) for arm in self.arms]
        lines = [
            Line("a run", x, y, MODEL_COLOURS[1], {"linestyle": "", "marker": "o", "alpha": 0.6}),
            Line("mean", places, means, INK, {"linestyle": "", "marker": "_", "markersize": 28}),
        ]

        def finish(axes: Any) -> None:
            axes.set_xticks(places, self.arms)
            axes.set_xlim(-0.6, len(self.arms) - 0.4)
            levels = {
                name: (self.start[key].get(measure, math.nan), FAINT)
                for name, key in self._levels.items()
            }
            draw_levels(axes, levels)

        return line_chart(lines, x="", y=f"{measure}, %", finish=finish)
