"""docs/results.md and its figures, from the JSONs that `run.py` wrote.

    python -m scripts.ablation.report [--runs ablation] [--page docs/results.md] [--quick]

The folder of the page's name holds the figures and `runs.json`, all records in one file, which makes the same page again:
`--runs docs/results/runs.json`. What `replay.py` has written to `replay.json` there is on the page too. Every verdict follows
from the numbers by the rule in `verdicts.judge`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.pools import POOLS
from open_clip_zerovl.report.tables import markdown_table
from scripts.ablation.comparisons import TABLES, Comparison, PaperTable
from scripts.ablation.conditions import CONDITIONS
from scripts.ablation.figures import Row, differences_figure, rows_figure
from scripts.ablation.protocol import ALL_UNSEEN, CHOICES, CONFIDENCE, MARGIN_RSUM, Choices, read_choices, read_pilots
from scripts.ablation.replay import REPLAY_FILE, replay_section
from scripts.ablation.unseen import CHANCE, POOL
from scripts.ablation.verdicts import (
    BETTER,
    CONTRADICTED,
    LEAST_SEEDS,
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
    interval,
    judge,
)
from scripts.emoji.runs import flag_values

Record = Mapping[str, Any]
Records = Mapping[str, Mapping[int, Record]]  # by condition and seed

# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


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
    found = [
        record for record in found if record["condition"] in CONDITIONS and isinstance(record.get("choices"), dict)
    ]
    if not found:
        raise UserError(f"there is no finished run in {path}; make them with `make ablation`")
    settings = [{**record["choices"], "split": record["split"]} for record in found]
    for name in {name for one in settings for name in one}:
        if len(values := {one[name] for one in settings if name in one}) > 1:
            raise UserError(f"{path} holds runs with several values of {name}, {sorted(values)}; train them alike")
    chosen = read_choices()
    for record in found:
        _check_settings(record, path, chosen)
    return {
        name: {record["seed"]: record for record in sorted(found, key=lambda one: one["seed"]) if record["condition"] == name}
        for name in CONDITIONS
    }  # fmt: skip


def _check_settings(record: Record, path: Path, chosen: Choices) -> None:
    condition = CONDITIONS[record["condition"]]
    choices = {**chosen, **record["choices"]}  # a setting may have become a choice after the run
    today = flag_values(condition.run_flags(choices)) | {
        "--sampling": [condition.sampling],
        "--epochs": [str(condition.run_epochs(choices))],
    }
    then = flag_values(record["flags"])
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


def judged(records: Records, comparison: Comparison, table: PaperTable, held_out: bool = False) -> Verdict:
    """`verdicts.judge` on the records of a comparison; what the paper does not claim is better or worse.

    Args:
        held_out: judge by the held-out pairs of the unseen source alone.
    """
    found = _judged(records, comparison, held_out)
    if table.of_paper:
        return found
    ours = {word: _NOT_OF_PAPER.get(word, word) for word in (found.verdict, found.by_seeds)}
    return replace(found, verdict=ours[found.verdict], by_seeds=ours[found.by_seeds])


_NOT_OF_PAPER = {REPRODUCED: BETTER, CONTRADICTED: WORSE}


def paired(records: Records, comparison: Comparison) -> dict[int, tuple[Record, Record]]:
    """Seed -> both records of a comparison, of the seeds that both conditions have."""
    runs, others = records[comparison.run], records[comparison.against]
    return {seed: (runs[seed], others[seed]) for seed in sorted(runs.keys() & others.keys())}


def scores(records: Records, comparison: Comparison, held_out: bool = False) -> dict[int, tuple[float, float]]:
    """Seed -> the scores of both conditions, of the same pairs: see `on_all_pairs`."""
    pairs = paired(records, comparison)
    if CONDITIONS[comparison.run].score != "unseen":
        return {seed: (run["score"], against["score"]) for seed, (run, against) in pairs.items()}
    chosen = [] if held_out else on_all_pairs(records, comparison)
    key, seeds = (ALL_UNSEEN, chosen) if chosen else ("unseen", [*pairs])
    return {seed: (pairs[seed][0]["rsum"][key], pairs[seed][1]["rsum"][key]) for seed in seeds}


def on_all_pairs(records: Records, comparison: Comparison) -> list[int]:
    """The seeds whose runs were both scored on all pairs of their unseen source (`unseen.py`), where they are enough.

    Else none, and all seeds are compared on the held-out pairs.
    """
    pairs = paired(records, comparison)
    seeds = [seed for seed, pair in pairs.items() if all(ALL_UNSEEN in one["rsum"] for one in pair)]
    return seeds if len(seeds) >= min(LEAST_SEEDS, len(pairs)) else []


def _judged(records: Records, comparison: Comparison, held_out: bool = False) -> Verdict:
    pairs = paired(records, comparison)
    if comparison.measure == "score":
        found = scores(records, comparison, held_out)
        ours, theirs = ({seed: pair[side] for seed, pair in found.items()} for side in (0, 1))
        return judge(comparison.claim, ours, theirs, comparison.margin, unseen_of(pairs), CHANCE + 2 * MARGIN_RSUM)
    ratios = {seed: reach(run, against) for seed, (run, against) in pairs.items()}
    if any(math.isinf(ratio) for ratio in ratios.values()):  # no mean: what was not reached has no cost
        word = UNDECIDED if len(ratios) >= LEAST_SEEDS else TOO_FEW
        return Verdict(word, len(ratios), run=sum(map(math.isfinite, ratios.values())), by_seeds=word)
    return judge(comparison.claim, ratios, dict.fromkeys(ratios, 0.0), comparison.margin)


# ---------------------------------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------------------------------


def mean_and_range(values: Sequence[float | None], digits: int = 1) -> str:
    """`231.4 (225.0-240.1)`, one value alone, or a dash."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{sum(known) / len(known):.{digits}f}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.{digits}f}-{max(known):.{digits}f})"


