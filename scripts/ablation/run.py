"""`make ablation`: the paper's tables in miniature, on the four emoji sources.

    python -m scripts.ablation.run [--seeds 0,1,2] [--epochs 8] [--jobs 2] [--only debiased,random] [--list]
    python -m scripts.ablation.report            # makes docs/results.md from the runs

Each condition of `conditions.py` is trained by training.main in a process of its own with one thread, and measured on the test
split (its hyperparameters were chosen on val). A run writes one JSON, ablation/NAME-seedS.json: its settings, loss curve,
retrieval, signs of bias, times. Called again, it keeps the runs whose JSON has the same settings and trains the others from the
start. All conditions of one seed come before the next seed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from open_clip_zerovl.datasets.drawn import load_drawn_split, prepare_drawn
from open_clip_zerovl.datasets.emoji import EMOJI
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import write_atomically
from scripts.ablation.conditions import CONDITIONS, TABLES
from scripts.ablation.sources import (
    CONTEXT_SOURCE,
    ContextPairs,
    cluster_data,
    context_data,
    measure_contexts,
    write_clusters,
    write_contexts,
)
from scripts.emoji.runs import Encoder, Pool, TrainingRun, emoji_flags, measure

QUICK_EPOCHS = 2
CURVE_POINTS = 100


@dataclass(frozen=True, order=True)
class Job:
    """A condition with a seed."""

    seed: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True)
class Ablation:
    """The folders of an ablation, and the settings of its jobs."""

    data: Path
    out: Path
    epochs: int
    split: str = "test"

    def training_run(self, job: Job) -> TrainingRun:
        condition = CONDITIONS[job.name]
        more = list(condition.flags)
        if condition.data == "context":
            more += ["--train-data", context_data(self.contexts)]
        elif condition.data == "clusters":
            more += ["--train-data", cluster_data(self.clusters(job.seed))]
        if condition.init_from is not None:
            more += ["--init-from", str(self.training_run(Job(job.seed, condition.init_from)).checkpoint)]
        epochs = self.epochs * condition.epochs
        flags = emoji_flags(self.data, sampling=condition.sampling, epochs=epochs, seed=job.seed, more=more)
        return TrainingRun(self.out / "runs" / str(job), tuple(flags), condition.ranks)

    @property
    def contexts(self) -> Path:
        return self.out / "data" / "contexts"

    def clusters(self, seed: int) -> Path:
        return self.out / "data" / f"clusters-seed{seed}"

    def record_file(self, job: Job) -> Path:
        return self.out / f"{job}.json"

    def asked(self, job: Job) -> dict[str, Any]:
        """The job's settings, by which its record is recognised: its flags, and those of the run that it is built on."""
        run, needs = self.training_run(job), CONDITIONS[job.name].needs
        built_on = None if needs is None else self.asked(Job(job.seed, needs))["flags"]
        return {
            "condition": job.name, "seed": job.seed, "epochs": self.epochs, "split": self.split,
            "ranks": run.ranks, "flags": list(run.flags), "built_on": built_on,
        }  # fmt: skip

    def is_recorded(self, job: Job) -> bool:
        """Whether the job's JSON exists and has the job's settings."""
        file = self.record_file(job)
        if not file.is_file():
            return False
        record = json.loads(file.read_text(encoding="utf-8"))
        return all(record.get(key) == value for key, value in self.asked(job).items())

    def plan(self, seeds: Sequence[int], names: Sequence[str]) -> list[Job]:
        """The jobs to train, seed by seed: those without a record, each after the one that it needs."""
        jobs: list[Job] = []
        for seed in seeds:
            wanted = {name for name in names if not self.is_recorded(Job(seed, name))}
            for name in [*wanted]:
                needs = CONDITIONS[name].needs
                if needs is not None and not self.training_run(Job(seed, needs)).is_finished():
                    wanted.add(needs)
            jobs += [Job(seed, name) for name in CONDITIONS if name in wanted]
        return jobs

    def tidy(self, job: Job) -> None:
        """Remove a recorded job's checkpoints, unless another condition of its seed still needs them."""
        waiting = [name for name, one in CONDITIONS.items() if one.needs == job.name]
        if self.is_recorded(job) and all(self.is_recorded(Job(job.seed, name)) for name in waiting):
            shutil.rmtree(self.training_run(job).folder / "checkpoints", ignore_errors=True)
        if CONDITIONS[job.name].data == "clusters":
            shutil.rmtree(self.clusters(job.seed), ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A training process that has ended, with its wall-clock seconds and the CPU seconds of all its ranks."""

    job: Job
    status: int
    wall_seconds: float
    cpu_seconds: float


@dataclass
class Processes:
    """Training processes that run at the same time, at most `slots` (a rank takes one)."""

    slots: int
    running: dict[Job, subprocess.Popen] = field(default_factory=dict)
    ended: queue.Queue[Ended] = field(default_factory=queue.Queue)
    _cost: dict[Job, int] = field(default_factory=dict)

    def has_room(self, ranks: int) -> bool:
        return sum(self._cost.values()) + min(ranks, self.slots) <= self.slots

    def start(self, job: Job, run: TrainingRun) -> None:
        child = run.start()
        self.running[job] = child
        self._cost[job] = min(run.ranks, self.slots)
        # One thread waits for each process: only wait4 gives a single child's CPU time, and the thread sees the end also
        # while another run is being measured.
        threading.Thread(target=self._wait, args=(job, child, time.monotonic()), daemon=True).start()

    def _wait(self, job: Job, child: subprocess.Popen, start: float) -> None:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        self.ended.put(Ended(job, child.returncode, time.monotonic() - start, cpu))

    def next_ended(self) -> Ended:
        """Waits for a process to end."""
        ended = self.ended.get()
        del self.running[ended.job], self._cost[ended.job]
        return ended

    def stop(self) -> None:
        """Ends all running processes, and waits for them."""
        for child in self.running.values():
            if child.returncode is None:
                os.kill(child.pid, signal.SIGTERM)
        while self.running:
            self.next_ended()


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class Measurements:
    """Measures runs in this process; the held-out pictures are loaded and transformed once for all."""

    def __init__(self, ablation: Ablation) -> None:
        self.ablation = ablation
        self.samples = load_drawn_split(EMOJI, ablation.data, ablation.split)
        self.pool = Pool.of(self.samples)
        self.contexts: ContextPairs | None = None
        self._ready: dict[tuple[str, int], tuple[Any, torch.Tensor]] = {}

    def write(self, ended: Ended) -> dict[str, Any]:
        """Measure a finished run and write its JSON."""
        job, ablation = ended.job, self.ablation
        run = ablation.training_run(job)
        encoder = Encoder.of(run.checkpoint, self._ready)
        if CONDITIONS[job.name].data == "context":
            if self.contexts is None:
                self.contexts = ContextPairs.of(self.samples[CONTEXT_SOURCE], ablation.contexts)
            record = measure_contexts(run, encoder, self.contexts, seed=job.seed)
        else:
            record, _ = measure(run, encoder, self.samples, self.pool, seed=job.seed)
        result = {
            **ablation.asked(job),
            **asdict(record),
            "loss_curve": thinned(record.loss_curve),
            "samples": record.loss_curve[-1][0],
            "wall_seconds": round(ended.wall_seconds, 1),
            "cpu_seconds": round(ended.cpu_seconds, 1),
            "samples_per_second": samples_per_second(run.log),
        }
        write_atomically(ablation.record_file(job), json.dumps(result, indent=1) + "\n")
        return result


def thinned(curve: Sequence[tuple[int, float]], points: int = CURVE_POINTS) -> list[tuple[int, float]]:
    """A loss curve of at most `points`: each is the mean of a block of neighbours, at the samples of the block's last."""
    step = -(-len(curve) // points)
    blocks = [curve[i : i + step] for i in range(0, len(curve), step)]
    return [(block[-1][0], round(sum(loss for _, loss in block) / len(block), 4)) for block in blocks]


_LOGGED = re.compile(r"^(\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d) .*Train Epoch: (\d+) \[\s*(\d+)/(\d+) ")


def samples_per_second(log: Path) -> float | None:
    """Samples a second from the first to the last logged step, with data loading; None if these are within a second."""
    steps = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _LOGGED.match(line):
            epoch, seen, per_epoch = (int(found[i]) for i in (2, 3, 4))
            steps.append((datetime.strptime(found[1], "%Y-%m-%d,%H:%M:%S"), epoch * per_epoch + seen))
    if not steps or steps[-1][0] == steps[0][0]:
        return None
    return round((steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0]).total_seconds(), 1)


# ---------------------------------------------------------------------------------------------------------------------
# The whole
# ---------------------------------------------------------------------------------------------------------------------


def run_all(ablation: Ablation, jobs: Sequence[Job], slots: int) -> dict[Job, str]:
    """Train and measure the jobs. If a run fails, those that are built on it are not started.

    Returns:
        The reasons of failures, by job.
    """
    start = time.monotonic()
    measurements = Measurements(ablation)
    processes = Processes(slots)
    pending, trained = list(jobs), set[Job]()
    failed: dict[Job, str] = {}

    def launch() -> None:
        for job in list(pending):
            needs = CONDITIONS[job.name].needs
            base = None if needs is None else Job(job.seed, needs)
            if base in failed:
                failed[job] = f"{base} failed"
            elif base in jobs and base not in trained:
                continue
            elif not processes.has_room(CONDITIONS[job.name].ranks):
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
            head = f"[{done}/{len(jobs)}, {(time.monotonic() - start) / 60:.1f} min] {ended.job}"
            try:
                result = None if ended.job in failed else measurements.write(ended)
            except UserError as error:
                failed[ended.job] = f"measuring: {error}"
                result = None
            if result is None:
                print(f"{head}: {failed[ended.job]}", flush=True)
                continue
            rsum = ", ".join(f"{pool} {value:.1f}" for pool, value in result["rsum"].items())
            print(f"{head}: RSUM {rsum}; {ended.wall_seconds:.0f} s, CPU {ended.cpu_seconds:.0f} s", flush=True)
            built_on = CONDITIONS[ended.job.name].needs
            for name in (ended.job.name, built_on):
                if name is not None:
                    ablation.tidy(Job(ended.job.seed, name))
    finally:
        processes.stop()
    return failed


def prepare(ablation: Ablation, job: Job) -> None:
    """Write the sources that only this condition has."""
    condition = CONDITIONS[job.name]
    if condition.data == "context":
        write_contexts(ablation.data, ablation.contexts)
    elif condition.clusters_of is not None:
        checkpoint = ablation.training_run(Job(job.seed, condition.clusters_of)).checkpoint
        write_clusters(ablation.data, checkpoint, ablation.clusters(job.seed), seed=job.seed)


def listing() -> str:
    """Every condition with its tables and flags."""
    lines = []
    for name, condition in CONDITIONS.items():
        tables = ", ".join(table.name for table in TABLES if name in table.conditions)
        flags = " ".join(["--sampling", condition.sampling, *condition.flags])
        extra = [
            f"{condition.ranks} ranks" if condition.ranks > 1 else "",
            f"{condition.data} data" if condition.data != "emoji" else "",
            f"built on {condition.needs}" if condition.needs else "",
        ]
        notes = "; ".join(note for note in extra if note)
        lines.append(f"{name:20} {tables:38} {flags}{f'  ({notes})' if notes else ''}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("data/emoji"), help="emoji data, fetched if it does not exist"
    )
    parser.add_argument("--out", type=Path, default=Path("ablation"))
    parser.add_argument("--seeds", help="default 0,1,2")
    parser.add_argument("--epochs", type=int, help="default 8")
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_EPOCHS} epochs, in OUT/quick")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time (default: cores)")
    parser.add_argument("--only", help="only these conditions and those that they are built on: NAME,NAME")
    parser.add_argument("--split", choices=("val", "test"), default="test", help="settings are chosen on val")
    parser.add_argument("--list", action="store_true", help="list the conditions")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print(listing())
        return 0
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
        raise UserError(f"there is no condition {unknown[0]!r}; --list shows them")
    text = arguments.seeds or ("0" if arguments.quick else "0,1,2")
    try:
        seeds = sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise UserError(f"--seeds takes numbers with commas between them, got {text!r}") from None
    epochs = arguments.epochs if arguments.epochs is not None else (QUICK_EPOCHS if arguments.quick else 8)
    if min(epochs, arguments.jobs) < 1 or min(seeds) < 0:
        raise UserError(f"--epochs and --jobs are 1 or more, seeds 0 or more: got {epochs}, {arguments.jobs}, {text}")
    out = arguments.out / "quick" if arguments.quick else arguments.out
    ablation = Ablation(arguments.data, out, epochs, arguments.split)
    prepare_drawn(EMOJI, ablation.data)
    jobs = ablation.plan(seeds, names)
    kept = sum(ablation.is_recorded(Job(seed, name)) for seed in seeds for name in names)
    print(f"{len(jobs)} runs to train, {arguments.jobs} at a time; {kept} finished runs are kept in {out}", flush=True)
    failed = run_all(ablation, jobs, arguments.jobs) if jobs else {}
    for job, reason in failed.items():
        print(f"ablation: error: {job}: {reason}", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
