"""Runs of the study on photographs (protocol.yaml): pilots, then arms by seeds. A stopped call continues.

    python -m scripts.photographs.run --study DIR --pilot     # one run a rate, scored on the validation photographs
    python -m scripts.photographs.run --study DIR --jobs 2    # the protocol's arms and seeds, scored on the test photographs

DIR holds train/SOURCE/00000.tar, model/ (the aligned start as an exported folder) and sets/ (flickr8k-validation.csv,
flickr8k-test.csv, products, noto, clothing). Each finished run leaves one JSON in docs/results/photographs/. The rates that
the pilots chose stand in rates.yaml beside the protocol, committed before the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from open_clip_zerovl.core.launch import training_command
from scripts.photographs.measuring import Measuring

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "docs" / "results" / "photographs"


@dataclass(frozen=True)
class Run:
    """One training: an arm with a rate and a seed, scored on validation (`pilot`) or test sets."""

    arm: str
    rate: float
    seed: int
    pilot: bool

    @property
    def name(self) -> str:
        return f"{'pilot' if self.pilot else 'run'}-{self.arm}-{self.rate:g}-{self.seed}"

    def arguments(self, protocol: dict[str, Any], study: Path, out: Path) -> list[str]:
        """Arguments of the training program."""
        arm, sources = protocol["arms"][self.arm], protocol["sources"]
        data = "::".join(f"{name}={study}/train/{name}/00000.tar" for name in sources)
        factors = "::".join(f"{share * arm['compute']:.6g}" for share in sources.values())
        words = f"{protocol['runs']['flags']} {arm['flags']} --lr {self.rate} --seed {self.seed}"
        words += f" --batch-size {protocol['runs']['batch_size']}"
        places = ["--model", f"local-dir:{study}/model", "--train-data", data]
        places += ["--train-data-upsampling-factors", factors, "--logs", str(out)]
        return [*words.split(), *places, "--name", self.name]


def planned(protocol: dict[str, Any], pilot: bool, seeds: list[int] | None = None) -> list[Run]:
    """Runs in the order in which they are made: seed by seed, so that what is done is paired."""
    if pilot:
        seed = protocol["runs"]["pilot_seed"]
        return [
            Run(name, rate, seed, True)
            for name, arm in protocol["arms"].items()
            for rate in arm["rates"]
        ]
    rates = yaml.safe_load((HERE / "rates.yaml").read_text(encoding="utf-8"))
    chosen = protocol["runs"]["seeds"] if seeds is None else seeds
    return [Run(arm, float(rates[arm]), seed, False) for seed in chosen for arm in protocol["arms"]]


def _write_record(name: str, content: dict[str, Any]) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(name, content["scores"], flush=True)


def score_start(study: Path, measuring: Measuring) -> None:
    """The record of the aligned model from which all runs start."""
    if not (RECORDS / "start.json").is_file():
        _write_record("start", {"arm": "start", "scores": measuring(study / "model", False)})


def cpu_seconds(command: Sequence[str], log: IO[Any], name: str) -> float:
    """CPU seconds of a command and of all processes that it starts; its words go to a file. SystemExit if it fails."""
    child = subprocess.Popen(command, stdout=log, stderr=log)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{name} ended with status {child.returncode}; see {log.name}")
    return usage.ru_utime + usage.ru_stime


def make(run: Run, protocol: dict[str, Any], study: Path, out: Path, measuring: Measuring) -> None:
    """Train and write the record; a run with a record is done."""
    record = RECORDS / f"{run.name}.json"
    if record.is_file():
        return
    arguments = run.arguments(protocol, study, out)
    shutil.rmtree(out / run.name, ignore_errors=True)  # of a call that was stopped
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{run.name}.log", "ab") as log:
        seconds = cpu_seconds(training_command(arguments), log, run.name)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    (checkpoint,) = (out / run.name / "checkpoints").glob("epoch_1.pt")
    found = {
        "arm": run.arm, "rate": run.rate, "seed": run.seed, "pilot": run.pilot, "commit": commit,
        "torch": torch.__version__, "cpu_seconds": round(seconds, 1),
        "flags": f"{protocol['runs']['flags']} {protocol['arms'][run.arm]['flags']}",
        "scores": measuring(checkpoint, run.pilot),
    }  # fmt: skip
    _write_record(run.name, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, help="checkpoints and logs (default: DIR/runs)")
    parser.add_argument("--pilot", action="store_true", help="one run a rate")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the protocol's")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once")
    parser.add_argument("--only", nargs="+", help="arms")
    given = parser.parse_args()
    protocol = yaml.safe_load((HERE / "protocol.yaml").read_text(encoding="utf-8"))
    os.environ["OMP_NUM_THREADS"] = "1"
    study, out = given.study.resolve(), (given.out or given.study / "runs").resolve()
    runs = planned(protocol, given.pilot, given.seeds)
    measuring = Measuring(study)
    with ThreadPoolExecutor(given.jobs) as pool:
        jobs = [
            pool.submit(make, run, protocol, study, out, measuring)
            for run in runs
            if given.only is None or run.arm in given.only
        ]
        for job in jobs:
            job.result()
    if not given.pilot:
        score_start(study, measuring)


if __name__ == "__main__":
    main()
