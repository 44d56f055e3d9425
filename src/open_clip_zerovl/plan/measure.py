"""Measurements on this machine: steps with few micro-batches, the loss at its full size, samples of a loader.

    B  micro-batch per rank    K  micro-batches    W  ranks    N = B*K*W  effective batch    R  graphs retained

A step takes a + R*g + (K-R)*h + loss(b, N): a for the optimizer and all that a step does once, g for a micro-batch whose graph
is kept, h for one that is forwarded twice. Steps with few micro-batches are run and timed as in training, while loader
processes work; the loss is timed by itself at the run's size; a, g and h follow from these. Up to K = 4 the run's own step is
timed.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from open_clip.loss import SigLipLoss

from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing, Sampling
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.views import teacher_features
from open_clip_zerovl.dga.retain import Retention, most_graphs
from open_clip_zerovl.distill.opening import open_teachers, shown_by
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss
from open_clip_zerovl.plan.estimate import loss_products
from open_clip_zerovl.plan.gpus import USABLE_SHARE
from open_clip_zerovl.plan.model import PlannedModel
from open_clip_zerovl.plan.settings import PlanSettings
from open_clip_zerovl.recipe.step import MicroBatch, RecipeStep

STEP_SECONDS = 30.0  # for timing steps, after each kind of step was taken once
ROUNDS = 50  # of each kind of step, at most
LOADER_SECONDS = 10.0
LOSS_ROWS_ON_CPU = 4096  # above, the loss' time is extrapolated as quadratic


@dataclass(frozen=True)
class StepTime:
    """A measured step of one rank, without waiting for data.

    Attributes:
        seconds: of a step with K micro-batches and the loss at N.
        loss_seconds: of the loss at N.
        retained: R of the run.
        timed: (K, R, median seconds) of each kind of step that was taken.
        peak_bytes: peak device memory, None on a CPU.
    """

    seconds: float
    loss_seconds: float
    retained: int
    timed: tuple[tuple[int, int, float], ...]
    peak_bytes: int | None = None


class Stepper:
    """One rank's optimizer steps, taken by training's `RecipeStep`, one for each number of graphs retained."""

    def __init__(self, planned: PlannedModel, settings: PlanSettings) -> None:
        self.planned, self.settings = planned, settings
        self.optimizer = planned.optimizer(settings)
        fp16 = planned.precision == "amp"
        self.scaler = torch.amp.GradScaler(device=planned.device.type) if fp16 else None
        self._steps: dict[int, RecipeStep] = {}
        self._count = 0

    def take(self, micro_batches: Sequence[MicroBatch], retain: int) -> None:
        """Take one step."""
        if retain not in self._steps:
            self._steps[retain] = RecipeStep(
                self.planned.model,
                _loss(self.planned, self.settings),
                self.optimizer,
                precision=self.planned.precision,
                scaler=self.scaler,
                normalize=self.planned.normalize,
                mixup=self.planned.mixup,
                grad_clip_norm=self.settings.grad_clip_norm,
                retain=retain,
            )
        self._steps[retain].take(micro_batches, self._count)
        self._count += 1


def kinds_of_steps(dga_steps: int, retained: int, high: int) -> list[tuple[int, int]]:
    """The steps (K, R) to time, from which `extrapolate` gives the run's.

    K = 3, R = 1: [(3, 1)]        K = 16, R = 1, high = 4: [(2, 1), (4, 1)]        K = 16, R = 16: [(2, 2), (4, 4)]
    """
    if dga_steps <= 4:
        return [(dga_steps, retained)]
    high = min(high, dga_steps)
    if retained <= 2:
        return [(2, retained), (high, retained)]
    if retained >= dga_steps:
        return [(2, 2), (high, high)]
    return [(2, 2), (min(high, retained), min(high, retained)), (high, 2)]


def extrapolate(timed: Sequence[tuple[int, int, float]], dga_steps: int, retained: int) -> float:
    """Seconds of a step with K and R from those of other (K, R), all without the loss: a + R*g + (K-R)*h."""
    rows = np.array([[1.0, r, k - r] for k, r, _ in timed])
    solution = np.linalg.lstsq(rows, np.array([seconds for *_, seconds in timed]), rcond=None)[0]
    return float(np.array([1.0, retained, dga_steps - retained]) @ solution)


def measure_step(
    planned: PlannedModel,
    settings: PlanSettings,
    batching: Batching,
    sources: Sequence[Source],
    *,
    step_seconds: float = STEP_SECONDS,
) -> StepTime:
    """Take real steps; returns the time and memory of the run's step.

    Args:
        sources: of the micro-batches, read by as many loader processes as in the run; none: random micro-batches.
        step_seconds: for timing.

    Raises:
        torch.OutOfMemoryError: the micro-batch does not fit on the device.
    """
    device, k = planned.device, batching.dga_steps
    stepper = Stepper(planned, settings)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _micro_batches(planned, settings, batching, sources) as stream:

        def take(kind: tuple[int, int]) -> float:
            micro_batches = list(itertools.islice(stream, kind[0]))
            _wait_for(device)
            start = time.perf_counter()
            stepper.take(micro_batches, kind[1])
            _wait_for(device)
            return time.perf_counter() - start

        take((min(2, k), min(1, most_graphs(k, batching.world_size))))  # memory, kernels, optimizer state
        retained = _retained(planned, settings, batching, next(stream))
        kinds = kinds_of_steps(k, retained, high=4)
        once = {kind: take(kind) for kind in kinds}
        slow = max(once.values()) > step_seconds / 4  # then there is no second warm-up: it would take too long
        if max(once.values()) < step_seconds / 20:  # short steps: take larger ones too, for a more precise figure
            kinds = kinds_of_steps(k, retained, high=8)
            for kind in set(kinds) - set(once):
                take(kind)
        seconds: dict[tuple[int, int], list[float]] = {kind: [once[kind]] if slow else [] for kind in kinds}
        end = time.perf_counter() + step_seconds
        for round_ in range(ROUNDS):  # interleaved, so that other load affects all kinds alike
            if (slow or round_ >= 1) and time.perf_counter() + sum(min(s) for s in seconds.values()) > end:
                break
            for kind in kinds:
                seconds[kind].append(take(kind))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    timed = tuple((*kind, statistics.median(values)) for kind, values in seconds.items())

    def loss(rows: int, total: int) -> float:
        return loss_seconds(planned, rows, total, width, settings)

    b, width = batching.micro_batch, _width(planned)
    without_loss = [(of_k, of_r, max(0.0, s - loss(of_k * b, of_k * b))) for of_k, of_r, s in timed]
    whole_loss = loss(k * b, batching.effective_batch)
    step = extrapolate(without_loss, k, retained) + whole_loss
    stepper.optimizer.zero_grad(set_to_none=True)
    return StepTime(step, whole_loss, retained, timed, peak)


def _width(planned: PlannedModel) -> int:
    with torch.no_grad(), planned.autocast():
        images, texts = (part.to(planned.device) for part in planned.micro_batch(1)[:2])
        planned.model.eval()
        width = planned.model(*planned.prepare(images, texts))["image_features"].shape[-1]
        planned.model.train()
    return width


def _retained(planned: PlannedModel, settings: PlanSettings, batching: Batching, micro_batch: MicroBatch) -> int:
    """R of the run; "auto" is decided as in training, from the size of one graph and the free memory."""
    if isinstance(settings.dga_retain, int):
        return min(settings.dga_retain, most_graphs(batching.dga_steps, batching.world_size))
    sizes = [batching.micro_batch] * batching.dga_steps
    retention = Retention("auto", planned.device, 1)
    retention.graphs(sizes)
    images, texts = planned.prepare(*(part.to(planned.device) for part in micro_batch[:2]))
    with retention.measured(len(images)), planned.autocast():
        outputs = planned.model(images, texts)
    sum(outputs[side].float().sum() for side in ("image_features", "text_features")).backward()
    planned.model.zero_grad(set_to_none=True)
    del outputs
    retention.step_done(sizes)
    return min(retention.graphs(sizes), most_graphs(batching.dga_steps, batching.world_size))


def loss_seconds(planned: PlannedModel, rows: int, total: int, width: int, settings: PlanSettings) -> float:
    """Seconds of the loss and its gradient for `rows` of `total` pairs. For several ranks it times as many products on one."""
    chunk, device = settings.loss_chunk, planned.device
    more = loss_products(rows, total, chunk) / loss_products(rows, rows, chunk)
    equal = round((rows * total * more) ** 0.5)
    taken = min(equal, LOSS_ROWS_ON_CPU) if device.type == "cpu" else equal
    loss, texts_per_image = _loss(planned, settings), planned.texts_per_image
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(of * taken, width, generator=generator) for of in (1, texts_per_image))
    images, texts = (torch.nn.functional.normalize(part).to(device).requires_grad_() for part in parts)
    inputs: dict[str, Any] = {"logit_scale": torch.tensor(50.0, device=device, requires_grad=True)}
    if texts_per_image > 1:
        inputs["texts_per_image"] = texts_per_image
    if planned.teacher_widths:
        embeddings = tuple(rows.to(device) for rows in planned.embeddings(taken))
        inputs["teacher_features"] = teacher_features([embeddings], texts_per_image)
    if settings.siglip:
        inputs["logit_bias"] = torch.tensor(-10.0, device=device)

    def once() -> float:
        start = time.perf_counter()
        loss(images, texts, **inputs).backward()
        _wait_for(device)
        return time.perf_counter() - start

    first = once()
    return min(first, *(once() for _ in range(2))) * (equal / taken) ** 2


def _loss(planned: PlannedModel, settings: PlanSettings) -> torch.nn.Module:
    """The loss that training takes."""
    distilled = {"distill_weight": settings.distill_weight} if planned.teacher_widths else {}
    if settings.siglip:
        if settings.loss_chunk is None and not distilled and planned.texts_per_image == 1:
            return SigLipLoss()
        return SigmoidLoss(chunk_size=settings.loss_chunk, **distilled)
    return ContrastiveLoss(chunk_size=settings.loss_chunk, **distilled)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------------------------
# Memory of a GPU
# ---------------------------------------------------------------------------------------------------------------------


def fits(planned: PlannedModel, settings: PlanSettings, micro_batch: int) -> bool:
    """Whether a step of two micro-batches of this size fits on the GPU, with a margin for fragmentation."""
    device = planned.device
    total = torch.cuda.get_device_properties(device).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        stepper = Stepper(planned, settings)
        retain = 1 if settings.dga_retain == "auto" else min(2, int(settings.dga_retain))
        for _ in range(2):  # the optimizer's state exists in the second
            stepper.take([planned.micro_batch(micro_batch)] * 2, retain)
        return torch.cuda.max_memory_reserved(device) < USABLE_SHARE * total
    except torch.OutOfMemoryError:
        return False
    finally:
        planned.model.zero_grad(set_to_none=True)


def largest_that_fits(fitting: Callable[[int], bool], start: int, most: int) -> int:
    """The largest power of two up to `most` for which `fitting` is true, searched from `start`; 0 if there is none."""
    size = 2 ** max(0, min(start, most).bit_length() - 1)
    if not fitting(size):
        while size > 1:
            size //= 2
            if fitting(size):
                return size
        return 0
    while 2 * size <= most and fitting(2 * size):
        size *= 2
    return size


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def _mixture(
    planned: PlannedModel, settings: PlanSettings, batching: Batching, sources: Sequence[Source], workers: int
) -> Mixture:
    opened = open_teachers(settings.teacher, settings.captions) if planned.teacher_widths else None
    shown = shown_by(opened, sources, planned.transform, pixel_path=settings.pixel_path, captions=settings.captions)
    return Mixture(
        sources,
        Batching(batching.micro_batch, 1, 1, max(1, workers)),
        Preprocessing(
            planned.transform,
            planned.tokenizer,
            planned.augment_caption,
            pixel_path=shown.pixel_path,
            teachers=shown.teachers,
            shard_teachers=shown.in_shards,
        ),
        sampling=Sampling("random", epoch_samples=_epoch(batching, sources, workers)),
        seed=settings.seed,
        on_bad_sample=settings.on_bad_sample,
    )


def _epoch(batching: Batching, sources: Sequence[Source], workers: int) -> int:
    """Samples of a short epoch: enough to measure, without a schedule of millions."""
    held = sum(source.num_samples for source in sources)
    return max(batching.micro_batch * max(1, workers), min(held, 50_000))


@contextmanager
def _micro_batches(
    planned: PlannedModel, settings: PlanSettings, batching: Batching, sources: Sequence[Source]
) -> Iterator[Iterator[MicroBatch]]:
    """An endless stream of micro-batches: read by as many loader processes as in the run, or random ones without sources."""
    if not sources:
        yield itertools.repeat(planned.micro_batch(batching.micro_batch))
        return
    mixture = _mixture(planned, settings, batching, sources, settings.workers)
    loader = MixtureLoader(mixture, workers=settings.workers, pin_memory=planned.device.type == "cuda")

    def endless() -> Iterator[Any]:
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            yield from loader

    try:
        yield endless()
    finally:
        loader.abandon()


@dataclass(frozen=True)
class LoaderRate:
    """Samples that one loader process delivered, and the seconds that it took."""

    samples: int
    seconds: float

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


def measure_loader(
    planned: PlannedModel,
    settings: PlanSettings,
    batching: Batching,
    sources: Sequence[Source],
    *,
    seconds: float = LOADER_SECONDS,
) -> LoaderRate:
    """Read, decode, augment and tokenize samples in this process, as a loader process of the run does."""
    mixture = _mixture(planned, settings, batching, sources, 1)
    threads = torch.get_num_threads()
    if settings.workers > 0:
        torch.set_num_threads(1)  # as torch does in loader processes
    try:
        stream = iter(MixtureLoader(mixture, workers=0))
        next(stream)  # opens the first shards
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            batch = next(stream, None)
            if batch is None:
                break
            count += len(batch[0])
        spent = time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)
    return LoaderRate(count, spent)


def step_with_data(
    compute_seconds: float,
    data_seconds: float,
    *,
    workers: int,
    ranks: int,
    cores: int,
    compute_threads: int,
) -> float:
    """Seconds of a step with its data.

    Without loader processes computation and data work follow each other. With them the step takes the longest of three times:
    the computation, the data work of the loader processes that have a core, and all work of the machine on all its cores.

    Args:
        compute_seconds: of a rank's step.
        data_seconds: of one process, for a rank's samples of a step.
        compute_threads: cores that a rank's computation uses (0 on a GPU).
    """
    if workers == 0:
        return compute_seconds + data_seconds
    at_work = min(workers, max(1.0, cores / ranks))
    shared = ranks * (compute_seconds * compute_threads + data_seconds) / cores
    return max(compute_seconds, data_seconds / at_work, shared)
