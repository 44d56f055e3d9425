"""What the bias report holds: the measurements of each model and the samples they were taken on; as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from open_clip_zerovl.evaluate.bias.samples import SourceSample


@dataclass(frozen=True)
class ModelBias:
    """The measurements of one model.

    Attributes:
        logit_scale: the factor `model.logit_scale.exp()`.
        log_p: batch size -> what `measures.mean_log_p_negatives` returns.
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

    def to_json(self) -> dict[str, Any]:
        """The report as plain numbers: captions as mean and quartiles, maps as source and coordinates of each point."""
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


def bias_table(report: BiasReport) -> str:
    """A text table, one row a model: source probe in percent, mean log p of negatives at the largest batch."""
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
