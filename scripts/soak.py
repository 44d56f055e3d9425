"""Kills trainings at random, lets them go on, and compares what comes out with runs that were never interrupted.

    python -m scripts.soak --kills 60 --minutes 30 [--seed 0] [--ranks 1 2] [--out docs/reliability.md]

Each run trains a tiny model on the CPU with dropout, mixup and loader workers, and saves every three steps. A kill is drawn
from `KILLS`; the same command with --resume latest goes on. When a run is through, its last checkpoint is compared bit for
bit with that of a run of as many ranks that nothing befell. Ranks are forks of a launcher, which is a fork of this process:
they share one start of Python and torch, meet over gloo, and end with their launcher as they do with torchrun. As root the
runs lie on a small file system in memory, which is filled for the kill "disk full"; otherwise the size of files is limited.
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
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image

from training.main import run_as_program

EPOCHS = 3
LIMIT_SECONDS = 20.0  # within which a run must have ended after a kill
SILENT_SECONDS = 120.0  # without a new step, after which a run counts as hanging
KILLS = (
    "SIGKILL to a rank", "SIGTERM to a rank", "SIGINT to a rank", "SIGTERM to all processes", "SIGINT to all processes",
    "SIGKILL to a loader worker", "SIGKILL to the launcher", "SIGKILL during a write", "disk full",
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
    sizes = {}
    (folder / "data").mkdir()
    for shard in range(8):
        with tarfile.open(folder / "data" / f"{shard}.tar", "w") as tar:
            for number in range(12 * shard, 12 * shard + 12):
                picture = io.BytesIO()
                Image.new("RGB", (24, 20), (2 * number, 255 - 2 * number, 99)).save(picture, "PNG")
                for name, content in (
                    (f"{number:03d}.png", picture.getvalue()),
                    (f"{number:03d}.txt", b"number %d" % number),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        sizes[f"{shard}.tar"] = 12
    (folder / "data" / "sizes.json").write_text(json.dumps(sizes))
    (folder / "soak-tiny.json").write_text(json.dumps(MODEL))


def processes_of(session: int) -> list[int]:
    """Processes of a session that still run, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended since it was listed
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


class Run:
    """One start of a training under a launcher."""

    def __init__(self, folder: Path, name: str, ranks: int, *, limit_bytes: int | None = None) -> None:
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
            finally:  # nothing of this program is to happen twice
                os._exit(1)
        os.close(done)
        with os.fdopen(ready) as pids:
            self.pids = [int(pid) for pid in pids.readline().split()]
        if not self.pids:
            raise SystemExit("soak: the launcher could not start its ranks; its message is above")

    def _launch(self, port: int, done: int, limit_bytes: int | None) -> None:
        os.setsid()
        atexit._clear()  # what was registered for the end of this program
        output = os.open(self.folder / f"{self.name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
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
        for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes; the ranks decide how they end
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

    def ended(self) -> bool:
        return not processes_of(self.launcher)

    def wait(self, limit_seconds: float) -> float | None:
        """Seconds until all its processes have ended, None if they had to be killed then."""
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

    def goes_on(self, new_steps: int) -> bool:
        """Wait for so many new steps; False when the run has ended before."""
        last, seen = time.monotonic(), -1
        while (now := self.steps() - self.steps_before) < new_steps:
            if now != seen:
                last, seen = time.monotonic(), now
            if time.monotonic() > last + SILENT_SECONDS:
                raise SystemExit(f"soak: a run that nothing befell hangs; see {self.folder}/{self.name}.out")
            if self.ended():
                return False
            time.sleep(0.01)
        return True

    def kill(self, kind: str, dice: random.Random, disk: Disk) -> bool:
        """Do one of `KILLS`; False where the run has ended before."""
        rank = dice.choice(self.pids)
        with contextlib.suppress(ProcessLookupError):
            if kind.endswith("to a rank"):
                os.kill(rank, getattr(signal, kind.split()[0]))
            elif kind.endswith("to all processes"):
                os.killpg(self.launcher, getattr(signal, kind.split()[0]))
            elif kind == "SIGKILL to the launcher":
                os.kill(self.launcher, signal.SIGKILL)
            elif kind == "SIGKILL to a loader worker":
                workers = [pid for pid in processes_of(self.launcher) if pid not in (self.launcher, *self.pids)]
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
    """Where the runs lie: a small file system in memory as root, else a plain folder."""

    SIZE_MIB = 400

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.SIZE_MIB}m", "tmpfs", str(folder)]
        self.mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0

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
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from tensors(item, f"{prefix}/{name}")


