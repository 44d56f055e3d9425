"""`make demo`: the product's main job on real pictures, on any laptop.

Four emoji sets are four sources (Noto, Twemoji, OpenMoji, Fluent: each with its own drawing style and caption style). The
same small model is trained twice by open_clip's own program, with batches from one source at a time (debiased, paper
section 3.1) and with mixed batches (random); then both are measured on pairs that their source never showed:

    within   a held-out picture among held-out captions of its own source
    across   a picture of one source among captions of another: knowing the source is of no use
    mixed    all sources in one pool: guessing the source alone narrows it four-fold

Writes demo/ (runs, exported model, results.json, report.html) and demo.png. Hardware: 2 CPU cores, about 6 minutes of
training for both runs side by side, after the environment and the data are there.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from open_clip_zerovl.bias import SourceFeatures, mean_log_p_negatives, pool_metrics, source_probe_accuracy
from open_clip_zerovl.bias_report import SourceSample, measure_bias
from open_clip_zerovl.checkpoints import export_local_dir
from open_clip_zerovl.datasets.emoji import EmojiSample, load_emoji_split, prepare_emoji
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.loading import load_model
from open_clip_zerovl.pages import demo_page
from open_clip_zerovl.reports import (
    MIXED_POOL_NOTE,
    POOLS,
    RunRecord,
    demo_picture,
    read_training_log,
    results_table,
    retrieval_examples,
)

SAMPLINGS = ("debiased", "random")
SOURCES = ("noto", "twemoji", "openmoji", "fluent")
MICRO_BATCH, DGA_STEPS = 32, 2  # effective batch 64


@dataclass(frozen=True)
class Settings:
    data: Path
    out: Path
    picture: Path
    epochs: int
    seed: int
    split: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/emoji"), help="emoji data, fetched if it is not there")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="runs, exported model and results.json")
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("val", "test"), default="test", help="settings are chosen on val")
    arguments = parser.parse_args()
    try:
        run(Settings(**vars(arguments)))
    except UserError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(settings: Settings) -> None:
    """Data, two trainings, measurements, table, picture, export."""
    start = time.monotonic()
    print("1/4 Data: four emoji sets as four sources", flush=True)
    prepare_emoji(settings.data)
    print("2/4 Training: the same model with debiased and with random sampling, side by side", flush=True)
    train(settings)
    print("3/4 Measuring both on pairs that their source never showed", flush=True)
    samples = load_emoji_split(settings.data, settings.split)
    pool = Pool.of(samples)
    measured = {sampling: measure(settings, sampling, samples, pool) for sampling in SAMPLINGS}
    records = {sampling: record for sampling, (record, _) in measured.items()}
    print(f"\n{results_table(records)}\n\n{explain(records)}", flush=True)
    results = {name: asdict(record) for name, record in records.items()}
    (settings.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (settings.out / "results.md").write_text(results_table(records, markdown=True) + "\n", encoding="utf-8")
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
        {name: features for name, (_, features) in measured.items()}, pool.source_samples(), seed=settings.seed
    )
    lead = explain(records).splitlines()[0]  # the page says the rest beside the table
    report = demo_page(settings.out / "report.html", records, examples, bias=bias, title=title, lead=lead)
    print(f"\nPicture: {settings.picture}\nReport, with loss curves, examples and embedding maps: {report}")
    print("4/4 Export: a folder that stock open_clip loads, proved in a process without this package", flush=True)
    folder = settings.out / "zerovl-emoji"
    export_local_dir(last_checkpoint(settings, "debiased"), folder, force=True)
    prove_stock_loading(folder)
    print(f"Done in {time.monotonic() - start:.0f} s.")


def run_folder(settings: Settings, sampling: str) -> Path:
    return settings.out / "runs" / f"{sampling}-seed{settings.seed}"


def last_checkpoint(settings: Settings, sampling: str) -> Path:
    return run_folder(settings, sampling) / "checkpoints" / f"epoch_{settings.epochs}.pt"


def train(settings: Settings) -> None:
    """Both runs at once, one thread each: small models scale badly over threads; finished runs are kept."""
    children = {}
    for sampling in SAMPLINGS:
        if last_checkpoint(settings, sampling).is_file():
            print(f"  {sampling}: {last_checkpoint(settings, sampling)} is there; remove it to train again")
            continue
        folder = run_folder(settings, sampling)
        if folder.exists():  # interrupted before its end: a run of a few minutes begins again
            for leftover in sorted(folder.rglob("*"), reverse=True):
                leftover.unlink() if leftover.is_file() else leftover.rmdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(settings.out / f"{sampling}.err", "w", encoding="utf-8") as errors:
            children[sampling] = subprocess.Popen(
                training_command(settings, sampling),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
    try:
        watch(settings, children)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.terminate()


def training_command(settings: Settings, sampling: str) -> list[str]:
    """What a person would type; the recipe of the demo."""
    folder = run_folder(settings, sampling)
    train_data = "::".join(f"{source}={settings.data / source}" for source in SOURCES)
    return [
        sys.executable, "-m", "training.main",
        "--model", "zerovl-emoji", "--text-model", str(settings.data / "bert"),
        "--train-data", train_data, "--sampling", sampling,
        "--batch-size", str(MICRO_BATCH), "--dga-steps", str(DGA_STEPS), "--dga-retain", "auto",
        "--epochs", str(settings.epochs), "--lr", "1e-3", "--lr-min", "1e-4", "--wd", "0.1", "--warmup", "50",
        "--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6",
        "--aug-cfg", "scale=(1.0,1.0)", "ratio=(1.0,1.0)",
        "--precision", "fp32", "--workers", "0", "--seed", str(settings.seed),
        "--log-every-n-steps", "10", "--save-frequency", "0",
        "--logs", str(folder.parent), "--name", folder.name,
    ]  # fmt: skip


def watch(settings: Settings, children: dict[str, subprocess.Popen]) -> None:
    """Progress bars from the runs' own logs; a run that fails is reported with its last words.

    Raises:
        UserError: a run ended with an error.
    """
    bars = {sampling: tqdm(desc=f"  {sampling}", total=None, unit="samples") for sampling in children}
    while any(child.poll() is None for child in children.values()):
        time.sleep(1)
        for sampling, bar in bars.items():
            advance(bar, run_folder(settings, sampling) / "out.log", settings.epochs)
    for sampling, bar in bars.items():
        advance(bar, run_folder(settings, sampling) / "out.log", settings.epochs)
        bar.close()
    for sampling, child in children.items():
        if child.returncode != 0:
            words = (settings.out / f"{sampling}.err").read_text(encoding="utf-8").strip().splitlines()
            reason = words[-1] if words else "no message"
            raise UserError(f"the {sampling} run ended with status {child.returncode}: {reason}")


def advance(bar: tqdm, log: Path, epochs: int) -> None:
    if not log.is_file():
        return
    lines = re.findall(r"Train Epoch: (\d+) \[ *(\d+)/(\d+) .*?Loss: (\S+)", log.read_text(encoding="utf-8"))
    if lines:
        epoch, seen, per_epoch, loss = lines[-1]
        bar.total = int(per_epoch) * epochs
        bar.n = int(epoch) * int(per_epoch) + int(seen)
        bar.set_postfix_str(f"loss {float(loss):.2f}")


@dataclass(frozen=True)
class Pool:
    """The held-out pairs of all sources, in one order."""

    samples: list[EmojiSample]
    rows: dict[str, torch.Tensor]  # of each source's samples, those held out of it

    @classmethod
    def of(cls, samples: dict[str, list[EmojiSample]]) -> Pool:
        rows = {
            source: torch.tensor([index for index, sample in enumerate(own) if sample.held_out])
            for source, own in samples.items()
        }
        return cls([samples[source][row] for source, held_out in rows.items() for row in held_out.tolist()], rows)

    @property
    def sources(self) -> list[str]:
        return [sample.source for sample in self.samples]

    def features(self, by_source: dict[str, SourceFeatures]) -> tuple[torch.Tensor, torch.Tensor]:
        """Image and text features of the pool (P, D)."""
        return (
            torch.cat([by_source[source].image_features[rows] for source, rows in self.rows.items()]),
            torch.cat([by_source[source].text_features[rows] for source, rows in self.rows.items()]),
        )

    def source_samples(self) -> list[SourceSample]:
        """The same pairs as the bias report takes them."""
        encoded = []
        for sample in self.samples:
            buffer = io.BytesIO()
            sample.image.save(buffer, "PNG")
            encoded.append(SourceSample(sample.source, buffer.getvalue(), sample.caption, sample.concept))
        return encoded

    def queries(self) -> list[int]:
        """One caption a source for the picture: the middle one of its own, not chosen by how well it does."""
        indices: dict[str, list[int]] = {}
        for index, source in enumerate(self.sources):
            indices.setdefault(source, []).append(index)
        return [own[len(own) // 2] for own in indices.values()]


@torch.inference_mode()
def embed(model, preprocess, tokenizer, samples: list[EmojiSample]) -> SourceFeatures:
    """L2-normalised features of one source's samples."""
    images = torch.stack([preprocess(sample.image) for sample in samples])
    texts = tokenizer([sample.caption for sample in samples])
    return SourceFeatures(
        image_features=model.encode_image(images, normalize=True),
        text_features=model.encode_text(texts, normalize=True),
        concepts=[sample.concept for sample in samples],
        held_out=[sample.held_out for sample in samples],
    )