def papers_words(comparison: Comparison) -> str:
    """The paper's numbers of both runs and their difference."""
    if comparison.paper is None:
        return "no numbers"
    run, against = comparison.paper
    if comparison.measure == "reach":
        return f"{against[0]:.0f} -> {run[0]:.0f} GPU h (x {run[0] / against[0]:.2f})"
    pairs = zip(("COCO", "F30K"), run, against, strict=True)
    return ", ".join(f"{name} {b:.1f} -> {a:.1f} ({a - b:+.1f})" for name, a, b in pairs)


def our_words(comparison: Comparison, verdict: Verdict) -> str:
    """The difference with its interval, of a comparison that has runs; "*" behind one that is over the unseen sources."""
    if comparison.measure == "reach":
        if math.isnan(verdict.difference):
            return f"the score is reached in {verdict.run:.0f} of {verdict.seeds} seeds"
        low, middle, high = (math.exp(value) for value in (verdict.low, verdict.difference, verdict.high))
        return f"x {middle:.2f} (x {low:.2f} to x {high:.2f})"
    if math.isinf(verdict.low):
        return f"{verdict.against:.1f} -> {verdict.run:.1f}: {verdict.difference:+.1f}"
    return f"{verdict.against:.1f} -> {verdict.run:.1f}: {verdict.difference:+.1f} {ends(verdict)}"


def ends(found: Verdict | Estimate) -> str:
    """`(+2.0 to +22.6)`, and "*" behind an interval that is over the unseen sources."""
    return f"({found.low:+.1f} to {found.high:+.1f}){'*' if found.by_source else ''}"


def p_words(verdict: Verdict) -> str:
    """`0.032`, or a dash."""
    if math.isnan(verdict.p):
        return "-"
    return "< 0.001" if verdict.p < 0.001 else f"{verdict.p:.3f}"


def verdict_words(verdict: Verdict) -> str:
    """The verdict, and where it is another one by Student's interval over the seeds, that one too."""
    other = verdict.by_seeds
    return verdict.verdict if other == verdict.verdict else f"{verdict.verdict} (over the seeds: {other})"


def here(records: Records, comparison: Comparison, verdict: Verdict) -> str:
    """`our_words`, and of which pairs where not of all."""
    return our_words(comparison, verdict) + of_which_pairs(records, comparison)


def of_which_pairs(records: Records, comparison: Comparison) -> str:
    """`, held-out pairs` where the scores are of these alone."""
    of_unseen = comparison.measure == "score" and CONDITIONS[comparison.run].score == "unseen"
    return ", held-out pairs" if of_unseen and not on_all_pairs(records, comparison) else ""


def label(comparison: Comparison) -> str:
    added = f"; added {comparison.added}" if comparison.added else ""
    return f"{comparison.what} (*{CONDITIONS[comparison.run].label}* against *{CONDITIONS[comparison.against].label}*{added})"


