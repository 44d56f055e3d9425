"""`make demo`: debiased sampling on four small sources, on any laptop.

Four emoji sets are four sources (Noto, Twemoji, OpenMoji, Fluent), each with its own drawing style and caption style. The same
small model is trained twice: with each batch from one source (debiased, paper section 3.1) and with mixed batches (random).
Both are measured on pairs that were held out of their source:

    within   pictures and captions of one source
    across   pictures of one source, captions of another: knowing the source does not help
    mixed    all sources in one pool: a model that recognises the source has to search a quarter of it only

Writes demo/ (runs, exported model, results.json, report.html) and demo.png. With the environment and the data in place, both
runs train at the same time in about 6 minutes on 2 CPU cores.

Training flags after -- apply to both runs and replace the demo's own flags of the same name:

    python -m scripts.demo -- --coin-flip-mixup --text-augment 0.2 --model zerovl-emoji-vit --token-drop 0.25
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from open_clip_zerovl.checkpoints.export import export_local_dir
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.pools import MIXED_POOL_NOTE, POOLS
from open_clip_zerovl.evaluate.bias.report import measure_bias
from open_clip_zerovl.evaluate.bias.samples import SourceSample
from open_clip_zerovl.evaluate.retrieval.examples import retrieval_examples
from open_clip_zerovl.prepare.drawn.emoji import EMOJI
from open_clip_zerovl.prepare.drawn.make import load_drawn_split, prepare_drawn
from scripts.emoji.page import demo_page
from scripts.emoji.picture import demo_picture
from scripts.emoji.records import RunRecord, results_table
from scripts.emoji.runs import Encoder, Pool, TrainingRun, drawn_flags, flag_names, flag_value, measure

SAMPLINGS = ("debiased", "random")
_COMPARED = "the two runs are debiased and random sampling"
_BEFORE = "give it before the --"
# Flags that the demo sets itself, with what to do instead.
OWN_FLAGS = {
    "--sampling": _COMPARED,
    "--debiased-sampling": _COMPARED,
    "--train-data": "give --data before the --",
    "--epochs": _BEFORE,
    "--seed": _BEFORE,
    "--logs": "give --out before the --",
    "--name": "give --out before the --",
    "--resume": "an interrupted run starts again",
    "--save-frequency": "only the last checkpoint is kept",
}


@dataclass(frozen=True)
class Settings:
    data: Path
    out: Path
    picture: Path
    epochs: int
    seed: int
    split: str
    flags: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("data/emoji"), help="emoji data, fetched if it does not exist"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for runs, exported model and results.json"
    )
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("val", "test"), default="test", help="settings are chosen on val")
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="training flags for both runs, after --; they replace the demo's own",
    )
    settings = Settings(**vars(parser.parse_args()))
    try:
        run(replace(settings, flags=checked_flags(settings.flags)))
    except UserError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    return 0


def checked_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """The user's training flags.

    Raises:
        UserError: a flag that the demo sets itself.
    """
    for name in flag_names(flags):
        if name in OWN_FLAGS:
            raise UserError(f"the demo sets {name} itself; {OWN_FLAGS[name]}")
    return tuple(flags)


def run(settings: Settings) -> None:
    """Data, two trainings, measurements, table, picture, export."""
    start = time.monotonic()
    print("1/4 Data: four emoji sets as four sources", flush=True)
    prepare_drawn(EMOJI, settings.data)
    print("2/4 Training: the same model with debiased and with random sampling, at the same time", flush=True)
    train(settings)
    print("3/4 Measuring both on pairs that were held out of their source", flush=True)
    samples = load_drawn_split(EMOJI, settings.data, settings.split)
    pool = Pool.of(samples)
    runs = {sampling: training_run(settings, sampling) for sampling in SAMPLINGS}
    encoders = {sampling: Encoder.of(run.checkpoint) for sampling, run in runs.items()}
    measured = {
        sampling: measure(run, encoders[sampling], samples, pool, seed=settings.seed) for sampling, run in runs.items()
    }
    records = {sampling: record for sampling, (record, _) in measured.items()}
    print(f"\n{results_table(records)}\n\n{explain(records)}", flush=True)
    results = {name: asdict(record) for name, record in records.items()}
    write_atomically(settings.out / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(settings.out / "results.md", results_table(records, markdown=True) + "\n")
    examples = retrieval_examples(
        [np.asarray(sample.image) for sample in pool.samples],
        [sample.caption for sample in pool.samples],
        pool.sources,
        {name: (images, texts) for name, (_, (images, texts, _)) in measured.items()},
        pool.queries(),
    )
    title = f"Batches from one source or mixed: {settings.epochs} epochs of four emoji sets"
    demo_picture(settings.picture, records, examples, title=title)
    bias = measure_bias(
        {name: features for name, (_, features) in measured.items()}, source_samples(pool), seed=settings.seed
    )
    lead = explain(records).splitlines()[0]  # the page has the rest of it below its table
    report = demo_page(settings.out / "report.html", records, examples, bias=bias, title=title, lead=lead)
    print(f"\nPicture: {settings.picture}\nReport, with loss curves, examples and embedding maps: {report}")
    print("4/4 Export: a folder that stock open_clip loads, tested in a process without this package", flush=True)
    folder = settings.out / flag_value(runs["debiased"].flags, "--model").replace("/", "-")
    export_local_dir(runs["debiased"].checkpoint, folder, force=True)
    check_stock_loading(folder)
    print(f"Done in {time.monotonic() - start:.0f} s.")


def training_run(settings: Settings, sampling: str) -> TrainingRun:
    flags = drawn_flags(
        settings.data, sampling=sampling, epochs=settings.epochs, seed=settings.seed, more=settings.flags
    )
    return TrainingRun(settings.out / "runs" / f"{sampling}-seed{settings.seed}", tuple(flags))


def train(settings: Settings) -> None:
    """Both runs at the same time; finished runs with the same flags are kept."""
    runs = {sampling: training_run(settings, sampling) for sampling in SAMPLINGS}
    children = {}
    for sampling, run in runs.items():
        if run.is_finished():
            print(f"  {sampling}: {run.checkpoint} exists; remove it to train again")
            continue
        if run.folder.exists() and not run.was_asked_for():
            print(f"  {sampling}: {run.folder} holds a run with other flags; trained again")
        children[sampling] = run.start()
    try:
        watch(runs, children)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.terminate()


def watch(runs: dict[str, TrainingRun], children: dict[str, subprocess.Popen]) -> None:
    """Progress bars from the runs' logs.

    Raises:
        UserError: a run ended with an error.
    """
    bars = {sampling: tqdm(desc=f"  {sampling}", total=None, unit="samples") for sampling in children}
    while any(child.poll() is None for child in children.values()):
        time.sleep(1)
        for sampling, bar in bars.items():
            advance(bar, runs[sampling])
    for sampling, bar in bars.items():
        advance(bar, runs[sampling])
        bar.close()
    for sampling, child in children.items():
        if child.returncode != 0:
            reason = runs[sampling].last_error()
            raise UserError(f"the {sampling} run ended with status {child.returncode}: {reason}")


def advance(bar: tqdm, run: TrainingRun) -> None:
    if not run.log.is_file():
        return
    lines = re.findall(r"Train Epoch: (\d+) \[ *(\d+)/(\d+) .*?Loss: (\S+)", run.log.read_text(encoding="utf-8"))
    if lines:
        epoch, seen, per_epoch, loss = lines[-1]
        bar.total = int(per_epoch) * int(flag_value(run.flags, "--epochs"))
        bar.n = int(epoch) * int(per_epoch) + int(seen)
        bar.set_postfix_str(f"loss {float(loss):.2f}")


def source_samples(pool: Pool) -> list[SourceSample]:
    """The pool's pairs in the form of the bias report."""
    encoded = []
    for sample in pool.samples:
        buffer = io.BytesIO()
        sample.image.save(buffer, "PNG")
        encoded.append(SourceSample(sample.source, buffer.getvalue(), sample.caption, sample.concept))
    return encoded


