"""Measures a finished run and writes its JSON.

The score of most runs is the RSUM in the source that it was not trained on. Nothing of that source was in training, so that its
training pairs count too: they number six to thirty times its held-out test pairs. They are compared in pools of `POOL` pairs,
fixed and disjoint, whose RSUMs are averaged. Validation pairs, by which settings are chosen, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.checkpoints.loading import load_model
from open_clip_zerovl.evaluate.compare.measures import source_probe_accuracy
from open_clip_zerovl.evaluate.compare.pools import SourceFeatures, pool_metrics
from open_clip_zerovl.evaluate.retrieval.metrics import retrieval_metrics
from scripts.ablation.jobs import Ablation, Job
from scripts.ablation.protocol import ALL_UNSEEN, MINIATURES, POOL
from scripts.ablation.sources import (
    CONTEXT_SOURCE,
    CONTEXTS,
    FRAME_PX,
    pairs_of,
    shared_information,
)
from scripts.drawn.make import DrawnSample, drawn_sample, fingerprint_of, load_drawn_split
from scripts.drawn.training import read_loss_curve
from scripts.paper.context_bias import caption_length, with_frame
from scripts.paper.figures import mean_log_p_negatives

CURVE_POINTS = 100


@dataclass(frozen=True)
class Ended:
    """A training process that has ended.

    Attributes:
        started: seconds since 1970.
        wall_seconds, cpu_seconds: wall time, and CPU time of all its ranks, with start-up and loading.
    """

    job: Job
    status: int
    started: float
    wall_seconds: float
    cpu_seconds: float


@dataclass
class Encoder:
    """Encodes samples with a checkpoint; transformed pictures are kept in `ready` for the next one with the same transform."""

    checkpoint: Path
    ready: dict[tuple[str, int], tuple[Any, Tensor]]

    def __post_init__(self) -> None:
        self.model: Any
        self.model, self.preprocess, self.tokenizer = load_model(self.checkpoint)

    @property
    def logit_scale(self) -> float:
        return self.model.logit_scale.exp().item()

    @torch.inference_mode()
    def __call__(self, samples: list[DrawnSample]) -> SourceFeatures:
        """L2-normalised features of one source's samples."""
        key = (repr(self.preprocess), id(samples))
        if (
            key not in self.ready
        ):  # the list is kept with its pictures, so that no other object gets its id
            self.ready[key] = (
                samples,
                torch.stack([self.preprocess(sample.image) for sample in samples]),
            )
        return SourceFeatures(
            image_features=self.model.encode_image(self.ready[key][1], normalize=True),
            text_features=self.model.encode_text(
                self.tokenizer([sample.caption for sample in samples]), normalize=True
            ),
            concepts=[sample.concept for sample in samples],
            held_out=[sample.held_out for sample in samples],
        )


def held_out(features: Sequence[SourceFeatures]) -> tuple[Tensor, Tensor]:
    """Image and text features (P, D) of all held-out pairs."""
    images = torch.cat([one.image_features[one.held_out_rows()] for one in features])
    return images, torch.cat([one.text_features[one.held_out_rows()] for one in features])


def rsum_of(*features: SourceFeatures) -> float:
    """RSUM of these sources' held-out pairs in one pool."""
    images, texts = held_out(features)
    return retrieval_metrics(images, texts, torch.arange(len(texts)))["rsum"]


def signs_of_bias(
    features: Mapping[str, SourceFeatures], logit_scale: float, seed: int
) -> dict[str, Any]:
    """The source probe's accuracies and the mean log p of negatives of all held-out pairs; None with one source."""
    names = (
        "probe_images",
        "probe_texts",
        "probe_chance",
        "log_p_same_source",
        "log_p_other_source",
    )
    if len(features) < 2:
        return dict.fromkeys(names)
    images, texts = held_out([*features.values()])
    sources = [name for name, one in features.items() for _ in one.held_out_rows()]
    concepts = [one.concepts[row] for one in features.values() for row in one.held_out_rows()]
    probe = partial(source_probe_accuracy, source=sources, concepts=concepts, seed=seed)
    log_p = mean_log_p_negatives(images, texts, sources, logit_scale)["mean"]
    values = (
        probe(images),
        probe(texts),
        1 / len(features),
        log_p["same_source"],
        log_p["other_source"],
    )
    return dict(zip(names, values, strict=True))