def measure(
    settings: Settings, sampling: str, samples: dict[str, list[EmojiSample]], pool: Pool
) -> tuple[RunRecord, tuple[torch.Tensor, torch.Tensor, float]]:
    """The table's row of one run (three pools, source probe, log p of negatives); its features of the pool and its scale."""
    model, preprocess, tokenizer = load_model(last_checkpoint(settings, sampling))
    by_source = {source: embed(model, preprocess, tokenizer, own) for source, own in samples.items()}
    pools = pool_metrics(by_source)
    images, texts = pool.features(by_source)
    concepts = [sample.concept for sample in pool.samples]
    logit_scale = model.logit_scale.exp().item()
    log_p = mean_log_p_negatives(images, texts, pool.sources, logit_scale)["mean"]
    record = RunRecord(
        loss_curve=read_training_log(run_folder(settings, sampling) / "out.log"),
        rsum={name: pools[name] for name in ("within", "across", "mixed")},
        probe_images=source_probe_accuracy(images, pool.sources, concepts=concepts, seed=settings.seed),
        probe_texts=source_probe_accuracy(texts, pool.sources, concepts=concepts, seed=settings.seed),
        probe_chance=1 / len(samples),
        log_p_same_source=log_p["same_source"],
        log_p_other_source=log_p["other_source"],
    )
    return record, (images, texts, logit_scale)


