"""The rows of docs/results/emoji.md from the records alone, by scipy."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import yaml
from scipy.stats import ttest_rel

ROOT = Path(__file__).resolve().parents[2]
RUNS: dict[str, dict[int, dict]] = {}
EMOJI = ROOT / "docs" / "results" / "emoji"
for _run in json.loads((EMOJI / "runs.json").read_text(encoding="utf-8")):
    RUNS.setdefault(_run["condition"], {})[_run["seed"]] = _run
CONDITIONS = yaml.safe_load((EMOJI / "protocol.yaml").read_text(encoding="utf-8"))["conditions"]
ROWS = list(csv.DictReader((EMOJI / "rows.csv").read_text(encoding="utf-8").splitlines()))
PAGE = EMOJI.with_suffix(".md").read_text(encoding="utf-8")
#: A record's RSUM of all pairs of the unseen source, of pools, without the frame (A.5); the probe; log p.
OF: dict[str, Callable[[dict], float]] = {
    "score": lambda run: run["rsum"]["all unseen" if run["unseen"] else "plain"],
    "held-out pairs": lambda run: run["rsum"]["unseen"],
    "within": lambda run: run["rsum"]["within"],
    "across": lambda run: run["rsum"]["across"],
    "mixed": lambda run: run["rsum"]["mixed"],
    "probe, texts %": lambda run: 100 * run["probe_texts"],
    "probe, images %": lambda run: 100 * run["probe_images"],
    "log p, other source": lambda run: run["log_p_other_source"],
}
#: Label on the page -> run, against, measure; None: not in the page's table.
MAIN = [
    ("debiased over random batches, unseen style, 16 epochs", "debiased", "random", "score"),
    ("the same, 40 epochs", "long-debiased", "long-random", "score"),
    ("from one trained source to another, 16 epochs", "debiased", "random", "across"),
    ("the same, 40 epochs", "long-debiased", "long-random", "across"),
    ("all trained sources in one pool, 40 epochs", "long-debiased", "long-random", "mixed"),
    (
        "debiased over random, two kinds of pictures in one source (A.5), 64 epochs",
        "contexts-debiased",
        "contexts-random",
        "score",
    ),
    (
        "debiased over random, batch 256, unseen style, 16 epochs",
        "batch-256",
        "random-256",
        "score",
    ),
    ("mixup, unseen style, 40 epochs", "mixup", "long-debiased", "score"),
    (
        "whole recipe over random batches of 16 (Tables 1 and 9, another gather), unseen style, 40 epochs",
        "stack-drop",
        "stack-baseline",
        "score",
    ),
    (
        "DGA to batch 64 over batch 16, within a trained source, 40 epochs",
        "stack-large",
        "stack-baseline",
        "within",
    ),
    (
        "the same, from one trained source to another",
        "stack-large",
        "stack-baseline",
        "across",
    ),
    (
        "the same, all trained sources in one pool",
        "stack-large",
        "stack-baseline",
        "mixed",
    ),
    ("the same, unseen style", "stack-large", "stack-baseline", "score"),
    (
        "gather with gradient over without (Table 4, the release's switch), unseen style, 16 epochs",
        "gather",
        "detached-gather",
        "score",
    ),
    (None, "debiased", "random", "mixed"),
    (None, "debiased", "random", "held-out pairs"),
    (None, "debiased", "random", "probe, texts %"),
    (None, "debiased", "random", "probe, images %"),
    (None, "debiased", "random", "log p, other source"),
    (None, "weight-0.05", "debiased", "score"),
    (None, "steps-256", "batch-64", "score"),
    (None, "dga-256", "batch-256", "score"),
]


def of_both(run: str, against: str, measure: str) -> tuple[list[float], list[float]]:
    """The measure of both conditions, seed by seed."""
    seeds = sorted(RUNS[run].keys() & RUNS[against].keys())
    ours, theirs = ([OF[measure](RUNS[name][seed]) for seed in seeds] for name in (run, against))
    return ours, theirs


def student(run: str, against: str, measure: str) -> tuple[float, float, float, int, str]:
    """Mean difference, low, high, seeds, verdict."""
    ours, theirs = of_both(run, against, measure)
    low, high = ttest_rel(ours, theirs).confidence_interval(0.95)
    margin = 0 if measure.startswith(("probe", "log")) else 10
    word = "no difference" if -margin <= low and high <= margin else ""
    word = word or ("higher" if low > 0 else "lower" if high < 0 else "undecided")
    return mean(ours) - mean(theirs), low, high, len(ours), word


def page_rows() -> list[list[str]]:
    return [
        [cell.strip(" *") for cell in line.split("|")[1:-1]]
        for line in PAGE.splitlines()
        if line.startswith("| ")
    ]


@pytest.mark.parametrize(("label", "run", "against", "measure"), MAIN)
def test_a_main_row_follows_from_the_records(label, run, against, measure):
    gain, low, high, seeds, word = student(run, against, measure)
    named = tuple(CONDITIONS[name]["label"] for name in (run, against))
    (row,) = [
        each
        for each in ROWS
        if (each["run"], each["against"], each["measure"]) == (*named, measure)
    ]
    stored = [
        float(row[column])
        for column in ("difference", "low", "high", "p", "mean run", "mean against")
    ]
    ours, theirs = of_both(run, against, measure)
    expected = [gain, low, high, ttest_rel(ours, theirs).pvalue, mean(ours), mean(theirs)]
    assert stored == pytest.approx(expected, abs=0.006) and int(row["seeds"]) == seeds
    read_later = (run, measure) in {("stack-large", name) for name in ("within", "across", "mixed")}
    assert row["verdict"] == ("" if read_later or measure == "held-out pairs" else word)
    if label is not None:
        shown = [f"{gain:+.0f} ({low:+.0f} to {high:+.0f})", str(seeds), word]
        assert [cells[1:4] for cells in page_rows() if cells[0] == label].count(shown) == 1


def test_every_interval_of_the_page_is_one_of_the_rows():
    """Each `+13 (+2 to +24)` and each `(+13, +2 to +24)`."""
    known = {
        tuple(f"{float(row[column]):+.{digits}f}" for column in ("difference", "low", "high"))
        for row in ROWS
        for digits in (0, 1)
        if row["high"]
    }
    number = r"([+-][\d.]+)"
    shown = re.findall(rf"{number},? \(?{number} to {number}\)", PAGE)
    assert len(shown) > 30 and set(shown) <= known, sorted(set(shown) - known)


def test_the_numbers_of_the_overview_are_those_of_the_records():
    """Each `+13 (+2 to +24) RSUM` of docs/results.md."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    section = page[page.index("[On emoji]") :]
    known = {"{:+.0f} ({:+.0f} to {:+.0f}".format(*student(*names)[:3]) for _, *names in MAIN}
    shown = re.findall(r"[+-]\d+ \([+-]\d+ to [+-]\d+", section)
    assert len(shown) == 2 and set(shown) <= known, sorted(set(shown) - known)


