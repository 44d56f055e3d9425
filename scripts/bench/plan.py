"""How right `zerovl plan` is: its step time compared with that of a training run of 50 steps on the same machine.

    OMP_NUM_THREADS=1 python scripts/bench/plan.py [--data data/emoji] [--case TEXT] [--rounds N] [--beside [cpu|wall]]

For each case a plan is made, and then `python -m training.main` runs with the same arguments; the real time is the median of
the steps that the run logs, without the first five. Prints planned/real for each. The exit status is 1 if the median over the
rounds of a case is more than 15 % off.

`--beside` is for a machine that other programs use, whose speed changes from minute to minute: the plan is made while the
training runs, and the real time is the median of the steps logged meanwhile, at least 50. Both programs measure the CPU time of
their own process (which does not show how loader processes and training share a machine), or the wall-clock time.
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
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS, SKIPPED, TOLERANCE = 50, 5, 0.15
SOURCES = ("noto", "twemoji", "openmoji", "fluent")
LOGGED = re.compile(r"(\S+) \| INFO \| Train Epoch: .*? Batch \(t\): ([\d.]+)")

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
    for size, steps in ((4, 4), (2, 8)):
        found[f"ViT-S-16 at 96 px, {size} x {steps}, retain 1, 0 workers"] = [
            *SMALL_VIT, "--token-drop", "0.25", "--batch-size", str(size), "--dga-steps", str(steps), "--workers", "0",
        ]  # fmt: skip
    return found


def effective_batch(arguments: list[str]) -> int:
    def value(flag: str) -> int:
        return int(arguments[arguments.index(flag) + 1])

    return value("--batch-size") * value("--dga-steps")


def as_child(program: str, clock: str, arguments: list[str]) -> int:
    """Run a program in this process, with the given clock."""
    now = {"wall": time.time, "cpu": time.process_time}[clock]
    if program == "plan":
        from open_clip_zerovl.cli.program import main as plan
        from open_clip_zerovl.plan import measure as plan_measure

        plan_measure.time = SimpleNamespace(perf_counter=now)  # type: ignore[assignment]
        return plan(["plan", "--json", *arguments])
    from training import step_log
    from training.main import main as training

    step_log.time = SimpleNamespace(time=now)  # type: ignore[assignment]
    return training(arguments)


def command(program: str, clock: str, arguments: list[str]) -> list[str]:
    return [sys.executable, __file__, "--child", program, "--clock", clock, "--", *arguments]


def logged_steps(folder: Path) -> list[tuple[datetime, float]]:
    """The time at which each step of a run was logged, and its seconds."""
    log = folder / "run" / "out.log"
    found = LOGGED.findall(log.read_text("utf-8")) if log.is_file() else []
    return [(datetime.strptime(when, "%Y-%m-%d,%H:%M:%S"), float(seconds)) for when, seconds in found]


def one_after_the_other(
    arguments: list[str], least: int = STEPS, skipped: int = SKIPPED
) -> tuple[dict[str, Any], list[float]]:
    """The plan, and the seconds of each step of a run of `least` steps or more, without the first `skipped`."""
    done = subprocess.run(command("plan", "wall", arguments), capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"plan.py: zerovl plan ended with status {done.returncode}: {done.stderr}")
    with tempfile.TemporaryDirectory() as logs:
        run = [*command("train", "wall", [*arguments, "--logs", logs, "--name", "run"])]
        trained = subprocess.run(run, capture_output=True, text=True)
        steps = logged_steps(Path(logs))
    if trained.returncode != 0 or len(steps) < least:
        raise SystemExit(f"plan.py: the run ended with status {trained.returncode}: {trained.stderr}")
    return json.loads(done.stdout), [seconds for _, seconds in steps[skipped:]]


def side_by_side(arguments: list[str], clock: str) -> tuple[dict[str, Any], list[float]]:
    """The plan and the seconds of steps by either clock; the training runs while the plan is made."""
    with tempfile.TemporaryDirectory() as logs, open(Path(logs) / "errors", "w+", encoding="utf-8") as errors:
        folder = Path(logs)
        run = command("train", clock, [*arguments, "--epochs", "1000", "--logs", logs, "--name", "run"])
        training = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while len(logged_steps(folder)) < SKIPPED:
                time.sleep(0.5)
                if training.poll() is not None:
                    raise SystemExit(f"plan.py: the run ended: {(folder / 'errors').read_text('utf-8')}")
            planning = subprocess.Popen(
                command("plan", clock, arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert planning.stdout is not None and planning.stderr is not None
            for line in planning.stderr:
                if "taking steps" in line:
                    begin = datetime.now()
            plan = json.loads(planning.stdout.read())
            planning.wait()
            end = datetime.now()
            while len([when for when, _ in logged_steps(folder) if when >= begin]) < STEPS:
                end = datetime.now()
                time.sleep(0.5)
        finally:
            training.terminate()
            training.wait()
        return plan, [seconds for when, seconds in logged_steps(folder) if begin <= when <= end]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("data/emoji"), help="folder of `python -m scripts.drawn emoji`"
    )
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=1, help="plans and runs of each case (default %(default)s)")
    parser.add_argument(
        "--beside",
        nargs="?",
        const="cpu",
        choices=("cpu", "wall"),
        help="plan while the training runs (default: by CPU time)",
    )
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=("plan", "train"), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return as_child(options.child, options.clock, options.arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    train_data = "::".join(f"{source}={options.data / source}" for source in SOURCES)
    print(
        "| run | steps | planned, s | real median, s | real mean, s | planned / real |\n|---|--:|--:|--:|--:|--:|",
        flush=True,
    )
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
            plan, seconds = side_by_side(common, options.beside) if options.beside else one_after_the_other(common)
            planned = plan["step_seconds"]
            median, mean = statistics.median(seconds), statistics.fmean(seconds)
            ratios.append(planned / median)
            figures = f"{len(seconds)} | {planned:.3f} | {median:.3f} | {mean:.3f} | {ratios[-1]:.2f}"
            print(f"| {name} | {figures} |", flush=True)
        if abs(statistics.median(ratios) - 1) > TOLERANCE:
            off.append(name)
    for name in off:
        print(f"more than {TOLERANCE:.0%} off: {name}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
