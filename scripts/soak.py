"""Kills trainings and commands at random moments, calls them again, and compares their files with those of undisturbed calls.

    python -m scripts.soak --kills 60 --minutes 30 [--seed 0] [train-2 search align]

Each target runs in a session of its own, in forks of this process: Python and torch start once. A training has dropout, mixup,
a loader worker, step checkpoints and one or two ranks under a launcher. They meet over gloo and end with their launcher, as
with torchrun. After each kill the same call goes on (a training by --resume latest) until it ends by itself. Then its files
must be those of the whole call, byte for byte, tensors of checkpoints bit for bit (`Target.left_out` names files with times),
and no part file may be left beside them, nor, by a command, a file in TMPDIR. Limits of memory and of file sizes count as
kills: the call must end with one sentence or work. A command after a kill may refuse with one sentence, which is counted; a
traceback, a hang and other files are faults.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: bit-equal sums, and many processes on few cores

import atexit
import collections
import contextlib
import hashlib
import io
import json
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated as A
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.cli import main as zerovl
from open_clip_zerovl.core.errors import DEFECT, UserError
from open_clip_zerovl.shards.files import write_source
from open_clip_zerovl.shards.tar import Sample
from scripts.program import program
from training.main import run_as_program

LIMIT_SECONDS = 20.0  # a call must end within this time after a signal
WHOLE_SECONDS = 300.0  # no call that is not killed takes longer
FILE_LIMIT_BYTES = 20_000
NO_MEMORY = "memory allocation of"  # with these words libraries in Rust end the process
SIGNALS = (
    "SIGKILL to one process", "SIGTERM to one process", "SIGINT to one process", "SIGHUP to one process",
    "SIGKILL to all processes", "SIGTERM to all processes", "SIGINT to all processes", "SIGHUP to all processes",
    "SIGKILL to the launcher", "SIGKILL to a loader worker", "SIGKILL during a write",
)  # fmt: skip
KILLS = (*SIGNALS, "memory limit", "file limit")
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


@dataclass(frozen=True)
class Target:
    """A command line, in which `{out}` is its folder and `{home}` that of its inputs.

    Attributes:
        left_out: patterns of files whose content depends on the time, or on where a run was resumed.
        ranks: processes of a training; None for a command, which is one process and its own launcher.
    """

    line: str
    left_out: tuple[str, ...] = ()
    ranks: int | None = None


TRAINED = ("*.log", "*.html", "record.jsonl", "params.txt", "step_*.pt", "traceback-rank*.txt")
TRAIN = (
    "--model soak-tiny --device cpu --precision fp32 --log-every-n-steps 1 --warmup 2 --train-data a={home}/a --dga-steps 2 "
    "--workers 1 --epochs 3 --save-every-steps 3 --coin-flip-mixup --mixup-alpha 1.0 --aug-cfg scale=(0.6,1.0) "
    "--logs {out} --name run --resume latest --batch-size "
)
TARGETS = {
    "train-1": Target(TRAIN + "4", TRAINED, ranks=1),
    "train-2": Target(TRAIN + "2", TRAINED, ranks=2),
    "search": Target(
        "search {home}/model {home}/photos red --cache {out} --output {out}/hits.json --batch-size 8 --workers 1 --device cpu"
    ),
    "data pack": Target("data pack {home}/photos --out {out} --test-share 0.1 --shard-size 40 --threads 2 --max-side 24"),
    "align": Target(
        "align --image {home}/model --text {home}/model --data a={home}/a::b={home}/b --epochs 40 --batch-size 16 "
        "--embed-dim 16 --out {out} --workers 1 --device cpu",
        ("align.html", "align.json"),
    ),
    "finetune": Target(
        "finetune --from {home}/model --data a={home}/a::b={home}/b --out {out} --batch-size 16 --device cpu --seed 0 "
        "--set epochs=3 --set lr=5e-4 --set text-augment= --set save-every-steps=5 --alphas 0.5",
        (*TRAINED, "*.tar.npz"),
    ),
}  # fmt: skip


def write_inputs(home: Path) -> None:
    """Write two sources of 120 pictures, a folder of all 240 with captions, and a small exported model."""
    dice = np.random.default_rng(0)
    colours = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220)}
    made = []
    (home / "photos").mkdir()
    for number in range(240):
        colour, place = list(colours)[number % 3], int(dice.integers(40))
        pixels = np.clip(
            np.array(colours[colour]) + dice.integers(-30, 30, (48, 40, 3)), 0, 255
        ).astype(np.uint8)
        pixels[place : place + 4] = 255
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "PNG")
        caption = (
            f"a {colour} field with a line {place} of number {number}\nline {place} on {colour}"
        )
        made.append(Sample(f"{number:05d}", {"png": content.getvalue(), "txt": caption.encode()}))
        (home / "photos" / f"{number:05d}.png").write_bytes(content.getvalue())
        (home / "photos" / f"{number:05d}.txt").write_text(caption)
    write_source(home / "a", made[:120], shard_size=20)
    write_source(home / "b", made[120:], shard_size=20)
    for name, config in (("tiny", MODEL), ("small", {**MODEL, "custom_text": False})):
        (home / f"soak-{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(home / f"soak-{name}.json")
    torch.manual_seed(0)
    checkpoint = home / "run" / "checkpoints" / "epoch_1.pt"
    checkpoint.parent.mkdir(parents=True)
    (home / "run" / "params.txt").write_text("model: soak-small\n")
    state = open_clip.create_model("soak-small").state_dict()
    torch.save({"epoch": 1, "name": "run", "state_dict": state}, checkpoint)
    export_local_dir(checkpoint, home / "model")


def processes_of(session: int) -> list[int]:
    """List the running processes of a session, from /proc."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", number, "stat").read_text()
        except OSError:  # it has ended since it was listed
            continue
        state, _, _, of = stat.rpartition(")")[2].split()[:4]
        if int(of) == session and state != "Z":
            found.append(int(number))
    return found