@pytest.mark.parametrize(
    ("run", "against", "measure", "word"),
    [
        ("stack-large", "stack-baseline", "within", "higher"),
        ("stack-large", "stack-baseline", "across", "higher"),
        ("stack-large", "stack-baseline", "score", "undecided"),
        ("debiased", "random", "score", "higher"),
        ("long-debiased", "long-random", "score", "undecided"),
        ("debiased", "random", "probe, texts %", "lower"),
        ("debiased", "random", "mixed", "lower"),
        ("mixup", "long-debiased", "score", "higher"),
        ("mixed-bert", "debiased", "score", "undecided"),
        ("stack-drop", "stack-baseline", "score", "higher"),
        ("gather", "detached-gather", "score", "lower"),
    ],
)
def test_the_readme_says_what_the_records_decide(run, against, measure, word):
    """ "When which flag helps" of README.md: whoever changes a sentence changes its row here."""
    assert student(run, against, measure)[-1] == word


@pytest.mark.parametrize(
    ("label", "measure", "confidence"),
    [
        ("Flickr8k, mean recall (primary)", "flickr8k_mean_recall", 0.975),
        ("products, mean recall", "products_mean_recall", 0.95),
        ("Noto, mean recall", "noto_mean_recall", 0.95),
        ("clothing, top-1", "clothing_top1", 0.95),
    ],
)
def test_a_row_end_to_end_follows_from_the_records(label, measure, confidence):
    """Batch 256 (B) over batch 16 (A), each at the rate of its pilots, ten seeds; README has the primary row."""
    folder = ROOT / "docs" / "results" / "photographs"
    scores = {}
    for arm, rate in (("A", "0.0001"), ("B", "0.001")):
        files = sorted(folder.glob(f"run-{arm}-{rate}-*.json"))
        assert len(files) == 10
        records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        scores[arm] = [record["scores"][measure] for record in records]
    low, high = ttest_rel(scores["B"], scores["A"]).confidence_interval(confidence)
    gain = f"{mean(scores['B']) - mean(scores['A']):+.1f} ({low:+.1f} to {high:+.1f})"
    start = json.loads((folder / "start.json").read_text(encoding="utf-8"))["scores"][measure]
    means = " | ".join(f"{value:.1f}" for value in (start, mean(scores["A"]), mean(scores["B"])))
    assert f"| {label} | {means} | {gain}, " in (ROOT / "docs" / "results.md").read_text("utf-8")
    if confidence > 0.95:
        readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
        assert f"batch 16 on 1.2 times the samples | {gain} |" in readme


