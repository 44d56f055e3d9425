"""docs/results.md and its figures, from the JSONs that `run.py` wrote.

    python -m scripts.ablation.report [--runs ablation] [--page docs/results.md] [--quick]

The folder of the page's name holds the figures and `runs.json`, all records in one file, which makes the same page again:
`--runs docs/results/runs.json`. What `replay.py` has written to `replay.json` there is on the page too. Every verdict follows
from the numbers by the rule in `verdicts.judge`; `results.md.j2` holds the words around them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.pools import POOLS
from open_clip_zerovl.report.markdown import markdown_table
from scripts.ablation import figures
from scripts.ablation.jobs import settings_of
from scripts.ablation.protocol import (
    ALL_UNSEEN,
    CHANCE,
    CHOICES,
    CONDITIONS,
    CONFIDENCE,
    LEAST_SEEDS,
    MARGIN_RSUM,
    POOL,
    TABLES,
    Comparison,
    PaperTable,
    read_choices,
    read_pilots,
)
from scripts.ablation.replay import REPLAY_FILE, read_table
from scripts.ablation.verdicts import (
    BETTER,
    CONTRADICTED,
    NEAR_CHANCE,
    NO_DIFFERENCE,
    NOT_RUN,
    REPRODUCED,
    TOO_FEW,
    UNDECIDED,
    WORSE,
    Estimate,
    Verdict,
    estimate,
    grouped,
    holm,
    judge,
    over_seeds,
)

Record = Mapping[str, Any]
Records = Mapping[str, Mapping[int, Record]]  # by condition and seed

_NOT_OF_PAPER = {REPRODUCED: BETTER, CONTRADICTED: WORSE}
#: The page's first lines: what came out, and the verdicts that say so.
_OUTCOMES = {
    "Higher": (REPRODUCED, BETTER),
    "Lower, or against the paper": (CONTRADICTED, WORSE),
    f"No difference of {MARGIN_RSUM:g} RSUM": (NO_DIFFERENCE,),
    "Near chance, where little can be told": (NEAR_CHANCE,),
    "Undecided (numbers in the table below)": (UNDECIDED,),
    f"Fewer than {LEAST_SEEDS} seeds": (TOO_FEW,),
}


def read_records(path: Path) -> Records:
    """The records of a folder of JSONs, or of a `runs.json`.

    Raises:
        UserError: no records, runs of different choices or splits, which cannot be compared, or runs of a condition that was
            another one when they were trained.
    """
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    else:
        found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(path.glob("*-seed*.json"))]
    # Records of earlier protocols have no table of choices.
    found = [one for one in found if one["condition"] in CONDITIONS and isinstance(one.get("choices"), dict)]
    if not found:
        raise UserError(f"there is no finished run in {path}; make them with `make ablation`")
    settings = [{**record["choices"], "split": record["split"]} for record in found]
    for name in {name for one in settings for name in one}:
        if len(values := {one[name] for one in settings if name in one}) > 1:
            raise UserError(f"{path} holds runs with several values of {name}, {sorted(values)}; train them alike")
    records: dict[str, dict[int, Record]] = {name: {} for name in CONDITIONS}
    for record in sorted(found, key=lambda one: one["seed"]):
        _check_settings(record, path)
        records[record["condition"]][record["seed"]] = record
    return records


def _check_settings(record: Record, path: Path) -> None:
    condition = CONDITIONS[record["condition"]]
    choices = {**read_choices(), **record["choices"]}  # a setting may have become a choice after the run
    run = ["--sampling", condition.sampling, "--epochs", str(condition.run_epochs(choices))]
    then = settings_of(record["flags"])
    today = settings_of([*condition.run_flags(choices), *run])
    if differing := [name for name, values in today.items() if then.get(name) != values]:
        raise UserError(
            f"{record['condition']}-seed{record['seed']} of {path} was trained with other settings than the condition has now "
            f"({', '.join(differing)}); remove its record, or run `make ablation` again"
        )


def reach(run: Record, against: Record) -> float:
    """Logarithm of the cost at which `run` first reaches the final score of `against`, over that of `against` (Table 8).

    Cost is CPU seconds, an epoch of each taken as its share of the run's. Infinite where the score is not reached.
    """
    costs = []
    for one in (run, against):
        epochs = [epoch for epoch, score in enumerate(one["score_by_epoch"], 1) if score >= against["score"]]
        costs.append(one["cpu_seconds"] * epochs[0] / one["epochs"] if epochs else math.inf)
    return math.log(costs[0] / costs[1])


@dataclass(frozen=True)
class Row:
    """A comparison with its records, and the words that the page has for it.

    Attributes:
        pairs: seed -> the records of `run` and of `against`, of the seeds that both have.
    """

    table: PaperTable
    comparison: Comparison
    pairs: Mapping[int, tuple[Record, Record]]

    @classmethod
    def of(cls, records: Records, table: PaperTable, comparison: Comparison) -> Row:
        runs, others = records[comparison.run], records[comparison.against]
        both = sorted(runs.keys() & others.keys())
        return cls(table, comparison, {seed: (runs[seed], others[seed]) for seed in both})

    @property
    def name(self) -> str:
        return f"{self.comparison.run} - {self.comparison.against}"

    @property
    def of_unseen(self) -> bool:
        """Whether it compares scores in a source that was not trained on."""
        return self.comparison.measure == "score" and CONDITIONS[self.comparison.run].score == "unseen"

    @cached_property
    def on_all_pairs(self) -> list[int]:
        """The seeds whose runs were both scored on all pairs of their unseen source, where they are enough.

        Else none, and all seeds are compared on the held-out pairs.
        """
        seeds = [seed for seed, pair in self.pairs.items() if all(ALL_UNSEEN in one["rsum"] for one in pair)]
        return seeds if self.of_unseen and len(seeds) >= min(LEAST_SEEDS, len(self.pairs)) else []

    @property
    def unseen(self) -> dict[int, str]:
        """The unseen source of each seed; empty where no source is left out."""
        return {seed: run["unseen"] for seed, (run, _) in self.pairs.items() if run["unseen"] is not None}

    def scores(self, held_out: bool = False) -> dict[int, tuple[float, float]]:
        """Seed -> the scores of both conditions, of the same pairs: see `on_all_pairs`."""
        if not self.of_unseen:
            return {seed: (run["score"], against["score"]) for seed, (run, against) in self.pairs.items()}
        seeds = [] if held_out else self.on_all_pairs
        key = ALL_UNSEEN if seeds else "unseen"
        pairs = {seed: self.pairs[seed] for seed in seeds or self.pairs}
        return {seed: (run["rsum"][key], against["rsum"][key]) for seed, (run, against) in pairs.items()}

    def judged(self, held_out: bool = False) -> Verdict:
        """`verdicts.judge` on the records; what the paper does not claim is better or worse.

        Args:
            held_out: judge by the held-out pairs of the unseen source alone.
        """
        one = self.comparison
        if one.measure == "reach":
            ratios = {seed: reach(*pair) for seed, pair in self.pairs.items()}
            if any(map(math.isinf, ratios.values())):  # no mean: what was not reached has no cost
                word = UNDECIDED if len(ratios) >= LEAST_SEEDS else TOO_FEW
                reached = sum(map(math.isfinite, ratios.values()))
                return Verdict(verdict=word, by_seeds=word, seeds=len(ratios), run=reached)
            return judge(one.claim, ratios, dict.fromkeys(ratios, 0.0), one.margin)
        scores = self.scores(held_out)
        ours, theirs = ({seed: pair[side] for seed, pair in scores.items()} for side in (0, 1))
        found = judge(one.claim, ours, theirs, one.margin, self.unseen, CHANCE + 2 * MARGIN_RSUM)
        if self.table.of_paper:
            return found
        verdict, by_seeds = (_NOT_OF_PAPER.get(word, word) for word in (found.verdict, found.by_seeds))
        return replace(found, verdict=verdict, by_seeds=by_seeds)

    @cached_property
    def verdict(self) -> Verdict:
        return self.judged()

    @property
    def decided(self) -> bool:
        """Whether it compares scores of enough seeds for an interval that counts."""
        return self.comparison.measure == "score" and self.verdict.seeds >= LEAST_SEEDS

    @cached_property
    def pools(self) -> dict[str, Estimate]:
        """Pool of the trained sources -> its difference; without pools that were not measured twice."""
        found = {}
        for pool in POOLS if self.comparison.measure == "score" else ():
            values = {
                seed: (run["rsum"].get(pool), other["rsum"].get(pool)) for seed, (run, other) in self.pairs.items()
            }
            differences = {seed: run - other for seed, (run, other) in values.items() if None not in (run, other)}
            if len(differences) > 1:
                found[pool] = estimate(differences, self.unseen)
        return found

    # The words, in the order of the page.

    @property
    def short(self) -> str:
        """`+12.3 (+2.0 to +22.6)*`, and the verdict over the seeds where it is another one."""
        found = self.verdict
        if not math.isfinite(found.low):
            return f"{found.mean:+.1f}{self.of_which_pairs}"
        other = "" if found.by_seeds == found.verdict else f", over the seeds {found.by_seeds}"
        return f"{found.mean:+.1f} {ends(found)}{other}{self.of_which_pairs}"

    @property
    def trained_words(self) -> str:
        """`within +0.5 (-23.8 to +24.9), across ...`."""
        return ", ".join(f"{pool} {found.mean:+.1f} {ends(found)}" for pool, found in self.pools.items())

    @property
    def label(self) -> str:
        one = self.comparison
        added = f"; added {one.added}" if one.added else ""
        return f"{one.what} (*{CONDITIONS[one.run].label}* against *{CONDITIONS[one.against].label}*{added})"

    @property
    def of_which_pairs(self) -> str:
        """`, held-out pairs` where the scores are of these alone."""
        return ", held-out pairs" if self.of_unseen and not self.on_all_pairs else ""

    @property
    def here(self) -> str:
        """The difference with its interval, and of which pairs where not of all."""
        found = self.verdict
        if self.comparison.measure == "reach":
            if math.isnan(found.mean):
                return f"the score is reached in {found.run:.0f} of {found.seeds} seeds"
            low, middle, high = (math.exp(value) for value in (found.low, found.mean, found.high))
            return f"x {middle:.2f} (x {low:.2f} to x {high:.2f})"
        interval = "" if math.isinf(found.low) else f" {ends(found)}"
        return f"{found.against:.1f} -> {found.run:.1f}: {found.mean:+.1f}{interval}{self.of_which_pairs}"

    @property
    def p_words(self) -> str:
        """`0.032`, or a dash."""
        p = self.verdict.p
        return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"

    @property
    def papers_words(self) -> str:
        """The paper's numbers of both runs and their difference."""
        if self.comparison.paper is None:
            return "no numbers"
        run, against = self.comparison.paper
        if self.comparison.measure == "reach":
            return f"{against[0]:.0f} -> {run[0]:.0f} GPU h (x {run[0] / against[0]:.2f})"
        pairs = zip(("COCO", "F30K"), run, against, strict=True)
        return ", ".join(f"{name} {b:.1f} -> {a:.1f} ({a - b:+.1f})" for name, a, b in pairs)

    @property
    def verdict_words(self) -> str:
        """The verdict, and where it is another one by Student's interval over the seeds, that one too."""
        word, other = self.verdict.verdict, self.verdict.by_seeds
        return word if other == word else f"{word} (over the seeds: {other})"

    @property
    def by_unseen_source(self) -> str:
        """The mean difference of the scores for each unseen source, with its seeds: `noto -10.5 (2), twemoji +33.5 (1)`.

        With all four sources also Student's interval of their means, and where the row's own interval is another one, that
        over the seeds; "" where no source is left out.
        """
        if not self.of_unseen or not self.unseen:
            return ""
        differences = {seed: ours - theirs for seed, (ours, theirs) in self.scores().items()}
        found = sorted(grouped(differences, self.unseen).items())
        means = [sum(values) / len(values) for _, values in found]
        words = ", ".join(
            f"{source} {mean:+.1f} ({len(values)})" for (source, values), mean in zip(found, means, strict=True)
        )
        if len(means) < 4:
            return words
        words += "; four sources as a sample: {0.low:+.1f} to {0.high:+.1f}".format(over_seeds(means))
        if self.verdict.by_source:
            words += "; over the seeds: {0.low:+.1f} to {0.high:+.1f}".format(over_seeds([*differences.values()]))
        return words