class Call:
    """One call of a target, in a session of its own."""

    def __init__(
        self,
        words: list[str],
        home: Path,
        ranks: int | None = None,
        limit: tuple[int, int] | None = None,
    ) -> None:
        self.output = home / "words.txt"
        self.output.write_bytes(b"")
        self.limit = limit
        self.tmpdir = home / ("tmp-command" if ranks is None else "tmp-training")
        ready, done = os.pipe()
        self.launcher = os.fork()
        if self.launcher == 0:
            self._lead()
            if ranks is None:
                os.write(done, f"{os.getpid()}\n".encode())
                self._work(lambda: zerovl(words))
            else:
                self._launch(words, ranks, done)
        os.close(done)
        with os.fdopen(ready) as pids:
            self.pids = [int(pid) for pid in pids.readline().split()]

    def _lead(self) -> None:
        """Make the fork lead a session whose output goes to a file."""
        os.setsid()
        # Under nohup, or in the background of a shell, it would inherit that these signals are ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        atexit._clear()  # the fork must not run this program's exit handlers
        file = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)

    def _work(self, program: Any) -> None:
        """Run a function as the whole of this fork."""
        status: Any = 1
        try:
            os.environ["TMPDIR"] = tempfile.tempdir = str(self.tmpdir)
            torch.set_num_threads(1)
            if self.limit is not None:
                resource.setrlimit(self.limit[0], (self.limit[1], resource.RLIM_INFINITY))
            status = program()
        except BaseException:
            traceback.print_exc()
        finally:  # the fork must not run the rest of this program
            atexit._run_exitfuncs()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(status or 0)

    def _launch(self, words: list[str], ranks: int, done: int) -> None:
        """Fork the ranks of a training and end with the highest of their statuses."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.close(done)
                os.environ["TORCHELASTIC_RUN_ID"] = "soak"  # ranks end with their launcher
                if ranks > 1:
                    os.environ.update(
                        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost",
                        MASTER_PORT=str(port),
                    )  # fmt: skip
                torch.use_deterministic_algorithms(True)
                sys.argv = ["training.main", *words]
                self._work(run_as_program)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it ends after its ranks
            signal.signal(number, signal.SIG_IGN)
        os.write(done, f"{' '.join(map(str, pids))}\n".encode())
        worst, running = 0, set(pids)
        while running:
            pid, word = os.wait()
            running.discard(pid)
            worst = max(worst, abs(os.waitstatus_to_exitcode(word)))
            if (
                worst
            ):  # as torchrun does: a rank that has not met the others yet would wait for them
                for other in running:
                    os.kill(other, signal.SIGTERM)
        os._exit(worst)

    def wait(self, limit_seconds: float) -> tuple[float | None, int]:
        """Wait for the end of all its processes.

        Returns:
            The seconds, None if they had to be ended by force, and the launcher's exit status.
        """
        status, begin, running = None, time.monotonic(), True
        while status is None or running:
            if status is None:
                pid, word = os.waitpid(self.launcher, os.WNOHANG)
                status = os.waitstatus_to_exitcode(word) if pid else None
            running = bool(processes_of(self.launcher))
            if time.monotonic() > begin + limit_seconds:
                for pid in processes_of(self.launcher):
                    os.kill(pid, signal.SIGKILL)
                if status is None:
                    os.waitpid(self.launcher, 0)
                return None, -1
            time.sleep(0.02)
        return time.monotonic() - begin, status

    def kill(self, kind: str, dice: random.Random, out: Path, after_seconds: float) -> bool:
        """Do one of SIGNALS after some seconds.

        Returns:
            Whether it met a running call.
        """
        begin = time.monotonic()
        while time.monotonic() < begin + after_seconds or kind.endswith("a write"):
            if self.launcher not in processes_of(self.launcher):
                return False
            if not self.has_begun():
                begin = time.monotonic()
            late = time.monotonic() > begin + after_seconds / 2
            if late and kind.endswith("a write") and any(out.rglob("*.part")):
                break
            time.sleep(0.001)
        workers = set(processes_of(self.launcher)) - {self.launcher, *self.pids}
        if kind.endswith("worker") and not workers:
            return False
        number = getattr(signal, kind.split()[0])
        with contextlib.suppress(ProcessLookupError):
            if kind.endswith("all processes"):
                os.killpg(self.launcher, number)
            elif kind.endswith("worker"):
                os.kill(dice.choice(sorted(workers)), number)
            elif kind.endswith("the launcher"):
                os.kill(self.launcher, number)
            else:
                os.kill(dice.choice(self.pids), number)
            return True
        return False

    def has_begun(self) -> bool:
        """Return whether a training has taken a step: before, a rank whose peer has ended waits for torchrun's signal."""
        return self.pids == [self.launcher] or "Train Epoch" in self.words()

    def words(self) -> str:
        return self.output.read_text(errors="replace")


