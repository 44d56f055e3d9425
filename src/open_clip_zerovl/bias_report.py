"""`zerovl bias`: what several models learned of their sources, measured on the same samples (figures 3 and 4, A.5).

For each model: mean log p of negatives at several batch sizes (figure 4), how well a linear probe guesses the source from
an image or a text embedding, and a t-SNE map of the embeddings coloured by source (figure 3). For the data: how many words
the captions of each source have. Written as JSON and as one HTML page (`pages.bias_page`).

Legend: `N` samples of all sources together, `M` of them on the maps, `D` embedding width.
"""

from __future__ import annotations

import io
import json
import logging
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn
from tqdm import tqdm

from open_clip_zerovl.bias import mean_log_p_negatives, source_probe_accuracy
from open_clip_zerovl.datasets.shards import read_shard, write_atomically
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.loading import load_model
from open_clip_zerovl.sources import REMOTE, Source, parse_sources

BATCH_SIZES = (16, 64, 256, 1024, 4096)
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
SHARDS_READ = 8  # a source's samples come from at most that many shards, evenly spaced, while those suffice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceSample:
    """One pair: its source, its encoded picture, its caption, and what it shows where a field of its json says so."""

    source: str
    image: bytes
    caption: str
    concept: str | None = None

    def picture(self) -> Image.Image:
        return Image.open(io.BytesIO(self.image)).convert("RGB")


@dataclass(frozen=True)
class ModelBias:
    """The measurements of one model.

    `log_p` maps a batch size to what `bias.mean_log_p_negatives` returns; probe accuracies are shares; the maps are (M, 2),
    row i being sample `BiasReport.map_rows[i]`.
    """

    logit_scale: float
    log_p: Mapping[int, Mapping[str, Any]]
    probe_images: float
    probe_texts: float
    map_images: np.ndarray
    map_texts: np.ndarray


