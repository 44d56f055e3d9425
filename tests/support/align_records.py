"""The tables of docs/align.md from the records of a study (`scripts/align_study.py` of commit 3c8fd466)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from open_clip_zerovl.report.verdicts import Estimate, student
from scripts.tables import markdown_table

Records = dict[tuple[str, str], dict[int, dict[str, Any]]]  # (question, row) -> seed -> record


def read_records(file: Path) -> Records:
    """Read the records of the runs."""
    records: Records = {}
    for record in json.loads(file.read_text(encoding="utf-8")):
        question, row, seed = record["key"]
        records.setdefault((question, row), {})[seed] = record
    return records


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
