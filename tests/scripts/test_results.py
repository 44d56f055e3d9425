"""docs/results/emoji.md: the rule of its verdicts, its rows, and the page as it is published."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import markdown
import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.report.verdicts import (
    HIGHER,
    LOWER,
    NEAR_CHANCE,
    NO_DIFFERENCE,
    NOT_RUN,
    TOO_FEW,
    UNDECIDED,
    student,
    verdict,
)
from scripts.ablation import report
from scripts.ablation.protocol import ALL_UNSEEN, CHOICES, CONDITIONS, TABLES
from scripts.ablation.rows import (
    CONTRADICTED,
    HELD_OUT,
    REPRODUCED,
    Row,
    beside_paper,
    other_sources,
    read_records,
    rows_of,
    same_sources,
    standing,
)
from support import ROOT

# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "differences", "word", "paper"),
    [
        ("higher", (20, 22, 21, 19, 23), HIGHER, REPRODUCED),
        ("lower", (20, 22, 21, 19, 23), HIGHER, CONTRADICTED),
        ("same", (20, 22, 21, 19, 23), HIGHER, CONTRADICTED),
        ("higher", (-20, -22, -21, -19, -23), LOWER, CONTRADICTED),
        ("lower", (-20, -22, -21, -19, -23), LOWER, REPRODUCED),
        # A wide interval is not evidence of sameness.
        ("same", (30, -28, 5, -12, 9), UNDECIDED, ""),
        ("higher", (30, -28, 5, -12, 9), UNDECIDED, ""),
        # A small difference counts as none, even if it is certain.
        ("same", (3, 2, 4, 3, 2), NO_DIFFERENCE, REPRODUCED),
        ("higher", (3, 2, 4, 3, 2), NO_DIFFERENCE, ""),
        # Beyond zero, not beyond the margin: a difference, but no contradiction of "the same".
        ("same", (9, 14, 12, 8, 13), HIGHER, ""),
        ("higher", (9, 14, 12, 8, 13), HIGHER, REPRODUCED),
        ("higher", (20, 22, 21, 19), TOO_FEW, ""),
        ("same", (), NOT_RUN, ""),
        (
            "lower",
            (1.0, math.inf, 2.0, 1.0, 0.0),
            UNDECIDED,
            "",
        ),  # a score that was never reached has no cost
    ],
)
def test_the_rule(claim, differences, word, paper):
    found = student(differences)
    assert verdict(found, len(differences), 10.0, least_seeds=5) == word
    assert beside_paper(word, claim, found, 10.0) == paper


def test_the_two_intervals_over_sources():
    """That of the same sources leaves their differences out; that of other sources is of their means."""
    # Means 2 and 12; squares within 2 + 8 = 10 over 2 degrees of freedom; sqrt(5/2 + 5/2) / 2 times t(0.975, 2) = 4.3027.
    found = same_sources({"a": [1.0, 3.0], "b": [10.0, 14.0]})
    assert (found.mean, round(found.low, 4), round(found.high, 4)) == (7.0, 2.1895, 11.8105)
    assert math.isinf(same_sources({"a": [1.0, 3.0], "b": [10.0]}).low) and math.isinf(
        same_sources({"a": [1.0, 3.0]}).low
    )
    # Means 51, 52, 52, 53: sd 0.8165, t(0.975, 3) = 3.1824, so 52 -/+ 1.2992.
    four = {"a": [50.0, 52.0], "b": [52.0], "c": [52.0], "d": [53.0]}
    assert [round(end, 4) for end in other_sources(four)[:3]] == [52.0, 50.7008, 53.2992]
    assert math.isinf(other_sources({"a": [1.0], "b": [2.0]}).low)


# --- rows ------------------------------------------------------------------------------------------------------------


SOURCES = {
    "emoji": ("noto", "twemoji", "openmoji", "fluent"),
    "icons": ("tabler", "phosphor", "bootstrap", "remix"),
}
QUICK = {"epochs": "2", "icon-epochs": "1", **{key: one.quick for key, one in CHOICES.items()}}


def record(name: str, seed: int, **change) -> dict:
    """A record as the runner writes it; debiased sampling gains 50, to a little more or less by seed."""
    condition = CONDITIONS[name]
    score = 150.0 + 20 * seed + (0 if "random" in name else 50 + seed)
    epochs = condition.run_epochs(QUICK)
    unseen = SOURCES[condition.miniature][seed % 4] if condition.score == "unseen" else None
    return {
        "condition": name, "seed": seed, "unseen": unseen, "split": "test", "ranks": 1,
        "choices": {name: QUICK[name] for name in condition.choices},
        "flags": ["--sampling", condition.sampling, "--epochs", str(epochs), *condition.run_flags(QUICK)], "built_on": {},
        "score": score, "epochs": epochs, "samples": 128, "cpu_seconds": 36.0,
        "rsum": {"within": 200.0 + seed, "across": None, "mixed": 150.0, condition.score: score},
        "probe_images": 0.63, "probe_texts": 0.9, "log_p_same_source": -20.0, "log_p_other_source": -25.0,
        **({"score_by_epoch": [score * (i + 1) / epochs for i in range(epochs)]} if condition.every_epoch else {}),
        **change,
    }  # fmt: skip


def rows_from(folder: Path, *records: dict) -> list[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    for one in records:
        (folder / f"{one['condition']}-seed{one['seed']}.json").write_text(json.dumps(one))
    return rows_of(read_records(folder))


def row_of(rows: list[Row], name: str, *measures: str) -> Row:
    return next(
        row for row in rows if row.name == name and row.measure in (measures or ("score", HELD_OUT))
    )


def scored(name: str, seed: int, score: float) -> dict:
    """A record with a score of all pairs."""
    return record(name, seed, score=score, rsum={**record(name, seed)["rsum"], ALL_UNSEEN: score})


def test_pairs_of_seeds_make_a_row_and_single_seeds_wait(tmp_path):
    runs = [record(name, seed) for name in ("random", "debiased") for seed in range(5)]
    rows = rows_from(tmp_path, *runs, record("debiased", 7))
    row = row_of(rows, "debiased - random")
    # By hand: differences 50 to 54, mean 52, sd 1.5811, half an interval 1.9632. Seeds 0 and 4 leave noto out.
    assert [round(end, 4) for end in row.found[:3]] == [52.0, 50.0368, 53.9632]
    assert (row.words, row.judged, row.verdict, row.beside_paper) == (
        "+52 (+50 to +54)", "higher (+52, +50 to +54)", HIGHER, REPRODUCED,
    )  # fmt: skip
    assert (row.mean(0), row.mean(1), row.papers_words) == (242.0, 190.0, "+21, +27")
    assert row.by_source == {
        "fluent": [53.0],
        "noto": [50.0, 54.0],
        "openmoji": [52.0],
        "twemoji": [51.0],
    }
    assert row_of(rows, "debiased - random", "mixed").verdict == NO_DIFFERENCE
    assert row_of(rows, "gather - detached-gather").judged == NOT_RUN
    assert (
        row_of(rows_from(tmp_path / "one", *runs[:1], runs[5]), "debiased - random").words == "+50"
    )


def test_scores_of_other_pairs_are_never_compared(tmp_path):
    """Runs with and without the score of all pairs meet in the held-out pairs, which both have."""
    name = "debiased - random"
    held_out = [record("random", seed) for seed in range(6)]
    rows = rows_from(
        tmp_path,
        *held_out,
        *(scored("debiased", seed, 70.0) for seed in range(5)),
        record("debiased", 5),
    )
    assert (row_of(rows, name).measure, row_of(rows, name).words) == (HELD_OUT, "+52 (+51 to +54)")
    rows = rows_from(
        tmp_path, *(scored("random", seed, 50.0 + seed) for seed in range(5))
    )  # the sixth has none
    row = row_of(rows, name)
    assert (row.measure, row.words, len(row.values)) == ("score", "+18 (+16 to +20)", 5)
    assert row_of(rows, name, HELD_OUT).decides is False and row.decides
    near = rows_from(
        tmp_path,
        *(scored(one, seed, 20.0 + seed) for one in ("random", "debiased") for seed in range(5)),
    )
    assert row_of(near, name).verdict == NEAR_CHANCE


def test_the_cost_of_a_score_counts_the_epochs_until_it_is_reached(tmp_path):
    def reach(*auxiliary: dict, whole: list[float]) -> Row:
        one = {"score": 100.0, "cpu_seconds": 50.0, "epochs": 4, "score_by_epoch": whole}
        runs = [record("vit", seed, **one) for seed in range(5)]
        return row_of(rows_from(tmp_path, *runs, *auxiliary), "auxiliary - vit", "reach")

    # Reached in the second of four epochs, of 30 CPU seconds in all: 15 of 50.
    reached = {"score_by_epoch": [60.0, 100.0, 90.0, 95.0], "epochs": 4, "cpu_seconds": 30.0}
    runs = [record("auxiliary", seed, **reached) for seed in range(5)]
    row = reach(*runs, whole=[60.0, 80.0, 90.0, 100.0])
    assert round(math.exp(row.found.mean), 6) == 0.3 and (row.verdict, row.beside_paper) == (
        LOWER,
        REPRODUCED,
    )
    # The whole run, too, is charged until it first reaches its score: 15 of 37.5.
    assert round(math.exp(reach(whole=[60.0, 80.0, 110.0, 100.0]).found.mean), 6) == 0.4
    never = record("auxiliary", 4, score_by_epoch=[60.0, 70.0, 90.0, 95.0], epochs=4)
    assert reach(never, whole=[60.0, 80.0, 110.0, 100.0]).verdict == UNDECIDED


def test_rows_stand_as_one_family_of_tests(tmp_path):
    runs = [
        record(name, seed) for name in ("random", "debiased", "weight-0.3") for seed in range(5)
    ]
    runs += [
        scored(name, seed, 90.0 + (seed % 3 - 1))
        for name in ("four-debiased", "last-noto")
        for seed in range(5)
    ]
    kept = [(row.name, row.measure) for row in standing(rows_from(tmp_path, *runs))]
    assert kept == [("debiased - random", HELD_OUT), ("weight-0.3 - random", HELD_OUT)]


def test_runs_that_do_not_stand_side_by_side_are_refused(tmp_path):
    with pytest.raises(UserError, match="no record of a run"):
        read_records(tmp_path)
    rows_from(tmp_path, record("random", 0))
    with pytest.raises(UserError, match=r"several values of epochs, \['2', '9'\]"):
        rows_from(tmp_path, record("debiased", 0, choices={"epochs": "9"}))
    flags = ["--cross-source-weight", "0.5", *record("random", 0)["flags"]]
    with pytest.raises(
        UserError,
        match=r"debiased-seed0 of .* other settings than the condition has now \(--sampling\)",
    ):
        rows_from(tmp_path, record("debiased", 0, flags=flags))


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_committed_page_and_its_data_are_those_of_its_runs(tmp_path, capsys):
    """Nothing was changed by hand or after it was made, and no figure is left that the page does not show."""
    page = ROOT / "docs" / "results" / "emoji.md"
    folder = page.parent
    for name in ("replay.json", "raw-probe.json"):
        shutil.copy(folder / name, tmp_path)
    made = tmp_path / "emoji.md"
    assert report.main(["--runs", str(folder / "runs.json"), "--page", str(made)]) == 0
    assert (
        "| Table 3 | Debiased sampling | debiased - random | score | +13 (+2 to +24) | 8 | higher |"
        in capsys.readouterr().out
    )
    for name in ("emoji.md", "rows.csv", "runs.json"):
        assert (tmp_path / name).read_text() == (folder / name).read_text(), name
    assert (tmp_path / "main.png").stat().st_size > 10_000 and (folder / "main.png").is_file()
    with open(folder / "rows.csv", encoding="utf-8") as file:
        tables = {row["table"] for row in csv.DictReader(file)}
    assert tables == {table.name for table in TABLES}
    assert not list(folder.glob("table-*.png")) and str(tmp_path) not in page.read_text()


def broken_emphasis(text: str) -> list[str]:
    """Stars that Markdown leaves in the text or takes for italics, which these pages do not use."""
    html = markdown.markdown(text, extensions=["tables", "fenced_code"])
    html = re.sub(r"<pre>.*?</pre>|<code>.*?</code>", "", html, flags=re.DOTALL)
    return re.findall(r"<em>.{0,40}|.{0,20}\*.{0,20}", html)


@pytest.mark.parametrize(
    ("page", "words"),
    [("docs/results/emoji.md", 1900), ("docs/results.md", 800), ("README.md", 800)],
)
def test_the_page_is_short_and_has_no_broken_emphasis(page, words):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert broken_emphasis(text) == [] and len(text.split()) <= words
    rendered = markdown.markdown(text, extensions=["tables", "fenced_code"])
    assert "<table>" in rendered and "|--" not in rendered
    assert broken_emphasis(
        "+12.9 (+10.6 to +15.2)*; more (+1.0 to +2.0)* here"
    )  # the page as it was
