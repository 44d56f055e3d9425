"""Kills `zerovl` commands at random moments, calls them again, and compares their files with those of a call never interrupted.

    python -m scripts.soak_commands --kills 60 --minutes 30 [--seed 0] [--commands search align] [--out docs/reliability.md]

Each command is called in a fork, and the same command again after each kill until it ends by itself. Then its files must be
those of the whole call, byte for byte, the tensors of checkpoints bit for bit (`Command.left_out` names the files with times),
and no part file may be left, beside them or in TMPDIR. A limit of memory or of file sizes counts as a kill: the call must end
with one sentence or work. A call after a kill may refuse with one sentence, which is counted; a traceback, a hang and other
files are faults. Beforehand each command that takes a model is given one with NaN in its weights, which it must refuse.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: bit-equal sums

import argparse
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
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_clip
import torch
from open_clip.constants import HF_SAFE_WEIGHTS_NAME
from PIL import Image
from safetensors.torch import load_file, save_file

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.cli.program import main as zerovl
from open_clip_zerovl.core.errors import DEFECT
from open_clip_zerovl.core.files import remove_scratch_folders
from open_clip_zerovl.core.scratch import PREFIX
from open_clip_zerovl.shards.members import Sample
from open_clip_zerovl.shards.writing import write_source
from scripts.sections import replace_section, write_table
from scripts.soak import LIMIT_SECONDS, MODEL, Fork, processes_of, tensors

KILLS = (
    "SIGKILL to the command", "SIGKILL to all processes", "SIGTERM to the command", "SIGTERM to all processes",
    "SIGINT to all processes", "SIGHUP to all processes", "SIGKILL during a write", "memory limit", "file limit",
)  # fmt: skip
FILE_LIMIT_BYTES = 20_000
NO_MEMORY = "memory allocation of"  # with these words libraries in Rust end the process
WHOLE_SECONDS = 300.0  # no call that is not killed takes longer


@dataclass(frozen=True)
class Command:
    """A command line; `{out}` is its folder, `{home}` that of its inputs.

    Attributes:
        left_out: patterns of files whose content depends on the time, or on where a run was resumed.
    """

    line: str
    left_out: tuple[str, ...] = ()


ALIGN = "--data a={home}/a::b={home}/b --epochs 40 --batch-size 16 --embed-dim 16"
COMMANDS = {
    "search": Command(
        "search {home}/model {home}/photos red --cache {out} --output {out}/hits.json --batch-size 8 --workers 1 --device cpu"
    ),
    "data pack": Command("data pack {home}/photos --out {out} --test-share 0.1 --shard-size 40 --threads 2 --max-side 24"),
    "align": Command(
        f"align --image {{home}}/model --text {{home}}/model {ALIGN} --out {{out}} --workers 1 --device cpu",
        ("align.html", "align.json"),
    ),
    "finetune": Command(
        "finetune --from {home}/model --data a={home}/a::b={home}/b --out {out} --batch-size 16 --device cpu --seed 0 "
        "--set epochs=3 --set lr=5e-4 --set text-augment= --set save-every-steps=5 --alphas 0.5",
        ("*.log", "*.html", "record.jsonl", "params.txt", "step_*.pt", "train-00000.tar.npz"),
    ),
}  # fmt: skip


def write_inputs(home: Path) -> None:
    """Two sources of 120 pictures, a folder of 240 with captions, a small exported model, and the same with NaN in it."""
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
    (home / "soak-small.json").write_text(json.dumps({**MODEL, "custom_text": False}))
    open_clip.add_model_config(home / "soak-small.json")
    torch.manual_seed(0)
    checkpoint = home / "run" / "checkpoints" / "epoch_1.pt"
    checkpoint.parent.mkdir(parents=True)
    (home / "run" / "params.txt").write_text("model: soak-small\n")
    torch.save(
        {
            "epoch": 1,
            "name": "run",
            "state_dict": open_clip.create_model("soak-small").state_dict(),
        },
        checkpoint,
    )
    export_local_dir(checkpoint, home / "model")
    shutil.copytree(home / "model", home / "nan")
    weights = load_file(home / "nan" / HF_SAFE_WEIGHTS_NAME)
    weights["visual.conv1.weight"][0, 0] = float("nan")
    save_file(weights, home / "nan" / HF_SAFE_WEIGHTS_NAME)


class Call(Fork):
    """One call of a command, in a session of its own."""

    def __init__(
        self, words: list[str], output: Path, tmpdir: Path, limit: tuple[int, int] | None = None
    ) -> None:
        self.output = output
        output.write_bytes(b"")
        self.launcher = os.fork()
        if self.launcher == 0:
            status = 1
            try:
                self.lead(output)
                os.environ["TMPDIR"] = tempfile.tempdir = str(tmpdir)
                torch.set_num_threads(1)
                if limit is not None:
                    resource.setrlimit(limit[0], (limit[1], resource.RLIM_INFINITY))
                status = zerovl(words)
            except BaseException:
                traceback.print_exc()
            finally:  # the fork must not run the rest of this program
                atexit._run_exitfuncs()
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                os._exit(status)

    def wait_for_end(self, limit_seconds: float) -> tuple[float | None, int]:
        """Seconds until all its processes have ended (None: they were ended by force), and the command's exit status."""
        status, begin = None, time.monotonic()
        while status is None:
            pid, word = os.waitpid(self.launcher, os.WNOHANG)
            status = os.waitstatus_to_exitcode(word) if pid else None
            if time.monotonic() > begin + limit_seconds:
                self.wait(0)
                return None, -1
            time.sleep(0.02)
        left = self.wait(limit_seconds)
        return None if left is None else time.monotonic() - begin, status

    def kill(self, kind: str, out: Path, after_seconds: float) -> bool:
        """Do one of KILLS that sends a signal, after some seconds; False if the command has ended before."""
        begin = time.monotonic()
        while time.monotonic() < begin + after_seconds or kind.endswith("a write"):
            if self.launcher not in processes_of(self.launcher):
                return False
            late = time.monotonic() > begin + after_seconds / 2
            if (
                late
                and kind.endswith("a write")
                and any(path.name.endswith(".part") for path in out.rglob("*"))
            ):
                break
            time.sleep(0.001)
        number = getattr(signal, kind.split()[0])
        with contextlib.suppress(ProcessLookupError):
            if kind.endswith("all processes"):
                os.killpg(self.launcher, number)
            else:
                os.kill(self.launcher, number)
            return True
        return False

    def words(self) -> str:
        return self.output.read_text(errors="replace")


