"""The rows of docs/results/rows.csv, from the records of the runs, and the one rule of their verdicts.

Student's paired interval over the seeds decides, for every row alike. The intervals over the unseen sources answer other
questions (the same four sources again; other sources) and carry no verdict.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.report.verdicts import (
    HIGHER,
    LOWER,
    NO_DIFFERENCE,
    Estimate,
    estimate_by_t,
    holm,
    student,
    verdict,
)
from scripts.ablation.protocol import (
    ALL_UNSEEN,
    CHANCE,
    CONDITIONS,
    LEAST_SEEDS,
    MARGIN_RSUM,
    MARGINS,
    POOLS,
    TABLES,
    Claim,
    Comparison,
    PaperTable,
    read_choices,
)
from scripts.drawn.training import flag_values

Record = Mapping[str, Any]
Records = Mapping[str, Mapping[int, Record]]  # by condition and seed
HELD_OUT = "held-out pairs"  # the score as the protocol first had it
_SIGNS = {  # measure -> its name among a record's values, and its unit
    "probe, images %": ("probe_images", 100),
    "probe, texts %": ("probe_texts", 100),
    "log p, same source": ("log_p_same_source", 1),
    "log p, other source": ("log_p_other_source", 1),
}
#: Flags of before `--ablate` had their names, with their values, in older records.
RENAMED = {
    ("--debiased-draw", "iid"): "iid-draw",
    ("--mixup-of", "both"): "mixup-both",
    ("--mixup-text", "embeddings"): "mixup-embeddings",
    ("--temperature-parameter", "temperature"): "temperature-parameter",
}
REPRODUCED, CONTRADICTED = "reproduced", "contradicted"


def other_sources(by_source: Mapping[str, Sequence[float]]) -> Estimate:
    """The four unseen sources as a sample of sources: Student's interval of the means of each."""
    return student(
        [sum(values) / len(values) for values in by_source.values()] if len(by_source) == 4 else []
    )


def same_sources(by_source: Mapping[str, Sequence[float]]) -> Estimate:
    """The same unseen sources again: from the spread between seeds of the same source, where each has two or more.

    Each source counts once. That sources differ from each other does not make the interval wider.
    """
    groups = list(by_source.values())
    if len(groups) < 2 or min(map(len, groups)) < 2:
        return Estimate()
    freedom = sum(map(len, groups)) - len(groups)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)
    error = math.sqrt(sum(squares / freedom / len(group) for group in groups)) / len(groups)
    return estimate_by_t(statistics.mean(map(statistics.mean, groups)), error, freedom)


def beside_paper(word: str, claim: Claim, found: Estimate, margin: float) -> str:
    """True if a decided row bears out a number of the paper: `REPRODUCED`, `CONTRADICTED`, or "" if neither holds."""
    if claim == "same":
        beyond = found.low > margin or found.high < -margin
        return (
            REPRODUCED
            if word == NO_DIFFERENCE
            else CONTRADICTED
            if beyond and word in (HIGHER, LOWER)
            else ""
        )
    return "" if word not in (HIGHER, LOWER) else REPRODUCED if word == claim else CONTRADICTED


def settings_of(flags: Sequence[str]) -> dict[str, list[str]]:
    """The values of each flag by its present name."""
    values = flag_values(flags)
    for (name, value), now in RENAMED.items():
        if values.get(name) == [value]:
            del values[name]
            values["--ablate"] = [*values.get("--ablate", []), now]
    return values


def read_records(path: Path) -> Records:
    """The records of a folder of JSONs, or of a `runs.json`.

    Raises:
        UserError: no records; runs of different choices or splits, which cannot be compared; or runs whose condition has
            changed since they were trained.
    """
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    else:
        found = [
            json.loads(file.read_text(encoding="utf-8"))
            for file in sorted(path.glob("*-seed*.json"))
        ]
    # Records of earlier protocols have no table of choices.
    found = [
        one
        for one in found
        if one["condition"] in CONDITIONS and isinstance(one.get("choices"), dict)
    ]
    if not found:
        raise UserError(f"there is no record of a run in {path}")
    settings = [{**record["choices"], "split": record["split"]} for record in found]
    for name in {name for one in settings for name in one}:
        if len(values := {one[name] for one in settings if name in one}) > 1:
            raise UserError(
                f"{path} holds runs with several values of {name}, {sorted(values)}; train them alike"
            )
    records: dict[str, dict[int, Record]] = {name: {} for name in CONDITIONS}
    for record in sorted(found, key=lambda one: one["seed"]):
        _check_settings(record, path)
        records[record["condition"]][record["seed"]] = record
    return records


