"""Heads on frozen encoders, on photographs: how many pairs they need, and which options of `zerovl align` earn their place.

    python -m scripts.encoders --out encoders
    python -m scripts.align_study --data DIR --features DIR       # encodes once, then trains every run that has no record
    python -m scripts.align_study --report                        # tables and figure from the records

`scripts/align_study.yaml` is the protocol: data, seeds, rules. Records lie in docs/results/align, one entry a run.

`n` samples and `T` captions of all sources, `F` width of the features, `D` of the shared space.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from torch.nn import functional as F

from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.align.heads import Heads
from open_clip_zerovl.align.request import AlignFlags, Recipe
from open_clip_zerovl.align.rows import (
    Features,
    HeldOut,
    Pairs,
    Sources,
    embed_tower,
    open_sources,
    unit_scale,
)
from open_clip_zerovl.align.train import (
    CHECKS,
    Task,
    default_batch,
    default_epochs,
    held_out_embeddings,
    learning_rate,
    train_heads,
)
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.embeddings.store import Store
from open_clip_zerovl.evaluate.accuracy import class_indices
from open_clip_zerovl.evaluate.embedded import picture_features
from open_clip_zerovl.evaluate.retrieval.metrics import recalls, retrieval_ranks
from open_clip_zerovl.evaluate.zero_shot.score import class_features, classify
from open_clip_zerovl.evaluate.zero_shot.sets import LabelledSet, open_labelled_set
from open_clip_zerovl.report.tables import markdown_table
from open_clip_zerovl.report.verdicts import student, verdict

PROTOCOL = Path(__file__).with_suffix(".yaml")
RECORDS = Path("docs/results/align")
CPU = torch.device("cpu")


@dataclass
class Encoded:
    """All features of the study, encoded once.

    Attributes:
        names: the sources, those that are trained on first.
        sources: the same, opened.
        images, texts: stores with the rows of all samples and captions.
        clothing: the labelled set, and the features (N, F) of its pictures.
        caption_features: caption of a class -> features (F,).
    """

    names: list[str]
    sources: Sources
    images: Store
    texts: Store
    labelled: LabelledSet
    clothing: torch.Tensor
    caption_features: dict[str, torch.Tensor]

    def samples(self, name: str) -> np.ndarray:
        """Numbers of a source's samples."""
        begins, number = self.sources.begins, self.names.index(name)
        return np.arange(begins[number], begins[number + 1])

    def captions(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the captions of some samples, sample by sample, and where each sample's begin, one longer."""
        starts = self.sources.starts
        counts = starts[samples + 1] - starts[samples]
        first = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(first[-1]) + np.repeat(starts[samples] - first[:-1], counts)
        return rows, first

    def held_out(self, names: Sequence[str]) -> HeldOut:
        """The pictures of some sources with their captions."""
        samples = np.concatenate([self.samples(name) for name in names])
        rows, first = self.captions(samples)
        return HeldOut(samples, rows, np.repeat(np.arange(len(samples)), np.diff(first)))

    def pairs(self, training: dict[str, np.ndarray]) -> Pairs:
        """The training samples of each source; Flickr8k's validation photographs choose the heads."""
        samples = np.concatenate(list(training.values()))
        rows, first = self.captions(samples)
        sizes = [len(numbers) for numbers in training.values()]
        held = self.held_out(["validation-held"])
        return Pairs(samples, rows, first, sizes, list(training), held, 0, 0)

    @cached_property
    def picture_classes(self) -> torch.Tensor:
        """(N,) class of each picture of clothing."""
        return class_indices(self.labelled.images.labels, self.labelled.classes)

    def clothing_top1(self, heads: Heads, task: Task) -> float:
        """Zero-shot top-1 in percent; each class is the mean of its captions' embeddings."""
        with torch.no_grad():
            pictures = F.normalize(heads.image(self.clothing * task.images.scale), dim=-1)

            def encode(captions: list[str]) -> torch.Tensor:
                features = torch.stack([self.caption_features[caption] for caption in captions])
                return F.normalize(heads.text(features * task.texts.scale), dim=-1)

            classes = class_features(self.labelled.captions(), encode, progress=False)
        chosen = classify(pictures, classes).argmax(dim=1)
        return 100 * float((chosen == self.picture_classes).float().mean())


def encode(data: Path, protocol: dict[str, Any], names: Sequence[str], folder: Path) -> Encoded:
    """Encode some sources with their held-out pictures and clothing, or open what an earlier call has encoded."""
    place = {name: data / protocol["training"][name] for name in names}
    held = {f"{name}-held": data / protocol["held_out"][name] for name in ("validation", *names)}
    named = "::".join(f"{name}={where}" for name, where in (place | held).items())
    sources = open_sources(named, "")
    image = open_tower(protocol["encoders"]["image"], "image")
    text = open_tower(protocol["encoders"]["text"], "text")
    flags = AlignFlags(encode_batch=64)
    given: dict[str, Any] = {"device": CPU, "say": print}
    images = embed_tower(image, sources, folder, flags, **given)
    texts = embed_tower(text, sources, folder, flags, **given)
    dataset = open_labelled_set(str(data / protocol["clothing"]))
    frozen = image.frozen(CPU)
    clothing = picture_features(frozen, dataset.images, folder, batch_size=64, name="clothing")
    captions = [caption for of_class in dataset.captions() for caption in of_class]
    features = text.frozen(CPU).texts(captions)
    return Encoded(
        [*place, *held],
        sources,
        images,
        texts,
        dataset,
        clothing,
        dict(zip(captions, features, strict=True)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A training of heads: the question and the row that it belongs to, what is trained on, and the recipe's changes.

    `settings` is None for an option that the rule took out of the program; its records remain.
    """

    question: str
    row: str
    sources: tuple[str, ...]
    seed: int
    settings: dict[str, Any] | None
    pairs: int | None = None
    plain: bool = False

    @property
    def key(self) -> list[Any]:
        """What a record of this run begins with."""
        return [self.question, self.row, self.seed]


def runs_of(protocol: dict[str, Any]) -> Iterator[Run]:
    """All runs, seed by seed, so that an unfinished study has the same seeds in each row."""
    for seed in protocol["seeds"]:
        for pairs in protocol["pairs"]:
            for plain in (False, True):
                row = f"{pairs}{' plain' if plain else ''}"
                yield Run("pairs", row, ("flickr8k",), seed, {}, pairs, plain)
        for question, setting in protocol["options"].items():
            for arm, settings in setting["arms"].items():
                yield Run(question, arm, tuple(setting["sources"]), seed, settings)


def train(run: Run, encoded: Encoded, embed_dim: int) -> dict[str, Any]:
    """A run's record: its scores on the test pictures and on clothing."""
    training = {name: encoded.samples(name) for name in run.sources}
    if run.pairs is not None:
        drawn = np.random.default_rng(run.seed).permutation(training["flickr8k"])
        training = {"flickr8k": np.sort(drawn[: run.pairs])}
    pairs = encoded.pairs(training)
    pictures, texts = encoded.images.rows["0.images"], encoded.texts.rows["0.texts"]
    scale = unit_scale(pictures, pairs.images)
    task = Task(
        pairs,
        Features(pictures, scale, CPU, None),
        Features(texts, unit_scale(texts, pairs.texts), CPU, None),
        np.array(encoded.images.rows["1.images"].array),
        np.array(encoded.texts.rows["1.texts"].array),
        CPU,
        "study",
    )
    weights = Heads((task.images.width, task.texts.width), embed_dim).weights
    recipe = Recipe(**{"embed_dim": embed_dim, "seed": run.seed, **(run.settings or {})})
    batch = recipe.batch_size or default_batch(CPU, weights, embed_dim, len(pairs.images))
    recipe = replace(recipe, batch_size=batch, epochs=default_epochs(len(pairs.images), batch))
    begin = time.process_time()
    if run.plain:
        heads, best = train_plainly(task, recipe)
    else:
        with TemporaryDirectory() as folder:
            outcome = train_heads(task, recipe, Path(folder))
        heads, best = outcome.heads, outcome.best_epoch
    seconds = time.process_time() - begin
    scores = {}
    tests = [[name] for name in run.sources] + ([list(run.sources)] if len(run.sources) > 1 else [])
    for names in tests:
        held = encoded.held_out([f"{name}-held" for name in names])
        found = metrics_of(heads, replace(task, pairs=replace(pairs, held_out=held)))
        scores["+".join(names)] = {
            name: round(found[name], 5)
            for name in ("rsum", "image_to_text_R@1", "text_to_image_R@1")
        }
    return {
        "key": run.key,
        "samples": len(pairs.images),
        "batch_size": batch,
        "epochs": recipe.epochs,
        "best_epoch": best,
        "scores": scores,
        "clothing": round(encoded.clothing_top1(heads, task), 4),
        "cpu_seconds": round(seconds, 1),
    }


def metrics_of(heads: Heads, task: Task) -> dict[str, float]:
    """Recalls of the task's held-out pictures."""
    return recalls(retrieval_ranks(*held_out_embeddings(heads, task)))


def train_plainly(task: Task, recipe: Recipe) -> tuple[Heads, int]:
    """The loop that a person writes: autograd's whole logit matrix, torch's shuffle; the same length, rate and choice."""
    torch.manual_seed(recipe.seed)
    widths = (task.images.width, task.texts.width)
    heads = Heads(widths, recipe.embed_dim, seed=recipe.seed)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=recipe.lr, weight_decay=recipe.wd)
    pairs, rng = task.pairs, np.random.default_rng(recipe.seed)
    steps = len(pairs.images) // recipe.batch_size
    every, step = -(-recipe.epochs // CHECKS), 0
    target = torch.arange(recipe.batch_size)
    scores: list[float] = []
    best: tuple[int, dict[str, torch.Tensor]] = (0, {})
    for epoch in range(recipe.epochs):
        shuffled = torch.randperm(len(pairs.images))[: steps * recipe.batch_size]
        for rows in shuffled.split(recipe.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step, recipe.epochs * steps)
            samples = rows.numpy()
            count = pairs.first[samples + 1] - pairs.first[samples]
            captions = pairs.texts[pairs.first[samples] + rng.integers(count)]
            images = F.normalize(heads.image(task.images[torch.from_numpy(pairs.images[samples])]))
            texts = F.normalize(heads.text(task.texts[torch.from_numpy(captions)]))
            logits = heads.logit_scale.exp() * images @ texts.T
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if (epoch + 1) % every and epoch + 1 < recipe.epochs:
            continue
        scores.append(metrics_of(heads, task)["rsum"])
        if scores[-1] == max(scores):
            best = epoch + 1, {k: v.detach().clone() for k, v in heads.state_dict().items()}
        if len(scores) - 1 - scores.index(max(scores)) >= recipe.patience:
            break
    heads.load_state_dict(best[1])
    return heads, best[0]


def run_all(data: Path, features: Path, records: Path) -> None:
    """Train each run that has no record, and write its record."""
    protocol = yaml.safe_load(PROTOCOL.read_text(encoding="utf-8"))
    done = json.loads(records.read_text()) if records.is_file() else []
    runs = sorted(runs_of(protocol), key=lambda run: len(run.sources))
    encoded: Encoded | None = None
    for run in runs:
        if run.settings is None or run.key in [record["key"] for record in done]:
            continue
        if encoded is None or len(encoded.names) != 2 * len(run.sources) + 1:
            encoded = encode(data, protocol, run.sources, features)
        done.append(train(run, encoded, protocol["embed_dim"]))
        lines = ",\n".join(json.dumps(record) for record in done)
        write_atomically(records, f"[\n{lines}\n]\n")
        print(done[-1], flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------

Records = dict[tuple[str, str], dict[int, dict[str, Any]]]  # (question, row) -> seed -> record


def read_records(file: Path) -> Records:
    """The records of the runs."""
    records: Records = {}
    for record in json.loads(file.read_text(encoding="utf-8")):
        question, row, seed = record["key"]
        records.setdefault((question, row), {})[seed] = record
    return records


def measures_of(record: dict[str, Any]) -> dict[str, float]:
    """The measures of the tables, in percent: `within` and `clothing` are the protocol's."""
    alone = [scores for name, scores in record["scores"].items() if "+" not in name]
    first = alone[0]
    return {
        "i2t": 100 * first["image_to_text_R@1"],
        "t2i": 100 * first["text_to_image_R@1"],
        "rsum": first["rsum"],
        "within": statistics.mean(scores["rsum"] / 6 for scores in alone),
        "clothing": record["clothing"],
    }


def pairs_table(records: Records, protocol: dict[str, Any]) -> str:
    """Means over seeds by number of photographs, with the standard deviation of RSUM; beside them the plain loop's RSUM."""
    rows = []
    for pairs in protocol["pairs"]:
        runs = [measures_of(run) for run in records[("pairs", str(pairs))].values()]
        plain = [measures_of(run)["rsum"] for run in records[("pairs", f"{pairs} plain")].values()]
        means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        spread = statistics.stdev(run["rsum"] for run in runs)
        cells = [f"{means[name]:.1f}" for name in ("i2t", "t2i")]
        cells += [f"{means['rsum']:.0f} ± {spread:.0f}", f"{statistics.mean(plain):.0f}"]
        rows.append([f"{pairs:,}", *cells, f"{means['clothing']:.1f}"])
    header = ["photographs", "I2T R@1", "T2I R@1", "RSUM", "plain loop", "clothing top-1"]
    return markdown_table(header, rows)


def options_table(records: Records, protocol: dict[str, Any]) -> str:
    """Each option's difference to the default of its setting, with the interval and the word of the protocol's rule."""
    arms = [
        (setting, arm)
        for setting, content in protocol["options"].items()
        for arm in content["arms"]
        if arm != "default"
    ]
    confidence = 1 - 0.05 / (2 * len(arms))
    rows = []
    for setting, arm in arms:
        runs, base = records.get((setting, arm), {}), records.get((setting, "default"), {})
        seeds = sorted(set(runs) & set(base))
        cells = [f"{arm}, {setting} source{'s' if setting != 'one' else ''}", str(len(seeds))]
        for name, margin in protocol["margins"].items():
            differences = [
                measures_of(runs[seed])[name] - measures_of(base[seed])[name] for seed in seeds
            ]
            found = student(differences, confidence)
            word = str(verdict(found, margin)) if seeds else "not run"
            shown = f"{found.mean:+.1f}" if seeds else ""
            if found.interval:
                shown += f" ({found.low:+.1f} to {found.high:+.1f})"
            cells += [shown, word]
        rows.append(cells)
    header = ["option", "seeds", "mean recall", "", "clothing top-1", ""]
    return markdown_table(header, rows)


def draw_pairs(records: Records, protocol: dict[str, Any], file: Path) -> None:
    """Mean recall and clothing top-1 by number of photographs, a point a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    titles = {
        "within": "mean recall (RSUM / 6), Flickr8k's test",
        "clothing": "zero-shot top-1, clothing",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for suffix, label, marker in (
            ("", "zerovl align", "o"),
            (" plain", "plain PyTorch loop", "x"),
        ):
            points = [
                (pairs, measures_of(run)[name])
                for pairs in protocol["pairs"]
                for run in records[("pairs", f"{pairs}{suffix}")].values()
            ]
            axis.scatter(*zip(*points, strict=True), marker=marker, s=18, alpha=0.7, label=label)
        axis.set_xscale("log")
        axis.set_xticks(
            protocol["pairs"], [f"{pairs:,}" for pairs in protocol["pairs"]], fontsize=8
        )
        axis.minorticks_off()
        axis.set_xlabel("photographs, five captions each")
        axis.set_title(f"{title} (%)", fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)


def report(folder: Path) -> None:
    """Print the tables of docs/align.md and draw its figure."""
    protocol = yaml.safe_load(PROTOCOL.read_text(encoding="utf-8"))
    records = read_records(folder / "runs.json")
    draw_pairs(records, protocol, folder / "pairs.png")
    print(pairs_table(records, protocol), options_table(records, protocol), sep="\n\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="with the folders of the protocol")
    parser.add_argument("--features", type=Path, metavar="DIR", help="for the stored features")
    parser.add_argument("--report", action="store_true", help="tables and figure, from the records")
    options = parser.parse_args(argv)
    if options.report:
        return report(RECORDS)
    if options.data is None or options.features is None:
        parser.error("--data and --features are needed, or --report")
    return run_all(options.data, options.features, RECORDS / "runs.json")


if __name__ == "__main__":
    main()
