"""Ways to fine-tune that forget less: the table of docs/finetune.md, and docs/results/forgetting.csv.

    python -m scripts.forgetting --data data/emoji --photographs clothing [--out forgetting] [--jobs 2]

The demo's model is trained on three emoji sources (OLD), by BASES seeds and the pilot's. `zerovl finetune` then teaches it
OpenMoji (new ability: RSUM) or photographs in classes (train, validation, test / CLASS / *.jpg; new ability: zero-shot top-1 in
percent). The old ability is the mean RSUM on the three sources. Fixed before any fine-tuning:

- Learning rate: of RATES the one with the best new ability on validation, OpenMoji, the pilot seed. LoRA has a grid three times
  higher, as adapters begin at zero; both grids grew by a third rate when the second was the best of both. Kept data and kept
  teacher change data and loss and not the weights that train, so that they take the rate of full fine-tuning; photographs take
  the rates of OpenMoji, since the model is the same.
- Each run has EPOCHS; `zerovl finetune` keeps the one with the best score on held-out pairs, as ever.
- Rows `ARM` are the model after training. Rows `ARM + curve` (WiSE-FT) are, of ALPHAS, the weights with the best new ability
  on validation among those that keep 99 % of the old ability on validation. Both are scored on the test splits.
- Cost: CPU seconds of the whole command over those of full fine-tuning with the same seed.

A call after an interruption goes on; it repeats only the run that was interrupted.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from open_clip_zerovl.checkpoints.between import open_ends
from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.evaluate.retrieval.score import score_set
from open_clip_zerovl.evaluate.settings import RetrievalSettings
from open_clip_zerovl.evaluate.zero_shot.score import score_loaded
from open_clip_zerovl.evaluate.zero_shot.sets import open_labelled_set
from open_clip_zerovl.report.tables import markdown_table
from open_clip_zerovl.report.verdicts import student
from scripts.drawn.training import TrainingRun, drawn_flags
from scripts.photographs.forgetting import on_curve, zerovl

OLD, NEW = ("noto", "twemoji", "fluent"), "openmoji"
BASES, BASE_EPOCHS, EPOCHS = 3, 12, {"emoji": 5, "photographs": 6}
RATES = {"full": (3e-4, 1e-3, 3e-3), "LoRA": (1e-3, 3e-3, 1e-2)}
ARMS = ("full", "LoRA", "kept data", "kept teacher")
LORA_RANK = 8
PHOTOGRAPHS_BATCH = 64  # the command's own choice, 256, has ten steps an epoch: one run of four epochs stayed at chance
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEPT_SHARE = 0.99
PILOT, SEEDS = 100, {"emoji": range(5), "photographs": range(3)}


def base(args: argparse.Namespace, seed: int) -> TrainingRun:
    """The training of the model before a fine-tuning with this seed, by the demo's flags."""
    seed = seed if seed == PILOT else seed % BASES
    flags = drawn_flags(args.data, sampling="debiased", epochs=BASE_EPOCHS, seed=seed, sources=OLD)
    return TrainingRun(args.out / f"base-{seed}", (*flags, "--device", "cpu"))


def train_base(args: argparse.Namespace, seed: int) -> None:
    if not (run := base(args, seed)).is_finished:
        child = run.start()
        child.process.wait()
        child.check()


def fine_tuned(
    args: argparse.Namespace, task: str, arm: str, rate: float, seed: int
) -> dict[str, Any]:
    """The record of a run, with its scores at each alpha, from an earlier call or made now."""
    file = args.out / f"{task}-{arm.replace(' ', '-')}-{rate:g}-{seed}.json"
    if not file.is_file():
        before, old = (
            str(base(args, seed).checkpoint),
            "::".join(f"{name}={args.data / name}" for name in OLD),
        )
        words = [
            "--data",
            str(args.out / "photographs"),
            "--set",
            f"effective-batch={PHOTOGRAPHS_BATCH}",
        ]
        if task == "emoji":
            words = [
                "--data",
                f"{NEW}={args.data / NEW}",
                "--retrieval-data",
                f"{NEW}={args.data / 'val' / NEW}",
            ]
            words += [
                "--skip-overlap"
            ]  # 5 of 200 validation emoji are drawn as another concept's emoji
        words += {"LoRA": ["--lora", str(LORA_RANK), "--set", f"lr-head={rate / 10:g}"], "kept data": ["--keep-data", old],
                  "kept teacher": ["--keep-teacher"]}.get(arm, [])  # fmt: skip
        words += [
            "--set",
            f"lr={rate:g}",
            "--set",
            f"epochs={EPOCHS[task]}",
            "--seed",
            str(seed),
            "--alphas",
            "1",
        ]
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            words += ["--from", before, "--device", "cpu", "--out", folder]
            seconds = zerovl("finetune", *words, log=file.with_suffix(".log"))
            after = json.loads(Path(folder, "finetune.json").read_text(encoding="utf-8"))[
                "checkpoint"
            ]
            ends = open_ends(Encoder(before, device="cpu"), Encoder(after, device="cpu"))
            points = [{"alpha": alpha, **scores(args, task, ends, alpha)} for alpha in ALPHAS]
        record = {
            "task": task,
            "arm": arm,
            "lr": rate,
            "seed": seed,
            "cpu_seconds": seconds,
            "points": points,
        }
        write_atomically(file, json.dumps(record, indent=1) + "\n")
        print(file.stem, f"{seconds:.0f} s", points[-1], flush=True)
    return json.loads(file.read_text(encoding="utf-8"))


