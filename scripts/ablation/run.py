"""`make ablation`: the paper's tables in miniature, on four emoji sets and four icon families.

    python -m scripts.ablation.run --pilot       # chooses settings on validation: choices.json, to be committed
    python -m scripts.ablation.run [--seeds 0,1] [--jobs 2] [--only debiased,random]
    python -m scripts.ablation.report            # makes docs/results/emoji.md from the runs

`protocol.py` defines the comparisons. Each condition is trained by the training program in a process of its
own with one thread. A run writes one JSON, ablation/NAME-seedS.json: its settings, loss curve, retrieval, signs of bias, times.
Called again, it keeps the runs whose JSON has the same settings, takes over those of docs/results/runs.json, and goes on with
the rest: several sittings (`timeout 3600 ...` ends one) and machines can share the work. All conditions of one seed come before
the next seed. Before the pilots, `--only` takes the conditions that depend on no choice.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.core.launch import TrainingProcess, last_error
from scripts.ablation.jobs import Ablation, Job
from scripts.ablation.measuring import Ended, Measurements
from scripts.ablation.protocol import (
    CHOICES,
    CHOICES_FILE,
    CONDITIONS,
    MINIATURES,
    PILOT_SEEDS,
    QUICK,
    SEEDS,
    Choices,
    read_choices,
    read_pilots,
)
from scripts.ablation.sources import (
    MIXTURES,
    write_clusters,
    write_contexts,
    write_embeddings,
    write_groups,
    write_mixture,
)
from scripts.drawn.make import prepare_drawn
from scripts.drawn.training import TrainingRun, flag_values

COMMITTED = Path("docs/results/runs.json")  # the runs of earlier sittings


@dataclass
class Processes:
    """Training processes that run at the same time, at most `slots` (a rank takes one)."""

    slots: int
    running: dict[Job, TrainingProcess] = field(default_factory=dict)
    ended: queue.Queue[Ended] = field(default_factory=queue.Queue)

    def has_room(self, ranks: int) -> bool:
        taken = sum(min(job.condition.ranks, self.slots) for job in self.running)
        return taken + min(ranks, self.slots) <= self.slots

    def start(self, job: Job, run: TrainingRun) -> None:
        self.running[job] = child = run.start()
        # One thread waits for each process: only wait4 gives a single child's CPU time, and the thread sees the end also
        # while another run is being measured.
        threading.Thread(target=self._wait, args=(job, child, time.time()), daemon=True).start()

    def _wait(self, job: Job, child: TrainingProcess, started: float) -> None:
        _, status, usage = os.wait4(child.process.pid, 0)
        child.process.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        self.ended.put(Ended(job, child.process.returncode, started, time.time() - started, cpu))

    def next_ended(self) -> Ended:
        """Waits for a process to end."""
        ended = self.ended.get()
        del self.running[ended.job]
        return ended

    def stop(self) -> None:
        """Ends all running processes, and waits for them."""
        for child in self.running.values():
            if child.process.returncode is None:
                os.kill(child.process.pid, signal.SIGTERM)
        while self.running:
            self.next_ended()


def run_all(ablation: Ablation, jobs: Sequence[Job], slots: int) -> dict[Job, str]:
    """Train and measure the jobs. If a run fails, those that are built on it are not started.

    Returns:
        The reasons of failures, by job.
    """
    start = time.monotonic()
    measurements, processes = Measurements(ablation), Processes(slots)
    pending, trained = list(jobs), set[Job]()
    failed: dict[Job, str] = {}

    def launch() -> None:
        for job in list(pending):
            if broken := [base for base in job.needs if base in failed]:
                failed[job] = f"{broken[0]} failed"
            elif any(base in jobs and base not in trained for base in job.needs):
                continue
            elif not processes.has_room(job.condition.ranks):
                return  # keep the order: no later, smaller job goes first
            else:
                try:
                    prepare(ablation, job)
                    processes.start(job, ablation.training_run(job))
                except UserError as error:
                    failed[job] = str(error)
            pending.remove(job)

    def measured(ended: Ended) -> str:
        """Measure a run; returns its results in words.

        Raises:
            UserError: the training failed, or it cannot be measured.
        """
        if ended.status != 0:
            words = last_error(ablation.training_run(ended.job).words)
            raise UserError(f"the training ended with status {ended.status}: {words}")
        rsum = measurements.write(ended)["rsum"]
        shown = ", ".join(
            f"{pool} {value:.1f}" for pool, value in rsum.items() if value is not None
        )
        return f"RSUM {shown}; CPU {ended.cpu_seconds:.0f} s"

    try:
        done = 0
        launch()
        while processes.running:
            ended = processes.next_ended()
            if ended.status == 0:
                trained.add(ended.job)
                launch()  # before measuring, so that the cores stay busy
            try:
                words = measured(ended)
                for job in (ended.job, *ended.job.needs):
                    ablation.tidy(job)
            except UserError as error:
                words = failed[ended.job] = str(error)
                launch()
            done += 1
            minutes = (time.monotonic() - start) / 60
            left = minutes / done * (len(jobs) - done)
            print(
                f"[{done}/{len(jobs)}, {minutes:.1f} min, {left:.0f} left] {ended.job}: {words}",
                flush=True,
            )
    finally:
        processes.stop()
    return failed


def prepare(ablation: Ablation, job: Job) -> None:
    """Write the sources that only this condition has."""
    condition, data = job.condition, ablation.data[job.condition.miniature]

    def checkpoint(name: str) -> Path:
        return ablation.training_run(Job(job.seed, name)).checkpoint

    if condition.kind == "contexts":
        write_contexts(data, ablation.out / "data" / "contexts")
    elif condition.kind == "groups":
        write_groups(data, ablation.sources(job))
    elif condition.kind in MIXTURES:
        write_mixture(data, condition.kind, job.trained, ablation.sources(job))
    elif condition.clusters_of is not None:
        base, choice = checkpoint(condition.clusters_of), ablation.choices["clusters"]
        write_clusters(data, job.trained, base, ablation.clusters(job), choice, seed=job.seed)
    if condition.teacher is not None:
        flags = flag_values(ablation.training_run(job).flags)
        write_embeddings(
            checkpoint(condition.teacher), flags["--train-data"][-1], ablation.teacher(job), aug_cfg=flags["--aug-cfg"],
            seed=job.seed,
        )  # fmt: skip


def choose(data: dict[str, Path], out: Path, slots: int) -> None:
    """Make the protocol's choices by pilot runs on the validation split, and write them to `CHOICES_FILE`.

    Finished pilots are kept. The file is written after each choice. A choice that it holds is made again only if its grid has
    values without a score.

    Raises:
        UserError: a pilot failed.
    """
    report, chosen = read_pilots(CHOICES_FILE), read_choices(CHOICES_FILE)
    for name, choice in CHOICES.items():
        if name in report and choice.is_settled(report[name]["scores"]):
            continue
        scores: dict[str, float] = {}
        for value in choice.grid:
            if choice.is_settled(scores):
                break
            pilot = Ablation(
                data,
                out / f"{name}={value}",
                {**QUICK, **chosen, **choice.during, name: value},
                "val",
            )
            jobs = pilot.plan(choice.seeds, choice.conditions)
            print(f"{name} = {value}: {len(jobs)} runs", flush=True)
            if jobs and (failed := run_all(pilot, jobs, slots)):
                raise UserError("; ".join(f"{job}: {reason}" for job, reason in failed.items()))
            found = [
                pilot.record(Job(seed, one))["score"]
                for seed in choice.seeds
                for one in choice.conditions
            ]
            scores[value] = sum(found) / len(found)
        chosen = {**chosen, name: choice.decide(scores)}
        rounded = {value: round(score, 1) for value, score in scores.items()}
        report[name] = {
            "what": choice.what,
            "rule": choice.rule,
            "scores": rounded,
            "chosen": chosen[name],
        }
        print(f"{choice.what}: {chosen[name]}, of {rounded}", flush=True)
        write_atomically(CHOICES_FILE, json.dumps(report, indent=1) + "\n")
    print(f"The choices are in {CHOICES_FILE}: commit it, then run the ablation.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data"),
        help="folder of the miniatures, fetched where missing",
    )
    parser.add_argument("--out", type=Path, default=Path("ablation"))
    parser.add_argument("--seeds", help=f"default {','.join(map(str, SEEDS))}")
    parser.add_argument(
        "--pilot",
        action="store_true",
        help=f"choose the settings on validation: {CHOICES_FILE.name}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed and short runs, in OUT/quick"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at the same time (default: cores)",
    )
    parser.add_argument(
        "--only", help="only these conditions and those that they are built on: NAME,NAME"
    )
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    torch.set_num_threads(1)
    try:
        return _run(arguments)
    except UserError as error:
        print(f"ablation: error: {error}", file=sys.stderr)
        return 2
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
        raise UserError(f"there is no condition {unknown[0]!r}; protocol.yaml has their names")
    seeds = _seeds(arguments.seeds) if arguments.seeds else ((0,) if arguments.quick else SEEDS)
    if arguments.jobs < 1:
        raise UserError(f"--jobs is 1 or more, got {arguments.jobs}")
    choices = QUICK if arguments.quick else read_choices()
    if not arguments.pilot:
        _check_chosen(names, choices)
    data = {name: arguments.data / name for name in MINIATURES}
    for name in sorted({CONDITIONS[one].miniature for one in names}):
        prepare_drawn(MINIATURES[name], data[name])
    if arguments.pilot:
        choose(data, arguments.out / "pilots", arguments.jobs)
        return 0
    ablation = Ablation(
        data, arguments.out / "quick" if arguments.quick else arguments.out, choices
    )
    if not arguments.quick:
        ablation.take_over(COMMITTED)
    jobs = ablation.plan(seeds, names)
    kept = sum(ablation.is_recorded(Job(seed, name)) for seed in seeds for name in names)
    print(
        f"{len(jobs)} runs to train, {arguments.jobs} at a time; {kept} finished runs are kept in {ablation.out}",
        flush=True,
    )
    failed = run_all(ablation, jobs, arguments.jobs)
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
        raise UserError(
            f"--seeds are 0 or more, without the pilots' {', '.join(map(str, PILOT_SEEDS))}: got {text}"
        )
    return seeds


if __name__ == "__main__":
    sys.exit(main())