def same(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same tensors, bit for bit: weights and the optimizer's."""
    ours, theirs = (dict(tensors(torch.load(path, weights_only=True))) for path in (first, second))
    return (
        ours.keys() == theirs.keys() and len(ours) > 20 and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=30, help="begin no new start of a run after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="a page in which the section between the marks `soak` is replaced")
    options = parser.parse_args()
    dice, begin = random.Random(options.seed), time.monotonic()
    # No TemporaryDirectory: each fork would inherit the wish to remove it.
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    disk = Disk(folder)
    try:
        lines, faults = soak(folder, disk, dice, options, begin)
    finally:
        disk.close()
        shutil.rmtree(folder)
    print("\n".join(lines))
    if options.out is not None:
        page = options.out.read_text(encoding="utf-8")
        head, rest = page.split("<!-- soak -->\n", 1)
        _, tail = rest.split("<!-- /soak -->", 1)
        options.out.write_text(
            f"{head}<!-- soak -->\n" + "\n".join(lines) + f"\n<!-- /soak -->{tail}", encoding="utf-8"
        )
    return int(faults > 0)


def soak(
    folder: Path, disk: Disk, dice: random.Random, options: argparse.Namespace, begin: float
) -> tuple[list[str], int]:
    """Kill runs until as many kills as asked for are done or the time is over; a table, and how much was wrong."""
    write_data(folder)
    last = f"checkpoints/epoch_{EPOCHS}.pt"
    whole = {}
    for ranks in options.ranks:
        run = Run(folder, f"whole{ranks}", ranks)
        run.goes_on(10**9)
        whole[ranks] = folder / "logs" / f"whole{ranks}" / last
        if not whole[ranks].exists():
            raise SystemExit((folder / f"whole{ranks}.out").read_text()[-3000:])
    done: dict[str, dict[int, list[float | None]]] = {kind: collections.defaultdict(list) for kind in KILLS}
    count, compared, equal, runs = 0, 0, 0, 0
    kinds: list[str] = []
    while count < options.kills and time.monotonic() < begin + 60 * options.minutes:
        ranks = options.ranks[runs % len(options.ranks)]
        runs += 1
        name = f"run{runs}"
        while not (folder / "logs" / name / last).exists():
            if not kinds:
                kinds = dice.sample(KILLS, len(KILLS))  # each once before one comes again
            over = count >= options.kills or time.monotonic() > begin + 60 * options.minutes
            kind = None if over else kinds[-1]
            limit = 100_000 if kind == "disk full" and not disk.mounted else None
            run = Run(folder, name, ranks, limit_bytes=limit)
            if kind is None or (not run.goes_on(dice.randrange(1, 9)) and limit is None):
                run.goes_on(10**9)
                continue
            if run.kill(kind, dice, disk):
                kinds.pop()
                # a full disk is met at the next checkpoint, and a signal heeded after the step in hand
                seconds = run.wait(LIMIT_SECONDS)
                count += 1
                done[kind][ranks].append(seconds)
                print(
                    f"{count:3d} {name} {ranks} rank(s), {kind}: {'HANGS' if seconds is None else f'{seconds:.1f} s'}",
                    flush=True,
                )
            else:
                run.wait(LIMIT_SECONDS)
            disk.free()
        compared += 1
        equal += same(folder / "logs" / name / last, whole[ranks])
        shutil.rmtree(folder / "logs" / name)
    lines = [
        "| kill | " + " | ".join(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in options.ranks) + " | slowest end |"
    ]
    lines.append("|---|" + "--:|" * (len(options.ranks) + 1))
    for kind, by_ranks in done.items():
        times = [seconds for found in by_ranks.values() for seconds in found]
        ended_times = [seconds for seconds in times if seconds is not None]
        slowest = f"over {LIMIT_SECONDS:.0f} s" if None in times else f"{max(ended_times):.1f} s" if times else ""
        counts = " | ".join(str(len(by_ranks[ranks])) for ranks in options.ranks)
        lines.append(f"| {kind} | {counts} | {slowest} |")
    hung = sum(seconds is None for by_ranks in done.values() for found in by_ranks.values() for seconds in found)
    minutes = (time.monotonic() - begin) / 60
    lines.append("")
    lines.append(
        f"{count} kills in {minutes:.0f} minutes "
        f"(`--kills {options.kills} --minutes {options.minutes:g} --seed {options.seed}`), "
        f"{'a full tmpfs' if disk.mounted else 'a limit on the size of files'} for a full disk; {hung} runs had to be ended by "
        f"force; {equal} of {compared} finished runs are bit-equal to the run never interrupted, weights and optimizer."
    )
    return lines, hung + compared - equal


if __name__ == "__main__":
    sys.exit(main())