HOW = f"""\
## How to read it

- **Zero-shot means an unseen source**: COCO and Flickr30K are no source of the paper's training. A miniature has four
  sources; seed s is trained on three of them and scored within the fourth, source number s mod 4. A.4 and A.5 leave no
  source out.
- **The score** is RSUM, the sum of recall at 1, 5 and 10 in both directions, 0 to 600, over the training and test pairs of
  the unseen source in pools of {POOL} (800 to 4,400 pairs); a random order has {CHANCE:g}. In rows with "held-out pairs" at
  least one run was scored on the source's test pairs alone: 200 (emoji, a random order has 16) or 150 (icons, 21); few icons
  are above chance there. The pairs are the same in all runs, and the intervals do not speak of other pairs.
- **What is new in an unseen source**: on the emoji the style; every concept of its test pairs is in the training sets of
  the three others. On the icons the concepts too: 3 to 14 % of the test names are in another family. The text tower's
  vocabulary was made from the training captions of all four.
- **Paired by seed**: two conditions share initialisation and unseen source; the difference is taken seed by seed. With
  eight seeds every source is left out twice: the number is then the mean over the four sources, and the interval (marked *)
  comes from the spread between seeds of the same source. It speaks of these four sources. With fewer seeds, at least
  {LEAST_SEEDS}, it is Student's interval over the seeds, in which a source that is left out twice counts twice (of five
  seeds Noto or Game-icons). *By unseen source*: the mean difference of each, its seeds in parentheses. *Four sources as a
  sample*: Student's interval over the four means, for other sources. *Over the seeds*: Student's over all eight.
- **{NO_DIFFERENCE}**: the interval lies within {MARGIN_RSUM:g} RSUM of zero, a margin fixed beforehand.
  **{NEAR_CHANCE}**: it does, but neither score is {2 * MARGIN_RSUM:g} above a random order, so that there is little to
  differ in, on whichever side of zero. **{REPRODUCED}**: it lies on the paper's side of zero (or within the margin, where the
  paper has nearly the same). **{CONTRADICTED}**: on the other side. **{UNDECIDED}**: all else; more seeds or more sources
  would be needed. Rows that are not in the paper: **{BETTER}**, **{WORSE}**.
- **Chosen on validation**: learning rates of batches, the clusters and the length of the long runs, by pilot runs with two
  other seeds, which leave out Noto and OpenMoji (`scripts/ablation/choices.json`); each choice was committed before the runs
  that use it, but for Table 4's (see there). The towers were chosen with debiased batches ([models](models.md)); the other
  lengths, and the learning rate 1e-3 of rows that name none, were given. The end of a run is scored once (Table 8: each
  epoch); the held-out test pairs had served an earlier protocol too (three seeds, scored on the trained sources). The rules
  are in `scripts/ablation/protocol.py`.
- **Changed after results were seen**: the score counts all pairs since six seeds of the first rows were known (on the icons
  the held-out pairs were at the level of chance); the interval marked * came with it, before any row had eight seeds;
  "{NEAR_CHANCE}" came after the icons' rows. Rows that were added later say so.
- *within*, *across*, *mixed*: the same on the sources that were trained on. *within*: pictures and captions of one source;
  *across*: pictures of one, captions of the same concepts in another (emoji only); *mixed*: all in one pool, where a model
  that recognises sources has less to search. **probe**: accuracy in percent of a linear probe that guesses the source."""


def decided_rows(records: Records) -> dict[Comparison, tuple[PaperTable, Verdict]]:
    """The comparisons of scores that have enough seeds for an interval that counts."""
    rows = {one: (table, judged(records, one, table)) for table in TABLES for one in table.comparisons}
    return {one: row for one, row in rows.items() if one.measure == "score" and row[1].seeds >= LEAST_SEEDS}


def standing(records: Records) -> set[Comparison]:
    """The comparisons that differ from zero also as one of so many rows (Holm)."""
    return holm({one: verdict.p for one, (_, verdict) in decided_rows(records).items()})


def many_rows(records: Records) -> str:
    """How many intervals miss zero, how many would by chance, and which rows stand against the number of rows."""
    decided, kept = decided_rows(records), standing(records)
    missed = sum(verdict.low > 0 or verdict.high < 0 for _, verdict in decided.values())
    chance = (1 - CONFIDENCE) * len(decided)
    names = [f"{one.run} - {one.against} ({table.name})" for one, (table, _) in decided.items() if one in kept]
    return (
        f"- **Many rows**: each row is a test of its own. {missed} of {len(decided)} intervals miss zero; without any effect "
        f"about {chance:.1f} would, and rows that share runs err together. As one family of tests (Holm's correction, "
        f"{100 * (1 - CONFIDENCE):.0f} %) these rows differ from zero: {', '.join(names) or 'none'}."
    )


