"""Kills trainings at random, resumes them, and compares the result with runs that were not interrupted.

    python -m scripts.soak --kills 60 --minutes 30 [--seed 0] [--ranks 1 2] [--out docs/reliability.md]

Each run trains a tiny model on the CPU with dropout, mixup and loader workers, and saves every three steps. Kills are drawn
from `KILLS`; the same command with --resume latest goes on. The last checkpoint of a finished run is compared bit for bit
with that of an uninterrupted run with as many ranks. Ranks are forks of a launcher, which is a fork of this process: Python and
torch start once, the ranks meet over gloo, and they end with their launcher as they do with torchrun. For the kill "disk full"
the runs are on a small file system in memory, which is filled; without root the size of files is limited instead.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: bit-equal sums, and many processes on few cores

import argparse
import atexit
import collections
import contextlib
import io
import json
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image

from open_clip_zerovl.shards.members import Sample
from open_clip_zerovl.shards.writing import write_source
from scripts.sections import replace_section, write_table
from training.main import run_as_program

EPOCHS = 3
LIMIT_SECONDS = 20.0  # a run must end within this time after a kill
SILENT_SECONDS = 120.0  # a run without a new step for this time counts as hanging
KILLS = (
    "SIGKILL to a rank", "SIGTERM to a rank", "SIGINT to a rank", "SIGHUP to a rank", "SIGTERM to all processes",
    "SIGINT to all processes", "SIGHUP to all processes", "SIGKILL to a loader worker", "SIGKILL to the launcher",
    "SIGKILL during a write", "disk full",
)  # fmt: skip
MODEL = {
    "embed_dim": 16,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 16,
        "layers": 2,
        "width": 32,
        "patch_size": 8,
        "head_width": 16,
        "patch_dropout": 0.25,
    },
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}


def write_data(folder: Path) -> None:
    """A source of 96 samples in 8 shards, and the model's config."""
    samples = []
    for number in range(96):
        picture = io.BytesIO()
        Image.new("RGB", (24, 20), (2 * number, 255 - 2 * number, 99)).save(picture, "PNG")
        samples.append(
            Sample(f"{number:03d}", {"png": picture.getvalue(), "txt": b"number %d" % number})
        )
    write_source(folder / "data", samples, shard_size=12)
    (folder / "soak-tiny.json").write_text(json.dumps(MODEL))


