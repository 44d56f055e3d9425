"""Ways to fine-tune that forget less: the table of docs/finetune.md and docs/results/forgetting.csv.

    python -m scripts.forgetting --data data/emoji --photographs clothing [--out forgetting] [--jobs 2]
    python -m scripts.forgetting --out forgetting --table

Three emoji sources (OLD) train the demo's model for BASE_EPOCHS. `zerovl finetune` then teaches it OpenMoji (new ability: RSUM)
or photographs in classes (train, validation, test / CLASS / *.jpg; new ability: zero-shot top-1 in percent). The old ability is
the mean RSUM on the three sources. Fixed before any run:

- Each of the ARMS has three learning rates a factor of three apart. LoRA's begin three times higher, as adapters begin at zero.
- The pilot seed decides: for each arm the rate with the best new ability on validation. All other seeds run with this rate.
- Each fine-tuning has EPOCHS; as ever, `zerovl finetune` keeps the epoch with the best score on held-out pairs.
- Rows `ARM` are the model after the training. Rows `ARM + curve` (WiSE-FT): of ALPHAS, the weights with the best new ability on
  validation among those that keep 99 % of the old ability on validation. Both are scored on the test splits.
- Cost: CPU seconds of the whole command, beside those of full fine-tuning with the same seed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from open_clip_zerovl.checkpoints.between import open_ends
from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.evaluate.bias.resampling import interval_over_seeds
from open_clip_zerovl.evaluate.retrieval.score import score_set
from open_clip_zerovl.evaluate.settings import RetrievalSettings
from open_clip_zerovl.evaluate.zero_shot.score import score_labelled
from open_clip_zerovl.evaluate.zero_shot.sets import open_labelled_set
from open_clip_zerovl.report.tables import markdown_table
from scripts.drawn.training import TrainingRun, drawn_flags

OLD, NEW = ("noto", "twemoji", "fluent"), "openmoji"
BASE_EPOCHS, EPOCHS = 12, 6
RATES = (1e-4, 3e-4, 1e-3)
ARMS = ("full", "LoRA", "kept data", "kept teacher")
LORA_RANK = 8
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
KEPT_SHARE = 0.99
PILOT = 100
SEEDS = {"emoji": range(5), "photographs": range(3)}


@dataclass(frozen=True)
class Bench:
    """The folders: drawn emoji, photographs in classes, results."""

    data: Path
    photographs: Path
    out: Path

    def base(self, seed: int) -> TrainingRun:
        """The model before, of the demo's flags."""
        flags = drawn_flags(self.data, sampling="debiased", epochs=BASE_EPOCHS, seed=seed, sources=OLD)
        return TrainingRun(self.out / f"base-{seed}", (*flags, "--device", "cpu"))

    def record(self, task: str, arm: str, rate: float, seed: int) -> dict[str, Any]:
        """Fine-tune and score, unless an earlier call has; the record holds a row of scores for each alpha."""
        name = f"{task}-{arm.replace(' ', '-')}-{rate:g}-{seed}"
        file = self.out / f"{name}.json"
        if not file.is_file():
            folder = self.out / name
            shutil.rmtree(folder, ignore_errors=True)
            seconds = run(*self.finetune(task, arm, rate, seed), "--out", str(folder), log=self.out / f"{name}.log")
            after = json.loads((folder / "finetune.json").read_text(encoding="utf-8"))["checkpoint"]
            rows = self.scores(task, str(self.base(seed).checkpoint), after)
            found = {"task": task, "arm": arm, "lr": rate, "seed": seed, "cpu_seconds": seconds, "points": rows}
            write_atomically(file, json.dumps(found, indent=1) + "\n")
            shutil.rmtree(folder)
            print(f"{name}: new {rows[-1]['test_new']:.1f}, old {rows[-1]['test_old']:.1f}", flush=True)
        return json.loads(file.read_text(encoding="utf-8"))

    def finetune(self, task: str, arm: str, rate: float, seed: int) -> list[str]:
        """The command of an arm, without its folder."""
        old = "::".join(f"{name}={self.data / name}" for name in OLD)
        new = ["--data", str(self.out / "photographs")]
        if task == "emoji":
            new = ["--data", f"{NEW}={self.data / NEW}", "--retrieval-data", f"{NEW}={self.data / 'val' / NEW}"]
        own = {
            "full": [],
            "LoRA": ["--lora", str(LORA_RANK), "--set", f"lr-head={rate / 10:g}"],
            "kept data": ["--keep-data", old],
            "kept teacher": ["--keep-teacher"],
        }[arm]
        shared = ["--set", f"lr={rate:g}", "--set", f"epochs={EPOCHS}", "--seed", str(seed), "--alphas", "1"]
        return ["finetune", "--from", str(self.base(seed).checkpoint), "--device", "cpu", *new, *own, *shared]

    def scores(self, task: str, before: str, after: str) -> list[dict[str, float]]:
        """New and old ability on validation and test of the weights at each alpha."""
        encoder = Encoder(before, device="cpu", batch_size=64, workers=0)
        ends, rows = open_ends(encoder, Encoder(after, device="cpu")), []
        for alpha in ALPHAS:
            loaded = (ends.at(alpha), ends.preprocess, ends.tokenizer, ends.device)

            def rsum(folder: Path, loaded=loaded) -> float:
                scored = score_set(
                    loaded, folder.name, open_retrieval_set(folder), RetrievalSettings(), encoder=encoder
                )
                assert scored is not None  # one process scores
                return scored.metrics["rsum"]

            def top1(folder: Path, loaded=loaded, alpha=alpha) -> float:
                model = FrozenModel.of(f"{alpha:g}", loaded, fingerprints={"image": f"{alpha:g}"})
                with tempfile.TemporaryDirectory() as place:
                    found = score_labelled(
                        model,
                        open_labelled_set(str(folder)),
                        Path(place),
                        batch_size=64,
                        workers=0,
                        name="",
                        progress=False,
                    )
                return 100 * found["top1"]

            row = {"alpha": alpha}
            for split, photographs in (("val", "validation"), ("test", "test")):
                row[f"{split}_old"] = mean(rsum(self.data / split / name) for name in OLD)
                emoji = task == "emoji"
                row[f"{split}_new"] = rsum(self.data / split / NEW) if emoji else top1(self.photographs / photographs)
            rows.append(row)
        return rows

    def train(self, seed: int) -> None:
        """The model before of a seed, if it is not there."""
        if not (run := self.base(seed)).is_finished:
            child = run.start()
            child.process.wait()
            child.check()


