"""`make ablation`: the paper's tables in miniature, on four emoji sets and four icon families.

    python -m scripts.ablation.run --pilot       # chooses settings on validation: choices.json, to be committed
    python -m scripts.ablation.run [--seeds 0,1] [--jobs 2] [--only debiased,random] [--minutes 60] [--list]
    python -m scripts.ablation.report            # makes docs/results.md from the runs

`protocol.py` says what is compared with what, and how. Each condition of `conditions.py` is trained by training.main in a
process of its own with one thread. A run writes one JSON, ablation/NAME-seedS.json: its settings, loss curve, retrieval, signs
of bias, times. Called again, it keeps the runs whose JSON has the same settings, takes over those of docs/results/runs.json,
and goes on with the others: several sittings and machines can share the work. All conditions of one seed come before the next
seed. `--only` takes those that depend on no choice before the pilots too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from scripts.ablation.comparisons import TABLES
from scripts.ablation.conditions import CONDITIONS
from scripts.ablation.jobs import MINIATURES, Ablation, Job
from scripts.ablation.measuring import Measurements
from scripts.ablation.processes import Processes
from scripts.ablation.protocol import (
    CHOICES,
    CHOICES_FILE,
    PILOT_SEEDS,
    QUICK,
    SEEDS,
    Choices,
    read_choices,
    read_pilots,
)
from scripts.ablation.sources import write_clusters, write_contexts, write_embeddings, write_groups
from scripts.drawn.make import prepare_drawn
from scripts.emoji.runs import flag_value

VIEWS = 4  # of each picture, for teachers
COMMITTED = Path("docs/results/runs.json")  # what earlier sittings have finished


class OutOfTime(Exception):
    """The minutes that were given are over; what is finished is kept."""


def run_all(ablation: Ablation, jobs: Sequence[Job], slots: int, ends_at: float | None = None) -> dict[Job, str]:
    """Train and measure the jobs. If a run fails, those that are built on it are not started.

    Args:
        ends_at: `time.monotonic()` after which no further run is started.

    Returns:
        The reasons of failures, by job.

    Raises:
        OutOfTime: jobs are left.
    """
    start = time.monotonic()
    measurements = Measurements(ablation)
    processes = Processes(slots)
    pending, trained = list(jobs), set[Job]()
    failed: dict[Job, str] = {}

    def launch() -> None:
        for job in list(pending):
            bases = [Job(job.seed, name) for name in job.condition.needs]
            broken = [base for base in bases if base in failed]
            if broken:
                failed[job] = f"{broken[0]} failed"
            elif any(base in jobs and base not in trained for base in bases):
                continue
            elif not processes.has_room(job.condition.ranks) or (ends_at is not None and time.monotonic() > ends_at):
                return  # keep the order: no later, smaller job goes first
            else:
                try:
                    prepare(ablation, job)
                    processes.start(job, ablation.training_run(job))
                except UserError as error:
                    failed[job] = str(error)
            pending.remove(job)

    try:
        done = 0
        launch()
        while processes.running:
            ended = processes.next_ended()
            if ended.status == 0:
                trained.add(ended.job)
            else:
                words = ablation.training_run(ended.job).last_error()
                failed[ended.job] = f"the training ended with status {ended.status}: {words}"
            launch()  # before measuring, so that the cores stay busy
            done += 1
            minutes = (time.monotonic() - start) / 60
            head = (
                f"[{done}/{len(jobs)}, {minutes:.1f} min, {minutes / done * (len(jobs) - done):.0f} left] {ended.job}"
            )
            try:
                result = None if ended.job in failed else measurements.write(ended)
            except UserError as error:
                failed[ended.job] = f"measuring: {error}"
                result = None
            if result is None:
                print(f"{head}: {failed[ended.job]}", flush=True)
                continue
            rsum = ", ".join(f"{pool} {value:.1f}" for pool, value in result["rsum"].items() if value is not None)
            print(f"{head}: RSUM {rsum}; CPU {ended.cpu_seconds:.0f} s", flush=True)
            for name in (ended.job.name, *ended.job.condition.needs):
                ablation.tidy(Job(ended.job.seed, name))
    finally:
        processes.stop()
    if pending:
        raise OutOfTime(f"{len(pending)} of {len(jobs)} runs are left; call it again to go on")
    return failed


def prepare(ablation: Ablation, job: Job) -> None:
    """Write the sources that only this condition has."""
    condition, data = job.condition, ablation.data[job.condition.miniature]
    if condition.kind == "contexts":
        write_contexts(data, ablation.contexts)
    elif condition.kind == "groups":
        write_groups(data, [*MINIATURES[condition.miniature].sources], ablation.groups)
    elif condition.clusters_of is not None:
        checkpoint = ablation.training_run(Job(job.seed, condition.clusters_of)).checkpoint
        folder = ablation.clusters(job)
        write_clusters(data, job.trained, checkpoint, folder, ablation.cluster_settings, seed=job.seed)
    if condition.teacher is not None:
        checkpoint = ablation.training_run(Job(job.seed, condition.teacher)).checkpoint
        flags = ablation.training_run(job).flags
        train_data, aug_cfg = (flag_value(flags, name) for name in ("--train-data", "--aug-cfg"))
        write_embeddings(checkpoint, train_data, ablation.teacher(job), views=VIEWS, aug_cfg=[aug_cfg], seed=job.seed)


# ---------------------------------------------------------------------------------------------------------------------
# Pilots
# ---------------------------------------------------------------------------------------------------------------------


def choose(data: dict[str, Path], out: Path, slots: int, ends_at: float | None) -> None:
    """Make the protocol's choices by pilot runs on the validation split, and write them to `CHOICES_FILE`.

    Finished pilots are kept. The file is written after each choice. A choice that it holds is made again only if its grid has
    values without a score.

    Raises:
        UserError: a pilot failed.
        OutOfTime: pilots are left.
    """
    report = read_pilots(CHOICES_FILE)
    chosen = read_choices(CHOICES_FILE)
    for name, choice in CHOICES.items():
        if name in report and choice.is_settled(report[name]["scores"]):
            continue
        scores: dict[str, float] = {}
        for value in choice.grid:
            if choice.is_settled(scores):
                break
            pilot = Ablation(data, out / f"{name}={value}", {**QUICK, **chosen, name: value}, "val")
            jobs = pilot.plan(PILOT_SEEDS, choice.conditions)
            print(f"{name} = {value}: {len(jobs)} runs", flush=True)
            failed = run_all(pilot, jobs, slots, ends_at) if jobs else {}
            if failed:
                raise UserError("; ".join(f"{job}: {reason}" for job, reason in failed.items()))
            records = [
                json.loads(pilot.record_file(Job(seed, condition)).read_text(encoding="utf-8"))
                for seed in PILOT_SEEDS
                for condition in choice.conditions
            ]
            scores[value] = sum(record["score"] for record in records) / len(records)
        chosen = {**chosen, name: choice.decide(scores)}
        rounded = {value: round(score, 1) for value, score in scores.items()}
        report[name] = {"what": choice.what, "rule": choice.rule, "scores": rounded, "chosen": chosen[name]}
        print(f"{choice.what}: {chosen[name]}, of {rounded}", flush=True)
        write_atomically(CHOICES_FILE, json.dumps(report, indent=1) + "\n")
    print(f"The choices are in {CHOICES_FILE}: commit it, then run the ablation.")


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def listing(choices: Choices) -> str:
    """Every condition with its tables and flags."""
    lines = []
    for name, condition in CONDITIONS.items():
        tables = ", ".join(table.name for table in TABLES if name in table.conditions)
        flags = " ".join(["--sampling", condition.sampling, *condition.run_flags(choices)])
        extra = [
            f"{condition.run_epochs(choices)} epochs",
            f"{condition.ranks} ranks" if condition.ranks > 1 else "",
            f"{condition.miniature}, {condition.trained}, {condition.kind}",
            f"built on {', '.join(condition.needs)}" if condition.needs else "",
        ]
        lines.append(f"{name:20} {tables:38} {flags}  ({'; '.join(note for note in extra if note)})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="folder of the miniatures, fetched where missing"
    )
    parser.add_argument("--out", type=Path, default=Path("ablation"))
    parser.add_argument("--seeds", help=f"default {','.join(map(str, SEEDS))}")
    parser.add_argument("--pilot", action="store_true", help=f"choose the settings on validation: {CHOICES_FILE.name}")
    parser.add_argument("--quick", action="store_true", help="one seed and short runs, in OUT/quick")
    parser.add_argument("--minutes", type=float, help="start no further run after so many minutes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time (default: cores)")
    parser.add_argument("--only", help="only these conditions and those that they are built on: NAME,NAME")
    parser.add_argument("--list", action="store_true", help="list the conditions")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    torch.set_num_threads(1)
    try:
        return _run(arguments)
    except UserError as error:
        print(f"ablation: error: {error}", file=sys.stderr)
        return 2
    except OutOfTime as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("ablation: stopped; call it again to go on", file=sys.stderr)
        return 130


def _end(*_: object) -> None:
    """End the trainings with this program; a second SIGTERM is ignored, so that this is not interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _run(arguments: argparse.Namespace) -> int:
    names = list(CONDITIONS) if arguments.only is None else arguments.only.split(",")
    if unknown := [name for name in names if name not in CONDITIONS]:
        raise UserError(f"there is no condition {unknown[0]!r}; --list shows them")
    if arguments.list:
        print(listing({**QUICK, **read_choices()}))
        return 0
    seeds = _seeds(arguments.seeds) if arguments.seeds else ((0,) if arguments.quick else SEEDS)
    if arguments.jobs < 1:
        raise UserError(f"--jobs is 1 or more, got {arguments.jobs}")
    ends_at = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    data = {name: arguments.data / name for name in MINIATURES}
    needed = {CONDITIONS[needs].miniature for name in names for needs in (name, *CONDITIONS[name].needs)}
    choices = QUICK if arguments.quick else read_choices()
    if not arguments.pilot:
        _check_chosen(names, choices)
    for name in sorted(needed):
        prepare_drawn(MINIATURES[name], data[name])
    if arguments.pilot:
        choose(data, arguments.out / "pilots", arguments.jobs, ends_at)
        return 0
    ablation = Ablation(data, arguments.out / "quick" if arguments.quick else arguments.out, choices)
    if not arguments.quick:
        ablation.take_over(COMMITTED)
    jobs = ablation.plan(seeds, names)
    kept = sum(ablation.is_recorded(Job(seed, name)) for seed in seeds for name in names)
    print(
        f"{len(jobs)} runs to train, {arguments.jobs} at a time; {kept} finished runs are kept in {ablation.out}",
        flush=True,
    )
    failed = run_all(ablation, jobs, arguments.jobs, ends_at) if jobs else {}
    for job, reason in failed.items():
        print(f"ablation: error: {job}: {reason}", file=sys.stderr)
    return 2 if failed else 0


def _check_chosen(names: Sequence[str], choices: Choices) -> None:
    """
    Raises:
        UserError: a condition depends on a choice that no pilot has made yet.
    """
    if waiting := [name for name in names if not CONDITIONS[name].choices <= set(choices)]:
        raise UserError(
            f"{len(waiting)} conditions ({', '.join(waiting[:3])} ...) depend on settings that pilots choose, and "
            f"{CHOICES_FILE.name} does not have all of them: run `make ablation PILOT=1` first, or name other conditions "
            "with --only"
        )


def _seeds(text: str) -> list[int]:
    try:
        seeds = sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise UserError(f"--seeds takes numbers with commas between them, got {text!r}") from None
    if seeds[0] < 0 or set(seeds) & set(PILOT_SEEDS):
        raise UserError(f"--seeds are 0 or more, without the pilots' {', '.join(map(str, PILOT_SEEDS))}: got {text}")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