def held_out_rows(records: Records) -> str:
    """Which rows would have another verdict by the held-out pairs alone, the score before it counted all pairs."""
    rows = [
        (one, verdict.verdict, judged(records, one, table, held_out=True).verdict)
        for one, (table, verdict) in decided_rows(records).items()
        if CONDITIONS[one.run].score == "unseen" and on_all_pairs(records, one)
    ]
    others = [
        f"{one.run} - {one.against} ({there} in place of {here})"
        for one, here, there in rows
        if here != there and {here, there} != {UNDECIDED, NEAR_CHANCE}
    ]
    return (
        f"- **By the held-out pairs alone**, a sixth to a thirtieth of all, {len(others)} of {len(rows)} rows that have both "
        f"scores would have another verdict: {'; '.join(others) or 'none'}."
    )


def introduction(records: Records) -> str:
    """What was run: seeds, epochs, samples, and time; how far it has got."""
    every = [record for by_seed in records.values() for record in by_seed.values()]
    seeds = sorted({record["seed"] for record in every})
    hours = sum(record["cpu_seconds"] for record in every) / 3600
    days = sorted({record["started"][:10] for record in every})
    lines = [
        "# The paper's tables in miniature",
        "",
        "Made by `make ablation` (`scripts/ablation/run.py`, then `scripts/ablation/report.py`): do not edit. "
        "`python -m scripts.ablation.report --runs docs/results/runs.json` makes the same page.",
        "",
        f"{len(every)} runs of `training.main` on four emoji sets and four icon families ([datasets](datasets.md)), seeds "
        f"{', '.join(map(str, seeds))}, {' to '.join(days[:1] + days[1:][-1:])}, on a CPU with one thread "
        f"a process, {hours:.1f} CPU hours in all, "
        f"scored on the {every[0]['split']} split. No row is left out.",
    ]
    missing = [name for name in CONDITIONS if len(records[name]) < LEAST_SEEDS]
    if missing:
        lines += [
            "",
            f"**Not finished**: {len(missing)} of {len(CONDITIONS)} conditions have fewer than {LEAST_SEEDS} seeds.",
        ]
    return "\n".join(lines)


#: The page's first lines: what came out, and the verdicts that say so.
OUTCOMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Higher", (REPRODUCED, BETTER)),
    ("Lower, or against the paper", (CONTRADICTED, WORSE)),
    (f"No difference of {MARGIN_RSUM:g} RSUM", (NO_DIFFERENCE,)),
    ("Near chance, where little can be told", (NEAR_CHANCE,)),
    ("Undecided (numbers in the table below)", (UNDECIDED,)),
    (f"Fewer than {LEAST_SEEDS} seeds", (TOO_FEW,)),
)


def takeaways(records: Records) -> str:
    """The page's first lines: the comparisons with a headline that have runs, by outcome; and those on trained sources.

    An undecided one is named without its numbers: a mean alone says more than is known, and the table has the interval.
    """
    found: dict[str, list[str]] = {}
    kept = standing(records)
    for table in TABLES:
        for one in table.comparisons:
            verdict = judged(records, one, table)
            if one.headline and verdict.verdict != NOT_RUN:
                word = NO_DIFFERENCE if one.claim == "same" and verdict.verdict == REPRODUCED else verdict.verdict
                numbers = "" if word == UNDECIDED else f" {short_words(verdict)}{of_which_pairs(records, one)}"
                found.setdefault(word, []).append(one.headline + ("\u2020" if one in kept else "") + numbers)
    lines = [
        "## In short",
        "",
        "The main rows: differences of RSUM in a source that was not trained on (A.4 and A.5: in those that were), with 95 % "
        "intervals. \u2020: differs from zero also as one of all rows of this page (see *Many rows*).",
        "",
    ]
    for title, verdicts in OUTCOMES:
        if listed := [words for verdict in verdicts for words in found.get(verdict, ())]:
            lines.append(f"- **{title}**: {'; '.join(listed)}.")
    trained = [f"{data}: {on_trained_sources(records, one)}" for data, one in debiasing_rows(records)]
    if trained:
        lines.append(f"- **On the trained sources, debiased sampling over random**: {'; '.join(trained)}.")
    return "\n".join(lines)