def sentence_in(words: str) -> str | None:
    """The one sentence with which a command refused; None if there is none, or a traceback."""
    errors = [line for line in words.splitlines() if line.startswith("zerovl: error: ")]
    return errors[0] if len(errors) == 1 and "Traceback" not in words else None


# Embeddings that this call of `search` made; fewer after a kill, which has left some in the cache.
COMPUTED = re.compile(rb'"computed": \d+')


def contents(out: Path, left_out: tuple[str, ...]) -> dict[str, str]:
    """Path -> digest of each file below a folder, but locks and those of `left_out`; checkpoints by their tensors alone."""
    files = (
        path for path in sorted(out.rglob("*")) if path.is_file() and not path.name.endswith("lock")
    )
    found = {}
    for path in files:
        if any(path.match(pattern) for pattern in left_out):
            continue
        digest = hashlib.sha256()
        if path.suffix == ".pt":
            for name, tensor in tensors(torch.load(path, weights_only=True)):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif path.name == "hits.json":
            digest.update(COMPUTED.sub(b"", path.read_bytes()))
        else:
            digest.update(path.read_bytes())
        found[str(path.relative_to(out))] = digest.hexdigest()
    return found


class Soak:
    """Kills commands in turn until enough kills are done or the time is over."""

    def __init__(self, home: Path, options: argparse.Namespace) -> None:
        self.home, self.options = home, options
        self.dice, self.begin = random.Random(options.seed), time.monotonic()
        self.kills: collections.Counter[tuple[str, str]] = collections.Counter()
        self.kinds: dict[str, list[str]] = {name: [] for name in options.commands}
        self.slowest: dict[str, float] = collections.defaultdict(float)
        self.compared, self.equal, self.refused = 0, 0, 0
        self.faults: list[str] = []
        self.tmpdir = home / "tmp"
        self.tmpdir.mkdir()

    def call(
        self, name: str, out: Path, limit: tuple[int, int] | None = None, model: str = "model"
    ) -> Call:
        line = (
            COMMANDS[name]
            .line.format(home=self.home, out=out)
            .replace(f"{self.home}/model", f"{self.home}/{model}")
        )
        return Call(line.split(), self.home / "words.txt", self.tmpdir, limit)

    def fault(self, name: str, kind: str, words: str) -> None:
        self.faults.append(f"{name}, {kind}: {words[-3000:]}")
        print(f"FAULT {self.faults[-1]}", flush=True)

    def refuse_nan(self) -> None:
        for name in self.options.commands:
            if "{home}/model" in COMMANDS[name].line:
                call = self.call(name, self.home / "nan-out", model="nan")
                _, status = call.wait_for_end(WHOLE_SECONDS)
                words = call.words()
                if status != 2 or sentence_in(words) is None:
                    self.fault(name, f"NaN in the model's weights, status {status}", words)
                else:
                    print(f"{name}, NaN: {sentence_in(words)}", flush=True)
                shutil.rmtree(self.home / "nan-out", ignore_errors=True)

    def run(self) -> None:
        self.refuse_nan()
        seconds, whole = {}, {}
        for name in self.options.commands:
            out = self.home / "out"  # the same folder for all: its name may stand in the files
            call = self.call(name, out)
            ended, status = call.wait_for_end(WHOLE_SECONDS)
            if ended is None or status != 0:
                raise SystemExit(f"soak: {name} ends with {status}:\n{call.words()[-3000:]}")
            seconds[name], whole[name] = ended, contents(out, COMMANDS[name].left_out)
            print(f"{name}: {ended:.1f} s, {len(whole[name])} files", flush=True)
            shutil.rmtree(out)
        while not self.is_over():
            for name in self.options.commands:
                self.kill_until_done(name, seconds[name], whole[name])

    def is_over(self) -> bool:
        return (
            sum(self.kills.values()) >= self.options.kills
            or time.monotonic() > self.begin + 60 * self.options.minutes
        )

    def kill_until_done(self, name: str, seconds: float, whole: dict[str, str]) -> None:
        """Call a command and kill it until it ends by itself, then compare its files."""
        out = self.home / "out"
        while not self.kill_once(name, out, seconds):
            pass
        found = contents(out, COMMANDS[name].left_out) if out.is_dir() else {}
        # As the next call with loader workers does: this one may have needed none, since all was stored.
        remove_scratch_folders(self.tmpdir, PREFIX)
        left = [str(path) for path in (*out.rglob("*.part"), *self.tmpdir.iterdir())]
        differing = sorted({path for path, _ in found.items() ^ whole.items()})
        self.compared += 1
        self.equal += not differing and not left
        if differing or left:
            self.fault(name, "after its end", f"differing files {differing}; left behind {left}")
            for path in self.tmpdir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(out, ignore_errors=True)

    def kill_once(self, name: str, out: Path, seconds: float) -> bool:
        """Call a command and kill it at a random moment; True if it has ended by itself with status 0."""
        if not self.kinds[name]:
            self.kinds[name] = self.dice.sample(KILLS, len(KILLS))
        kind = None if self.is_over() else self.kinds[name][-1]
        limit = None
        if kind == "memory limit":
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = (resource.RLIMIT_AS, held + self.dice.randrange(4 << 20, 400 << 20))
        elif kind == "file limit":
            limit = (resource.RLIMIT_FSIZE, FILE_LIMIT_BYTES)
        call = self.call(name, out, limit)
        killed = kind is not None and (
            limit is not None or call.kill(kind, out, self.dice.uniform(0, 0.95 * seconds))
        )
        ended, status = call.wait_for_end(WHOLE_SECONDS if limit or not killed else LIMIT_SECONDS)
        words = call.words()
        if killed:
            self.kinds[name].pop()
            self.kills[name, str(kind)] += 1
            self.slowest[name] = (
                max(self.slowest[name], ended or 0.0) if limit is None else self.slowest[name]
            )
            shown = "HANGS" if ended is None else f"{ended:.1f} s, status {status}"
            print(
                f"{sum(self.kills.values()):3d} {name}, {kind}: {shown} {sentence_in(words) or ''}",
                flush=True,
            )
        if ended is None:
            self.fault(name, f"{kind}, does not end", words)
        elif (status != 0 and any(mark in words for mark in ("Traceback", DEFECT))) or (
            limit is not None and status not in (0, 2) and NO_MEMORY not in words
        ):
            self.fault(name, f"{kind}, status {status}", words)
        elif status == 2 and not killed:
            self.refused += 1
            print(f"    refused: {sentence_in(words)}", flush=True)
            shutil.rmtree(out, ignore_errors=True)  # as its sentence asks
        return status == 0

    def report(self) -> list[str]:
        """The counts as a table in Markdown."""
        options = self.options
        lines = [
            f"| kill | {' | '.join(options.commands)} |",
            "|---|" + "--:|" * len(options.commands),
        ]
        for kind in KILLS:
            lines.append(
                f"| {kind} | "
                + " | ".join(str(self.kills[name, kind]) for name in options.commands)
                + " |"
            )
        minutes = (time.monotonic() - self.begin) / 60
        lines.append("")
        lines.append(
            f"{sum(self.kills.values())} kills in {minutes:.0f} minutes (`python -m scripts.soak_commands --kills "
            f"{options.kills} --minutes {options.minutes:g} --seed {options.seed}`); after a signal all processes ended within "
            f"{max(self.slowest.values(), default=0):.1f} s; {self.refused} calls after a kill were refused with a sentence; "
            f"{self.equal} of {self.compared} calls that came to their end left the files of the call never interrupted, byte "
            f"for byte; {len(self.faults)} faults."
        )
        return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=30, help="kill no call after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument(
        "--out", type=Path, help="a page in which the section `soak-commands` is replaced"
    )
    options = parser.parse_args()
    home = Path(
        tempfile.mkdtemp(prefix="soak-")
    )  # not a TemporaryDirectory: each fork would remove it at its end
    try:
        write_inputs(home)
        soak = Soak(home, options)
        soak.run()
    finally:
        shutil.rmtree(home)
    lines = soak.report()
    print("\n".join(lines))
    if options.out is not None:
        write_table(options.out.parent / "results" / "soak-commands.csv", lines)
        replace_section(options.out, "soak-commands", lines[-1:])
    return int(bool(soak.faults))


if __name__ == "__main__":
    sys.exit(main())
