"""The tables and the figure of the study of large and debiased batches on photographs, from its records.

    python -m scripts.photographs.study_report [--out docs/results.md]

Rows follow study.yaml: differences are paired by seed, at the rate that the validation photographs choose. What has no
records is no row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from scipy.stats import spearmanr

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.report.pages import FAINT, MODEL_COLOURS, new_figure, plain_axes, png_bytes
from open_clip_zerovl.report.verdicts import CONFIDENCE, Estimate, student, verdict
from scripts.photographs.study import (
    RECORDS,
    Record,
    mean_scores,
    next_rate,
    read_protocol,
    read_records,
)
from scripts.tables import markdown_table

FIGURE = RECORDS / "mixtures.png"
PRIMARIES = ("clean", "pool")
SHOWN = ("clean", "pool", "cross", "unseen")
NAMES = {"adamw": "AdamW", "lars": "LARS"}
SMALLEST = "16"  # the arm that all batches are compared with


def holm(p_values: Mapping[Any, float], level: float = 1 - CONFIDENCE) -> set[Any]:
    """Find the keys that stay below `level` by Holm's correction.

    The k-th smallest of n counts times (n - k + 1), and a key is among them only with all before it.
    """
    significant: set[Any] = set()
    ascending = sorted(p_values, key=p_values.__getitem__)
    for tests_left, key in zip(range(len(p_values), 0, -1), ascending, strict=True):
        if p_values[key] * tests_left >= level:
            break
        significant.add(key)
    return significant


def shown(estimate: Estimate) -> str:
    """Write the mean with its interval."""
    mean, low, high, _ = estimate
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def difference(of: Sequence[Record], over: Sequence[Record], measure: str) -> Estimate:
    """Estimate the paired difference of two arms' runs, seed by seed, by Student's t."""
    values = [{run["seed"]: run["scores"][measure] for run in runs} for runs in (of, over)]
    assert values[0].keys() == values[1].keys()
    return student([values[0][seed] - values[1][seed] for seed in sorted(values[0])])


def of_arm(records: Sequence[Record], **facts: Any) -> list[Record]:
    """Choose the runs whose entries are `facts`."""
    return [run for run in records if all(run[key] == value for key, value in facts.items())]


@dataclass(frozen=True)
class MixtureRow:
    """Debiased against random batches on a mixture with all of its records.

    Attributes:
        rates: the common grid.
        records: of the mixture.
    """

    name: str
    says: str
    rates: Sequence[float]
    records: Sequence[Record]

    @property
    def is_whole(self) -> bool:
        """Ask whether both arms have runs at every rate."""
        runs = {(run["arm"], run["rate"]) for run in self.records}
        return len(runs) == 2 * len(self.rates)

    @cached_property
    def rate(self) -> float:
        """Choose the rate that random batches prefer on the validation photographs."""
        scores = mean_scores(self.records, "validation", arm="random")
        return max(scores, key=scores.__getitem__)

    @property
    def measures(self) -> list[str]:
        return [name for name in SHOWN if name in self.records[0]["scores"]]

    def estimate(self, measure: str, rate: float | None = None) -> Estimate:
        """Estimate debiased minus random at a rate, by default at the verdict's."""
        at = self.rate if rate is None else rate
        debiased, random = (
            of_arm(self.records, arm=arm, rate=at) for arm in ("debiased", "random")
        )
        return difference(debiased, random, measure)


def mixture_rows(records: Sequence[Record], protocol: dict[str, Any]) -> list[MixtureRow]:
    """List the mixtures that are measured at all rates, in the protocol's order."""
    settings = protocol["debiased"]
    rows = [
        MixtureRow(name, given["says"], settings["rates"], of_arm(records, data=name))
        for name, given in settings["mixtures"].items()
    ]
    return [row for row in rows if row.is_whole]


def mixtures_table(rows: Sequence[MixtureRow], protocol: dict[str, Any]) -> str:
    """Show differences at each mixture's rate with the primaries' two facts, bold where they stand after Holm's correction."""
    p_values = {(row.name, name): row.estimate(name).p for row in rows for name in PRIMARIES}
    standing = holm(p_values)
    lines = []
    for row in rows:
        cells = [row.says, f"{row.rate:g}"]
        for name in SHOWN[:3]:
            if name not in row.measures:
                cells.append("")
                continue
            estimate = row.estimate(name)
            cell = shown(estimate)
            if name in PRIMARIES:
                bold = "**" if (row.name, name) in standing else ""
                cell = f"{bold}{cell}{bold}<br>{verdict(estimate, protocol['margin'])}"
            cells.append(cell)
        lines.append(cells)
    header = ["two sources", "rate", "clean photographs", "one pool", "across"]
    return markdown_table(header, lines)