def short_words(verdict: Verdict) -> str:
    """`+12.3 (+2.0 to +22.6)*`, and the verdict over the seeds where it is another one."""
    if math.isnan(verdict.low) or math.isinf(verdict.low):
        return f"{verdict.difference:+.1f}"
    other = "" if verdict.by_seeds == verdict.verdict else f", over the seeds {verdict.by_seeds}"
    return f"{verdict.difference:+.1f} {ends(verdict)}{other}"


def summary(records: Records) -> str:
    """One line for each comparison that has runs, and the names of the others."""
    rows, waiting = [], []
    for table in TABLES:
        for one in table.comparisons:
            result = judged(records, one, table)
            if result.verdict == NOT_RUN:
                waiting.append(f"{table.name}, {one.run} against {one.against}")
                continue
            words = (
                here(records, one, result),
                p_words(result),
                str(result.seeds),
                papers_words(one),
                verdict_words(result),
            )
            rows.append((table.name, label(one), *words))
    shown = markdown_table(("table", "what", "here", "p", "seeds", "the paper", "verdict"), rows)
    return f"{shown}\n\nNot run yet: {'; '.join(waiting)}." if waiting else shown


def by_unseen_source(records: Records, comparison: Comparison) -> str:
    """The mean difference of the scores for each unseen source, with its seeds: `noto -10.5 (2), twemoji +33.5 (1)`.

    With all four sources also Student's interval of their means, and where the row's own interval is another one, that over the
    seeds; "" where no source is left out.
    """
    sources = unseen_of(paired(records, comparison))
    if not sources:
        return ""
    differences = {seed: ours - theirs for seed, (ours, theirs) in scores(records, comparison).items()}
    found = grouped(differences, sources)
    means = {source: sum(values) / len(values) for source, values in sorted(found.items())}
    words = ", ".join(f"{source} {mean:+.1f} ({len(found[source])})" for source, mean in means.items())
    if len(means) < 4:
        return words
    _, low, high = interval([*means.values()])
    words += f"; four sources as a sample: {low:+.1f} to {high:+.1f}"
    if estimate(differences, sources).by_source:
        _, low, high = interval([*differences.values()])
        words += f"; over the seeds: {low:+.1f} to {high:+.1f}"
    return words


def pool_differences(records: Records, comparison: Comparison) -> dict[str, Estimate]:
    """Pool of the trained sources -> its difference; without pools that were not measured twice."""
    found = {}
    pairs = paired(records, comparison)
    for pool in POOLS:
        values = {seed: (run["rsum"].get(pool), against["rsum"].get(pool)) for seed, (run, against) in pairs.items()}
        differences = {seed: run - against for seed, (run, against) in values.items() if None not in (run, against)}
        if len(differences) > 1:
            found[pool] = estimate(differences, unseen_of(pairs))
    return found


def unseen_of(pairs: Mapping[int, tuple[Record, Record]]) -> dict[int, str]:
    """The unseen source of each seed; empty where no source is left out."""
    return {seed: run["unseen"] for seed, (run, _) in pairs.items() if run["unseen"] is not None}


def on_trained_sources(records: Records, comparison: Comparison) -> str:
    """`within +0.5 (-23.8 to +24.9), across ...`."""
    differences = pool_differences(records, comparison).items()
    return ", ".join(f"{pool} {found.mean:+.1f} {ends(found)}" for pool, found in differences)


def debiasing_rows(records: Records) -> list[tuple[str, Comparison]]:
    """The comparisons of debiased with random sampling that have two seeds: the emoji's, short and long, and the icons'."""
    emoji, icons = TABLES[0].comparisons
    (long,) = (
        one for table in TABLES for one in table.comparisons if one.run == "long-debiased" and not table.of_paper
    )
    rows = [("emoji", emoji), ("emoji, long", long), ("icons", icons)]
    return [(data, one) for data, one in rows if _judged(records, one).seeds > 1]


def debiasing_figure(records: Records, folder: Path) -> str:
    """A line with the figure of what debiased sampling changes, in each pool of both miniatures; "" before its runs."""
    rows = []
    pools = {
        "within": "within a trained source",
        "across": "across trained sources",
        "mixed": "all trained sources in one pool",
    }
    for data, comparison in debiasing_rows(records):
        verdict = _judged(records, comparison)
        rows.append(Row(f"{data}: a source not trained on", verdict.difference, verdict.low, verdict.high))
        for pool, found in pool_differences(records, comparison).items():
            rows.append(Row(f"{data}: {pools[pool]}", found.mean, found.low, found.high))
    if not rows:
        return ""
    title = "Debiased sampling less random sampling"
    write_atomically(folder / "debiasing.png", rows_figure(title, rows))
    return f"![What debiased sampling changes]({folder.name}/debiasing.png)"