def _check_settings(record: Record, path: Path) -> None:
    condition = CONDITIONS[record["condition"]]
    choices = {
        **read_choices(),
        **record["choices"],
    }  # a setting may have become a choice after the run
    run = ["--sampling", condition.sampling, "--epochs", str(condition.run_epochs(choices))]
    then = settings_of(record["flags"])
    today = settings_of([*condition.run_flags(choices), *run])
    if differing := [name for name, values in today.items() if then.get(name) != values]:
        raise UserError(
            f"{record['condition']}-seed{record['seed']} of {path} was trained with other settings than the condition has "
            f"now ({', '.join(differing)}); remove its record"
        )


def value_of(record: Record, measure: str) -> float | None:
    """A measure of one run; None if it was not measured."""
    if measure == "score" and record["unseen"] is not None:
        return record["rsum"].get(ALL_UNSEEN)
    if measure == "score":
        return record["score"]
    if measure == HELD_OUT:
        return record["rsum"].get("unseen")
    if measure in _SIGNS:
        name, unit = _SIGNS[measure]
        return None if record[name] is None else unit * record[name]
    return record["rsum"].get(measure)


def reach(run: Record, against: Record) -> float:
    """Logarithm of the cost at which `run` first reaches the final score of `against`, over that of `against` (Table 8).

    Cost is CPU seconds, an epoch of each taken as its share of the run's. Infinite where the score is not reached.
    """
    costs = []
    for one in (run, against):
        epochs = [
            epoch
            for epoch, score in enumerate(one["score_by_epoch"], 1)
            if score >= against["score"]
        ]
        costs.append(one["cpu_seconds"] * epochs[0] / one["epochs"] if epochs else math.inf)
    return math.log(costs[0] / costs[1])


@dataclass(frozen=True)
class Row:
    """One measure of a comparison.

    Attributes:
        decides: whether it is the comparison's own measure, which alone has a verdict.
        values: seed -> the value of `run` and of `against`, for the seeds that both have.
        unseen: seed -> the source that is scored and was not trained on; empty where the measure is of trained sources.
    """

    table: PaperTable
    comparison: Comparison
    measure: str
    decides: bool
    values: Mapping[int, tuple[float, float]]
    unseen: Mapping[int, str]

    @classmethod
    def of(cls, records: Records, table: PaperTable, comparison: Comparison, measure: str) -> Row:
        """Scores of all pairs of the unseen source where enough seeds have them, else of the held-out ones, in both runs."""
        runs, others = records[comparison.run], records[comparison.against]
        decides = measure == comparison.measure
        pairs = {seed: (runs[seed], others[seed]) for seed in sorted(runs.keys() & others.keys())}

        def known(measure: str) -> dict[int, tuple[float, float]]:
            both = {
                seed: (value_of(run, measure), value_of(other, measure))
                for seed, (run, other) in pairs.items()
            }
            return {
                seed: (a, b) for seed, (a, b) in both.items() if a is not None and b is not None
            }

        if measure == "reach":
            values = {seed: (reach(*pair), 0.0) for seed, pair in pairs.items()}
        else:
            values = known(measure)
        if measure == "score" and len(values) < min(LEAST_SEEDS, len(pairs)):
            values, measure = known(HELD_OUT), HELD_OUT
        scored = measure in ("score", HELD_OUT)
        unseen = {
            seed: run["unseen"]
            for seed, (run, _) in pairs.items()
            if scored and run["unseen"] and seed in values
        }
        return cls(table, comparison, measure, decides, values, unseen)

    @property
    def name(self) -> str:
        return f"{self.comparison.run} - {self.comparison.against}"

    @property
    def margin(self) -> float:
        return MARGINS.get(self.measure, MARGIN_RSUM)

    @cached_property
    def differences(self) -> dict[int, float]:
        return {seed: run - against for seed, (run, against) in self.values.items()}

    @cached_property
    def by_source(self) -> dict[str, list[float]]:
        """Unseen source -> the differences of its seeds."""
        found: dict[str, list[float]] = {}
        for seed, source in sorted(self.unseen.items(), key=lambda one: (one[1], one[0])):
            found.setdefault(source, []).append(self.differences[seed])
        return found

    @cached_property
    def found(self) -> Estimate:
        return student([*self.differences.values()])

    def mean(self, side: int) -> float:
        """The mean of `run` (0) or of `against` (1); NaN without runs."""
        return (
            sum(pair[side] for pair in self.values.values()) / len(self.values)
            if self.values
            else math.nan
        )

    @cached_property
    def verdict(self) -> str:
        near_chance = (
            bool(self.unseen) and max(self.mean(0), self.mean(1)) < CHANCE + 2 * MARGIN_RSUM
        )
        return verdict(
            self.found,
            len(self.values),
            self.margin,
            least_seeds=LEAST_SEEDS,
            near_chance=near_chance,
        )

    @property
    def beside_paper(self) -> str:
        """True if it bears out a number of the paper; "" if the paper has none, or nothing is decided."""
        if self.comparison.paper is None:
            return ""
        return beside_paper(self.verdict, self.comparison.claim, self.found, self.margin)

    @property
    def words(self) -> str:
        """`+13 (+2 to +24)`, in whole RSUM or percent, log p with a decimal."""
        digits = 1 if self.measure.startswith("log p") else 0
        if not math.isfinite(self.found.low):
            return "not run" if not self.values else f"{self.found.mean:+.{digits}f}"
        return "{0.mean:+.{1}f} ({0.low:+.{1}f} to {0.high:+.{1}f})".format(self.found, digits)

    @property
    def judged(self) -> str:
        """`higher (+13, +2 to +24)`, or `not run`."""
        if not self.values:
            return self.verdict
        return f"{self.verdict} ({self.words.replace(' (', ', ').replace(')', '')})"

    @property
    def papers_words(self) -> str:
        """`+21, +27`, the paper's differences on COCO and Flickr30K; "" if it has no numbers."""
        pairs = zip(*self.comparison.paper, strict=True) if self.comparison.paper else ()
        return ", ".join(f"{run - against:+.0f}" for run, against in pairs)