def explain(records: dict[str, RunRecord]) -> str:
    """What the numbers say, whatever they are."""
    change = {pool: records["debiased"].rsum[pool] - records["random"].rsum[pool] for pool in POOLS}
    sentence = (
        f"Debiased against random: RSUM within a source {change['within']:+.1f}, across sources {change['across']:+.1f}, "
        f"in the mixed pool {change['mixed']:+.1f}."
    )
    return sentence + (f"\n{MIXED_POOL_NOTE}" if change["mixed"] < 0 else "")


PROOF = """
import sys, torch, open_clip
model, _, preprocess = open_clip.create_model_and_transforms(sys.argv[1])
tokenizer = open_clip.get_tokenizer(sys.argv[1])
features = model.encode_text(tokenizer(["grinning face"]), normalize=True)
assert "open_clip_zerovl" not in sys.modules and torch.isfinite(features).all()
print(f"  open_clip.create_model_and_transforms({sys.argv[1]!r}) -> {type(model).__name__}, "
      f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
"""


def prove_stock_loading(folder: Path) -> None:
    """Load the exported folder with open_clip alone, offline, in a fresh process.

    Raises:
        UserError: it does not load.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROOF, f"local-dir:{folder.resolve()}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise UserError(f"stock open_clip does not load {folder}: {done.stderr.strip().splitlines()[-1]}")
    print(done.stdout.rstrip())


if __name__ == "__main__":
    sys.exit(main())
