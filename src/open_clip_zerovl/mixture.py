"""The data engine: webdataset shards of several sources in, micro-batches of (images, texts) out (section 3.1).

    schedule (sampling.py) --> this reader's pieces of each source --> tar samples --> shuffle window
        --> decode, transform, tokenize, collate --> (images (B, C, H, W), texts (B, L))

Each (rank, worker) reads its own stretch of every source and emits the micro-batches that the schedule gives to it, so that
homogeneity (invariant 2) and exactly-once (invariant 3) hold together for any number of shards, ranks and workers, without
communication. All randomness derives from (seed, epoch, source, position): the same seed gives the same batches.

An error in a worker travels to the training process as a value and is raised there as one sentence: a traceback out of a
worker process helps nobody, and an exception lost in one would leave the other ranks waiting.
"""

from __future__ import annotations

import io
import multiprocessing
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from webdataset.tariterators import group_by_keys, tar_file_expander, url_opener

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.sampling import (
    Batching,
    Piece,
    Schedule,
    cut,
    epoch_pieces,
    micro_batch_counts,
    owed,
    source_schedule,
)
from open_clip_zerovl.sources import Source

IMAGE_MEMBERS = ("jpg", "png", "jpeg", "webp")
SHUFFLE_WINDOW_SAMPLES = 5000  # in memory, encoded, over all sources of a worker; open_clip's figure
_STREAM_ORDER, _STREAM_SAMPLE = 3, 4  # as in sampling.py: independent random streams of one seed


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in a shard: encoded bytes, and where it came from."""

    image: bytes
    caption: str
    source: int
    position: int  # in the source's endless cycle: unique over epochs and passes
    key: str
    shard: str


@dataclass(frozen=True)
class Failure:
    """What a worker hands over instead of a batch when it cannot go on."""

    message: str


@dataclass(frozen=True)
class Sampling:
    """How sources make batches: the strategy and its details, as `source_schedule` and `epoch_pieces` take them.

    Attributes:
        source_order: names of the sources in sequential order.
    """

    strategy: str = "debiased"
    draw: str = "exact"
    source_order: tuple[str, ...] | None = None
    epoch_samples: int | None = None
    resampled: bool = False


def schedule_of(
    sources: Sequence[Source], effective_batch: int, sampling: Sampling, *, seed: int, epoch: int
) -> Schedule:
    """`source_schedule` of named sources.

    Raises:
        UserError: what `source_schedule` refuses, and a source order that names an unknown source or leaves one out.
    """
    names = [source.name for source in sources]
    order = None
    if sampling.source_order is not None:
        if sorted(sampling.source_order) != sorted(names):
            raise UserError(
                f"the source order {', '.join(sampling.source_order)} must name each source once; the sources are "
                f"{', '.join(names)}"
            )
        order = [names.index(name) for name in sampling.source_order]
    return source_schedule(
        [source.num_samples for source in sources],
        effective_batch,
        strategy=sampling.strategy,
        seed=seed,
        epoch=epoch,
        weights=[source.weight for source in sources],
        epoch_samples=sampling.epoch_samples,
        draw=sampling.draw,
        source_order=order,
        names=names,
    )


class SharedEpoch:
    """An epoch number that worker processes of a persistent loader see change."""

    def __init__(self, epoch: int = 0) -> None:
        self._value = multiprocessing.Value("q", epoch)

    def set(self, epoch: int) -> None:
        self._value.value = epoch

    def get(self) -> int:
        return int(self._value.value)


class Mixture(IterableDataset):
    """Micro-batches of one rank for one epoch at a time.

    Args:
        sources: what to mix.
        batching: B, K, W and loader workers V (V is 1 when the loader has no worker processes).
        rank: of this process.
        sampling: how sources make batches.
        seed: the only seed; the process's own generators are neither read nor moved.
        transform: PIL image -> tensor (C, H, W); its torch, numpy and `random` draws are seeded per sample.
        tokenizer: list of captions -> LongTensor (B, L).
        with_origin: also yield the (source, position) of each sample, as a third item (B, 2); for tests and reports.

    Yields:
        (images (B, C, H, W), texts (B, L)) or a `Failure`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        batching: Batching,
        *,
        rank: int = 0,
        sampling: Sampling = Sampling(),  # frozen
        seed: int = 0,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Callable[[list[str]], torch.Tensor],
        shuffle_window_samples: int = SHUFFLE_WINDOW_SAMPLES,
        with_origin: bool = False,
    ) -> None:
        super().__init__()
        self.sources = tuple(sources)
        self.batching = batching
        self.rank = rank
        self.sampling = sampling
        self.seed = seed
        self.transform = transform
        self.tokenizer = tokenizer
        self.shuffle_window_samples = shuffle_window_samples
        self.with_origin = with_origin
        self.epoch = SharedEpoch()

    def schedule(self, epoch: int) -> Schedule:
        """The schedule of an epoch; the same on every rank and worker."""
        return schedule_of(self.sources, self.batching.effective_batch, self.sampling, seed=self.seed, epoch=epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if workers != self.batching.workers:
            yield Failure(f"the mixture was planned for {self.batching.workers} loader workers and runs in {workers}")
            return
        try:
            yield from self._micro_batches(self.epoch.get(), worker)
        except UserError as error:
            yield Failure(str(error))

    def _micro_batches(self, epoch: int, worker: int) -> Iterator[Any]:
        schedule = self.schedule(epoch)
        counts = micro_batch_counts(schedule, self.batching)
        quotas = owed(counts, self.batching.workers)
        streams = [
            self._shuffled_stream(schedule, index, quotas[:, :, index].ravel().tolist(), worker)
            for index in range(len(self.sources))
        ]
        for row in counts[worker :: self.batching.workers, self.rank]:
            samples = [next(streams[source]) for source in np.flatnonzero(row) for _ in range(int(row[source]))]
            yield self._collate(samples)
        for stream in streams:
            next(stream, None)  # lets each reader find out whether its last shard ends where it should

    def _shuffled_stream(
        self, schedule: Schedule, index: int, quotas: Sequence[int], worker: int
    ) -> Iterator[RawSample]:
        source, epoch = self.sources[index], schedule.epoch
        reader = self.rank * self.batching.workers + worker
        pieces = epoch_pieces(source.sizes, schedule, index, resampled=self.sampling.resampled)
        mine = cut(pieces, quotas, reader)
        window = int(self.shuffle_window_samples * schedule.taken[index] / schedule.taken.sum())
        rng = np.random.default_rng([self.seed, epoch, _STREAM_ORDER, index, reader])
        order = local_order(sum(map(len, mine)), max(window, self.batching.micro_batch), rng)
        return follow(order, read_pieces(source, index, mine))

    def _collate(self, samples: Sequence[RawSample]) -> tuple[torch.Tensor, ...]:
        images = torch.stack([self._image(sample) for sample in samples])
        texts = self.tokenizer([sample.caption for sample in samples])
        if not self.with_origin:
            return images, texts
        return images, texts, torch.tensor([(sample.source, sample.position) for sample in samples])

    def _image(self, sample: RawSample) -> torch.Tensor:
        try:
            image = Image.open(io.BytesIO(sample.image)).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(
                f"the image of sample {sample.key!r} in {sample.shard} (source {self.sources[sample.source].name!r}) "
                f"cannot be decoded ({error}); remove the sample or write the shard again"
            ) from error
        with seeded(sample_seed(self.seed, sample.source, sample.position)):
            return self.transform(image)


class MixtureLoader:
    """A loader of a `Mixture`, with the attributes that open_clip's training loop reads.

    Attributes:
        num_batches: optimizer steps of an epoch (T); iterating yields K micro-batches a step.
        num_samples: samples of an epoch (T*N).
        batch_size: B.
    """

    def __init__(self, mixture: Mixture, *, workers: int, pin_memory: bool = False, prefetch: int = 2) -> None:
        self.mixture = mixture
        first = mixture.schedule(0)
        self.num_batches = first.steps
        self.num_samples = first.steps * first.effective_batch
        self.batch_size = mixture.batching.micro_batch
        self._loader: DataLoader = DataLoader(
            mixture,
            batch_size=None,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers > 0 else None,
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        micro_batches = self.num_batches * self.mixture.batching.dga_steps
        seen = 0
        for batch in self._loader:
            if isinstance(batch, Failure):
                raise UserError(batch.message)
            seen += 1
            yield batch
        if seen != micro_batches:
            raise UserError(
                f"the loader ended after {seen} of {micro_batches} micro-batches; a worker process was lost"
            )

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields."""
        self.mixture.epoch.set(epoch)


def read_pieces(source: Source, index: int, pieces: Iterable[Piece]) -> Iterator[RawSample]:
    """The raw samples of pieces of a source's shards, in order.

    Raises:
        UserError: a shard that cannot be read, holds another number of samples than was counted, or a sample without an
            image or a caption.
    """
    for piece in pieces:
        shard, size = source.shards[piece.shard], source.sizes[piece.shard]
        try:
            yield from _read_piece(source, index, piece, shard, size)
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            reason = error.args[0] if error.args else type(error).__name__
            raise UserError(
                f"shard {shard} of source {source.name!r} cannot be read ({reason}); fetch or write it again"
            ) from error


def _read_piece(source: Source, index: int, piece: Piece, shard: str, size: int) -> Iterator[RawSample]:
    samples = group_by_keys(tar_file_expander(url_opener([{"url": shard}])))
    seen = 0
    for sample in samples:
        if seen == size:
            raise UserError(_wrong_size(source, shard, size, "more"))
        if piece.start <= seen < piece.stop:
            try:
                raw = _raw(sample, source, index, piece.position + seen - piece.start, shard)
            except UserError:
                if (
                    seen + 1 < size and next(samples, None) is None
                ):  # not a bad sample: the shard ends in the middle of it
                    raise UserError(_wrong_size(source, shard, size, seen)) from None
                raise
            yield raw
        seen += 1
        if seen == piece.stop < size:
            return  # the rest of the shard belongs to another reader
    if seen < size:
        raise UserError(_wrong_size(source, shard, size, seen))


def _wrong_size(source: Source, shard: str, size: int, found: int | str) -> str:
    return (
        f"shard {shard} of source {source.name!r} was counted with {size} samples and holds {found}; correct its entry in "
        "sizes.json, or remove the entry to have the shard counted"
    )


def _raw(sample: dict[str, Any], source: Source, index: int, position: int, shard: str) -> RawSample:
    key = sample["__key__"]
    image = next((sample[member] for member in IMAGE_MEMBERS if member in sample), None)
    if image is None or "txt" not in sample:
        lacking = "image (jpg, png, jpeg or webp)" if image is None else "caption (txt)"
        raise UserError(
            f"sample {key!r} in {shard} (source {source.name!r}) has no {lacking}; remove it or write the shard again"
        )
    try:
        caption = sample["txt"].decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(
            f"the caption of sample {key!r} in {shard} (source {source.name!r}) is not UTF-8 ({error}); convert it"
        ) from error
    if not caption:
        raise UserError(f"sample {key!r} in {shard} (source {source.name!r}) has an empty caption; remove the sample")
    return RawSample(image, caption, index, position, key, shard)


def local_order(count: int, window: int, rng: np.random.Generator) -> np.ndarray:
    """A shuffled order of `count` items that a reader of a stream can follow with `window` of them in memory.

    Item i comes at most `window` places from where it lies, so that a reader that starts in the middle has to look back no
    further; where all items fit into the window it is a plain random permutation.

    Returns:
        (count,) the item to take at each place.
    """
    if count <= window:
        return rng.permutation(count)
    return np.argsort(np.arange(count) + rng.random(count) * window, kind="stable")


def follow(order: np.ndarray, stream: Iterator[RawSample]) -> Iterator[RawSample]:
    """The items of a stream in another order, reading no further ahead than the order asks for."""
    waiting: dict[int, RawSample] = {}
    arrived = 0
    for wanted in order.tolist():
        while arrived <= wanted:
            waiting[arrived] = next(stream)
            arrived += 1
        yield waiting.pop(wanted)
    next(stream, None)  # lets the reader find out whether its last shard ends where it should


def sample_seed(seed: int, source: int, position: int) -> int:
    """The 64-bit seed of one sample's augmentation, spread so that neighbours share nothing."""
    entropy = np.random.SeedSequence([seed, _STREAM_SAMPLE, source, position])
    return int(entropy.generate_state(1, np.uint64)[0])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under seeded CPU generators (torch, numpy, `random`) and leave the process's own as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reset the GPU's generators
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
