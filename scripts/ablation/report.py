"""docs/results.md and its figures, from the JSONs that `run.py` wrote.

    python -m scripts.ablation.report [--runs ablation] [--page docs/results.md] [--quick]

The folder of the page's name holds the figures and `runs.json`, all records in one file, which makes the same page again:
`--runs docs/results/runs.json`. Every verdict follows from the numbers by the rule in `judge`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.bias.pools import POOLS
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import write_atomically
from scripts.ablation.conditions import CONDITIONS, TABLES, Claim, Comparison, PaperTable
from scripts.ablation.figures import table_figure

Record = Mapping[str, Any]
Records = Mapping[str, Mapping[int, Record]]  # by condition and seed

REPRODUCED, INVISIBLE, CONTRADICTED = "reproduced in direction", "not visible at this scale", "contradicted"
REPRODUCED_SAME = "reproduced: no difference to be seen"
NO_VERDICT, NOT_RUN = "no verdict from one seed", "not run"

# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


def read_records(path: Path) -> Records:
    """The records of a folder of JSONs, or of a `runs.json`.

    Raises:
        UserError: no records, or runs of different lengths or splits, which cannot be compared.
    """
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    else:
        found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(path.glob("*-seed*.json"))]
    found = [record for record in found if record["condition"] in CONDITIONS]
    if not found:
        raise UserError(f"there is no finished run in {path}; make them with `make ablation`")
    kinds = {(record["epochs"], record["split"]) for record in found}
    if len(kinds) > 1:
        raise UserError(f"{path} holds runs of several lengths or splits, {sorted(kinds)}; train them alike")
    return {
        name: {record["seed"]: record for record in sorted(found, key=lambda one: one["seed"]) if record["condition"] == name}
        for name in CONDITIONS
    }  # fmt: skip


def value_of(record: Record, measure: str) -> float:
    """A pool's RSUM; "rsum", the mean of within and across by which rows are judged; or another number of the record."""
    if measure == "rsum":
        return (record["rsum"]["within"] + record["rsum"]["across"]) / 2
    return record["rsum"][measure] if measure in POOLS else record[measure]


# ---------------------------------------------------------------------------------------------------------------------
# The rule
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """The verdict on a comparison: means over the seeds that both have, and the larger of their spreads (max - min)."""

    verdict: str
    seeds: int
    run: float = float("nan")
    against: float = float("nan")
    spread: float = float("nan")

    @property
    def difference(self) -> float:
        return self.run - self.against


def judge(claim: Claim, run: Mapping[int, float], against: Mapping[int, float]) -> Judgement:
    """Whether two conditions reproduce the paper's claim, from their values by seed.

    A difference counts if it exceeds the spread, the larger of the two ranges over seeds.

        claim              within the spread    beyond it, the paper's sign    beyond it, the other sign
        higher, lower      not visible          reproduced                     contradicted
        different          not visible          reproduced                     reproduced
        same               reproduced           contradicted                   contradicted
    """
    seeds = sorted(run.keys() & against.keys())
    if not seeds:
        return Judgement(NOT_RUN, 0)
    ours, theirs = [run[seed] for seed in seeds], [against[seed] for seed in seeds]
    mean, other = sum(ours) / len(seeds), sum(theirs) / len(seeds)
    if len(seeds) == 1:
        return Judgement(NO_VERDICT, 1, mean, other)
    spread = max(max(ours) - min(ours), max(theirs) - min(theirs))
    difference = mean - other
    if claim == "same":
        verdict = REPRODUCED_SAME if abs(difference) <= spread else CONTRADICTED
    elif abs(difference) <= spread:
        verdict = INVISIBLE
    elif claim == "different":
        verdict = REPRODUCED
    else:
        verdict = REPRODUCED if (difference > 0) == (claim == "higher") else CONTRADICTED
    return Judgement(verdict, len(seeds), mean, other, spread)


def judged(records: Records, comparison: Comparison) -> Judgement:
    """`judge` on the records of a comparison."""
    run, against = (
        {seed: value_of(record, comparison.measure) for seed, record in records[name].items()}
        for name in (comparison.run, comparison.against)
    )
    return judge(comparison.claim, run, against)