def rates_table(rows: Sequence[MixtureRow], signs: Sequence[Record]) -> str:
    """Show mean differences at each rate of the grid, and what was known of a mixture before its trainings."""
    known = {sign["data"]: sign for sign in signs}
    lines = []
    for row in rows:
        cells = [row.name]
        for name in PRIMARIES:
            cells += [f"{row.estimate(name, rate).mean:+.1f}" for rate in row.rates]
        cells.append(f"{row.estimate('unseen').mean:+.1f}")
        sign = known[row.name]
        cells += [f"{sign['picture']:.0f}", f"{sign['caption']:.0f}"]
        lines.append(cells)
    rates = [f"{rate:g}" for rate in rows[0].rates] if rows else []
    header = [
        "mixture",
        *(f"clean, {rate}" for rate in rates),
        *(f"pool, {rate}" for rate in rates),
    ]
    header += ["unseen", "picture probe %", "caption probe %"]
    return markdown_table(header, lines)


def rank_correlations(rows: Sequence[MixtureRow], signs: Sequence[Record]) -> dict[str, float]:
    """Correlate each measure's difference with the sign, by Spearman's ranks, over the mixtures that have it."""
    known = {sign["data"]: sign["sign"] for sign in signs}
    correlations = {}
    for measure in ("clean", "pool", "cross"):
        having = [row for row in rows if measure in row.measures]
        values = [row.estimate(measure).mean for row in having]
        correlations[measure] = float(
            spearmanr([known[row.name] for row in having], values).statistic
        )
    return correlations


def batch_table(records: Sequence[Record], protocol: dict[str, Any]) -> str:
    """Show mean recall of each arm at its best rate and at the neighbours, and the difference to 16.

    An arm is a row once its best rate lies inside its grid.
    """
    settings = protocol["batch"]["arms"]
    arms = [
        arm
        for arm in sorted(
            settings, key=lambda arm: (settings[arm].get("longer", 1), settings[arm]["batch"])
        )
        if (scores := mean_scores(records, "validation", arm=arm))
        and next_rate(scores, protocol["ladder"]) is None
    ]
    best = {arm: best_rate(records, arm) for arm in arms}
    smallest = of_arm(records, arm=SMALLEST, rate=best[SMALLEST])
    p_values = {
        arm: difference(of_arm(records, arm=arm, rate=best[arm]), smallest, "clean").p
        for arm in arms
        if arm != SMALLEST
    }
    standing = holm(p_values)
    lines = []
    for arm in arms:
        runs = of_arm(records, arm=arm, rate=best[arm])
        scores = mean_scores(records, "clean", arm=arm)
        grid = sorted(scores)
        place = grid.index(best[arm])
        around = [
            f"{scores[grid[index]]:.1f}" if 0 <= index < len(grid) else ""
            for index in (place - 1, place, place + 1)
        ]
        cells = [arm, f"{runs[0]['samples']:,}", f"{fmean(run['cpu_seconds'] for run in runs):.1f}"]
        cells += [f"{best[arm]:g}", *around]
        if arm == SMALLEST:
            cells.append("")
        else:
            estimate = difference(runs, smallest, "clean")
            bold = "**" if arm in standing else ""
            facts = verdict(estimate, protocol["margin"])
            cells.append(f"{bold}{shown(estimate)}{bold}, {facts}")
        lines.append(cells)
    header = [
        "batch",
        "samples",
        "CPU s",
        "best rate",
        "a step lower",
        "mean recall",
        "a step higher",
    ]
    return markdown_table([*header, "minus 16"], lines)


def accumulation_table(records: Sequence[Record], protocol: dict[str, Any]) -> str:
    """Compare open_clip's `--accum-freq` with DGA in each setting that has all its runs, at the rate that DGA prefers."""
    given = protocol["accumulation"]
    whole: dict[str, tuple[float, list[Record]]] = {}
    for setting in given["settings"]:
        runs = of_arm(records, **setting)
        rates = given["rates"][setting["optimizer"]]
        if len(runs) == 2 * len(rates) * len(given["seeds"]):
            scores = mean_scores(runs, "validation", arm="dga")
            clip = "" if setting["clip"] is None else f", clip {setting['clip']:g}"
            name = f"{NAMES[setting['optimizer']]}, K = {setting['K']}{clip}"
            whole[name] = max(scores, key=scores.__getitem__), runs
    estimates = {
        name: difference(
            of_arm(runs, arm="accum-freq", rate=rate), of_arm(runs, arm="dga", rate=rate), "clean"
        )
        for name, (rate, runs) in whole.items()
    }
    standing = holm({name: estimate.p for name, estimate in estimates.items()})
    lines = []
    for name, (rate, runs) in whole.items():
        bold = "**" if name in standing else ""
        cells = [name, f"{rate:g}"]
        for arm in ("dga", "accum-freq"):
            by_rate = mean_scores(runs, "clean", arm=arm)
            cells.append(" / ".join(f"{by_rate[each]:.1f}" for each in sorted(by_rate)))
            cells.append(f"{fmean(run['cpu_seconds'] for run in of_arm(runs, arm=arm)):.0f}")
        facts = verdict(estimates[name], protocol["margin"])
        lines.append([*cells, f"{bold}{shown(estimates[name])}{bold}, {facts}"])
    header = ["setting", "rate", "DGA, by rate", "CPU s", "--accum-freq, by rate", "CPU s"]
    return markdown_table([*header, "--accum-freq - DGA"], lines)