def sentence_in(words: str) -> str | None:
    """Return the one sentence with which a command refused.

    Returns:
        None where there is no sentence, more than one, or a traceback.
    """
    errors = [line for line in words.splitlines() if line.startswith("zerovl: error: ")]
    return errors[0] if len(errors) == 1 and "Traceback" not in words else None


def tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dicts and lists by their paths."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, item in value.items():
            yield from tensors(item, f"{prefix}/{name}")


# Embeddings that this call of `search` made; fewer after a kill, which has left some in the cache.
COMPUTED = re.compile(rb'"computed": \d+')


def contents(out: Path, left_out: tuple[str, ...]) -> dict[str, str]:
    """Digest each file below a folder, checkpoints by their tensors, without locks and the files of `left_out`."""
    digests = {}
    for path in sorted(out.rglob("*")):
        if not path.is_file() or any(path.match(pattern) for pattern in ("*lock", *left_out)):
            continue
        digest = hashlib.sha256()
        if path.suffix == ".pt":
            for name, tensor in tensors(torch.load(path, weights_only=True)):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(COMPUTED.sub(b"", path.read_bytes()))
        digests[str(path.relative_to(out))] = digest.hexdigest()
    return digests


class Soak:
    """Kills calls of the targets in turn until enough kills are done or the time is over."""

    def __init__(
        self, home: Path, targets: Sequence[str], kills: int, minutes: float, seed: int
    ) -> None:
        self.home, self.most, self.minutes = home, kills, minutes
        # the same folder for all calls of a target: its name may stand in the files
        self.out = {name: home / f"out-{name.replace(' ', '-')}" for name in targets}
        self.dice, self.begin = random.Random(seed), time.monotonic()
        self.kills: collections.Counter[tuple[str, str]] = collections.Counter()
        # kinds of kills still to come before any comes again
        self.kinds: dict[str, list[str]] = {name: [] for name in targets}
        self.slowest: dict[str, float] = collections.defaultdict(float)
        self.compared, self.equal, self.refused = 0, 0, 0
        self.faults: list[str] = []
        for kind in ("command", "training"):
            (home / f"tmp-{kind}").mkdir()

    def call(self, name: str, limit: tuple[int, int] | None = None) -> Call:
        target = TARGETS[name]
        words = target.line.format(home=self.home, out=self.out[name]).split()
        return Call(words, self.home, target.ranks, limit)

    def fault(self, name: str, kind: str, words: str) -> None:
        self.faults.append(f"{name}, {kind}: {words[-3000:]}")
        print(f"FAULT {self.faults[-1]}", flush=True)

    def run(self) -> None:
        """Kill the targets in turn, then let each come to its end."""
        seconds, whole = {}, {}
        for name, out in self.out.items():
            call = self.call(name)
            ended, status = call.wait(WHOLE_SECONDS)
            if ended is None or status != 0:
                raise SystemExit(f"soak: {name} ends with {status}:\n{call.words()[-3000:]}")
            seconds[name], whole[name] = ended, contents(out, TARGETS[name].left_out)
            print(f"{name}: {ended:.1f} s, {len(whole[name])} files", flush=True)
            shutil.rmtree(out)
        begun: set[str] = set()
        while begun or not self.is_over():
            for name in begun if self.is_over() else self.out:
                begun.add(name)
                if self.kill_once(name, seconds[name]):
                    self.compare(name, whole[name])
                    begun = begun - {name}

    def is_over(self) -> bool:
        return (
            sum(self.kills.values()) >= self.most
            or time.monotonic() > self.begin + 60 * self.minutes
        )

    def compare(self, name: str, whole: dict[str, str]) -> None:
        """Compare the files of a target that has ended by itself with those of the whole call, and remove them."""
        out = self.out[name]
        made = contents(out, TARGETS[name].left_out) if out.is_dir() else {}
        left = [str(path) for path in out.rglob("*.part")]
        differing = sorted({path for path, _ in made.items() ^ whole.items()})
        self.compared += 1
        self.equal += not differing and not left
        if differing or left:
            self.fault(name, "after its end", f"differing files {differing}; left behind {left}")
        shutil.rmtree(out, ignore_errors=True)

    def kill_once(self, name: str, seconds: float) -> bool:
        """Call a target and kill it at a random moment.

        Returns:
            Whether it has ended by itself with status 0.
        """
        if not self.kinds[name]:
            self.kinds[name] = self.dice.sample(KILLS, len(KILLS))
        kind = None if self.is_over() else self.kinds[name].pop()
        limit = None
        if kind == "memory limit":
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = (resource.RLIMIT_AS, held + self.dice.randrange(4 << 20, 400 << 20))
        elif kind == "file limit":
            limit = (resource.RLIMIT_FSIZE, FILE_LIMIT_BYTES)
        call = self.call(name, limit)
        killed = kind is not None and (
            limit is not None
            or call.kill(kind, self.dice, self.out[name], self.dice.uniform(0, 0.6 * seconds))
        )
        ended, status = call.wait(LIMIT_SECONDS if killed and limit is None else WHOLE_SECONDS)
        words = call.words()
        if killed:
            self.kills[name, str(kind)] += 1
            if limit is None:
                self.slowest[name] = max(self.slowest[name], ended or 0.0)
            shown = "HANGS" if ended is None else f"{ended:.1f} s, status {status}"
            number = sum(self.kills.values())
            print(f"{number:3d} {name}, {kind}: {shown} {sentence_in(words) or ''}", flush=True)
        if ended is None:
            self.fault(name, f"{kind}, does not end", words)
        elif TARGETS[name].ranks is None and self.is_fault(status, words, limit is not None):
            self.fault(name, f"{kind}, status {status}", words)
        elif status == 2 and not killed:
            self.refused += 1
            print(f"    refused: {sentence_in(words)}", flush=True)
            shutil.rmtree(self.out[name], ignore_errors=True)  # as its sentence asks
        return status == 0

    @staticmethod
    def is_fault(status: int, words: str, limited: bool) -> bool:
        """Return whether a command ended in another way than by a signal, one sentence or success."""
        if status != 0 and any(mark in words for mark in ("Traceback", DEFECT)):
            return True
        return limited and status not in (0, 2) and NO_MEMORY not in words

    def report(self) -> str:
        """Return the counts as CSV, and a sentence."""
        rows = [["kill", *self.out]]
        rows += [[kind, *(str(self.kills[name, kind]) for name in self.out)] for kind in KILLS]
        minutes = (time.monotonic() - self.begin) / 60
        return "\n".join(",".join(row) for row in rows) + (
            f"\n\n{sum(self.kills.values())} kills in {minutes:.0f} minutes; after a signal all processes ended within "
            f"{max(self.slowest.values(), default=0):.1f} s; {self.refused} calls after a kill were refused with a sentence; "
            f"{self.equal} of {self.compared} calls that came to their end left the files of the call never interrupted, byte "
            f"for byte; {len(self.faults)} faults."
        )


def soak(
    targets: A[tuple[str, ...], "of " + ", ".join(TARGETS) + " (default: all)", "TARGET"] = (),
    /,
    *,
    kills: A[int, "kills, at most"] = 100,
    minutes: A[float, "kill no call after this time"] = 30,
    seed: int = 0,
) -> int:
    """Kill the targets, print the counts, and return the exit status.

    Raises:
        UserError: an unknown target.
    """
    if unknown := {*targets} - {*TARGETS}:
        raise UserError(f"there is no target {min(unknown)!r}; give some of {', '.join(TARGETS)}")
    # Not a TemporaryDirectory: each fork would remove it at its end.
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        write_inputs(home)
        done = Soak(home, targets or tuple(TARGETS), kills, minutes, seed)
        done.run()
    finally:
        shutil.rmtree(home)
    print(done.report())
    return int(bool(done.faults))


if __name__ == "__main__":
    sys.exit(program(soak))