@dataclass(frozen=True)
class BiasReport:
    """Several models on the same N samples.

    `probe_chance` is the share of the largest source. `caption_words` holds the number of words of each caption by source.
    """

    samples: Sequence[SourceSample]
    skipped: Mapping[str, int]
    probe_chance: float
    caption_words: Mapping[str, Sequence[int]]
    map_rows: Sequence[int]
    models: Mapping[str, ModelBias]

    @property
    def sources(self) -> list[str]:
        """In the order given."""
        return list(self.caption_words)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; of the captions their summary, of the maps source and coordinates."""
        words = {name: np.asarray(counts) for name, counts in self.caption_words.items()}
        return {
            "sources": {
                name: {
                    "samples": len(counts),
                    "skipped": self.skipped.get(name, 0),
                    "caption_words": {
                        "mean": float(counts.mean()),
                        "quartiles": np.percentile(counts, (25, 50, 75)).tolist(),
                    },
                }
                for name, counts in words.items()
            },
            "probe_chance": self.probe_chance,
            "map_sources": [self.samples[row].source for row in self.map_rows],
            "models": {
                name: {
                    "logit_scale": one.logit_scale,
                    "log_p_negatives": {str(size): values for size, values in one.log_p.items()},
                    "source_probe": {"images": one.probe_images, "texts": one.probe_texts},
                    "map_images": one.map_images.round(2).tolist(),
                    "map_texts": one.map_texts.round(2).tolist(),
                }
                for name, one in self.models.items()
            },
        }


# ---------------------------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------------------------


def read_source_samples(
    sources: Sequence[Source], limit: int, *, concept_field: str | None = None
) -> tuple[list[SourceSample], dict[str, int]]:
    """Up to `limit` pairs of each source, out of up to 8 evenly spaced shards, in their order there.

    A sample without a caption or a picture that decodes is passed over and counted.

    Args:
        concept_field: a field of each sample's json that says what it shows; the source probe then keeps all samples of a
            concept together, so that it cannot succeed by remembering what a source shows.

    Returns:
        The samples, source by source, and how many were passed over by source.

    Raises:
        UserError: remote shards, clusters read by index, a shard that is no tar, a source without a usable sample, a sample
            without the field.
    """
    if limit < 2:
        raise UserError(f"{limit} samples a source measure nothing; take at least 2")
    samples: list[SourceSample] = []
    skipped: dict[str, int] = {}
    for source in sources:
        if remote := [shard for shard in source.shards if REMOTE.match(shard)]:
            raise UserError(f"the bias report reads local shards, and {remote[0]} of source {source.name!r} is not")
        if source.picked is not None:
            raise UserError(
                f"the bias report reads whole shards, and {source.name!r} is a cluster read by the index; write the clusters "
                "as sources first, with `zerovl cluster --reshard`"
            )
        spaced = source.shards[:: -(-len(source.shards) // SHARDS_READ)]
        share = -(-limit // len(spaced))
        own: list[SourceSample] = []
        skipped[source.name] = 0
        for shard in [*spaced, *(shard for shard in source.shards if shard not in spaced)]:
            taken = 0
            try:
                for sample in read_shard(shard):
                    if taken == share or len(own) == limit:
                        break
                    pair = _pair(source.name, sample.files, concept_field, f"{sample.key} of {shard}")
                    if pair is None:
                        skipped[source.name] += 1
                    else:
                        own.append(pair)
                        taken += 1
            except (tarfile.TarError, OSError) as error:
                raise UserError(f"shard {shard} cannot be read as a tar file ({error}); fetch it again") from error
            if len(own) == limit:
                break
        if not own:
            raise UserError(f"source {source.name!r} has no pair of a readable picture and a caption in its shards")
        samples += own
    return samples, skipped


def _pair(source: str, files: Mapping[str, bytes], concept_field: str | None, where: str) -> SourceSample | None:
    image = next((files[extension] for extension in IMAGE_EXTENSIONS if extension in files), None)
    caption = files.get("txt", b"").decode("utf-8", errors="replace").strip()
    if image is None or not caption:
        return None
    concept = None
    if concept_field is not None:
        try:
            concept = str(json.loads(files["json"])[concept_field])
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"sample {where} has no field {concept_field!r} in its json; leave --concept out"
            ) from error
    sample = SourceSample(source, image, caption, concept)
    try:
        sample.picture()
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError):
        return None
    return sample


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def embed_samples(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    samples: Sequence[SourceSample],
    *,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    name: str = "embedding",
) -> tuple[Tensor, Tensor]:
    """L2-normalised image_features and text_features (N, D), float32, on the CPU; the model is in eval mode."""
    images, texts = [], []
    for start in tqdm(range(0, len(samples), batch_size), desc=name, unit="batch", leave=False):
        batch = samples[start : start + batch_size]
        pixels = torch.stack([preprocess(sample.picture()) for sample in batch])
        tokens = tokenizer([sample.caption for sample in batch])
        images.append(model.encode_image(pixels.to(device), normalize=True).float().cpu())
        texts.append(model.encode_text(tokens.to(device), normalize=True).float().cpu())
    return torch.cat(images), torch.cat(texts)


def measure_model(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: float,
    samples: Sequence[SourceSample],
    *,
    batch_sizes: Sequence[int],
    map_rows: Sequence[int],
    seed: int = 0,
) -> ModelBias:
    """All measurements of one model's features (N, D) of the samples; see `ModelBias`.

    Raises:
        UserError: what `bias` refuses: fewer samples than a batch, a single source, a source too small for the probe.
    """
    sources = [sample.source for sample in samples]
    known = [sample.concept for sample in samples]
    concepts = None if None in known else known
    rows = list(map_rows)
    return ModelBias(
        logit_scale=logit_scale,
        log_p={
            size: mean_log_p_negatives(image_features, text_features, sources, logit_scale, batch_size=size, seed=seed)
            for size in batch_sizes
        },
        probe_images=source_probe_accuracy(image_features, sources, concepts=concepts, seed=seed),
        probe_texts=source_probe_accuracy(text_features, sources, concepts=concepts, seed=seed),
        map_images=embedding_map(image_features[rows], seed=seed),
        map_texts=embedding_map(text_features[rows], seed=seed),
    )


def embedding_map(features: Tensor, *, seed: int = 0) -> np.ndarray:
    """t-SNE (scikit-learn, started from PCA, perplexity 30 or less) of L2-normalised features (M, D) -> (M, 2).

    Raises:
        UserError: scikit-learn is missing, or fewer than 5 samples.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise UserError("the embedding map needs scikit-learn; pip install 'open_clip_zerovl[demo]'") from error
    if len(features) < 5:
        raise UserError(f"a map of {len(features)} samples shows nothing; take at least 5")
    tsne = TSNE(init="pca", perplexity=min(30.0, (len(features) - 1) / 3), random_state=seed)
    return tsne.fit_transform(features.numpy().astype(np.float64))