def explain(records: dict[str, RunRecord]) -> str:
    """The differences between the two runs, in a sentence."""
    change = {pool: records["debiased"].rsum[pool] - records["random"].rsum[pool] for pool in POOLS}
    sentence = (
        f"Debiased against random: RSUM within a source {change['within']:+.1f}, across sources {change['across']:+.1f}, "
        f"in the mixed pool {change['mixed']:+.1f}."
    )
    return sentence + (f"\n{MIXED_POOL_NOTE}" if change["mixed"] < 0 else "")


STOCK_LOADING = """
import sys, torch, open_clip
model, _, preprocess = open_clip.create_model_and_transforms(sys.argv[1])
tokenizer = open_clip.get_tokenizer(sys.argv[1])
features = model.encode_text(tokenizer(["grinning face"]), normalize=True)
assert "open_clip_zerovl" not in sys.modules and torch.isfinite(features).all()
print(f"  open_clip.create_model_and_transforms({sys.argv[1]!r}) -> {type(model).__name__}, "
      f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
"""


def check_stock_loading(folder: Path) -> None:
    """Load the exported folder with open_clip alone, offline, in a fresh process.

    Raises:
        UserError: it does not load.
    """
    done = subprocess.run(
        [sys.executable, "-c", STOCK_LOADING, f"local-dir:{folder.resolve()}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise UserError(f"stock open_clip does not load {folder}: {done.stderr.strip().splitlines()[-1]}")
    print(done.stdout.rstrip())


if __name__ == "__main__":
    sys.exit(main())