def unseen_pools(folder: Path, source: str, test: Sequence[DrawnSample]) -> list[list[DrawnSample]]:
    """The pools of a source, the same for every run; pairs that do not fill the last one are left out.

    Args:
        folder: the folder of the miniature.
        test: the source's samples of the test split.
    """
    samples = [sample for sample in test if sample.held_out]
    samples += [drawn_sample(pair, source, held_out=True) for pair in pairs_of(folder, source)]
    order = np.random.default_rng(0).permutation(len(samples))
    return [
        [samples[i] for i in order[start : start + POOL]]
        for start in range(0, len(samples) - POOL + 1, POOL)
    ]


@dataclass(frozen=True)
class ContextPairs:
    """The held-out pairs of the source: by context, with the frame of their own or of the other, and all without a frame."""

    own: dict[str, list[DrawnSample]]
    other: dict[str, list[DrawnSample]]
    plain: list[DrawnSample]

    @classmethod
    def of(cls, samples: Sequence[DrawnSample], contexts: Path) -> ContextPairs:
        """
        Args:
            samples: the source's held-out samples.
            contexts: folder of `write_contexts`; its training captions set the length that divides the contexts.
        """
        bound = tuple(
            json.loads((contexts / "context.json").read_text(encoding="utf-8"))["long_from"]
        )
        pairs = cls(
            {context: [] for context in CONTEXTS}, {context: [] for context in CONTEXTS}, []
        )
        for sample in samples:
            if sample.held_out:
                framed = replace(sample, image=with_frame(sample.image, FRAME_PX))
                long = caption_length(sample.caption) >= bound
                pairs.own["long" if long else "short"].append(framed if long else sample)
                pairs.other["long" if long else "short"].append(sample if long else framed)
                pairs.plain.append(sample)
        return pairs


