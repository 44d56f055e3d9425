"""The tables of docs/align.md are those of the records, and each record is a run of the protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from open_clip_zerovl.report.verdicts import student
from support import align_records

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "results" / "align"


@pytest.fixture(scope="module")
def protocol():
    return yaml.safe_load((RECORDS / "protocol.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def records():
    return align_records.read_records(RECORDS / "runs.json")


def test_the_page_shows_the_table_of_the_records(protocol, records):
    page = (ROOT / "docs" / "align.md").read_text(encoding="utf-8")
    assert align_records.pairs_table(records, protocol) in page
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
    found = align_records.options(records, protocol)
    within, _ = found["one", "batch 256"]
    page = " ".join((ROOT / "docs" / "align.md").read_text(encoding="utf-8").split())
    said = "{:+.1f} points of mean recall ({:+.1f} to {:+.1f}, 99.64 % for seven comparisons)"
    assert said.format(*within[:3]) in page and len(found) == 7
    assert round(100 * (1 - 0.05 / 14), 2) == 99.64
    assert all(measure.low <= 0 for both in found.values() for measure in both)


def test_the_page_says_how_other_pairs_changed_the_scores(records):
    one, two = (
        [align_records.measures_of(run) for run in records[setting, "default"].values()]
        for setting in ("one", "two")
    )
    clothing, rsum = (
        [sum(run[key] for run in runs) / len(runs) for runs in (one, two)]
        for key in ("clothing", "rsum")
    )
    page = " ".join((ROOT / "docs" / "align.md").read_text(encoding="utf-8").split())
    assert "clothing rose from {:.1f} to {:.1f} %".format(*clothing) in page
    assert "on Flickr8k fell from {:.0f} to {:.0f}".format(*rsum) in page


def test_the_page_has_the_row_of_one_pool(records):
    runs, base = records["two", "debiased sampling"], records["two", "default"]
    pool = [
        (
            runs[seed]["scores"]["flickr8k+products"]["rsum"]
            - base[seed]["scores"]["flickr8k+products"]["rsum"]
        )
        / 6
        for seed in sorted(runs)
    ]
    mean, low, high, _ = student(pool)
    page = " ".join((ROOT / "docs" / "align.md").read_text(encoding="utf-8").split())
    assert f"debiased sampling {mean:+.1f} ({low:+.1f} to {high:+.1f})" in page


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
    stored = {(*row, seed) for row, runs in records.items() for seed in runs}
    assert stored <= planned
    assert len(planned) == 5 * (2 * 6 + 6 + 3)
    for runs in records.values():
        for run in runs.values():
            assert set(run["scores"]) and 0 <= run["clothing"] <= 100
