"""Fine-tuning a model of photographs on new classes, and what it forgets: the table of docs/finetune.md.

    python -m scripts.photographs.prepare --tars DIR --study STUDY
    python -m scripts.photographs.forgetting --study STUDY [--out forgetting] [--jobs 2]

Each finished run leaves one JSON in docs/results/photographs/forgetting/.

The model is the study's start: released encoders (EfficientNet-Lite0 at 96 px, MiniLM-L6), aligned on Flickr8k, products and
Noto. `zerovl finetune` teaches it ten classes of clothing. New is zero-shot top-1 on clothing's photographs, old the mean
recall (RSUM / 6) on Flickr8k's, both in percent. Fixed before any fine-tuning:

- The text tower and its head are frozen: ten classes have ten captions. The norms keep their statistics (the default).
- Rate: of RATES the one with the best new score on validation, full fine-tuning, the pilot seed. Kept data changes
  the data and not the weights that train, so that it takes the same. A best rate at an edge of RATES gets the
  next rate beyond it.
- EPOCHS epochs; the command keeps the one with the best score on held-out pictures, as ever.
- `ARM + curve` (WiSE-FT): of ALPHAS, the weights with the best new score on validation among those that keep 95 % of the old
  one on validation. Both rows are scored on the test splits.
- `kept teacher`, distillation from the model before (half of the loss, 4 views), has records alone: full fine-tuning at alpha
  0.5 scored higher on both measures, so that the flag went.
- Cost: CPU seconds of the whole command over those of full fine-tuning with the same seed.

A call after an interruption goes on; it repeats only the run that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from open_clip_zerovl.checkpoints.between import open_ends
from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.report.tables import markdown_table
from open_clip_zerovl.report.verdicts import student
from open_clip_zerovl.trial.running import best_rate
from scripts.photographs.measuring import Measuring
from scripts.photographs.run import cpu_seconds

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "photographs" / "forgetting"
RATES = (1e-4, 3e-4, 1e-3)
EPOCHS, BATCH = 3, 64
ALPHAS = (0.0, 0.5, 1.0)
KEPT_SHARE = 0.95
PILOT, SEEDS = 100, range(5)
ARMS = ("full", "kept data")
MEASURED = (*ARMS, "kept teacher")
SPLITS = {"val": ("validation", "flickr8k-validation.csv"), "test": ("test", "flickr8k-test.csv")}
Record = Mapping[str, Any]


def zerovl(*words: str, log: Path) -> float:
    """CPU seconds of a command and of all processes that it starts."""
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "open_clip_zerovl.cli", *words]
        return cpu_seconds(command, file, f"zerovl {words[0]}")


class Tuning:
    """Fine-tunings of the study's start.

    Args:
        study: of `scripts.photographs.prepare`.
        out: gets the packed photographs, and a log a run.
    """

    def __init__(self, study: Path, out: Path) -> None:
        self.study, self.out = study, out
        self.measuring = Measuring(study)

    def pack(self) -> None:
        """The training photographs of clothing as a folder that `zerovl finetune` takes."""
        folder = str(self.study / "raw" / "clothing" / "train")
        sizes = ["--max-side", "128", "--test-share", "0.1"]
        zerovl("data", "pack", folder, "--out", str(self.out / "clothing"), *sizes,
               log=self.out / "pack.log")  # fmt: skip

    def record(self, arm: str, rate: float, seed: int) -> Record:
        """The record of a run, from an earlier call or made now."""
        name = f"{arm.replace(' ', '-')}-{rate:g}-{seed}"
        file = RECORDS / f"{name}.json"
        if not file.is_file():
            before = str(self.study / "model")
            kept = f"flickr8k={self.study / 'train' / 'flickr8k' / '00000.tar'}"
            words = ["--from", before, "--data", str(self.out / "clothing"), "--device", "cpu"]
            words += ["--keep-data", kept] if arm == "kept data" else []
            settings = [f"lr={rate:g}", f"epochs={EPOCHS}", f"effective-batch={BATCH}"]
            for setting in (*settings, "freeze=text", "channels-last"):
                words += ["--set", setting]
            with tempfile.TemporaryDirectory(dir=self.out) as folder:
                words += ["--seed", str(seed), "--alphas", "1", "--out", folder]
                seconds = zerovl("finetune", *words, log=self.out / f"{name}.log")
                report = json.loads(Path(folder, "finetune.json").read_text(encoding="utf-8"))
                points = self.points(before, report["checkpoint"])
            facts = {"arm": arm, "lr": rate, "seed": seed, "cpu_seconds": round(seconds, 1)}
            write_atomically(file, json.dumps({**facts, "points": points}, indent=1) + "\n")
            print(file.stem, f"{seconds:.0f} s", points[-1], flush=True)
        return json.loads(file.read_text(encoding="utf-8"))

    def points(self, before: str, after: str) -> list[dict[str, float]]:
        """Scores of the weights at each alpha; those of the model before are measured once."""
        ends = open_ends(Encoder(before, device="cpu"), Encoder(after, device="cpu"))
        start = RECORDS / "before.json"
        if not start.is_file():
            write_atomically(start, json.dumps(self.scores(ends, 0.0)))
        first = json.loads(start.read_text(encoding="utf-8"))
        return [first, *(self.scores(ends, alpha) for alpha in ALPHAS[1:])]

    def scores(self, ends: Any, alpha: float) -> dict[str, float]:
        model = ends.at(alpha).eval().to(memory_format=torch.channels_last)
        scores = {"alpha": alpha}
        for split, (classes, captions) in SPLITS.items():
            folder = self.study / "raw" / "clothing" / classes
            new = self.measuring.labelled(model, ends.preprocess, folder)
            old = self.measuring.captioned(model, ends.preprocess, captions)["mean_recall"]
            scores |= {f"{split}_new": round(new, 2), f"{split}_old": round(old, 2)}
        return scores


def run_all(tuning: Tuning, jobs: int) -> list[Record]:
    """The records of all runs, the pilots' among them."""
    tuning.pack()
    pilots: list[Record] = []

    def score(rate: float) -> float:
        pilots.append(tuning.record("full", rate, PILOT))
        return pilots[-1]["points"][-1]["val_new"]

    rate, _ = best_rate(RATES, score)
    with ThreadPoolExecutor(jobs) as pool:
        runs = [(arm, rate, seed) for seed in SEEDS for arm in ARMS]
        return [*pilots, *pool.map(lambda run: tuning.record(*run), runs)]