def ends(found: Estimate) -> str:
    """`(+2.0 to +22.6)`, and "*" behind an interval that is over the unseen sources."""
    return f"({found.low:+.1f} to {found.high:+.1f}){'*' if found.by_source else ''}"


def mean_and_range(values: Sequence[float | None], digits: int = 1) -> str:
    """`231.4 (225.0-240.1)`, one value alone, or a dash."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{sum(known) / len(known):.{digits}f}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.{digits}f}-{max(known):.{digits}f})"


def conditions_table(records: Records, names: Sequence[str], with_temperature: bool = False) -> str:
    """One line for each of these conditions, which have runs, with all that was measured.

    The score is of all pairs of the unseen source where each run has it, else of the held-out ones.
    """
    rows = []
    for name in names:
        runs = list(records[name].values())
        if CONDITIONS[name].score == "unseen" and not all(ALL_UNSEEN in run["rsum"] for run in runs):
            score = f"{mean_and_range([run['rsum']['unseen'] for run in runs])}, held-out pairs"
        else:
            score = mean_and_range([run["score"] for run in runs])
        more = ""
        if shared := [run["shared_information"] for run in runs if "shared_information" in run]:
            more += f"; NMI with the sources {mean_and_range(shared, 2)}"
        if with_temperature and all("temperature" in run for run in runs):
            more += f"; temperature {mean_and_range([run['temperature'] for run in runs], 3)}"
        probes = [[run[key] and 100 * run[key] for run in runs] for key in ("probe_images", "probe_texts")]
        samples = mean_and_range([run["samples"] / 1000 for run in runs], 0)
        pools = (mean_and_range([run["rsum"][pool] for run in runs]) for pool in POOLS)
        cells = (score, *pools, *(mean_and_range(values, 0) for values in probes))
        cpu = mean_and_range([run["cpu_seconds"] for run in runs], 0)
        rows.append((f"{CONDITIONS[name].label}{more}", str(len(runs)), str(runs[0]["epochs"]), samples, *cells, cpu))
    header = (
        "run",
        "seeds",
        "epochs",
        "samples, thousands",
        "score",
        *POOLS,
        "probe images %",
        "probe texts %",
        "CPU s",
    )
    return markdown_table(header, rows)


def outcomes(rows: Sequence[Row], standing: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The comparisons with a headline that have runs, by outcome.

    An undecided one is named without its numbers: a mean alone says more than is known, and the table has the interval.
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        word = row.verdict.verdict
        if row.comparison.headline and word != NOT_RUN:
            word = NO_DIFFERENCE if row.comparison.claim == "same" and word == REPRODUCED else word
            numbers = "" if word == UNDECIDED else f" {row.short}"
            mark = "\u2020" if row in standing else ""
            found.setdefault(word, []).append(row.comparison.headline + mark + numbers)
    listed = [(title, [one for word in words for one in found.get(word, ())]) for title, words in _OUTCOMES.items()]
    return [(title, words) for title, words in listed if words]


def held_out_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Which rows would have another verdict by the held-out pairs alone, the score before it counted all pairs."""
    both = [
        (row, row.verdict.verdict, row.judged(held_out=True).verdict)
        for row in rows
        if row.decided and row.on_all_pairs
    ]
    others = [
        f"{row.name} ({there} in place of {here})"
        for row, here, there in both
        if here != there and {here, there} != {UNDECIDED, NEAR_CHANCE}
    ]
    return {"rows": len(both), "others": others}


