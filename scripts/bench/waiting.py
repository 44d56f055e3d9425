"""Seconds until a command's first line, until the first step of a training, and until a command ends.

    python -m scripts.bench.waiting --data data/emoji --demo demo [--rounds 3] [--source OTHER_CHECKOUT]

It runs the commands on the data and the runs of `make demo`, in processes of their own. Each number is the smallest of the
rounds, because other work on the machine only adds. The first row is the bound: `import torch, open_clip` and nothing else; the
last column is the CPU time relative to it. With --source it measures the package of another checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BOUND = "import torch, open_clip"
STEP = re.compile(r"Train Epoch|step +1\b|loss:? +\d", re.IGNORECASE)


def commands(data: Path, demo: Path, out: Path) -> dict[str, list[str]]:
    """Each command and its words after `zerovl`; `search` is called twice, the second time with stored embeddings."""
    sources = [name for name in ("noto", "twemoji", "openmoji", "fluent") if (data / name).is_dir()]
    named = "::".join(f"{name}={data / name}" for name in sources)
    run = [
        "--debiased-sampling",
        "--batch-size",
        "32",
        "--dga-steps",
        "2",
        "--precision",
        "fp32",
        "--device",
        "cpu",
    ]
    run += [
        "--workers",
        "2",
        "--log-every-n-steps",
        "1",
        "--logs",
        str(out / "logs"),
        "--name",
        "first",
    ]
    checkpoint = max((demo / "runs" / "debiased-seed0" / "checkpoints").glob("epoch_*.pt"))
    other = max((demo / "runs" / "random-seed0" / "checkpoints").glob("epoch_*.pt"))
    held_out = "::".join(f"{name}={data / 'test-across' / name}" for name in sources)
    search = [
        "search",
        str(checkpoint),
        str(data / "noto"),
        "a red apple",
        "--text-model",
        str(data / "bert"),
    ]
    search += ["--device", "cpu", "--cache", str(out / "cache"), "--page", str(out / "search.html")]
    return {
        "train": [
            "train",
            "--model",
            "zerovl-emoji",
            "--text-model",
            str(data / "bert"),
            "--train-data",
            named,
            *run,
        ],
        "retrieval, two models": [
            "retrieval",
            f"a={checkpoint}",
            f"b={other}",
            "--data",
            held_out,
        ],
        "search, first call": search,
        "search, second call": search,
        "export": [
            "export",
            str(checkpoint),
            str(out / "export"),
            "--text-model",
            str(data / "bert"),
        ],
        "doctor": ["doctor"],
    }


def measured(
    name: str, words: Sequence[str], environment: dict[str, str]
) -> tuple[float, float, float]:
    """Seconds to the first line, to the first step of a training (else to the end), and CPU seconds until then.

    Raises:
        RuntimeError: the command failed.
    """
    begin, before, lines = time.perf_counter(), os.times(), []
    command = [
        sys.executable,
        *(["-c", BOUND] if name == BOUND else ["-m", "open_clip_zerovl.cli", *words]),
    ]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.perf_counter() - begin, line))
        if name == "train" and STEP.search(line):
            process.kill()
            break
    status, seconds = process.wait(), time.perf_counter() - begin
    if name == "train":
        seconds = lines[-1][0]
    elif status not in (0, 1):  # doctor has 1 where something is missing
        raise RuntimeError("".join(line for _, line in lines[-20:]))
    now = os.times()
    cpu = now.children_user + now.children_system - before.children_user - before.children_system
    return lines[0][0] if lines else seconds, seconds, cpu


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--only", default="")
    options = parser.parse_args(argv)
    environment = {**os.environ, "PYTHONPATH": str(options.source.resolve() / "src")}
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as out:
            asked = commands(options.data.resolve(), options.demo.resolve(), Path(out))
            for name, words in {BOUND: [], **asked}.items():
                if name == BOUND or name.startswith(options.only):
                    found.setdefault(name, []).append(measured(name, words, environment))
    print(
        "| command | first line, s | first step or end, s | CPU, s | CPU / import's |\n|---|--:|--:|--:|--:|"
    )
    best = {
        name: [min(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
    }
    for name, (first, seconds, cpu) in best.items():
        print(f"| {name} | {first:.1f} | {seconds:.1f} | {cpu:.1f} | {cpu / best[BOUND][2]:.2f} |")


if __name__ == "__main__":
    main()