def processes_of(session: int) -> list[int]:
    """The running processes of a session, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended since it was listed
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


class Fork:
    """A session of processes that a fork of this program leads."""

    launcher: int

    def lead(self, output: Path) -> None:
        """Called by the fork: make the session; the output of its processes goes to a file."""
        os.setsid()
        # Under nohup, or in the background of a shell, it would inherit that these signals are ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        atexit._clear()  # the fork must not run this program's exit handlers
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)

    def ended(self) -> bool:
        return not processes_of(self.launcher)

    def wait(self, limit_seconds: float) -> float | None:
        """Seconds until all its processes have ended; None if they did not within the limit and were killed."""
        begin = time.monotonic()
        while not self.ended():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.launcher, os.WNOHANG)
            if time.monotonic() > begin + limit_seconds:
                for pid in processes_of(self.launcher):
                    os.kill(pid, signal.SIGKILL)
                return None
            time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.launcher, 0)
        return time.monotonic() - begin


class Run(Fork):
    """One start of a training, under a launcher."""

    def __init__(
        self, folder: Path, name: str, ranks: int, *, limit_bytes: int | None = None
    ) -> None:
        self.folder, self.name, self.ranks = folder, name, ranks
        self.checkpoints = folder / "logs" / name / "checkpoints"
        self.log = folder / "logs" / name / "out.log"
        self.steps_before = self.steps()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ready, done = os.pipe()
        self.launcher = os.fork()
        if self.launcher == 0:
            try:
                self._launch(port, done, limit_bytes)
            except BaseException:
                with contextlib.suppress(OSError):
                    traceback.print_exc()
            finally:  # the fork must not run the rest of this program
                os._exit(1)
        os.close(done)
        with os.fdopen(ready) as pids:
            self.pids = [int(pid) for pid in pids.readline().split()]
        if not self.pids:
            raise SystemExit("soak: the launcher could not start its ranks; its message is above")

    def _launch(self, port: int, done: int, limit_bytes: int | None) -> None:
        self.lead(self.folder / f"{self.name}.out")
        pids = []
        for rank in range(self.ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.close(done)
                os.environ["TORCHELASTIC_RUN_ID"] = "soak"  # ranks end with their launcher
                if self.ranks > 1:
                    os.environ.update(
                        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.ranks), MASTER_ADDR="localhost",
                        MASTER_PORT=str(port),
                    )  # fmt: skip
                if limit_bytes is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
                os.chdir(self.folder)
                open_clip.add_model_config(self.folder / "soak-tiny.json")
                torch.use_deterministic_algorithms(True)
                sys.argv = ["training.main", *self.arguments()]
                run_as_program()
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
        ):  # the launcher ends after its ranks
            signal.signal(number, signal.SIG_IGN)
        os.write(done, f"{' '.join(map(str, pids))}\n".encode())
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os._exit(max(abs(status) for status in statuses))

    def arguments(self) -> list[str]:
        return [
            "--model", "soak-tiny", "--device", "cpu", "--precision", "fp32", "--log-every-n-steps", "1", "--warmup", "2",
            "--train-data", f"a={self.folder / 'data'}", "--batch-size", str(4 // self.ranks),
            "--dga-steps", "2", "--workers", "1", "--epochs", str(EPOCHS), "--save-every-steps", "3", "--coin-flip-mixup",
            "--mixup-alpha", "1.0", "--aug-cfg", "scale=(0.6,1.0)", "--name", self.name, "--resume", "latest",
        ]  # fmt: skip

    def steps(self) -> int:
        """Optimizer steps in the log, of all starts of this run."""
        return self.log.read_text().count("Train Epoch") if self.log.exists() else 0

    def wait_for_steps(self, new_steps: int) -> bool:
        """Wait for this many new steps; False if the run has ended before."""
        last, seen = time.monotonic(), -1
        while (now := self.steps() - self.steps_before) < new_steps:
            if now != seen:
                last, seen = time.monotonic(), now
            if time.monotonic() > last + SILENT_SECONDS:
                raise SystemExit(
                    f"soak: a run hangs that was not killed; see {self.folder}/{self.name}.out"
                )
            if self.ended():
                return False
            time.sleep(0.01)
        return True

    def kill(self, kind: str, dice: random.Random, disk: Disk) -> bool:
        """Do one of `KILLS`; False if the run has ended before."""
        rank = dice.choice(self.pids)
        with contextlib.suppress(ProcessLookupError):
            if kind.endswith("to a rank"):
                os.kill(rank, getattr(signal, kind.split()[0]))
            elif kind.endswith("to all processes"):
                os.killpg(self.launcher, getattr(signal, kind.split()[0]))
            elif kind == "SIGKILL to the launcher":
                os.kill(self.launcher, signal.SIGKILL)
            elif kind == "SIGKILL to a loader worker":
                workers = [
                    pid
                    for pid in processes_of(self.launcher)
                    if pid not in (self.launcher, *self.pids)
                ]
                if not workers:
                    return False
                os.kill(dice.choice(workers), signal.SIGKILL)
            elif kind == "SIGKILL during a write":
                while not list(self.checkpoints.glob(".*.part")):
                    if self.ended():
                        return False
                os.kill(self.pids[0], signal.SIGKILL)
            elif kind == "disk full":
                disk.fill()
            return True
        return False


class Disk:
    """The folder of the runs: a small file system in memory for root, else a plain folder."""

    SIZE_MIB = 400

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.SIZE_MIB}m", "tmpfs", str(folder)]
        self.mounted = (
            os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        )

    def fill(self) -> None:
        with open(self.folder / "ballast", "wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 18))
                file.flush()

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


def tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix, value
    for name, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from tensors(item, f"{prefix}/{name}")


def same(first: Path, second: Path) -> bool:
    """True if two checkpoints hold the same tensors of weights and optimizer, bit for bit."""
    ours, theirs = (dict(tensors(torch.load(path, weights_only=True))) for path in (first, second))
    return (
        ours.keys() == theirs.keys()
        and len(ours) > 20
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=30, help="kill no run after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--out", type=Path, help="a page in which the section between the marks `soak` is replaced"
    )
    options = parser.parse_args()
    # Not a TemporaryDirectory: each fork would remove it at its end.
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    disk = Disk(folder)
    try:
        outcome = Soak(folder, disk, options)
        outcome.run()
    finally:
        disk.close()
        shutil.rmtree(folder)
    lines, faults = outcome.report()
    print("\n".join(lines))
    if options.out is not None:
        write_table(options.out.parent / "results" / "soak.csv", lines)
        replace_section(options.out, "soak", lines[-1:])
    return int(faults > 0)


class Soak:
    """Kills runs until enough kills are done or the time is over."""

    LAST = f"checkpoints/epoch_{EPOCHS}.pt"

    def __init__(self, folder: Path, disk: Disk, options: argparse.Namespace) -> None:
        self.folder, self.disk, self.options = folder, disk, options
        self.dice, self.begin = random.Random(options.seed), time.monotonic()
        self.kinds: list[str] = []  # kinds of kills still to come before any comes again
        self.seconds: dict[str, dict[int, list[float | None]]] = {
            kind: collections.defaultdict(list) for kind in KILLS
        }
        self.kills, self.compared, self.equal = 0, 0, 0

    def run(self) -> None:
        write_data(self.folder)
        whole = {ranks: self.train_whole(ranks) for ranks in self.options.ranks}
        runs = 0
        while not self.is_over():
            ranks = self.options.ranks[runs % len(self.options.ranks)]
            runs += 1
            logs = self.folder / "logs" / f"run{runs}"
            while not (logs / self.LAST).exists():
                self.start_and_kill(logs.name, ranks)
            self.compared += 1
            self.equal += same(logs / self.LAST, whole[ranks])
            shutil.rmtree(logs)

    def is_over(self) -> bool:
        return (
            self.kills >= self.options.kills
            or time.monotonic() > self.begin + 60 * self.options.minutes
        )

    def train_whole(self, ranks: int) -> Path:
        """The last checkpoint of a run that is not killed."""
        name = f"whole{ranks}"
        Run(self.folder, name, ranks).wait_for_steps(10**9)
        checkpoint = self.folder / "logs" / name / self.LAST
        if not checkpoint.exists():
            raise SystemExit((self.folder / f"{name}.out").read_text()[-3000:])
        return checkpoint

    def start_and_kill(self, name: str, ranks: int) -> None:
        """Start or resume a run and kill it after some steps; let it finish if the soak is over."""
        if not self.kinds:
            self.kinds = self.dice.sample(KILLS, len(KILLS))
        kind = None if self.is_over() else self.kinds[-1]
        limit = 100_000 if kind == "disk full" and not self.disk.mounted else None
        run = Run(self.folder, name, ranks, limit_bytes=limit)
        if kind is None or (not run.wait_for_steps(self.dice.randrange(1, 9)) and limit is None):
            run.wait_for_steps(10**9)
            return
        if run.kill(kind, self.dice, self.disk):
            self.kinds.pop()
            # The run meets a full disk at its next checkpoint, and obeys a signal after the current step.
            seconds = run.wait(LIMIT_SECONDS)
            self.kills += 1
            self.seconds[kind][ranks].append(seconds)
            ended = "HANGS" if seconds is None else f"{seconds:.1f} s"
            print(f"{self.kills:3d} {name} {ranks} rank(s), {kind}: {ended}", flush=True)
        else:
            run.wait(LIMIT_SECONDS)
        self.disk.free()

    def report(self) -> tuple[list[str], int]:
        """A table in Markdown, and how many runs hung or ended with other weights."""
        options = self.options
        heads = [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in options.ranks]
        lines = [
            f"| kill | {' | '.join(heads)} | slowest end |",
            "|---|" + "--:|" * (len(heads) + 1),
        ]
        for kind, by_ranks in self.seconds.items():
            times = [seconds for found in by_ranks.values() for seconds in found]
            ended_times = [seconds for seconds in times if seconds is not None]
            slowest = (
                f"over {LIMIT_SECONDS:.0f} s"
                if None in times
                else f"{max(ended_times):.1f} s"
                if times
                else ""
            )
            counts = " | ".join(str(len(by_ranks[ranks])) for ranks in options.ranks)
            lines.append(f"| {kind} | {counts} | {slowest} |")
        hung = sum(
            found.count(None) for by_ranks in self.seconds.values() for found in by_ranks.values()
        )
        minutes = (time.monotonic() - self.begin) / 60
        disk = "a full tmpfs" if self.disk.mounted else "a limit on the size of files"
        lines.append("")
        lines.append(
            f"{self.kills} kills in {minutes:.0f} minutes "
            f"(`--kills {options.kills} --minutes {options.minutes:g} --seed {options.seed}`), "
            f"{disk} for a full disk; {hung} runs had to be ended by force; {self.equal} of {self.compared} finished runs are "
            "bit-equal to the run never interrupted, weights and optimizer."
        )
        return lines, hung + self.compared - self.equal


if __name__ == "__main__":
    sys.exit(main())
