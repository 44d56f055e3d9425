"""`make demo`: debiased sampling on four small sources, on any laptop.

Four emoji sets are four sources (Noto, Twemoji, OpenMoji, Fluent), each with its own drawing style and caption style. The same
small model is trained twice: with each batch from one source (debiased, paper section 3.1) and with mixed batches (random).
`scripts.paper.bias` measures both on pairs that were held out of their source; `zerovl export` writes the debiased one for
stock open_clip. Everything is written below demo/. With the environment and the data in place, both runs train at the
same time in about 4 minutes on 2 CPU cores. A call after an interruption goes on.

Training flags after -- apply to both runs and replace the demo's own flags of the same name:

    python -m scripts.demo -- --epochs 40 --coin-flip-mixup --text-augment 0.2 --model zerovl-emoji-vit --token-drop 0.25

Runs with other flags have other places (demo/runs/debiased-seed0-epochs-40-coin-flip-mixup ...), so that earlier ones stay.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated as A
from typing import Literal

from tqdm import tqdm

from open_clip_zerovl.cli import main as zerovl
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import TrainingProcess, start_training
from open_clip_zerovl.report.run import RECORD, read_record
from scripts.drawn.emoji import SOURCES
from scripts.drawn.make import HELD_OUT, prepare_emoji
from scripts.paper import bias
from scripts.program import program

SAMPLINGS = ("random", "debiased")
EPOCHS = 20
# RSUM of a random order of a source's held-out pairs.
CHANCE = 2 * 100 * (1 + 5 + 10) / HELD_OUT
_COMPARED = "the two runs are debiased and random sampling"
_PLACE = "a run's place is below demo/ (python -m scripts.demo --out DIR)"
# Flags that the demo sets itself, and why.
OWN_FLAGS = {
    "--sampling": _COMPARED,
    "--debiased-sampling": _COMPARED,
    "--train-data": "it trains on its four emoji sets (zerovl train takes your own data)",
    "--logs": _PLACE,
    "--name": _PLACE,
    "--resume": "a second call goes on with an interrupted run",
    "--save-frequency": "the last checkpoint of a run is kept",
}


@dataclass(frozen=True)
class Run:
    """One of the two trainings.

    Attributes:
        folder: --logs/--name.
        flags: all other flags; of a flag that comes twice training takes the last.
    """

    folder: Path
    flags: tuple[str, ...]

    def value(self, flag: str) -> str:
        """Return the last value of a flag."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(flag, dest="value")
        return parser.parse_known_args(self.flags)[0].value

    @property
    def checkpoint(self) -> Path:
        """Return the path of the last checkpoint."""
        return self.folder / "checkpoints" / f"epoch_{self.value('--epochs')}.pt"

    def start(self) -> TrainingProcess:
        """Start or go on, with one thread a process: small models scale badly over threads."""
        place = ["--logs", str(self.folder.parent), "--name", self.folder.name]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        log = self.folder.with_name(f"{self.folder.name}.log")
        return start_training([*self.flags, *place, "--resume", "latest"], log=log, threads=1)


def run_of(
    sampling: str, data: Path, out: Path, *, epochs: int, seed: int, flags: Sequence[str]
) -> Run:
    """Return the training with a kind of sampling, its flags chosen on the validation split (docs/models.md)."""
    warmup = (
        [] if any(word.startswith("--warmup") for word in flags) else ["--warmup-share", "0.05"]
    )
    own = [
        "--model", "zerovl-emoji", "--text-model", str(data / "bert"),
        "--train-data", "::".join(f"{source}={data / source}" for source in SOURCES), "--sampling", sampling,
        "--batch-size", "32", "--dga-steps", "2", "--dga-retain", "auto",
        "--epochs", str(epochs), "--lr", "1e-3", "--lr-min", "1e-4", "--wd", "0.1", *warmup,
        "--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6",
        "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)",
        "--precision", "fp32", "--workers", "0", "--seed", str(seed),
        "--log-every-n-steps", "10", "--save-frequency", "0", "--save-every-steps", "200", *flags,
    ]  # fmt: skip
    # Other flags have another place, so that a call takes up no earlier call's run.
    other = [] if epochs == EPOCHS else [f"epochs {epochs}"]
    words = [f"{sampling} seed{seed}", *other, *flags]
    return Run(out / "runs" / re.sub("[^A-Za-z0-9.]+", "-", " ".join(words)), tuple(own))