def debiasing_rows(rows: Sequence[Row]) -> dict[str, Row]:
    """The comparisons of debiased with random sampling that have two seeds: the emoji's, short and long, and the icons'."""
    named = {"debiased": "emoji", "long-debiased": "emoji, long", "icons-debiased": "icons"}
    found = {
        named[row.comparison.run]: row for row in reversed(rows) if row.comparison.run in named and "random" in row.name
    }
    return {data: found[data] for data in named.values() if found[data].verdict.seeds > 1}


def summary(rows: Sequence[Row]) -> str:
    """One line for each comparison that has runs, and the names of the others."""
    cells = [
        (row.table.name, row.label, row.here, row.p_words, str(row.verdict.seeds), row.papers_words, row.verdict_words)
        for row in rows
        if row.pairs
    ]
    shown = markdown_table(("table", "what", "here", "p", "seeds", "the paper", "verdict"), cells)
    waiting = [
        f"{row.table.name}, {row.comparison.run} against {row.comparison.against}" for row in rows if not row.pairs
    ]
    return f"{shown}\n\nNot run yet: {'; '.join(waiting)}." if waiting else shown


def choices_table() -> str:
    """What the pilots chose; "" before they are done."""
    rows = [
        (
            one["what"],
            ", ".join(CONDITIONS[condition].label for condition in CHOICES[name].conditions),
            ", ".join(f"{value}: {score:.0f}" for value, score in one["scores"].items()),
            one["rule"],
            one["chosen"],
        )
        for name, one in read_pilots().items()
    ]
    header = ("setting", "pilots, two seeds each", "mean validation RSUM", "rule", "chosen")
    return markdown_table(header, rows) if rows else ""