@dataclass
class Measurements:
    """Measures runs in this process; the held-out pictures are loaded and transformed once for all."""

    ablation: Ablation
    _samples: dict[str, dict[str, list[DrawnSample]]] = field(default_factory=dict)
    _ready: dict[tuple[str, int], tuple[Any, Tensor]] = field(default_factory=dict)
    _pools: dict[str, list[list[DrawnSample]]] = field(default_factory=dict)

    def samples(self, miniature: str) -> dict[str, list[DrawnSample]]:
        """The held-out pairs of all sources of a miniature."""
        if miniature not in self._samples:
            folder = self.ablation.data[miniature]
            self._samples[miniature] = load_drawn_split(
                MINIATURES[miniature], folder, self.ablation.split
            )
        return self._samples[miniature]

    def pools(self, miniature: str, source: str) -> list[list[DrawnSample]]:
        """The pools of a source that was not trained on."""
        if source not in self._pools:
            folder = self.ablation.data[miniature]
            self._pools[source] = unseen_pools(folder, source, self.samples(miniature)[source])
        return self._pools[source]

    @cached_property
    def contexts(self) -> ContextPairs:
        return ContextPairs.of(
            self.samples("emoji")[CONTEXT_SOURCE], self.ablation.out / "data" / "contexts"
        )

    def write(self, ended: Ended) -> dict[str, Any]:
        """Measure a finished run and write its JSON."""
        job, ablation = ended.job, self.ablation
        run, condition = ablation.training_run(job), job.condition
        curve = read_loss_curve(run.log)
        result = {
            **ablation.asked(job),
            **self._measure(job, run.checkpoint),
            "data": fingerprint_of(ablation.data[condition.miniature]),
            "torch": torch.__version__,
            "loss_curve": thinned(curve),
            "epochs": condition.run_epochs(ablation.choices),
            "samples": curve[-1][0],
            "started": datetime.fromtimestamp(ended.started, timezone.utc).isoformat(
                timespec="seconds"
            ),
            "wall_seconds": round(ended.wall_seconds, 1),
            "cpu_seconds": round(ended.cpu_seconds, 1),
        }
        if condition.every_epoch:
            epochs = (
                run.checkpoint.with_name(f"epoch_{epoch}.pt")
                for epoch in range(1, result["epochs"] + 1)
            )
            result["score_by_epoch"] = [
                self._measure(job, checkpoint)["score"] for checkpoint in epochs
            ]
        if condition.kind == "clusters":
            result["shared_information"] = round(shared_information(ablation.clusters(job)), 3)
        ablation.write_record(job, result)
        return result

    def _measure(self, job: Job, checkpoint: Path) -> dict[str, Any]:
        """RSUM by pool, the score, and the signs of bias if there are several sources; a missing value is None.

        The score, by which a run is compared, is over all pairs of an unseen source; in pilots over its validation pairs.
        """
        encoder = Encoder(checkpoint, self._ready)
        if job.condition.kind == "contexts":
            features, rsum = self._contexts(encoder)
        else:
            features, rsum = self._pools_of(job, encoder)
        key = ALL_UNSEEN if ALL_UNSEEN in rsum else job.condition.score
        bias = signs_of_bias(features, encoder.logit_scale, job.seed)
        return {"rsum": rsum, **bias, "temperature": 1 / encoder.logit_scale, "score": rsum[key]}

    def _pools_of(
        self, job: Job, encoder: Encoder
    ) -> tuple[dict[str, SourceFeatures], dict[str, Any]]:
        samples = self.samples(job.condition.miniature)
        features = {source: encoder(samples[source]) for source in job.trained}
        pools = pool_metrics(features)
        rsum: dict[str, Any] = {
            "within": pools["within"],
            # Of icons a few held-out names at most are in two families, which would make a pool of their own.
            "across": pools["across"] if MINIATURES[job.condition.miniature].across else None,
            "mixed": pools["mixed"] if len(features) > 1 else None,
        }
        if job.condition.score == "seen":
            rsum["seen"] = (rsum["within"] + rsum["across"]) / 2
        if job.unseen is not None:
            rsum["unseen"] = rsum_of(encoder(samples[job.unseen]))
            if self.ablation.split == "test":
                scores = [
                    rsum_of(encoder(pool))
                    for pool in self.pools(job.condition.miniature, job.unseen)
                ]
                rsum[ALL_UNSEEN] = sum(scores) / len(scores)
        return features, rsum

    def _contexts(self, encoder: Encoder) -> tuple[dict[str, SourceFeatures], dict[str, Any]]:
        """RSUM without frames (the score), within a half (mean of both), across (the other's frame), mixed (own frames)."""
        own = {context: encoder(samples) for context, samples in self.contexts.own.items()}
        return own, {
            "plain": rsum_of(encoder(self.contexts.plain)),
            "within": sum(map(rsum_of, own.values())) / len(own),
            "across": rsum_of(*(encoder(self.contexts.other[context]) for context in CONTEXTS)),
            "mixed": rsum_of(*own.values()),
        }


def thinned(
    curve: Sequence[tuple[int, float]], points: int = CURVE_POINTS
) -> list[tuple[int, float]]:
    """A loss curve of at most `points`: each is the mean of a block of neighbours, at the samples of the block's last."""
    step = -(-len(curve) // points)
    blocks = [curve[i : i + step] for i in range(0, len(curve), step)]
    return [
        (block[-1][0], round(sum(loss for _, loss in block) / len(block), 4)) for block in blocks
    ]