def scores(args: argparse.Namespace, task: str, ends: Any, alpha: float) -> dict[str, float]:
    """New and old ability of the weights at alpha, on validation and test."""
    loaded = (ends.at(alpha), ends.preprocess, ends.tokenizer, ends.device)
    encoder = Encoder(ends.names[0], device="cpu")
    found: dict[str, float] = {}

    def rsum(folder: Path) -> float:
        scored = score_set(
            loaded, folder.name, open_retrieval_set(folder), RetrievalSettings(), encoder=encoder
        )
        assert scored is not None  # one process scores
        return scored.metrics["rsum"]

    def top1(folder: Path) -> float:
        return (
            100
            * score_loaded(
                loaded, open_labelled_set(str(folder)), encoder=encoder, name="photographs"
            )["top1"]
        )

    for split, photographs in (("val", "validation"), ("test", "test")):
        new = (
            rsum(args.data / split / NEW)
            if task == "emoji"
            else top1(args.photographs / photographs)
        )
        found |= {
            f"{split}_new": new,
            f"{split}_old": mean(rsum(args.data / split / name) for name in OLD),
        }
    return found


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of all runs, the pilots' among them."""
    packed = ["--out", str(args.out / "photographs"), "--max-side", "64", "--test-share", "0.1"]
    zerovl("data", "pack", str(args.photographs / "train"), *packed, log=args.out / "pack.log")
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(partial(train_base, args), [PILOT, *range(BASES)]))
        pilots = [("emoji", arm, rate, PILOT) for arm, rates in RATES.items() for rate in rates]
        records = list(pool.map(lambda one: fine_tuned(args, *one), pilots))
        best = {
            arm: max(
                (r for r in records if r["arm"] == arm), key=lambda r: r["points"][-1]["val_new"]
            )["lr"]
            for arm in RATES
        }
        jobs = [
            (task, arm, best.get(arm, best["full"]), seed)
            for task in SEEDS
            for seed in SEEDS[task]
            for arm in ARMS
        ]
        return records + list(pool.map(lambda one: fine_tuned(args, *one), jobs))


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds on the test splits; for arms Student's 95 % interval of the paired difference to full fine-tuning."""

    def shown(values: Sequence[float], full: Sequence[float]) -> str:
        between = student(
            [value - other for value, other in zip(values, full, strict=True)]
        ).interval
        if between is None or values == full:
            return f"{mean(values):.1f}"
        return f"{mean(values):.1f} ({between[0]:+.1f} to {between[1]:+.1f})"

    rows: dict[str, list[str]] = {}
    for task in SEEDS:
        own = sorted(
            (r for r in records if r["task"] == task and r["seed"] != PILOT),
            key=lambda r: r["seed"],
        )
        by_arm = {arm: [run for run in own if run["arm"] == arm] for arm in ARMS}
        full = by_arm["full"]
        points, costs = {"before": [run["points"][0] for run in full]}, {}
        for arm, runs in by_arm.items():
            points |= {
                arm: [run["points"][-1] for run in runs],
                f"{arm} + curve": [on_curve(run["points"], KEPT_SHARE) for run in runs],
            }
            ratios = [
                run["cpu_seconds"] / other["cpu_seconds"]
                for run, other in zip(runs, full, strict=True)
            ]
            costs[arm] = f"{mean(ratios):.2f}"
        for label, found in points.items():
            against = points["full"] if label in ARMS else found
            cells = [
                shown([p[key] for p in found], [p[key] for p in against])
                for key in ("test_new", "test_old")
            ]
            rows.setdefault(label, [label]).extend([*cells, costs.get(label, "")])
    return markdown_table(
        ["", *(f"{task}: {k}" for task in SEEDS for k in ("new", "old", "cost"))], [*rows.values()]
    )


def write_csv(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """All points of all runs, a line each."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["task", "arm", "lr", "seed", "cpu_seconds", *records[0]["points"][0]])
        for one in records:
            head = [
                one["task"],
                one["arm"],
                f"{one['lr']:g}",
                one["seed"],
                round(one["cpu_seconds"], 1),
            ]
            out.writerows(
                [*head, *(round(value, 2) for value in point.values())] for point in one["points"]
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data/emoji"), help="of `python -m scripts.drawn emoji`"
    )
    parser.add_argument("--photographs", type=Path, default=Path("clothing"))
    parser.add_argument("--out", type=Path, default=Path("forgetting"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    args = parser.parse_args()
    args.data, args.photographs, args.out = (
        args.data.absolute(),
        args.photographs.absolute(),
        args.out.absolute(),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    records = run_all(args)
    write_csv(records, Path("docs/results/forgetting.csv"))
    print(table(records))


if __name__ == "__main__":
    main()
