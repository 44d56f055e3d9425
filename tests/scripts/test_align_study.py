"""The tables of docs/align.md are those of the records (`scripts/align_study.py` of commit 3c8fd466) by the protocol."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from open_clip_zerovl.report.verdicts import Estimate, student
from scripts.tables import markdown_table

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "results" / "align"


Records = dict[tuple[str, str], dict[int, dict[str, Any]]]  # (question, row) -> seed -> record


def measures_of(record: dict[str, Any]) -> dict[str, float]:
    """Compute the measures of the tables, in percent, of which `within` and `clothing` are the protocol's."""
    alone = [scores for name, scores in record["scores"].items() if "+" not in name]
    first = alone[0]
    return {
        "i2t": 100 * first["image_to_text_R@1"],
        "t2i": 100 * first["text_to_image_R@1"],
        "rsum": first["rsum"],
        "within": statistics.mean(scores["rsum"] / 6 for scores in alone),
        "clothing": record["clothing"],
    }


def pairs_table(records: Records, protocol: dict[str, Any]) -> str:
    """Write means over seeds by number of photographs, with RSUM's standard deviation and the plain loop's RSUM."""
    rows = []
    for pairs in protocol["pairs"]:
        runs = [measures_of(run) for run in records[("pairs", str(pairs))].values()]
        plain = [measures_of(run)["rsum"] for run in records[("pairs", f"{pairs} plain")].values()]
        means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        spread = statistics.stdev(run["rsum"] for run in runs)
        cells = [f"{means[name]:.1f}" for name in ("i2t", "t2i")]
        cells += [f"{means['rsum']:.0f} ± {spread:.0f}", f"{statistics.mean(plain):.0f}"]
        rows.append([f"{pairs:,}", *cells, f"{means['clothing']:.1f}"])
    header = ["photographs", "I2T R@1", "T2I R@1", "RSUM", "plain loop", "clothing top-1"]
    return markdown_table(header, rows)


def options(records: Records, protocol: dict[str, Any]) -> dict[tuple[str, str], list[Estimate]]:
    """Estimate each option's difference to the default of its setting, for the two measures of the protocol."""
    settings = protocol["options"]
    arms = [(name, arm) for name, content in settings.items() for arm in content["arms"]]
    compared = [key for key in arms if key[1] != "default"]
    confidence = 1 - 0.05 / (2 * len(compared))
    return {
        (setting, arm): [
            student(
                differences(records[setting, arm], records[setting, "default"], name), confidence
            )
            for name in protocol["margins"]
        ]
        for setting, arm in compared
    }


def differences(runs: dict[int, dict], base: dict[int, dict], name: str) -> list[float]:
    """Return a measure's differences of the same seed."""
    return [measures_of(runs[seed])[name] - measures_of(base[seed])[name] for seed in sorted(runs)]


@pytest.fixture(scope="module")
def protocol():
    return yaml.safe_load((RECORDS / "protocol.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def records() -> Records:
    found: Records = {}
    for record in json.loads((RECORDS / "runs.json").read_text(encoding="utf-8")):
        question, row, seed = record["key"]
        found.setdefault((question, row), {})[seed] = record
    return found


def test_the_page_shows_the_table_of_the_records(protocol, records):
    page = (ROOT / "docs" / "align.md").read_text(encoding="utf-8")
    assert pairs_table(records, protocol) in page
    runs = records["pairs", "6091"].values()
    first = [100 * run["scores"]["flickr8k"]["text_to_image_R@1"] for run in runs]
    seconds = max(run["cpu_seconds"] for run in runs)
    said = (
        f"{seconds:.0f} CPU seconds of training, the right one of 1,000 new photographs comes first "
        f"for {sum(first) / 5:.0f} %"
    )
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_page_says_what_the_options_did(protocol, records):
    """Seven comparisons of two measures: what lost, and that none gained."""
    found = options(records, protocol)
    within, _ = found["one", "batch 256"]
    page = " ".join((ROOT / "docs" / "align.md").read_text(encoding="utf-8").split())
    said = "{:+.1f} points of mean recall ({:+.1f} to {:+.1f}, 99.64 % for seven comparisons)"
    assert said.format(*within[:3]) in page and len(found) == 7
    assert round(100 * (1 - 0.05 / 14), 2) == 99.64
    assert all(measure.low <= 0 for both in found.values() for measure in both)


def test_the_page_says_what_other_pairs_and_one_pool_did(records):
    runs, base = records["two", "debiased sampling"], records["two", "default"]
    pool = "flickr8k+products"
    gains = [
        (runs[n]["scores"][pool]["rsum"] - base[n]["scores"][pool]["rsum"]) / 6
        for n in sorted(runs)
    ]
    said = "debiased sampling {:+.1f} ({:+.1f} to {:+.1f})".format(*student(gains)[:3])
    page = " ".join((ROOT / "docs" / "align.md").read_text(encoding="utf-8").split())
    assert said in page
    for key, words in (
        ("clothing", "clothing rose from {:.1f} to {:.1f} %"), ("rsum", "on Flickr8k fell from {:.0f} to {:.0f}"),
    ):  # fmt: skip
        settings = (records[setting, "default"].values() for setting in ("one", "two"))
        means = [statistics.mean(measures_of(run)[key] for run in each) for each in settings]
        assert words.format(*means) in page


def test_each_record_is_a_run_of_the_protocol(protocol, records):
    planned = {
        ("pairs", f"{pairs}{plain}", seed)
        for pairs in protocol["pairs"]
        for plain in ("", " plain")
        for seed in protocol["seeds"]
    } | {
        (question, arm, seed)
        for question, setting in protocol["options"].items()
        for arm in setting["arms"]
        for seed in protocol["seeds"]
    }
    assert {(*row, seed) for row, runs in records.items() for seed in runs} <= planned
    assert len(planned) == 5 * (2 * 6 + 6 + 3)