def end_to_end_records() -> list[Record]:
    """Read the pilots and the runs of the program end to end."""
    files = sorted([*RECORDS.glob("pilot-*.json"), *RECORDS.glob("run-*.json")])
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def common_rates_table(records: Sequence[Record]) -> str:
    """Compare debiased (C) with random (B) batches end to end at each common rate, with a verdict where all seeds are there."""
    protocol = yaml.safe_load((RECORDS / "protocol.yaml").read_text(encoding="utf-8"))
    settings, measure = protocol["common_rates"], "flickr8k_mean_recall"
    lines = []
    for rate in settings["grid"]:
        pilots, runs = [], []
        for arm in "BC":
            at_rate = of_arm(records, arm=arm, rate=rate)
            pilots += [f"{run['scores'][measure]:.1f}" for run in at_rate if run["pilot"]] or ["-"]
            runs.append(
                {run["seed"]: run["scores"][measure] for run in at_rate if not run["pilot"]}
            )
        random, debiased = runs
        pairs = [(random[seed], debiased[seed]) for seed in sorted(random.keys() & debiased.keys())]
        estimate = student([c - b for b, c in pairs], settings["confidence"])
        means = [f"{fmean(values):.1f}" for values in zip(*pairs, strict=True)] or ["", ""]
        cell = shown(estimate) if len(pairs) > 1 else ""
        if len(pairs) == len(protocol["runs"]["seeds"]):
            cell += f", {verdict(estimate, settings['margin'])}"
        lines.append([f"{rate:g}", " / ".join(pilots), str(len(pairs)), *means, cell])
    return markdown_table(["rate", "pilots, B / C", "seeds", "B", "C", "C - B"], lines)


def best_rate(records: Sequence[Record], arm: str) -> float:
    """Choose the rate with the best mean recall on the validation photographs."""
    scores = mean_scores(records, "validation", arm=arm)
    return max(scores, key=scores.__getitem__)


def draw(rows: Sequence[MixtureRow]) -> bytes:
    """Draw debiased minus random by mixture: clean, across, one pool, with their intervals."""
    figure = new_figure(8, 0.45 * len(rows) + 1.2)
    axes = figure.add_subplot()
    plain_axes(axes)
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=FAINT, linewidth=1)
    labels = {"clean": "clean photographs", "cross": "across the styles", "pool": "one pool"}
    for number, (measure, label) in enumerate(labels.items()):
        having = [(place, row) for place, row in enumerate(rows) if measure in row.measures]
        estimates = [row.estimate(measure) for _, row in having]
        axes.errorbar(
            [estimate.mean for estimate in estimates],
            [-place + 0.2 * (1 - number) for place, _ in having],
            xerr=[
                [estimate.mean - estimate.low for estimate in estimates],
                [estimate.high - estimate.mean for estimate in estimates],
            ],
            fmt="os^"[number],
            color=MODEL_COLOURS[(1, 2, 0)[number]],
            markersize=5,
            label=label,
        )
    axes.set_yticks([-place for place in range(len(rows))], [row.says for row in rows], fontsize=9)
    axes.set_xlabel("debiased - random, points of mean recall (95 %, ten seeds)", fontsize=9)
    figure.legend(frameon=False, fontsize=9, loc="outside upper center", ncols=3)
    return png_bytes(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, metavar="PAGE", help="write its sections and the figure"
    )
    page = parser.parse_args().out
    protocol = read_protocol()
    sections = tables(protocol)
    for name, table in sections.items():
        print(f"\n{name}\n\n{table}")
        if page is not None:
            replace_section(page, name, table)
    rows = mixture_rows(read_records("debiased"), protocol)
    print("\nrank correlations with the sign:", rank_correlations(rows, read_records("signs")))
    if page is not None and rows:
        write_atomically(FIGURE, draw(rows))


def replace_section(page: Path, name: str, table: str) -> None:
    """Put a table between a page's marks `<!-- NAME -->` and `<!-- /NAME -->`."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    head, rest = page.read_text(encoding="utf-8").split(begin, 1)
    _, tail = rest.split(end, 1)
    page.write_text(f"{head}{begin}\n{table}\n{end}{tail}", encoding="utf-8")


def tables(protocol: dict[str, Any]) -> dict[str, str]:
    """Make the table of each section of the page that has records."""
    made = {}
    for start in protocol["batch"]["starts"]:
        if records := read_records(f"batch-{start}"):
            made[f"batch-{start}"] = batch_table(records, protocol)
    if records := read_records("accumulation"):
        made["accumulation"] = accumulation_table(records, protocol)
    if rows := mixture_rows(read_records("debiased"), protocol):
        made["mixtures"] = mixtures_table(rows, protocol)
        made["mixtures by rate"] = rates_table(rows, read_records("signs"))
    stages = protocol | protocol["stages"]
    if rows := mixture_rows(read_records("stages-debiased"), stages):
        made["stages, mixtures"] = mixtures_table(rows, stages)
    if records := read_records("stages-batch"):
        made["stages, batch"] = batch_table(records, stages)
    made["common rates"] = common_rates_table(end_to_end_records())
    return made


if __name__ == "__main__":
    main()