def rows_of(records: Records) -> list[Row]:
    """The row of each comparison, then those of its further measures that are not rows of their own."""
    listed = [(table, one) for table in TABLES for one in table.comparisons]
    own = {(one.run, one.against, one.measure) for _, one in listed}
    rows = []
    for table, one in listed:
        rows.append(main := Row.of(records, table, one, one.measure))
        more = (HELD_OUT, *POOLS) if one.measure == "score" else ()
        further = [
            Row.of(records, table, one, name)
            for name in more
            if (one.run, one.against, name) not in own
        ]
        rows += [row for row in further if row.values and row.measure != main.measure]
    return rows


def standing(rows: Sequence[Row]) -> list[Row]:
    """The decided rows that differ from zero as one family of tests (Holm)."""
    kept = holm({index: row.found.p for index, row in enumerate(rows) if row.decides and len(row.values) >= LEAST_SEEDS
                 and math.isfinite(row.found.mean)})  # fmt: skip
    return [rows[index] for index in sorted(kept)]


def as_csv(rows: Sequence[Row]) -> str:
    """All rows with all intervals."""
    out = io.StringIO()
    kept = standing(rows)
    header = (
        "table", "what", "run", "against", "measure", "seeds", "mean against", "mean run", "difference", "low", "high", "p",
        "verdict", "beside the paper", "holm", "same four sources low", "same four sources high", "other sources low",
        "other sources high", "by unseen source", "the paper's run", "the paper's against", "added", "setting",
    )  # fmt: skip
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        one, found = row.comparison, row.found
        intervals = [end for of in (same_sources, other_sources) for end in of(row.by_source)[1:3]]
        sources = "; ".join(
            f"{name} {sum(of) / len(of):+.1f} ({len(of)})" for name, of in row.by_source.items()
        )
        verdicts = (
            (row.verdict, row.beside_paper, "stands" if row in kept else "")
            if row.decides
            else ("", "", "")
        )
        papers = (
            " ".join(map(str, side))
            for side in (one.paper if one.paper and row.decides else ((), ()))
        )
        about = (one.added, row.table.setting) if row.decides else ("", "")
        writer.writerow((
            row.table.name, one.what, CONDITIONS[one.run].label, CONDITIONS[one.against].label, row.measure, len(row.values),
            *map(_number, (row.mean(1), row.mean(0), *found[:3])), f"{found.p:.3g}" if math.isfinite(found.p) else "",
            *verdicts, *map(_number, intervals), sources, *papers, *about,
        ))  # fmt: skip
    return out.getvalue()


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ""