def run(*words: str, log: Path) -> float:
    """CPU seconds of a command of `zerovl` and of all processes that it starts."""
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen([sys.executable, "-m", "open_clip_zerovl.cli", *words], stdout=file, stderr=file)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"forgetting: error: zerovl {words[0]} ended with status {child.returncode}; see {log}")
    return usage.ru_utime + usage.ru_stime


def rates_of(arm: str) -> list[float]:
    return [3 * rate if arm == "LoRA" else rate for rate in RATES]


def run_all(bench: Bench, jobs: int) -> None:
    """All runs that have no record, the pilots of a task before its other seeds."""
    packed = ["--out", str(bench.out / "photographs"), "--max-side", "64", "--test-share", "0.1"]
    run("data", "pack", str(bench.photographs / "train"), *packed, log=bench.out / "pack.log")
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(bench.train, [PILOT, *SEEDS["emoji"]]))
        for task, seeds in SEEDS.items():
            pilots = [(arm, rate) for arm in ARMS for rate in rates_of(arm)]
            found = list(pool.map(lambda one, task=task: bench.record(task, *one, PILOT), pilots))
            best = {arm: max((one for one in found if one["arm"] == arm), key=new_on_validation)["lr"] for arm in ARMS}
            pairs = [(seed, arm) for seed in seeds for arm in ARMS]
            list(pool.map(lambda one, task=task, best=best: bench.record(task, one[1], best[one[1]], one[0]), pairs))


def new_on_validation(record: Mapping[str, Any]) -> float:
    return record["points"][-1]["val_new"]


def on_curve(record: Mapping[str, Any]) -> Mapping[str, float]:
    """The point of the curve that validation chooses."""
    points = record["points"]
    allowed = [one for one in points if one["alpha"] == 0 or one["val_old"] >= KEPT_SHARE * points[0]["val_old"]]
    return max(allowed, key=lambda one: (one["val_new"], -one["alpha"]))


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds on the test splits, with Student's 95 % interval of the paired difference to full fine-tuning."""

    def shown(values: Sequence[float], full: Sequence[float], form: str = ".1f") -> str:
        between = interval_over_seeds([value - other for value, other in zip(values, full, strict=True)])
        same = between is None or list(values) == list(full)
        return f"{mean(values):{form}}" + ("" if same else f" ({between[0]:+{form}} to {between[1]:+{form}})")

    rows: dict[str, list[str]] = {}
    for task in SEEDS:
        own = [one for one in records if one["task"] == task and one["seed"] != PILOT]
        by_arm = {arm: sorted((r for r in own if r["arm"] == arm), key=lambda r: r["seed"]) for arm in ARMS}
        points = {"before": [one["points"][0] for one in by_arm["full"]]}
        for arm, found in by_arm.items():
            points |= {arm: [r["points"][-1] for r in found], f"{arm} + curve": [on_curve(r) for r in found]}
        full = by_arm["full"]
        for label, found in points.items():
            arm = label.removesuffix(" + curve")
            cells = [
                shown([p[f"test_{k}"] for p in found], [p[f"test_{k}"] for p in points["full"]]) for k in ("new", "old")
            ]
            cost = [r["cpu_seconds"] / f["cpu_seconds"] for r, f in zip(by_arm.get(arm, ()), full, strict=False)]
            rows.setdefault(label, [label]).extend([*cells, f"{mean(cost):.2f}" if cost and arm == label else ""])
    header = ["", *(f"{task}: {what}" for task in SEEDS for what in ("new", "old", "cost"))]
    return markdown_table(header, list(rows.values()))


def write_csv(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """All points of all runs, a line each."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        keys = ("alpha", "val_new", "val_old", "test_new", "test_old")
        out.writerow(["task", "arm", "lr", "seed", "cpu_seconds", *keys])
        for one in sorted(records, key=lambda one: (one["task"], ARMS.index(one["arm"]), one["seed"], one["lr"])):
            head = [one["task"], one["arm"], f"{one['lr']:g}", one["seed"], round(one["cpu_seconds"], 1)]
            out.writerows([*head, *(round(point[key], 2) for key in keys)] for point in one["points"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/emoji"), help="of `python -m scripts.drawn emoji`")
    parser.add_argument("--photographs", type=Path, default=Path("clothing"))
    parser.add_argument("--out", type=Path, default=Path("forgetting"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--table", action="store_true", help="train nothing: write the CSV and print the table")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        torch.set_num_threads(1)
        run_all(Bench(args.data.absolute(), args.photographs.absolute(), args.out.absolute()), args.jobs)
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(args.out.glob("*-*.json"))]
    records = [one for one in records if "points" in one]
    write_csv(records, Path("docs/results/forgetting.csv"))
    print(table(records))


if __name__ == "__main__":
    main()
