"""`zerovl bias`: what several models learned of their sources, measured on the same samples (figures 3 and 4, A.5).

For each model: mean log p of negatives at several batch sizes (figure 4), how well a linear probe guesses the source from
an image or a text embedding, and a t-SNE map of the embeddings coloured by source (figure 3). For the data: the number of
words of each source's captions. The report is written as JSON and as one HTML page (page.py).

Legend: `N` samples of all sources together, `M` of them on the maps, `D` embedding width.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.evaluate.bias.measures import (
    check_source_probe,
    mean_log_p_negatives,
    probe_groups,
    source_probe_accuracy,
)
from open_clip_zerovl.evaluate.bias.report import BiasReport, ModelBias, bias_table
from open_clip_zerovl.evaluate.bias.samples import SourceSample, read_source_samples
from open_clip_zerovl.evaluate.settings import BiasSettings as BiasSettings
from open_clip_zerovl.models.configs import ClipModel

ALIKE = 1e-6  # a standard deviation of L2-normalised features below this one is rounding error
BATCH_SIZES = (16, 64, 256, 1024, 4096)

log = logging.getLogger(__name__)


@torch.no_grad()
def embed_samples(
    model: ClipModel,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    samples: Sequence[SourceSample],
    *,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    name: str = "embedding",
) -> tuple[Tensor, Tensor]:
    """L2-normalised image_features and text_features (N, D) of the samples, float32, on the CPU.

    Args:
        model: an open_clip model in eval mode, on `device`.
        name: for the progress bar.

    Raises:
        BadImage: a picture that cannot be decoded; `read_source_samples` yields none such.
    """
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
    """All measurements of one model; see `ModelBias`.

    Args:
        image_features, text_features: (N, D), L2-normalised, of the samples in their order.
        logit_scale: the factor `model.logit_scale.exp()`.
        map_rows: rows of the samples that the maps show.

    Raises:
        UserError: fewer samples than a batch, a single source, a source too small for the probe.
    """
    sources = [sample.source for sample in samples]
    concepts = probe_groups([sample.concept for sample in samples])
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

    Where all features are alike, as a collapsed model's are, the map is one point, with a warning.

    Raises:
        UserError: scikit-learn is missing, fewer than 5 samples, or features that are not finite.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise UserError("the embedding map needs scikit-learn; pip install 'open_clip_zerovl[data]'") from error
    if len(features) < 5:
        raise UserError(f"a map of {len(features)} samples shows nothing; take at least 5")
    if not torch.isfinite(features).all():
        raise UserError("the model gives embeddings that are not finite numbers; its training has diverged")
    if features.std(dim=0).max() < ALIKE:  # PCA divides by the spread, and t-SNE crashes on what comes of it
        log.warning("All embeddings are alike, the model has collapsed: the map shows one point.")
        return np.zeros((len(features), 2))
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
        features: model name -> (image_features (N, D), text_features (N, D), the factor `logit_scale.exp()`).
        samples: the N samples, in the features' order.
        skipped: source -> samples passed over, for the report.
        batch_sizes: of log p. None takes those of 16, 64, 256, 1024, 4096 that are at most N; where N is below 16, N.
        map_samples: samples of each source on the maps, evenly spaced.
        seed: of batches, folds and maps.

    Raises:
        UserError: no model, a batch larger than N, and what `measure_model` refuses.
    """
    if not features:
        raise UserError("a bias report needs at least one model")
    if batch_sizes is None:
        batch_sizes = [size for size in BATCH_SIZES if size <= len(samples)] or [len(samples)]
    check_batch_sizes(batch_sizes, len(samples))
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


def check_batch_sizes(batch_sizes: Sequence[int], samples: int) -> None:
    """UserError for a batch that has no negatives, or that so many samples do not fill."""
    if wrong := [size for size in batch_sizes if not 2 <= size <= samples]:
        advice = "raise --samples" if wrong[0] > 1 else f"take 2 to {samples}"
        raise UserError(f"a batch of {wrong[0]} cannot be cut from {samples} samples; {advice}")


def name_models(models: Sequence[str]) -> dict[str, str]:
    """Names of models, given as `NAME=MODEL` or told from the path.

        ["random=a.pt", "logs/run/checkpoints/epoch_9.pt"]  ->  {"random": "a.pt", "run": "logs/run/checkpoints/epoch_9.pt"}

    Raises:
        UserError: two models of one name, or one without a name.
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
    encoders: Mapping[str, Encoder],
    data: str,
    settings: BiasSettings | None = None,
    *,
    out: str | os.PathLike[str],
) -> BiasReport:
    """Measure checkpoints on named sources; prints a table, writes `bias.json` and `bias.html` into `out`.

    Args:
        encoders: the checkpoints, by the names that the report gives them.
        data: `name=shards::name=shards`, as `--train-data`, and retrieval sets in CLIP_benchmark's layout; held-out pairs tell
            more than pairs trained on.

    Raises:
        UserError: data or a checkpoint that cannot be read or do not fit, an `out` that cannot be written, a missing package.
    """
    from open_clip_zerovl.evaluate.bias.page import bias_page
    from open_clip_zerovl.report.plot import require_matplotlib

    require_matplotlib()
    settings, out = settings or BiasSettings(), Path(out)
    check_writable(out, folder=True)
    for encoder in encoders.values():
        encoder.check()
    sources = parse_sources(data, evaluation=True)
    if len(sources) < 2:
        raise UserError(f"--data {data!r} names one source; bias is measured between two or more: a=SHARDS::b=SHARDS")
    samples, skipped = read_source_samples(sources, settings.samples_per_source, concept_field=settings.concept_field)
    for name, count in skipped.items():
        if count:
            log.warning("Source %s: %d samples without a readable picture and a caption were passed over.", name, count)
    check_batch_sizes(settings.batch_sizes or (), len(samples))
    check_source_probe([sample.source for sample in samples], probe_groups([sample.concept for sample in samples]))
    features = {}
    for name, encoder in encoders.items():
        model, preprocess, tokenizer, device = encoder.load()
        pair = embed_samples(
            model, preprocess, tokenizer, samples, batch_size=encoder.batch_size, device=device, name=name
        )
        features[name] = (*pair, model.logit_scale.exp().item())
    report = measure_bias(
        features,
        samples,
        skipped=skipped,
        batch_sizes=settings.batch_sizes,
        map_samples=settings.map_samples,
        seed=settings.seed,
    )
    write_atomically(out / "bias.json", json.dumps(report.to_json(), indent=1) + "\n")
    bias_page(out / "bias.html", report)
    print(f"{bias_table(report)}\nWritten: {out / 'bias.html'}, {out / 'bias.json'}")
    return report