# ---------------------------------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; columns of numbers are aligned to the right."""
    numbers = [all(row[i][:1] in "-0123456789" for row in rows) for i in range(len(header))]
    rule = ["--:" if right else "---" for right in numbers]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


def mean_and_range(values: Sequence[float], digits: int = 1) -> str:
    """`231.4 (225.0-240.1)`, one value alone, or a dash."""
    if not values:
        return "-"
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def papers_words(comparison: Comparison) -> str:
    """The paper's numbers of both runs and their difference."""
    if comparison.paper is None:
        return "bars, no numbers"
    run, against = comparison.paper
    if comparison.measure == "cpu_seconds":
        return f"{against[0]:.0f} -> {run[0]:.0f} GPU h (x {run[0] / against[0]:.2f})"
    pairs = zip(("COCO", "F30K"), run, against, strict=True)
    return ", ".join(f"{name} {b:.1f} -> {a:.1f} ({a - b:+.1f})" for name, a, b in pairs)


def our_words(comparison: Comparison, judgement: Judgement) -> str:
    """Our numbers of both runs and their difference."""
    if not judgement.seeds:
        return "-"
    if comparison.measure == "cpu_seconds":
        ratio = judgement.run / judgement.against
        return f"{judgement.against:.0f} -> {judgement.run:.0f} CPU s (x {ratio:.2f})"
    return f"{judgement.against:.1f} -> {judgement.run:.1f} ({judgement.difference:+.1f})"


def sentence(comparison: Comparison, judgement: Judgement) -> str:
    """A comparison as a sentence."""
    run, against = CONDITIONS[comparison.run].label, CONDITIONS[comparison.against].label
    head = f"{comparison.what} (*{run}* against *{against}*)"
    if not judgement.seeds:
        return f"{head}: not run."
    unit = "CPU seconds" if comparison.measure == "cpu_seconds" else "RSUM"
    said = {
        "higher": f"the paper has more {unit if unit == 'RSUM' else 'GPU hours'}",
        "lower": f"the paper has less {unit if unit == 'RSUM' else 'GPU hours'}",
        "same": "the paper has nearly the same",
        "different": "the paper finds a difference",
    }[comparison.claim]
    spread = f", with a seed spread of {judgement.spread:.1f}" if judgement.seeds > 1 else ""
    return f"{head}: {judgement.difference:+.1f} {unit}{spread}; {said}: **{judgement.verdict}**."


HOW = """\
## How to read it

- **RSUM** is the sum of recall at 1, 5 and 10 in both directions, 0 to 600, on held-out pairs of the test split; the
  hyperparameters are those of `make demo`, chosen on validation, the same for every row.
- *within*: pictures and captions of one source (mean over the four); *across*: pictures of one source, captions of
  the same concepts in another (mean over twelve pairs); *mixed*: all sources in one pool. A model that knows the query's
  source has to search a quarter of the mixed pool only, so bias raises that number.
- The paper's numbers are zero-shot RSUM on COCO and Flickr30K, where knowing a source does not help. The nearest measure
  here is **the mean of within and across**, called RSUM below; verdicts use it alone, and it was chosen before any run.
- Cells are the mean over seeds (min-max). **Spread** is the larger of the two runs' max - min over seeds.
- **reproduced in direction**: the difference has the paper's sign and exceeds the spread. **not visible at this scale**: it
  lies within the spread. **contradicted**: it exceeds the spread with the other sign. Where the paper has nearly the same
  for both, a difference within the spread is reproduced and one beyond it contradicted; with a wide spread that says little.
  With three seeds, equal normal noise and no effect, 5 % of differences exceed the spread, half of them with the paper's sign.
- **probe**: accuracy in percent of a linear probe that guesses the source from an embedding; chance is 25 (50 in A.5).
  **log p**: its mean over negative pairs of the same and of another source (figure 4 of the paper).
- **CPU s**: CPU seconds of the training process(es) with start-up (about 8 s a process) and data loading; **samples/s**: from
  the first to the last logged step by wall-clock time, on a machine with other work."""


