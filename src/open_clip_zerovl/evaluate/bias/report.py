"""The bias report: the source bias of several models on the same samples (figures 3 and 4, A.5).

For each model: mean log p of negatives at several batch sizes (figure 4), how well a linear probe guesses the source from
an image or a text embedding, and a t-SNE map of the embeddings coloured by source (figure 3). For the data: the number of
words of each source's captions.

Legend: `N` samples of all sources together, `M` of them on the maps, `D` embedding width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.bias.measures import (
    mean_log_p_negatives,
    probe_groups,
    source_probe_accuracy,
)
from open_clip_zerovl.evaluate.bias.samples import SourceSample, rows_by_source
from open_clip_zerovl.report.tables import text_table

ALIKE = 1e-6  # a standard deviation of L2-normalised features below this one is rounding error
BATCH_SIZES = (16, 64, 256, 1024, 4096)
SHOWN_SAMPLES = 6  # of each source, on the page

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelBias:
    """The measurements of one model.

    Attributes:
        logit_scale: the factor `model.logit_scale.exp()`.
        log_p: batch size -> result of `measures.mean_log_p_negatives`.
        probe_images, probe_texts: accuracy of the source probe, 0..1.
        map_images, map_texts: (M, 2) t-SNE maps; row i is sample `BiasReport.map_rows[i]`.
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

    Attributes:
        samples: the N samples.
        skipped: source -> samples passed over.
        probe_chance: the share of the largest source, 0..1.
        caption_words: source -> number of words of each of its captions.
        map_rows: (M,) rows of the samples that the maps show.
        models: name -> measurements.
    """

    samples: Sequence[SourceSample]
    skipped: Mapping[str, int]
    probe_chance: float
    caption_words: Mapping[str, Sequence[int]]
    map_rows: Sequence[int]
    models: Mapping[str, ModelBias]

    @property
    def sources(self) -> list[str]:
        """The sources' names, in the order given."""
        return list(self.caption_words)

    @property
    def largest_batch(self) -> int:
        """The largest batch at which log p was measured."""
        return max(next(iter(self.models.values())).log_p)

    def to_json(self) -> dict[str, Any]:
        """The report as plain numbers: captions as mean and quartiles, maps as source and coordinates of each point."""
        return {
            "sources": {
                name: {
                    "samples": len(counts),
                    "skipped": self.skipped.get(name, 0),
                    "caption_words": {
                        "mean": float(np.mean(counts)),
                        "quartiles": np.percentile(counts, (25, 50, 75)).tolist(),
                    },
                }
                for name, counts in self.caption_words.items()
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

    def header(self) -> list[str]:
        """Column titles of `rows`."""
        size = self.largest_batch
        guessed = ["source guessed from images", "source guessed from texts"]
        return [
            "model",
            *guessed,
            f"log p, same source, batch {size}",
            f"log p, other source, batch {size}",
            "temperature",
        ]

    def rows(self) -> list[list[str]]:
        """A row a model: source probe in percent, mean log p of negatives at the largest batch, temperature; then chance."""
        probe, uniform = f"{100 * self.probe_chance:.1f} %", f"{-math.log(self.largest_batch):.2f}"
        rows = []
        for name, one in self.models.items():
            mean = one.log_p[self.largest_batch]["mean"]
            log_p = (
                "none" if mean[key] is None else f"{mean[key]:.2f}"
                for key in ("same_source", "other_source")
            )
            probes = f"{100 * one.probe_images:.1f} %", f"{100 * one.probe_texts:.1f} %"
            rows.append([name, *probes, *log_p, f"{1 / one.logit_scale:.4f}"])
        return [*rows, ["chance", probe, probe, uniform, uniform, ""]]

    def table(self) -> str:
        """The rows for a terminal."""
        return text_table(self.header(), self.rows())

    def shown_samples(self) -> dict[str, list[tuple[Any, str]]]:
        """Source, with the number of samples passed over -> some pictures and captions, spread evenly."""
        shown = {}
        for source, rows in rows_by_source(self.samples).items():
            step = max(1, len(rows) // SHOWN_SAMPLES)
            own = [self.samples[row] for row in rows[step // 2 :: step][:SHOWN_SAMPLES]]
            bad = self.skipped.get(source, 0)
            note = f" ({bad} samples passed over: no readable picture or no caption)" if bad else ""
            shown[source + note] = [(sample.picture(), sample.caption) for sample in own]
        return shown


def embedding_map(features: Tensor, *, seed: int = 0) -> np.ndarray:
    """t-SNE (scikit-learn, started from PCA, perplexity 30 or less) of L2-normalised features (M, D) -> (M, 2).

    Where all features are alike, as a collapsed model's are, the map is one point, with a warning.

    Raises:
        UserError: scikit-learn is missing, fewer than 5 samples, or features that are not finite.
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise UserError(
            "the embedding map needs scikit-learn; pip install 'open_clip_zerovl[data]'"
        ) from error
    if len(features) < 5:
        raise UserError(f"a map of {len(features)} samples shows nothing; take at least 5")
    if not torch.isfinite(features).all():
        raise UserError(
            "the model gives embeddings that are not finite numbers; its training has diverged"
        )
    if (
        features.std(dim=0).max() < ALIKE
    ):  # PCA divides by the spread, and t-SNE crashes on the quotient
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
        batch_sizes: batch sizes of log p. None takes those of 16, 64, 256, 1024, 4096 that are at most N, or N below 16.
        map_samples: samples of each source on the maps, evenly spaced.
        seed: seed of batches, folds and maps.

    Raises:
        UserError: no model, a batch larger than N, a single source, a source too small for the probe.
    """
    if batch_sizes is None:
        batch_sizes = [size for size in BATCH_SIZES if size <= len(samples)] or [len(samples)]
    check_batch_sizes(batch_sizes, len(samples))
    rows = rows_by_source(samples)
    sources = [sample.source for sample in samples]
    concepts = probe_groups([sample.concept for sample in samples])
    map_rows = [row for own in rows.values() for row in own[:: max(1, -(-len(own) // map_samples))]]
    models = {}
    for name, (images, texts, scale) in tqdm(features.items(), desc="measuring", unit="model"):
        probe_images, probe_texts = (
            source_probe_accuracy(one, sources, concepts=concepts, seed=seed)
            for one in (images, texts)
        )
        map_images, map_texts = (embedding_map(one[map_rows], seed=seed) for one in (images, texts))
        log_p = {
            n: mean_log_p_negatives(images, texts, sources, scale, batch_size=n, seed=seed)
            for n in batch_sizes
        }
        models[name] = ModelBias(scale, log_p, probe_images, probe_texts, map_images, map_texts)
    return BiasReport(
        samples=samples,
        skipped=dict(skipped or {}),
        probe_chance=max(map(len, rows.values())) / len(samples),
        caption_words={
            name: [len(samples[row].caption.split()) for row in own] for name, own in rows.items()
        },
        map_rows=map_rows,
        models=models,
    )


def check_batch_sizes(batch_sizes: Sequence[int], samples: int) -> None:
    """UserError for a batch without negatives, or one that is larger than the number of samples."""
    if wrong := [size for size in batch_sizes if not 2 <= size <= samples]:
        advice = "raise --samples" if wrong[0] > 1 else f"take 2 to {samples}"
        raise UserError(f"a batch of {wrong[0]} cannot be cut from {samples} samples; {advice}")
