"""The table of the study on photographs, from its records: `python -m scripts.photographs.report`.

The two primary rows have Student's interval at 1 - 0.025 each; the secondary ones are corrected together by Holm. A row
without all of the protocol's seeds says how many it has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from open_clip_zerovl.report.verdicts import holm
from open_clip_zerovl.trial.result import Row
from scripts.photographs.run import HERE, RECORDS

CONFIDENCE_OF_PRIMARIES = 1 - 0.025
SET_OF = {"mean_recall": "flickr8k_mean_recall"}  # the protocol's short name -> the records' key


def read_records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """All runs' records, without the pilots'."""
    files = sorted(folder.glob("run-*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def rows(records: Sequence[dict[str, Any]], protocol: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure, arms, seeds, interval and verdict of each row; a primary's verdict needs all of the protocol's seeds."""
    planned = len(protocol["runs"]["seeds"])
    made = []
    for kind, confidence in (("primaries", CONFIDENCE_OF_PRIMARIES), ("secondaries", 0.95)):
        for row in protocol[kind]:
            measure = SET_OF.get(row["measure"], row["measure"])
            pair = row["of"], row["over"], row["margin"]
            paired = Row.from_records(records, measure, *pair, confidence, planned)
            facts = {"seeds": len(paired.differences), "estimate": paired.estimate}
            made.append({**row, **facts, "kind": kind, "verdict": paired.verdict})
    secondary = {
        (row["measure"], row["of"], row["over"]): row["estimate"].p
        for row in made
        if row["kind"] == "secondaries" and row["seeds"] >= planned
    }
    standing = holm(secondary)
    for row in made:
        row["holm"] = (row["measure"], row["of"], row["over"]) in standing
    return made


def main() -> None:
    protocol = yaml.safe_load((HERE / "protocol.yaml").read_text(encoding="utf-8"))
    records = read_records()
    planned = len(protocol["runs"]["seeds"]) * len(protocol["arms"])
    hours = sum(each["cpu_seconds"] for each in records) / 3600
    print(f"{len(records)} of {planned} runs, {hours:.1f} CPU hours\n")
    print("| measure | arms | seeds | difference | verdict |\n|---|---|--:|--:|---|")
    for row in rows(records, protocol):
        mean, low, high, _ = row["estimate"]
        shown = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" if row["seeds"] > 1 else "-"
        word = (
            f"**{row['verdict']}**" if row["holm"] or row["kind"] == "primaries" else row["verdict"]
        )
        print(
            f"| {row['measure']} | {row['of']} - {row['over']} | {row['seeds']} | {shown} | {word} |"
        )


if __name__ == "__main__":
    main()
