"""The tables of the study on photographs, from its records.

    python -m scripts.photographs.report [--out docs/results.md]

The two primary rows have Student's interval at 1 - 0.025 each; the secondary ones are corrected together by Holm. A row
without all of the protocol's seeds says how many it has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from open_clip_zerovl.report.tables import markdown_table
from open_clip_zerovl.report.verdicts import holm
from open_clip_zerovl.trial.result import Row
from scripts.photographs.run import HERE, RECORDS
from scripts.sections import replace_section

CONFIDENCE_OF_PRIMARIES = 1 - 0.025
SHOWN = {  # column -> the records' key
    "I2T R@1": "flickr8k_image_to_text_R@1",
    "T2I R@1": "flickr8k_text_to_image_R@1",
    "mean recall": "flickr8k_mean_recall",
    "products": "products_mean_recall",
    "Noto": "noto_mean_recall",
    "clothing top-1": "clothing_top1",
}
MEASURES = {
    "mean_recall": "Flickr8k, mean recall",
    "products_mean_recall": "products, mean recall",
    "noto_mean_recall": "Noto, mean recall",
    "clothing_top1": "clothing, top-1",
}
SET_OF = {"mean_recall": "flickr8k_mean_recall"}  # the protocol's short name -> the records' key


def read_records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """All runs' records and the start's, without the pilots'."""
    files = [*sorted(folder.glob("start.json")), *sorted(folder.glob("run-*.json"))]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def rows(records: Sequence[dict[str, Any]], protocol: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure, arms, seeds, interval and verdict of each row; a primary's verdict needs all of the protocol's seeds."""
    planned = len(protocol["runs"]["seeds"])
    made = []
    for kind, confidence in (("primaries", CONFIDENCE_OF_PRIMARIES), ("secondaries", 0.95)):
        for row in protocol[kind]:
            measure = SET_OF.get(row["measure"], row["measure"])
            pair = row["of"], row["over"], row["margin"]
            paired = Row.from_records(records, measure, *pair, confidence)
            seeds = len(paired.differences)
            word = f"{seeds} of {planned} seeds" if seeds < planned else str(paired.verdict)
            facts = {"seeds": seeds, "estimate": paired.estimate}
            made.append({**row, **facts, "kind": kind, "verdict": word})
    secondary = {
        (row["measure"], row["of"], row["over"]): row["estimate"].p
        for row in made
        if row["kind"] == "secondaries" and row["seeds"] >= planned
    }
    standing = holm(secondary)
    for row in made:
        row["holm"] = (row["measure"], row["of"], row["over"]) in standing
    return made


def tuned_arms(protocol: dict[str, Any]) -> list[str]:
    """The arms whose learning rate has pilots of its own; another arm's scores are no row."""
    return [arm for arm, settings in protocol["arms"].items() if settings["rates"]]


def arms_table(records: Sequence[dict[str, Any]], protocol: dict[str, Any]) -> str:
    """Means over seeds of the scores of each arm with pilots, and of its CPU seconds; first the model from which all start."""
    arms = {"start": "aligned, not trained"}
    arms |= {arm: f"{arm}: {protocol['arms'][arm]['name']}" for arm in tuned_arms(protocol)}
    lines = []
    for arm, name in arms.items():
        runs = [run for run in records if run["arm"] == arm]
        if not runs:
            continue
        scores = [fmean(run["scores"][key] for run in runs) for key in SHOWN.values()]
        seconds = [run["cpu_seconds"] for run in runs if "cpu_seconds" in run]
        cost = f"{fmean(seconds):.0f}" if seconds else ""
        lines.append([name, *(f"{score:.1f}" for score in scores), cost])
    return markdown_table(["arm", *SHOWN, "CPU s"], lines)


def differences_table(records: Sequence[dict[str, Any]], protocol: dict[str, Any]) -> str:
    """Show pairs of arms with pilots of their own; a verdict is bold if it is a primary's or stands after Holm's correction."""
    lines = []
    for row in rows(records, protocol):
        if not {row["of"], row["over"]} <= set(tuned_arms(protocol)):
            continue
        mean, low, high, _ = row["estimate"]
        difference = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" if row["seeds"] > 1 else "-"
        stands = row["holm"] or row["kind"] == "primaries"
        word = f"**{row['verdict']}**" if stands else row["verdict"]
        measure = f"{MEASURES[row['measure']]}{' (primary)' if row['kind'] == 'primaries' else ''}"
        pair = f"{row['of']} - {row['over']}"
        lines.append([measure, pair, difference, word])
    return markdown_table(["measure", "arms", "difference", "verdict"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write the section `photographs`")
    page = parser.parse_args().out
    protocol = yaml.safe_load((HERE / "protocol.yaml").read_text(encoding="utf-8"))
    records = read_records()
    tables = [arms_table(records, protocol), "", differences_table(records, protocol)]
    hours = sum(run.get("cpu_seconds", 0) for run in records) / 3600
    print("\n".join([*tables, f"\n{hours:.1f} CPU hours"]))
    if page is not None:
        replace_section(page, "photographs", ["", *tables, ""])


if __name__ == "__main__":
    main()
