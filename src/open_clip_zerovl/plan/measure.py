"""A few steps of a planned run, taken on this machine as training takes them, while the run's loader processes read.

    B  micro-batch per rank    K  micro-batches    R  graphs retained

Up to K = 4 the run's own step is timed; of a larger K a step of four micro-batches, on a CPU of smaller ones, from which
`Costs.step_flops` gives the run's. The wait for a micro-batch is timed apart.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from open_clip.loss import SigLipLoss

from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.dga.extras import CaptionTerm
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss
from open_clip_zerovl.plan.batching import PlanSettings
from open_clip_zerovl.plan.model import PlannedModel
from open_clip_zerovl.recipe.step import MicroBatch, RecipeStep
from open_clip_zerovl.sampling.schedule import Batching, Sampling

STEP_SECONDS = 30.0  # for timing steps; the last one ends later
CPU_STEP_SECONDS = 10.0
CPU_STEP_FLOPS = 1e12  # of a timed step on a CPU: 10 to 30 s on two cores
MOST_STEPS = 100
LARGEST_K = 4


@dataclass(frozen=True)
class StepTime:
    """A measured step of one rank.

    Attributes:
        dga_steps, retained: K and R of the step that was taken.
        seconds: median seconds of that step, without waiting for data.
        wait_seconds: the mean wait for a micro-batch.
    """

    dga_steps: int
    retained: int
    seconds: float
    wait_seconds: float


def recipe_step(planned: PlannedModel, settings: PlanSettings, retain: int) -> RecipeStep:
    """Training's optimizer step for one rank, with R graphs retained and a learning rate of zero."""
    fp16 = planned.precision == "amp"
    return RecipeStep(
        planned.model,
        _loss(planned, settings),
        planned.optimizer(settings),
        precision=planned.precision,
        terms=CaptionTerm() if hasattr(planned.model, "text_decoder") else None,
        scaler=torch.amp.GradScaler(device=planned.device.type) if fp16 else None,
        normalize=planned.normalize,
        mixup=planned.mixup,
        grad_clip_norm=settings.grad_clip_norm,
        retain=retain,
    )


def measure_step(
    planned: PlannedModel,
    settings: PlanSettings,
    batching: Batching,
    retained: int,
    sources: Sequence[Source],
) -> StepTime:
    """Take real steps of at most four micro-batches, which keep the run's share of their graphs.

    Args:
        batching: the run's, or one with smaller micro-batches.
        retained: R of the run.
        sources: sources of the micro-batches, read by the loader processes of the run.

    Raises:
        torch.OutOfMemoryError: the micro-batch does not fit on the device.
    """
    device, k = planned.device, min(LARGEST_K, batching.dga_steps)
    retained_here = round(retained * k / batching.dga_steps) or min(1, retained)
    step = recipe_step(planned, settings, retained_here)
    seconds: list[float] = []
    waits: list[float] = []
    with _micro_batches(planned, settings, batching, sources) as stream:
        next(stream)  # starts the loaders
        limit = CPU_STEP_SECONDS if device.type == "cpu" else STEP_SECONDS
        first, end = True, 0.0
        while not seconds or (time.perf_counter() < end and len(seconds) < MOST_STEPS):
            start = time.perf_counter()
            micro_batches = list(itertools.islice(stream, k))
            fetched = time.perf_counter()
            step.take(micro_batches, len(seconds))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken = time.perf_counter() - fetched
            # The first step makes the optimizer's state and chooses kernels. It counts if there is no time for another.
            if first:
                end = fetched + limit
            if not first or taken >= limit:
                waits.append((fetched - start) / k)
                seconds.append(taken)
            first = False
    step.optimizer.zero_grad(set_to_none=True)
    return StepTime(k, retained_here, statistics.median(seconds), statistics.mean(waits))


def _loss(planned: PlannedModel, settings: PlanSettings) -> torch.nn.Module:
    """The loss that training takes."""
    if not settings.siglip:
        return ContrastiveLoss(chunk_size=settings.loss_chunk)
    if settings.loss_chunk is None:
        return SigLipLoss()
    return SigmoidLoss(chunk_size=settings.loss_chunk)


@contextmanager
def _micro_batches(
    planned: PlannedModel, settings: PlanSettings, batching: Batching, sources: Sequence[Source]
) -> Iterator[Iterator[MicroBatch]]:
    """An endless stream of micro-batches, read by the loader processes of the run."""
    workers = max(1, settings.workers)
    # An epoch long enough to measure, without a schedule of millions.
    held = min(sum(source.num_samples for source in sources), 50_000)
    mixture = Mixture(
        sources,
        Batching(batching.micro_batch, 1, 1, workers),
        Preprocessing(
            planned.transform,
            planned.tokenizer,
            planned.augment_caption,
        ),
        sampling=Sampling("random", epoch_samples=max(batching.micro_batch * workers, held)),
        seed=settings.seed,
        on_bad_sample=settings.on_bad_sample,
    )
    loader = MixtureLoader(
        mixture, workers=settings.workers, pin_memory=planned.device.type == "cuda"
    )

    def endless() -> Iterator[Any]:
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            yield from loader

    try:
        yield endless()
    finally:
        loader.abandon()