def choices_table() -> str:
    """What the pilots chose, if they are done."""
    found = read_pilots()
    if not found:
        return "## What was chosen on validation\n\nNothing yet."
    rows = [
        (
            one["what"],
            ", ".join(CONDITIONS[condition].label for condition in CHOICES[name].conditions),
            ", ".join(f"{value}: {score:.0f}" for value, score in one["scores"].items()),
            one["rule"],
            one["chosen"],
        )
        for name, one in found.items()
    ]
    table = markdown_table(("setting", "pilots, two seeds each", "mean validation RSUM", "rule", "chosen"), rows)
    return f"## What was chosen on validation\n\n{table}"


def conditions_table(records: Records, names: Sequence[str], with_temperature: bool = False) -> str:
    """One line for each of these conditions, which have runs, with all that was measured.

    The score is of all pairs of the unseen source where each run has it, else of the held-out ones.
    """
    rows = []
    for name in names:
        runs = list(records[name].values())
        if CONDITIONS[name].score == "unseen" and not all(ALL_UNSEEN in run["rsum"] for run in runs):
            cells = [f"{mean_and_range([run['rsum']['unseen'] for run in runs])}, held-out pairs"]
        else:
            cells = [mean_and_range([run["score"] for run in runs])]
        cells += [mean_and_range([run["rsum"][pool] for run in runs]) for pool in POOLS]
        probes = [[run[key] for run in runs if run[key] is not None] for key in ("probe_images", "probe_texts")]
        cells += [mean_and_range([100 * value for value in values], 0) for values in probes]
        shared = [run["shared_information"] for run in runs if "shared_information" in run]
        more = f"; NMI with the sources {mean_and_range(shared, 2)}" if shared else ""
        if with_temperature and all("temperature" in run for run in runs):
            more += f"; temperature {mean_and_range([run['temperature'] for run in runs], 3)}"
        cpu = mean_and_range([run["cpu_seconds"] for run in runs], 0)
        samples = mean_and_range([run["samples"] / 1000 for run in runs], 0)
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


def section(records: Records, table: PaperTable, folder: Path) -> str:
    """The page's section on a table of the paper: setting, comparisons, figure, measurements; "" before its first runs.

    Draws the figure's file.
    """
    comparisons = [(one, judged(records, one, table)) for one in table.comparisons]
    comparisons = [(one, result) for one, result in comparisons if result.verdict != NOT_RUN]
    if not comparisons:
        return ""
    lines = []
    for one, result in comparisons:
        lines.append(
            f"- {label(one)}: {here(records, one, result)}; the paper: {papers_words(one)}. **{verdict_words(result)}**"
        )
        if one.measure == "score":
            found = (by_unseen_source(records, one), on_trained_sources(records, one))
            titles = ("by unseen source", "on the trained sources")
            lines += [f"    - {title}: {words}" for title, words in zip(titles, found, strict=True) if words]
        if one.guess and result.verdict in (CONTRADICTED, WORSE):
            lines.append(f"    - a guess at the reason: {one.guess}")
    parts = [f"## {table.name}: {table.title}", table.setting, "\n".join(lines)]
    if any(one.measure == "score" for one, _ in comparisons):
        name = "".join(letter for letter in table.name.lower().replace(" ", "-") if letter.isalnum() or letter == "-")
        write_atomically(folder / f"{name}.png", differences_figure(table, comparisons))
        parts.append(f"![{table.name}]({folder.name}/{name}.png)")
    names = [name for name in table.conditions if records[name]]
    parts.append(conditions_table(records, names, with_temperature=table.name == "Temperature"))
    return "\n\n".join(parts)


def write_page(records: Records, page: Path) -> str:
    """Write the page, its figures and `runs.json`; return the summary."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for by_seed in records.values() for record in by_seed.values()]
    write_atomically(folder / "runs.json", "[\n" + ",\n".join(lines) + "\n]\n")
    overview = summary(records)
    sections = (section(records, table, folder) for table in TABLES)
    measured = replay_section(folder / REPLAY_FILE)
    parts = [
        introduction(records),
        takeaways(records),
        debiasing_figure(records, folder),
        f"{HOW}\n{held_out_rows(records)}\n{many_rows(records)}",
        overview,
        *sections,
        measured,
        choices_table(),
    ]
    write_atomically(page, "\n\n".join(part for part in parts if part) + "\n")
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