def test_the_readmes_first_picture_and_its_costs_are_of_the_rows():
    with open(ROOT / "docs/results/performance/dga-one-process.csv", encoding="utf-8") as file:
        of_way = {row["way"]: row for row in csv.DictReader(file) if row["K"] == "16"}
    memory, time = (
        [float(of_way[way][column].split()[0]) for way in ("ours, retain 1", "one graph")]
        for column in ("memory", "time / plain (range)")
    )
    assert memory[0] < 1.3 and memory[1] > 12 and 1.2 < time[0] < 1.4 and time[1] < 1
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs/results/gpu-nvidia-h100-80gb-hbm3.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:plain training|`--dga|`--acc).*", readme, re.MULTILINE)
    rates = [rate for row in rows for rate in row.split("|")[3:5] if rate.strip()]
    assert len(rows) == 4 and all(f"|{rate}|" in measured for rate in rates)


def test_the_table_of_accumulation_is_that_of_its_records():
    """The rows of docs/dga.md at K = 16."""
    page = (ROOT / "docs" / "dga.md").read_text(encoding="utf-8")
    file = ROOT / "docs" / "results" / "performance" / "masks.csv"
    rows = [row for row in csv.DictReader(file.read_text().splitlines()) if row["K"] == "16"]
    assert len(rows) == 4
    for row in rows:
        bias, floor, noise, scale = (
            f"{float(row[name]):.2f}" for name in ("bias", "floor", "noise", "logit_scale")
        )
        shown = "" if row["way"] == "one graph" else f"{bias} ({floor}) "
        assert f"| {row['way']} | {shown}| {noise} | {scale} |" in page
    (later,) = [
        row
        for row in csv.DictReader(file.read_text().splitlines())
        if (row["trained"], row["way"]) == ("200", "open_clip --accum-freq")
    ]
    noise, bias, floor = (float(later[name]) for name in ("noise", "bias", "floor"))
    sentence = f"the noise of `--accum-freq` is {noise:.2f} and its bias {bias:.2f} ({floor:.2f})"
    assert sentence in " ".join(page.split()) and later["K"] == "8"
    (theirs,) = [row for row in rows if "accum" in row["way"]]
    assert float(theirs["bias"]) < float(theirs["floor"]) and float(theirs["noise"]) > 1