def demo(
    flags: A[tuple[str, ...], "training flags for both runs, after --", "-- FLAGS"] = (),
    /,
    *,
    data: A[Path, "emoji data, fetched if it does not exist"] = Path("data/emoji"),
    out: A[Path, "folder of all results"] = Path("demo"),
    epochs: A[int, "passes over the data"] = EPOCHS,
    seed: int = 0,
    split: A[Literal["val", "test"], "settings are chosen on val"] = "test",
) -> None:
    """Make the data, train twice, compare and export.

    Raises:
        UserError: a flag that the demo sets itself, a part that failed.
    """
    start = time.monotonic()
    for name in (word.split("=")[0] for word in flags):
        if name in OWN_FLAGS:
            raise UserError(f"the demo sets {name} itself: {OWN_FLAGS[name]}; leave it out")
    runs = {
        sampling: run_of(sampling, data, out, epochs=epochs, seed=seed, flags=flags)
        for sampling in SAMPLINGS
    }
    epochs = int(runs["debiased"].value("--epochs"))
    print("1/4 Data: four emoji sets as four sources", flush=True)
    prepare_emoji(data)
    print(
        f"2/4 Training: the same model with random and with debiased sampling, at the same time, {epochs} epochs\n  A random "
        f"order has RSUM {CHANCE:g} within a source; 20 epochs (4 minutes on 2 cores) reach about 230 to 260, and a few epochs "
        "stay near chance.",
        flush=True,
    )
    train(runs, epochs)
    print("3/4 Measuring both on pairs that were held out of their source", flush=True)
    models = [f"{sampling}={run.checkpoint}" for sampling, run in runs.items()]
    held_out = "::".join(f"{source}={data / f'{split}-across' / source}" for source in SOURCES)
    fields = ("--concept", "concept", "--held-out", "held_out")
    words = [*models, "--data", held_out, *fields, "--out", str(out / "bias"), "--device", "cpu"]
    table = io.StringIO()

    def measure(words: list[str]) -> int:
        with redirect_stdout(table):
            return program(bias.bias, words)

    call(measure, "python -m scripts.paper.bias", words)
    print(judgement(json.loads((out / "bias" / "bias.json").read_text(encoding="utf-8")), epochs))
    print(table.getvalue(), end="")
    print(
        "4/4 Export: a folder that stock open_clip loads, tested in a process without this package",
        flush=True,
    )
    exported = out / runs["debiased"].value("--model").replace("/", "-")
    call(zerovl, "zerovl", ["export", str(runs["debiased"].checkpoint), str(exported), "--force"])
    place = f"local-dir:{exported.resolve()}"
    stock = [sys.executable, "-c", STOCK_LOADING, place]
    subprocess.run(stock, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True)
    print(f"Done in {time.monotonic() - start:.0f} s.")


def call(program: Callable[[list[str]], int], name: str, words: Sequence[str]) -> None:
    """Print and run a command.

    Raises:
        UserError: it failed.
        KeyboardInterrupt: it was interrupted.
    """
    print(f"\n{name} {shlex.join(words)}", flush=True)
    status = program(list(words))
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise UserError(f"{name} ended with status {status}")


def train(runs: dict[str, Run], epochs: int) -> None:
    """Train both at the same time, with progress bars, where finished runs are kept and interrupted ones go on.

    Raises:
        UserError: a run ended with an error.
    """
    children: dict[str, TrainingProcess] = {}
    for sampling, run in runs.items():
        if run.checkpoint.is_file():
            print(f"  {sampling}: {run.checkpoint} exists; remove it to train again")
            continue
        children[sampling] = run.start()
    form = "{desc} {percentage:3.0f}% |{bar}| {n:.1f} of {total} epochs [{elapsed}<{remaining}{postfix}]"
    bars = {name: tqdm(desc=f"  {name:8}", total=epochs, bar_format=form) for name in children}
    try:
        going = True
        while going:
            going = any(child.process.poll() is None for child in children.values())
            for sampling, bar in bars.items():
                folder = runs[sampling].folder
                if steps := read_record(folder)["step"] if (folder / RECORD).is_file() else []:
                    bar.n = steps[-1]["at"]
                    bar.set_postfix_str(f"loss {steps[-1]['loss']}"[:9])
            time.sleep(going)
        for child in children.values():
            child.check()
    finally:
        for child in children.values():
            child.process.terminate()
        for child in children.values():
            child.stop()
        for bar in bars.values():
            bar.close()


def judgement(rows: list[dict], epochs: int) -> str:
    """Say what debiased batches did from one style to another and in one pool, or that the models learned nothing."""
    scores = {
        row["kind"]: {name: number["value"] for name, number in row["models"].items()}
        for row in rows
    }
    within = " and ".join(f"{score:.0f} ({name})" for name, score in scores["within"].items())
    if max(scores["within"].values()) < 2 * CHANCE:
        return (
            f"\nAt chance: RSUM within a source is {within}, a random order has {CHANCE:g}. After {epochs} epochs the models "
            "know next to nothing, and their differences mean nothing; train longer."
        )
    across, pool = (
        scores[kind]["debiased"] - scores[kind]["random"] for kind in ("across", "mixed")
    )
    return (
        f"\nDebiased - random batches: {across:+.0f} RSUM from one style to another, {pool:+.0f} in one pool of all styles "
        f"(within a style {within}; chance {CHANCE:g}; one run each)."
    )


STOCK_LOADING = """
import sys, torch, open_clip
model, _, preprocess = open_clip.create_model_and_transforms(sys.argv[1])
tokenizer = open_clip.get_tokenizer(sys.argv[1])
features = model.encode_text(tokenizer(["grinning face"]), normalize=True)
assert "open_clip_zerovl" not in sys.modules and torch.isfinite(features).all()
print(f"  open_clip.create_model_and_transforms({sys.argv[1]!r}) -> {type(model).__name__}, "
      f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
"""


if __name__ == "__main__":
    sys.exit(program(demo))
