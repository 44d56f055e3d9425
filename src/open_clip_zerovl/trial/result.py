"""The rows of a trial from the records of its runs: paired differences over seeds, and the verdict of `report.verdicts`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from open_clip_zerovl.report.plot import MODEL_COLOURS, Line, line_chart
from open_clip_zerovl.report.tables import text_table
from open_clip_zerovl.report.verdicts import (
    CONFIDENCE,
    HIGHER,
    LOWER,
    MOST_SEEDS,
    NO_DIFFERENCE,
    UNDECIDED,
    Estimate,
    seeds_to_decide,
    student,
    verdict,
)

Record = Mapping[str, Any]  # of a run: "arm", "rate", "seed", "scores": measure -> value, ...
MEAN_RECALL = "mean_recall"
START = "start model"  # the arm of the record before training
WORDS = {HIGHER: "gain", LOWER: "loss", NO_DIFFERENCE: "no use"}


@dataclass(frozen=True)
class Row:
    """One measure of an arm compared with that of another, seed by seed.

    Attributes:
        of, over: arms.
        margin: an interval within it counts as no difference.
        differences: seed -> value of `of` minus value of `over`.
        confidence: of the interval.
        near_chance: neither arm is above the value that a random order reaches.
        least_seeds: fewer decide nothing.
    """

    measure: str
    of: str
    over: str
    margin: float
    differences: Mapping[int, float]
    confidence: float = CONFIDENCE
    near_chance: bool = False
    least_seeds: int = 2

    HEADER = ("measure", "arms", "difference", "interval", "seeds", "verdict")

    @classmethod
    def from_records(
        cls,
        records: Sequence[Record],
        measure: str,
        of: str,
        over: str,
        margin: float,
        confidence: float = CONFIDENCE,
        least_seeds: int = 2,
    ) -> Row:
        """The row over the seeds of which both arms have a record.

        A record's `chance_upper` holds the value of a measure that random orders reach, where it is known.
        """
        values = {
            arm: {run["seed"]: run["scores"][measure] for run in records if run["arm"] == arm}
            for arm in (of, over)
        }
        seeds = sorted(values[of].keys() & values[over].keys())
        differences = {seed: values[of][seed] - values[over][seed] for seed in seeds}
        chance = records[0].get("chance_upper", {}) if records else {}
        upper = chance.get(measure, -math.inf)
        near_chance = bool(seeds) and all(
            fmean(scores[seed] for seed in seeds) <= upper for scores in values.values()
        )
        return cls(measure, of, over, margin, differences, confidence, near_chance, least_seeds)

    @cached_property
    def estimate(self) -> Estimate:
        return student([*self.differences.values()], self.confidence)

    @property
    def verdict(self) -> str:
        """A word of `report.verdicts`."""
        return verdict(
            self.estimate,
            len(self.differences),
            self.margin,
            least_seeds=self.least_seeds,
            near_chance=self.near_chance,
        )

    @property
    def cells(self) -> list[str]:
        """Cells below HEADER."""
        mean, low, high, _ = self.estimate
        between = "" if self.estimate.interval is None else f"{low:+.2f} to {high:+.2f}"
        difference = f"{mean:+.2f}" if self.differences else "-"
        arms, seeds = f"{self.of} - {self.over}", str(len(self.differences))
        return [
            self.measure,
            arms,
            difference,
            between,
            seeds,
            WORDS.get(self.verdict, self.verdict),
        ]

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        _, _, difference, between, seeds, word = self.cells
        start = f"{self.of} over {self.over}: {word}. {self.measure} {difference} ({between}, {seeds} seeds)"
        if self.verdict == NO_DIFFERENCE:
            return f"{start}: within the margin of {self.margin:g}."
        if self.verdict != UNDECIDED:
            return f"{start}."
        needed = seeds_to_decide([*self.differences.values()], self.margin, self.confidence)
        count = f"more than {MOST_SEEDS}" if needed is None else str(needed)
        return f"{start}; at this scatter {count} seeds would decide."


@dataclass(frozen=True)
class TrialResult:
    """A finished trial.

    Attributes:
        records: of all runs on the test sets.
        arms: compared; the first is the one that all others are compared with.
        measures: all keys of the scores that are compared. The first, with `margin`, decides.
        start: the record of the model before training.
    """

    records: Sequence[Record]
    arms: Sequence[str]
    measures: Sequence[str]
    margin: float
    start: Record

    @cached_property
    def rows(self) -> list[Row]:
        """For each measure a row an arm. All comparisons of a measure hold together with 95 % (Bonferroni)."""
        first, *others = self.arms
        confidence = 1 - (1 - CONFIDENCE) / len(others)
        return [
            Row.from_records(self.records, measure, arm, first, self.margin, confidence)
            for measure in self.measures
            for arm in others
        ]

    @property
    def deciding(self) -> list[Row]:
        """The rows of the measure that decides."""
        return [row for row in self.rows if row.measure == self.measures[0]]

    @property
    def winner(self) -> str:
        """The arm with the largest sure gain; the first arm where none gains."""
        gains = {row.estimate.mean: row.of for row in self.deciding if row.verdict == HIGHER}
        return gains[max(gains)] if gains else self.arms[0]

    @property
    def gain(self) -> Row:
        """The winner compared with the model before training; holds with 95 % for whichever arm wins."""
        start = [{**self.start, "arm": START, "seed": run["seed"]} for run in self.records]
        confidence = 1 - (1 - CONFIDENCE) / len(self.arms)
        return Row.from_records(
            [*self.records, *start], self.measures[0], self.winner, START, self.margin, confidence
        )

    def means(self) -> list[list[str]]:
        """A row an arm: learning rate, samples of a run, and the mean of each score over its seeds; the start model above."""
        rows = [[START, "-", "0", *(f"{self.start['scores'][key]:.1f}" for key in self.keys)]]
        for arm in self.arms:
            runs = [run for run in self.records if run["arm"] == arm]
            values = [fmean(run["scores"][key] for run in runs) for key in self.keys]
            numbers = [f"{value:.1f}" for value in values]
            rows.append([arm, f"{runs[0]['rate']:g}", f"{runs[0]['samples']:,}", *numbers])
        return rows

    @property
    def keys(self) -> list[str]:
        """The scores of a record, chance levels among them."""
        return list(self.records[0]["scores"])

    @property
    def header(self) -> list[str]:
        return ["arm", "rate", "samples", *self.keys]

    @property
    def differences(self) -> list[list[str]]:
        """Cells below `Row.HEADER` for each measure and arm; only those of the first measure have a verdict."""
        return [row.cells if row in self.deciding else [*row.cells[:-1], ""] for row in self.rows]

    def table(self) -> str:
        """Means, differences and verdicts for a terminal."""
        tables = (
            text_table(self.header, self.means()),
            text_table(Row.HEADER, self.differences, left=2),
            "\n".join(row.sentence for row in (*self.deciding, self.gain)),
        )
        return "\n\n".join(tables)

    def picture(self) -> bytes:
        """The deciding measure of each run, a line an arm."""
        lines = []
        for arm, colour in zip(self.arms, MODEL_COLOURS, strict=False):
            by_seed = {
                run["seed"]: run["scores"][self.measures[0]]
                for run in self.records
                if run["arm"] == arm
            }
            seeds = sorted(by_seed)
            points = [by_seed[seed] for seed in seeds]
            lines.append(Line(arm, seeds, points, colour, {"marker": "o"}))
        return line_chart(lines, x="seed", y=self.measures[0].replace("_", " "))
