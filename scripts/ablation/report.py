"""docs/results/emoji.md, its figure and `rows.csv`, from the records of the runs.

    python -m scripts.ablation.report     # `make ablation`

`docs/results/runs.json` holds all records. `results.md.j2` holds the words of the page around the numbers, so that whoever
changes a number reads them again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.report.tables import markdown_table
from open_clip_zerovl.report.verdicts import (
    HIGHER,
    LOWER,
    NEAR_CHANCE,
    NO_DIFFERENCE,
    UNDECIDED,
    verdict,
)
from scripts.ablation.figures import main_effects
from scripts.ablation.protocol import CHANCE, LEAST_SEEDS, MARGIN_RSUM, read_pilots
from scripts.ablation.rows import (
    HELD_OUT,
    Records,
    Row,
    as_csv,
    other_sources,
    read_records,
    rows_of,
    standing,
)


class Page:
    """The names that `results.md.j2` uses beside `rows`."""

    def __init__(self, records: Records, rows: Sequence[Row], folder: Path) -> None:
        self.rows = rows
        self.records = [record for by_seed in records.values() for record in by_seed.values()]
        scores = [row for row in rows if row.decides and row.measure in ("score", HELD_OUT)]
        self.scores = [row for row in scores if len(row.values) >= LEAST_SEEDS]
        self.decided = [row for row in self.scores if row.verdict in (HIGHER, LOWER, NO_DIFFERENCE)]
        self.standing = standing(rows)
        self.replay, self.raw_probe = (
            read_list(folder / name) for name in ("replay.json", "raw-probe.json")
        )
        self.pilots = read_pilots()
        self.seeds = [len(by_seed) for by_seed in records.values() if by_seed]

    def row(self, run: str, against: str, measure: str = "score") -> Row:
        """The row of a comparison's measure; the measure "score" is of the held-out pairs if not all were scored."""
        measures = ("score", HELD_OUT) if measure == "score" else (measure,)
        return next(
            row for row in self.rows if row.name == f"{run} - {against}" and row.measure in measures
        )

    def line(self, label: str, run: str, against: str, measure: str = "score") -> str:
        """A line of the main table: label, difference with interval, seeds, verdict (bold: also by Holm), the paper."""
        row = self.row(run, against, measure)
        paper = f"{row.papers_words}: {row.beside_paper or 'open'}" if row.papers_words else ""
        word = f"**{row.verdict}**" if row in self.standing else row.verdict
        return f"| {label} | {row.words} | {len(row.values)} | {word} | {paper} |"

    @property
    def mixtures(self) -> str:
        """A table of mixtures: the signs that can be read before a training, and the gain of debiased batches."""
        header = ("trained on", "pictures", "captions", "other sources", "gain, RSUM")
        lines = []
        for one in self.raw_probe:
            row = self.row(one["run"], one["against"])
            shares = [f"{100 * one[key]:.0f} %" for key in ("pictures", "captions", "other_source")]
            lines.append((one["mixture"], *shares, row.judged))
        return markdown_table(header, lines)

    def other_sources(self, run: str, against: str) -> str:
        """`-9 to +35`, the interval for other sources."""
        found = other_sources(self.row(run, against).by_source)
        return f"{found.low:+.0f} to {found.high:+.0f}"

    def sources(self, run: str, against: str) -> dict[str, str]:
        """Unseen source -> its mean difference."""
        return {
            name: f"{sum(of) / len(of):+.0f}"
            for name, of in self.row(run, against).by_source.items()
        }

    def cpu(self, run: str, against: str) -> float:
        """CPU time of a condition's runs over that of another's."""
        times = {
            name: sum(one["cpu_seconds"] for one in self.records if one["condition"] == name)
            for name in (run, against)
        }
        return times[run] / times[against]

    def last_losses(self, condition: str) -> str:
        """`4.7 to 5.1`, the last point of the loss curves of a condition's runs."""
        losses = [one["loss_curve"][-1][1] for one in self.records if one["condition"] == condition]
        return f"{min(losses):.1f} to {max(losses):.1f}"

    @property
    def families(self) -> str:
        """`Table 4 (1), Figure 3 (5)`, the tables of the rows that stand as one family of tests."""
        counts = Counter(row.table.name for row in self.standing)
        return ", ".join(f"{name} ({count})" for name, count in counts.items())

    def bias(self, epoch: int, dropout: float) -> str:
        """`14 % (chance 9 %)`, the bias of the gradient without replayed masks, beyond the chance of so many draws."""
        one = next(one for one in self.replay if (one["epoch"], one["dropout"]) == (epoch, dropout))
        return f"{100 * one['bias']:.0f} % (chance {100 * one['chance']:.0f} %)"

    @property
    def by_first_protocol(self) -> tuple[int, int]:
        """(rows with another word by the protocol as first committed, rows that have both): held-out pairs, no near chance."""
        held_out = {(row.name, row.table.name): row for row in self.rows if row.measure == HELD_OUT}
        both = [(row, held_out.get((row.name, row.table.name), row)) for row in self.scores]
        words = [
            (
                row.verdict,
                verdict(first.found, len(first.values), first.margin, least_seeds=LEAST_SEEDS),
            )
            for row, first in both
        ]
        return sum(now.replace(NEAR_CHANCE, UNDECIDED) != then for now, then in words), len(words)


def read_list(path: Path) -> list[dict[str, Any]]:
    """The entries of a JSON list of measurements; empty where it was not made."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def summary(rows: Sequence[Row]) -> str:
    """A line for each comparison that has runs, and the names of those without."""
    shown = [row for row in rows if row.decides]
    cells = [
        (
            row.table.name,
            row.comparison.what,
            row.name,
            row.measure,
            row.words,
            str(len(row.values)),
            row.verdict,
        )
        for row in shown
        if row.values
    ]
    waiting = [row.name for row in shown if not row.values]
    table = markdown_table(
        ("table", "what", "runs", "measure", "difference", "seeds", "verdict"), cells
    )
    return f"{table}\n\nNot run yet: {'; '.join(waiting)}." if waiting else table


def write_rows(records: Records, folder: Path) -> list[Row]:
    """Write `rows.csv`; return the rows."""
    rows = rows_of(records)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "rows.csv", as_csv(rows))
    return rows


def write_page(records: Records, page: Path) -> list[Row]:
    """Write the page, its figure, `runs.json` and `rows.csv`; return the rows."""
    folder = page.parent
    rows = write_rows(records, folder)
    shown = Page(records, rows, folder)
    write_atomically(
        folder / "runs.json", "[\n" + ",\n".join(map(json.dumps, shown.records)) + "\n]\n"
    )
    write_atomically(folder / "main.png", main_effects(shown.row))
    template = Template(
        Path(__file__).with_name("results.md.j2").read_text(encoding="utf-8"), keep_trailing_newline=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    hours = sum(one["cpu_seconds"] for one in shown.records) / 3600
    text = template.render(page=shown, chance=CHANCE, margin=round(MARGIN_RSUM), cpu_hours=hours)
    write_atomically(page, text)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("docs/results/runs.json"),
        help="a runs.json, or a folder of the runs' JSONs (default %(default)s)",
    )
    parser.add_argument(
        "--page", type=Path, default=Path("docs/results/emoji.md"), help="default %(default)s"
    )
    arguments = parser.parse_args(argv)
    try:
        rows = write_page(read_records(arguments.runs), arguments.page)
    except UserError as error:
        print(f"ablation_report: error: {error}", file=sys.stderr)
        return 2
    print(summary(rows))
    print(f"\nWritten: {arguments.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