def introduction(records: Records) -> str:
    """What was run: seeds, epochs, samples, and time."""
    every = [record for by_seed in records.values() for record in by_seed.values()]
    seeds = sorted({record["seed"] for record in every})
    epochs, split = every[0]["epochs"], every[0]["split"]
    samples = sorted({record["samples"] for record in every})
    hours = sum(record["cpu_seconds"] for record in every) / 3600
    lines = [
        "# The paper's tables in miniature",
        "",
        "Made by `make ablation` (`scripts/ablation/run.py`, then `scripts/ablation/report.py`): do not edit. "
        "`python -m scripts.ablation.report --runs docs/results/runs.json` makes the same page.",
        "",
        f"{len(every)} runs of `training.main` on four emoji sets (docs/data.md), seeds {', '.join(map(str, seeds))}, {epochs} "
        f"epochs each ({samples[0]:,} to {samples[-1]:,} samples), on a CPU with one thread a process, {hours:.1f} CPU hours "
        f"in all. Retrieval is measured on the {split} split. No row is tuned, and none is left out.",
    ]
    if len(seeds) < 2:
        lines += ["", "**One seed only: differences are shown, but without a spread there is no verdict.**"]
    return "\n".join(lines)


def summary(records: Records) -> str:
    """One line for each comparison."""
    rows = []
    for table in TABLES:
        for one in table.comparisons:
            result = judged(records, one)
            spread = f"{result.spread:.1f}" if result.seeds > 1 else "-"
            what = f"{one.what} (*{CONDITIONS[one.run].label}* against *{CONDITIONS[one.against].label}*)"
            rows.append((table.name, what, our_words(one, result), spread, papers_words(one), result.verdict))
    return markdown_table(("table", "what", "RSUM here", "spread", "the paper", "verdict"), rows)


def conditions_table(records: Records, names: Sequence[str]) -> str:
    """One line for each condition, with all that was measured."""
    rows = []
    for name in names:
        runs = list(records[name].values())
        cells = [mean_and_range([value_of(run, key) for run in runs]) for key in (*POOLS, "rsum")]
        probes = [mean_and_range([100 * run[key] for run in runs], 0) for key in ("probe_images", "probe_texts")]
        log_p = [mean_and_range([run[f"log_p_{key}_source"] for run in runs]) for key in ("same", "other")]
        speed = mean_and_range([run["samples_per_second"] for run in runs if run["samples_per_second"]], 0)
        cpu = mean_and_range([run["cpu_seconds"] for run in runs], 0)
        rows.append((CONDITIONS[name].label, *cells, *probes, *log_p, cpu, speed))
    header = (
        "run", *POOLS, "RSUM", "probe images %", "probe texts %", "log p same", "log p other", "CPU s", "samples/s",
    )  # fmt: skip
    return markdown_table(header, rows)


def section(records: Records, table: PaperTable, folder: Path) -> str:
    """The page's section on a table of the paper: setting, measurements, comparisons, figure. Draws the figure's file."""
    picture = folder / f"{table.name.lower().replace(' ', '-').replace('.', '')}.png"
    write_atomically(picture, table_figure(table, records))
    comparisons = [(one, judged(records, one)) for one in table.comparisons]
    return "\n\n".join(
        [
            f"## {table.name}: {table.title}",
            table.setting,
            conditions_table(records, table.conditions),
            "\n".join(f"- {sentence(one, result)} The paper: {papers_words(one)}." for one, result in comparisons),
            f"![{table.name}]({folder.name}/{picture.name})",
        ]
    )


def write_page(records: Records, page: Path) -> str:
    """Write the page, its figures and `runs.json`; return the summary."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for by_seed in records.values() for record in by_seed.values()]
    write_atomically(folder / "runs.json", "[\n" + ",\n".join(lines) + "\n]\n")
    overview = summary(records)
    parts = [introduction(records), overview, HOW, *(section(records, table, folder) for table in TABLES)]
    write_atomically(page, "\n\n".join(parts) + "\n")
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