def read_records() -> list[Record]:
    """The committed records."""
    return [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(RECORDS.glob("*-*.json"))
    ]


def on_curve(points: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The point that validation chooses among those that keep the old ability; the model before is always one of them."""
    least = KEPT_SHARE * points[0]["val_old"]
    allowed = [point for point in points if point["alpha"] == 0 or point["val_old"] >= least]
    return max(allowed, key=lambda point: (point["val_new"], -point["alpha"]))


def table(records: Sequence[Record]) -> str:
    """Means over seeds on the test splits; Student's 95 % interval of the paired difference to full fine-tuning."""
    runs = {arm: _by_seed(records, arm) for arm in MEASURED}
    points = {"before": [run["points"][0] for run in runs["full"]]}
    for arm, made in runs.items():
        points[arm] = [run["points"][-1] for run in made]
        points[f"{arm} + curve"] = [on_curve(run["points"]) for run in made]
    rows = []
    for label in points:
        cells = [_shown(points, label, key) for key in ("test_new", "test_old")]
        cost = ""
        if label in runs:
            pairs = zip(runs[label], runs["full"], strict=True)
            cost = f"{mean(run['cpu_seconds'] / full['cpu_seconds'] for run, full in pairs):.2f}"
        rows.append([label, *cells, cost])
    return markdown_table(["", "clothing top-1", "Flickr8k mean recall", "cost"], rows)


def _by_seed(records: Sequence[Record], arm: str) -> list[Record]:
    runs = [run for run in records if run["arm"] == arm and run["seed"] != PILOT]
    return sorted(runs, key=lambda run: run["seed"])


def _shown(points: Mapping[str, list[Any]], label: str, key: str) -> str:
    values = [point[key] for point in points[label]]
    full = [point[key] for point in points["full"]]
    if label in ("before", "full") or len(values) < 2:
        return f"{mean(values):.1f}"
    between = student([value - other for value, other in zip(values, full, strict=True)]).interval
    assert between is not None
    return f"{mean(values):.1f} ({between[0]:+.1f} to {between[1]:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("forgetting"), metavar="DIR")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    RECORDS.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    records = run_all(Tuning(given.study.absolute(), out), given.jobs)
    print(table(records))


if __name__ == "__main__":
    main()
