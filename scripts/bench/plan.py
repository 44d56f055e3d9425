"""How right `zerovl plan` is: its step time beside that of a real training run of 50 steps on the same machine.

    OMP_NUM_THREADS=1 python scripts/bench/plan.py [--data data/emoji] [--case TEXT] [--rounds N]

For each case a plan is made and then `python -m training.main` run with the same arguments; the real time is the median of
the steps that the run logs, without the first five. Prints predicted/real for each, and exits with 1 if the median over the
rounds of a case is more than 15 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, SKIPPED, TOLERANCE = 50, 5, 0.15
SOURCES = ("noto", "twemoji", "openmoji", "fluent")
LOGGED = re.compile(r"Train Epoch: .*? Batch \(t\): ([\d.]+)")

EMOJI = ["--model", "zerovl-emoji"]
SMALL_VIT = ["--model", "ViT-S-16", "--force-image-size", "96", "--force-context-length", "25"]


def cases(data: Path) -> dict[str, list[str]]:
    """Name -> arguments of training, without data."""
    emoji = [*EMOJI, "--text-model", str(data / "bert")]
    found = {}
    for steps in (2, 4):
        for workers in (0, 1):
            for retain in ("1", "auto"):
                name = f"zerovl-emoji, 32 x {steps}, retain {retain}, {workers} workers"
                found[name] = [
                    *emoji, "--batch-size", "32", "--dga-steps", str(steps), "--dga-retain", retain,
                    "--workers", str(workers),
                ]  # fmt: skip
    recipe = ["--coin-flip-mixup", "--text-augment", "0.2", "--auto-augment", "imagenet", "--workers", "1"]
    found["zerovl-emoji, 32 x 16, all methods, 1 worker"] = [
        *emoji, "--batch-size", "32", "--dga-steps", "16", *recipe,
    ]  # fmt: skip
    for steps in (4, 12):
        found[f"ViT-S-16 at 96 px, 4 x {steps}, retain 1, 0 workers"] = [
            *SMALL_VIT, "--token-drop", "0.25", "--batch-size", "4", "--dga-steps", str(steps), "--workers", "0",
        ]  # fmt: skip
    return found


def effective_batch(arguments: list[str]) -> int:
    def value(flag: str) -> int:
        return int(arguments[arguments.index(flag) + 1])

    return value("--batch-size") * value("--dga-steps")


def planned_seconds(arguments: list[str]) -> float:
    """The step time that the plan tells."""
    done = subprocess.run(
        [sys.executable, "-m", "open_clip_zerovl.cli", "plan", "--json", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise SystemExit(f"plan.py: zerovl plan ended with status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)["step_seconds"]


def real_seconds(arguments: list[str]) -> tuple[float, float]:
    """Median and mean seconds of the steps of a real run."""
    with tempfile.TemporaryDirectory() as logs:
        done = subprocess.run(
            [sys.executable, "-m", "training.main", *arguments, "--logs", logs, "--name", "run"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        seconds = [float(found) for found in LOGGED.findall((Path(logs) / "run" / "out.log").read_text("utf-8"))]
    if done.returncode != 0 or len(seconds) < STEPS:
        raise SystemExit(f"plan.py: the run ended with status {done.returncode} after {len(seconds)} steps: {done.stdout}")
    seconds = seconds[SKIPPED:]
    return statistics.median(seconds), statistics.fmean(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/emoji"), help="folder of `zerovl data emoji`")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=1, help="plans and runs of each case (default %(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    train_data = "::".join(f"{source}={options.data / source}" for source in SOURCES)
    print("| run | planned, s | real median, s | real mean, s | planned / real |\n|---|--:|--:|--:|--:|", flush=True)
    off = []
    for name, arguments in cases(options.data).items():
        if options.case not in name:
            continue
        common = [
            *arguments, "--train-data", train_data, "--sampling", "debiased", "--precision", "fp32", "--epochs", "1",
            "--train-num-samples", str(STEPS * effective_batch(arguments)), "--lr", "1e-3", "--warmup", "10",
            "--log-every-n-steps", "1", "--save-frequency", "0", "--device", "cpu",
        ]  # fmt: skip
        ratios = []
        for _ in range(options.rounds):
            planned = planned_seconds(common)
            median, mean = real_seconds(common)
            ratios.append(planned / median)
            print(f"| {name} | {planned:.3f} | {median:.3f} | {mean:.3f} | {ratios[-1]:.2f} |", flush=True)
        if abs(statistics.median(ratios) - 1) > TOLERANCE:
            off.append(name)
    for name in off:
        print(f"more than {TOLERANCE:.0%} off: {name}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