def section(records: Records, table: PaperTable, rows: Sequence[Row], folder: Path) -> tuple[Any, ...]:
    """The page's section on a table that has runs: its rows, the name of its figure, which is drawn here, measurements."""
    scored = [row for row in rows if row.comparison.measure == "score"]
    letters = table.name.lower().replace(" ", "-")
    figure = f"{''.join(letter for letter in letters if letter.isalnum() or letter == '-')}.png" if scored else ""
    if figure:
        title = f"{table.name}: {table.title}".replace("`", "")
        bars = [figures.Bar(row.name, row.verdict, row.comparison.paper) for row in scored]
        write_atomically(folder / figure, figures.differences(title, bars))
    names = [name for name in table.conditions if records[name]]
    return table, rows, figure, conditions_table(records, names, with_temperature=table.name == "Temperature")


def debiasing_figure(rows: Mapping[str, Row]) -> bytes:
    """What debiased sampling changes, in each pool of both miniatures."""
    pools = {
        "within": "within a trained source",
        "across": "across trained sources",
        "mixed": "all trained sources in one pool",
    }
    bars = []
    for data, row in rows.items():
        bars.append(figures.Bar(f"{data}: a source not trained on", row.verdict))
        bars += [figures.Bar(f"{data}: {pools[pool]}", found) for pool, found in row.pools.items()]
    return figures.differences("Debiased sampling less random sampling", bars)