def measure_bias(
    features: Mapping[str, tuple[Tensor, Tensor, float]],
    samples: Sequence[SourceSample],
    *,
    skipped: Mapping[str, int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    map_samples: int = 300,
    seed: int = 0,
) -> BiasReport:
    """Measure models side by side.

    Args:
        features: by model, image_features and text_features (N, D), and the factor `logit_scale.exp()`.
        samples: the N samples, in the features' order.
        batch_sizes: None takes those of 16, 64, 256, 1024, 4096 that the samples fill, else all samples as one batch.
        map_samples: samples of each source on the maps, spaced evenly.

    Raises:
        UserError: no model, and what `measure_model` refuses.
    """
    if not features:
        raise UserError("a bias report needs at least one model")
    if batch_sizes is None:
        batch_sizes = [size for size in BATCH_SIZES if size <= len(samples)] or [len(samples)]
    if too_large := [size for size in batch_sizes if size > len(samples)]:
        raise UserError(f"a batch of {too_large[0]} cannot be cut from {len(samples)} samples; raise --samples")
    rows: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault(sample.source, []).append(row)
    map_rows = [row for own in rows.values() for row in own[:: max(1, -(-len(own) // map_samples))]]
    models = {}
    for name, (image_features, text_features, logit_scale) in tqdm(features.items(), desc="measuring", unit="model"):
        models[name] = measure_model(
            image_features, text_features, logit_scale, samples, batch_sizes=batch_sizes, map_rows=map_rows, seed=seed
        )
    return BiasReport(
        samples=samples,
        skipped=dict(skipped or {}),
        probe_chance=max(map(len, rows.values())) / len(samples),
        caption_words={name: [len(samples[row].caption.split()) for row in own] for name, own in rows.items()},
        map_rows=map_rows,
        models=models,
    )


# ---------------------------------------------------------------------------------------------------------------------
# `zerovl bias`
# ---------------------------------------------------------------------------------------------------------------------


def name_models(models: Sequence[str]) -> dict[str, str]:
    """`["random=a.pt", "logs/run/checkpoints/epoch_9.pt"]` -> {"random": "a.pt", "run": "logs/..."}.

    Raises:
        UserError: two models of one name.
    """
    named: dict[str, str] = {}
    for entry in models:
        name, equals, path = entry.partition("=")
        if not equals or "/" in name:
            name, path = "", entry
        if not name:
            place = Path(path.removeprefix("local-dir:"))
            name = place.parent.parent.name if place.parent.name == "checkpoints" else place.stem
        if not name or not path or name in named:
            raise UserError(f"model {entry!r} needs a name of its own; write NAME={path or 'MODEL'}")
        named[name] = path
    return named


def run_bias(
    models: Sequence[str],
    data: str,
    *,
    out: str | os.PathLike[str],
    samples_per_source: int = 500,
    batch_sizes: Sequence[int] | None = None,
    map_samples: int = 300,
    concept_field: str | None = None,
    text_model: str | None = None,
    seed: int = 0,
    batch_size: int = 64,
    device: str = "auto",
) -> BiasReport:
    """Measure checkpoints on named sources; prints a table, writes `bias.json` and `bias.html` into `out`.

    Args:
        models: `NAME=MODEL` or `MODEL`, each what `loading.load_model` takes.
        data: `name=shards::name=shards`, as `--train-data`; held-out pairs tell more than pairs trained on.
        batch_size: samples encoded at once.

    Raises:
        UserError: whatever of this cannot be read, does not fit, or is missing.
    """
    from open_clip_zerovl.charts import require_matplotlib
    from open_clip_zerovl.pages import bias_page

    require_matplotlib()
    named = name_models(models)
    sources = parse_sources(data)
    if len(sources) < 2:
        raise UserError(f"--data {data!r} names one source; bias is told between two or more: a=SHARDS::b=SHARDS")
    samples, skipped = read_source_samples(sources, samples_per_source, concept_field=concept_field)
    for name, count in skipped.items():
        if count:
            log.warning("Source %s: %d samples without a readable picture and a caption were passed over.", name, count)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    features = {}
    for name, path in named.items():
        model, preprocess, tokenizer = load_model(path, text_model=text_model, device=device)
        pair = embed_samples(model, preprocess, tokenizer, samples, batch_size=batch_size, device=device, name=name)
        features[name] = (*pair, model.logit_scale.exp().item())
    report = measure_bias(
        features, samples, skipped=skipped, batch_sizes=batch_sizes, map_samples=map_samples, seed=seed
    )
    out = Path(out)
    write_atomically(out / "bias.json", json.dumps(report.to_json(), indent=1) + "\n")
    bias_page(out / "bias.html", report)
    print(f"{bias_table(report)}\nWritten: {out / 'bias.html'}, {out / 'bias.json'}")
    return report


def bias_table(report: BiasReport) -> str:
    """One row a model: the source probe in percent, mean log p of negatives at the largest batch."""
    size = max(next(iter(report.models.values())).log_p)
    width = max(len("model"), *(len(name) for name in report.models))
    lines = [
        f"{'':{width}}  {'source guessed from':^21}  log p of negatives, batch {size}",
        f"{'model':{width}}  {'images':>10} {'texts':>10}  {'same source':>12} {'other source':>13}",
    ]
    for name, one in report.models.items():
        mean = one.log_p[size]["mean"]
        lines.append(
            f"{name:{width}}  {100 * one.probe_images:8.1f} % {100 * one.probe_texts:8.1f} %  "
            f"{mean['same_source']:12.2f} {mean['other_source']:13.2f}"
        )
    return "\n".join([*lines, f"chance of the probe: {100 * report.probe_chance:.1f} %"])
