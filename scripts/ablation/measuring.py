"""What is measured of a finished run, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from open_clip_zerovl.evaluate.bias.pools import pool_metrics
from scripts.ablation.jobs import MINIATURES, Ablation, Job
from scripts.ablation.processes import Ended
from scripts.ablation.protocol import ALL_UNSEEN
from scripts.ablation.sources import CONTEXT_SOURCE, ContextPairs, measure_contexts, rsum_of, shared_information
from scripts.ablation.unseen import unseen_pools, unseen_rsum
from scripts.drawn.make import DrawnSample, fingerprint_of, load_drawn_split
from scripts.emoji.records import read_training_log
from scripts.emoji.runs import Encoder, Pool, signs_of_bias

CURVE_POINTS = 100


class Measurements:
    """Measures runs in this process; the held-out pictures are loaded and transformed once for all."""

    def __init__(self, ablation: Ablation) -> None:
        self.ablation = ablation
        self._samples: dict[str, dict[str, list[DrawnSample]]] = {}
        self._contexts: ContextPairs | None = None
        self._ready: dict[tuple[str, int], tuple[Any, torch.Tensor]] = {}
        self._pools: dict[str, list[list[DrawnSample]]] = {}

    def samples(self, miniature: str) -> dict[str, list[DrawnSample]]:
        """The held-out pairs of all sources of a miniature."""
        if miniature not in self._samples:
            folder = self.ablation.data[miniature]
            self._samples[miniature] = load_drawn_split(MINIATURES[miniature], folder, self.ablation.split)
        return self._samples[miniature]

    def pools(self, miniature: str, source: str) -> list[list[DrawnSample]]:
        """Of a source that was not trained on (`unseen.py`)."""
        if source not in self._pools:
            folder = self.ablation.data[miniature]
            self._pools[source] = unseen_pools(folder, source, self.samples(miniature)[source])
        return self._pools[source]

    def write(self, ended: Ended) -> dict[str, Any]:
        """Measure a finished run and write its JSON."""
        job, ablation = ended.job, self.ablation
        run, condition = ablation.training_run(job), job.condition
        curve = read_training_log(run.log)
        measured = self._measure(job, run.checkpoint)
        result = {
            **ablation.asked(job),
            **measured,
            "score": self._score(job, measured),
            "data": fingerprint_of(ablation.data[condition.miniature]),
            "torch": torch.__version__,
            "loss_curve": thinned(curve),
            "epochs": condition.run_epochs(ablation.choices),
            "samples": curve[-1][0],
            "started": datetime.fromtimestamp(ended.started, timezone.utc).isoformat(timespec="seconds"),
            "wall_seconds": round(ended.wall_seconds, 1),
            "cpu_seconds": round(ended.cpu_seconds, 1),
        }
        if condition.every_epoch:
            result["score_by_epoch"] = [
                self._score(job, self._measure(job, run.checkpoint.with_name(f"epoch_{epoch}.pt")))
                for epoch in range(1, result["epochs"] + 1)
            ]
        if condition.kind == "clusters":
            result["shared_information"] = round(shared_information(ablation.clusters(job)), 3)
        ablation.write_record(job, result)
        return result

    def _score(self, job: Job, measured: dict[str, Any]) -> float:
        """The number by which a run is compared: over all pairs of an unseen source; in pilots over its validation pairs."""
        rsum = measured["rsum"]
        return rsum.get(ALL_UNSEEN, rsum["unseen"]) if job.condition.score == "unseen" else rsum[job.condition.score]

    def _measure(self, job: Job, checkpoint: Path) -> dict[str, Any]:
        """RSUM by pool, and the signs of bias where there is more than one source; None for what there is not."""
        encoder = Encoder.of(checkpoint, self._ready)
        samples = self.samples(job.condition.miniature)
        if job.condition.kind == "contexts":
            if self._contexts is None:
                self._contexts = ContextPairs.of(samples[CONTEXT_SOURCE], self.ablation.contexts)
            return measure_contexts(encoder, self._contexts, seed=job.seed)
        trained = {source: encoder(samples[source]) for source in job.trained}
        pool = Pool.of({source: samples[source] for source in job.trained})
        pools = pool_metrics(trained)
        rsum: dict[str, Any] = {
            "within": pools["within"],
            # Of icons a few held-out names at most are in two families, which would make a pool of their own.
            "across": pools["across"] if MINIATURES[job.condition.miniature].across else None,
            "mixed": pools["mixed"] if len(trained) > 1 else None,
        }
        if job.condition.score == "seen":
            rsum["seen"] = (rsum["within"] + rsum["across"]) / 2
        if job.unseen is not None:
            rsum["unseen"] = rsum_of([encoder(samples[job.unseen])])
            if self.ablation.split == "test":
                rsum[ALL_UNSEEN] = unseen_rsum(encoder, self.pools(job.condition.miniature, job.unseen))
        images, texts = pool.features(trained)
        bias = signs_of_bias(images, texts, encoder.logit_scale, pool, job.seed)
        return {"rsum": rsum, **bias, "temperature": 1 / encoder.logit_scale}


def thinned(curve: Sequence[tuple[int, float]], points: int = CURVE_POINTS) -> list[tuple[int, float]]:
    """A loss curve of at most `points`: each is the mean of a block of neighbours, at the samples of the block's last."""
    step = -(-len(curve) // points)
    blocks = [curve[i : i + step] for i in range(0, len(curve), step)]
    return [(block[-1][0], round(sum(loss for _, loss in block) / len(block), 4)) for block in blocks]