def write_page(records: Records, page: Path) -> str:
    """Write the page, its figures and `runs.json`; return the summary."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    every = [record for by_seed in records.values() for record in by_seed.values()]
    write_atomically(folder / "runs.json", "[\n" + ",\n".join(map(json.dumps, every)) + "\n]\n")
    tables = [(table, [Row.of(records, table, one) for one in table.comparisons]) for table in TABLES]
    rows = [row for _, own in tables for row in own]
    decided = [row for row in rows if row.decided]
    kept = holm({id(row): row.verdict.p for row in decided})
    standing = [row for row in decided if id(row) in kept]
    if debiasing := debiasing_rows(rows):
        write_atomically(folder / "debiasing.png", debiasing_figure(debiasing))
    begun = [(table, [row for row in own if row.pairs]) for table, own in tables]
    overview = summary(rows)
    template = Template(
        Path(__file__).with_name("results.md.j2").read_text(encoding="utf-8"), keep_trailing_newline=True
    )
    text = template.render(
        every=every, seeds=sorted({record["seed"] for record in every}), folder=folder.name,
        days=sorted({record["started"][:10] for record in every}),
        hours=sum(record["cpu_seconds"] for record in every) / 3600,
        missing=[name for name in CONDITIONS if len(records[name]) < LEAST_SEEDS], conditions=CONDITIONS,
        least_seeds=LEAST_SEEDS, pool=POOL, chance=CHANCE, margin=round(MARGIN_RSUM),
        outcomes=outcomes(rows, standing), debiasing=debiasing, held_out=held_out_rows(rows),
        many={
            "decided": len(decided), "missed": sum(row.verdict.low > 0 or row.verdict.high < 0 for row in decided),
            "chance": (1 - CONFIDENCE) * len(decided), "standing": [f"{row.name} ({row.table.name})" for row in standing],
        },
        summary=overview, sections=[section(records, table, own, folder) for table, own in begun if own],
        replay=read_table(folder / REPLAY_FILE), chosen=choices_table(),
    )  # fmt: skip
    write_atomically(page, text)
    return overview


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs' JSONs, or a runs.json (default ablation)")
    parser.add_argument("--page", type=Path, help="default docs/results.md")
    parser.add_argument(
        "--quick", action="store_true", help="the runs of ablation/quick, into ablation/quick/results.md"
    )
    arguments = parser.parse_args(argv)
    runs = arguments.runs or Path("ablation/quick" if arguments.quick else "ablation")
    page = arguments.page or (Path("ablation/quick/results.md") if arguments.quick else Path("docs/results.md"))
    try:
        print(write_page(read_records(runs), page))
    except UserError as error:
        print(f"ablation_report: error: {error}", file=sys.stderr)
        return 2
    print(f"\nThe page: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
