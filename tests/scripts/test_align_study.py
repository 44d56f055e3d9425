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


def test_the_page_shows_the_tables_of_the_records(protocol, records):
    page = (ROOT / "docs" / "align.md").read_text(encoding="utf-8")
    for table in (align_records.pairs_table, align_records.options_table):
        assert table(records, protocol) in page


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


@pytest.mark.parametrize("option", ["debiased sampling", "cross-source weight 0.1"])
def test_the_page_has_the_rows_of_one_pool(records, option):
    runs, base = records["two", option], records["two", "default"]
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
    assert (
        f"{option.replace('weight', 'weight of')} {mean:+.1f} ({low:+.1f} to {high:+.1f})" in page
    )


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


def test_an_option_is_judged_by_its_differences_of_the_same_seed(protocol):
    """Made-up records: a gain of 2 points in each seed, although the seeds differ by 20."""

    def record(rsum):
        scores = {"rsum": rsum, "image_to_text_R@1": 0.1, "text_to_image_R@1": 0.1}
        return {"scores": {"flickr8k": scores}, "clothing": 10.0}

    made_up = {
        ("one", "default"): {seed: record(100 + 120 * seed) for seed in range(5)},
        ("one", "mlp"): {seed: record(112 + 120 * seed + 0.1 * seed) for seed in range(5)},
    }
    table = align_records.options_table(made_up, protocol)
    row = next(line for line in table.splitlines() if line.startswith("| mlp"))
    assert (
        "| 5 | +2.0 (+2.0 to +2.1) | higher, above the margin | +0.0 (+0.0 to +0.0) | sign open, below the margin |"
        in row
    )
    assert "| siglip, one source | 0 |  | not run |" in table
