"""The data engine: webdataset shards of several sources in, micro-batches of (images, texts) out (section 3.1).

    schedule (schedule.py) --> this reader's slices of each source --> samples (reader.py)
        --> shuffled, decoded, bad ones replaced (sample_stream.py) --> transform, tokenize, collate
        --> (images (B, C, H, W), texts (B, L))

Each reader reads its own stretch of every source and emits the micro-batches that the schedule gives to it. Batches of one
source (invariant 2) and each sample once an epoch (invariant 3) therefore hold for any number of shards, ranks and workers,
without communication.

    rank     a training process, 0..W-1
    worker   a loader process of a rank, 0..V-1
    reader   the work of one worker in an epoch: reader r of a rank delivers its micro-batches r, r + V, r + 2V ...

All randomness derives from (seed, epoch, source, position): the same seed gives the same batches.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import RawArray
from typing import Any

import numpy as np
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import (
    Purpose,
    preserved,
    reseed,
    reseed_torch,
    stream,
    stream_seed,
)
from open_clip_zerovl.data.images import (
    PixelTransform,
    batch_layout,
    collate_images,
    crop_of,
    pictures,
)
from open_clip_zerovl.data.reader import ShardReader, picture_of
from open_clip_zerovl.data.sample_stream import BatchReport, SampleStream, Shown, SliceReader
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.tokens import fast_tokenizer
from open_clip_zerovl.data.workers import BufferPool, PooledBatch
from open_clip_zerovl.sampling.assignment import Assignment, LocalOrder
from open_clip_zerovl.sampling.schedule import (
    Batching,
    Sampling,
    Schedule,
    epoch_slices,
    slice_range,
    source_schedule,
)
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache, ahead_of_reading
from open_clip_zerovl.shards.urls import local_path

SHUFFLE_WINDOW_SAMPLES = (
    5000  # encoded samples of all sources together in a worker's memory; open_clip's number
)


def schedule_of(
    sources: Sequence[Source], effective_batch: int, sampling: Sampling, *, seed: int, epoch: int
) -> Schedule:
    """Compute `source_schedule` of `Source` records, whose order may be given by name.

    Raises:
        UserError: what `source_schedule` refuses; a source order that names an unknown source or leaves one out.
    """
    names = [source.name for source in sources]
    order = None
    if sampling.source_order is not None:
        if sorted(sampling.source_order) != sorted(names):
            raise UserError(
                f"--source-order {'::'.join(sampling.source_order)} must name each source once, separated by '::', as "
                f"{'::'.join(names)}"
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
        source_order=order,
        names=names,
    )


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of samples, and the items of a batch besides images and texts.

    Attributes:
        transform: PIL image -> tensor (C, H, W); its torch, numpy and `random` draws are seeded per sample. JPEGs are decoded
            at a reduced size if no crop of the transform loses by it (`images.Crop`).
        tokenizer: list of captions -> LongTensor (B, L).
        augment_caption: (caption, seed of its stream) -> caption, before the tokenizer.
        with_origin: yield the (source, position) of each sample as a third item (B, 2).
        with_content: yield a third item of four columns (B, 4): source, position, a number of the caption before augmentation
            and a number of the image file. Equal texts (but for case and white space) have
            the same number, equal files too.
    """

    transform: Callable[[Image.Image], torch.Tensor]
    tokenizer: Callable[[list[str]], torch.Tensor]
    augment_caption: Callable[[str, int], str] | None = None
    with_origin: bool = False
    with_content: bool = False


@dataclass
class _Reader:
    """One reader of this rank in one epoch: the samples that it delivers, and the loader process that runs it.

    Attributes:
        number: 0..V-1; reader r delivers the rank's micro-batches j with j % V == r.
        worker: number of the loader process.
        before: (S,) samples that all readers before this one deliver in the epoch.
        quota: (S,) samples that this one delivers in the epoch.
        done: (S,) those of them that lie before the step at which the epoch is entered.
        notes: for the next batch's report.
        ahead: called with the URLs of remote shards that will be read soon, and with None at the end.
    """

    number: int
    worker: int
    before: np.ndarray
    quota: np.ndarray
    done: np.ndarray
    notes: list[str] = field(default_factory=list)
    ahead: Callable[[str | None], None] = lambda _: None


class Mixture(IterableDataset):
    """Micro-batches of one rank for one epoch at a time.

    Args:
        sources: the sources to mix.
        batching: B, K, W and loader workers V (V is 1 when the loader has no worker processes).
        preprocessing: see `Preprocessing`.
        rank: of this process.
        sampling: how sources make batches.
        seed: the only seed; the process's own generators are neither read nor moved.
        on_bad_sample: "replace" it by a neighbour of the same source and count it, or "fail" with a sentence.
        cache: the folder of fetched shards; None for the one in the user's cache.
        shuffle_window_samples: encoded samples that a worker keeps in memory to shuffle, over all sources.

    Yields:
        (images (B, C, H, W), texts (B, L), `BatchReport`), with the third item of `Preprocessing` before the report; in a
        loader's worker (`PooledBatch`, `BatchReport`); or a `UserError` in place of a batch. `MixtureLoader` yields batches
        without the report, and raises the error.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        batching: Batching,
        preprocessing: Preprocessing,
        *,
        rank: int = 0,
        sampling: Sampling = Sampling(),  # frozen
        seed: int = 0,
        on_bad_sample: str = "replace",
        cache: ShardCache | None = None,
        shuffle_window_samples: int = SHUFFLE_WINDOW_SAMPLES,
    ) -> None:
        super().__init__()
        self.sources = tuple(sources)
        self.batching = batching
        self.preprocessing = preprocessing
        self.rank = rank
        self.sampling = sampling
        self.seed = seed
        self.on_bad_sample = on_bad_sample
        self.cache = cache or ShardCache()
        self.shuffle_window_samples = shuffle_window_samples
        self.transform, self.decode = pictures(preprocessing.transform)
        self.crop = crop_of(preprocessing.transform)
        self.padding = padding_of(preprocessing.tokenizer)
        self.tokenize = fast_tokenizer(preprocessing.tokenizer)
        # Pictures on the array path draw from torch's generator alone; seeding Python's and numpy's takes most of the time.
        self.reseed = reseed_torch if isinstance(self.transform, PixelTransform) else reseed
        self.pool: BufferPool | None = None  # set by a loader with worker processes
        self.timeout_seconds = 0.0  # of the loader, which sets it
        # epoch and step that the next iteration begins with, in memory that the loader's workers share
        self.start = RawArray("q", 2)
        # process, source, shard
        self.activity = [RawArray("q", (-1, -1, -1)) for _ in range(batching.workers)]

    def schedule(self, epoch: int) -> Schedule:
        """Compute the schedule of an epoch, the same on every rank and worker."""
        return schedule_of(
            self.sources, self.batching.effective_batch, self.sampling, seed=self.seed, epoch=epoch
        )

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if workers != self.batching.workers:
            yield UserError(
                f"the mixture was planned for {self.batching.workers} loader workers and runs in {workers}"
            )
            return
        try:
            epoch, step = self.start
            yield from self._micro_batches(epoch, step, worker)
        except UserError as error:
            yield error

    def _micro_batches(self, epoch: int, step: int, worker: int) -> Iterator[Any]:
        """Yield the micro-batches of an epoch that loader process `worker` delivers, from optimizer step `step` on.

        A DataLoader asks process 0 first, wherever the epoch is entered, while micro-batch j always belongs to reader j % V.
        Where the first micro-batch is j0, process v therefore runs reader (j0 + v) % V:

            V = 2, from the start    process 0 runs reader 0: micro-batches 0, 2, 4 ...    process 1 runs reader 1: 1, 3, 5 ...
            V = 2, entered at 3      process 0 runs reader 1: micro-batches 3, 5 ...       process 1 runs reader 0: 4, 6 ...
        """
        schedule = self.schedule(epoch)
        assignment = Assignment(schedule, self.batching)
        number = (step * self.batching.dga_steps + worker) % self.batching.workers
        reader = _Reader(
            number,
            worker,
            before=assignment.before(self.rank, number),
            quota=assignment.quota(self.rank, number),
            done=assignment.quota(self.rank, number, step),
        )
        remote = any(local_path(source.shards[0]) is None for source in self.sources)
        if remote and get_worker_info() is not None:
            reader.ahead = ahead_of_reading(self.cache, RetryPolicy.within(self.timeout_seconds))
        streams = [self._stream(schedule, index, reader) for index in range(len(self.sources))]
        left = assignment.of_reader(number) - assignment.of_reader(
            number, step * self.batching.dga_steps
        )
        try:
            for count, row in enumerate(assignment.counts(self.rank, number, step), start=1):
                takes = [
                    streams[source]
                    for source in np.flatnonzero(row)
                    for _ in range(int(row[source]))
                ]
                batch = self._batch(takes, worker)
                if count == left:
                    for stream in streams:
                        stream.finish()
                batch[-1].delivered = {
                    int(source): int(row[source]) for source in np.flatnonzero(row)
                }
                batch[-1].notes, reader.notes[:] = list(reader.notes), []
                yield batch
        finally:
            reader.ahead(None)

    def _stream(self, schedule: Schedule, index: int, reader: _Reader) -> SampleStream:
        """Open a reader's samples of source `index`: its quota, after the quotas of the readers before it."""
        source, epoch = self.sources[index], schedule.epoch
        quota = int(reader.quota[index])
        slices = epoch_slices(source.sizes, schedule, index, resampled=self.sampling.resampled)
        window = int(self.shuffle_window_samples * schedule.taken[index] / schedule.taken.sum())
        window = max(window, self.batching.micro_batch)
        mine = slice_range(slices, int(reader.before[index]), quota)
        # the reader's number over all ranks
        of_all = self.rank * self.batching.workers + reader.number
        draws = partial(stream, self.seed, Purpose.ORDER, epoch, index, of_all)
        order = LocalOrder(quota, window, draws)

        def opened(shard: int) -> None:
            self.activity[reader.worker][:] = os.getpid(), index, shard

        of_source = ShardReader.of_pairs(
            source,
            policy=RetryPolicy.within(
                self.timeout_seconds,
                lambda reason: reader.notes.append(
                    f"shards of source {source.name!r} are fetched with retries ({reason})"
                ),
            ),
            cache=self.cache,
            opens=opened,
            notes=reader.notes.append,
        )
        reading = SliceReader(
            of_source,
            mine,
            slices,
            index=index,
            seed=self.seed,
            fail=self.on_bad_sample == "fail",
            ahead=reader.ahead,
        )
        return SampleStream(reading, order, int(reader.done[index]))

    def _batch(self, streams: Sequence[SampleStream], worker: int) -> tuple[Any, ...]:
        """Take the next sample of each stream: (images, texts, origin, report), or (`PooledBatch`, report)."""
        wanted = self.preprocessing
        images = []
        captions = []
        origins = []
        report = BatchReport()
        with preserved():
            for stream in streams:
                shown, source = stream.take(self._decode), stream.slices.index
                place = shown.placed.place
                self.reseed(stream_seed(self.seed, Purpose.IMAGE, source, place))
                images.append(self.transform(shown.image))  # at once: decoded images are large
                captions.append(
                    shown.caption
                    if wanted.augment_caption is None
                    else wanted.augment_caption(
                        shown.caption, stream_seed(self.seed, Purpose.WORDS, source, place)
                    )
                )
                content = content_numbers(shown) if wanted.with_content else ()
                origins.append((source, shown.placed.position, *content))
                if shown.placed.loss is not None:
                    report.dropped.append(shown.placed.loss)
        others: list[Any] = [self.tokenize(captions)]
        report.full = _full(others[0], [source for source, *_ in origins], self.padding)
        if wanted.with_origin or wanted.with_content:
            others.append(torch.tensor(origins))
        shared_block = (
            self.pool.block(worker, batch_layout(images)) if self.pool is not None else None
        )
        if shared_block is None:
            return (collate_images(images), *others, report)
        block, memory = shared_block
        return (PooledBatch.of(worker, block, collate_images(images, memory), others), report)

    def _decode(self, picture: bytes) -> Any:
        return self.decode(picture, self.crop)


def _full(texts: Any, sources: Sequence[int], padding: int | None) -> dict[int, int]:
    """Count each source's samples with a text that fills the context: its last token is not padding."""
    if padding is None or not isinstance(texts, torch.Tensor) or texts.ndim != 2:
        return {}
    full: dict[int, int] = {}
    for row in (texts[:, -1] != padding).nonzero().flatten().tolist():
        full[sources[row]] = full.get(sources[row], 0) + 1
    return full


def padding_of(tokenizer: Any) -> int | None:
    """Return the token with which open_clip's tokenizers pad a text, None for any other tokenizer."""
    if isinstance(tokenizer, SimpleTokenizer):
        return 0
    return (
        getattr(tokenizer.tokenizer, "pad_token_id", None)
        if isinstance(tokenizer, HFTokenizer)
        else None
    )


def content_numbers(shown: Shown) -> tuple[int, ...]:
    """Return numbers of the caption and of the image file, int64.

    They are hashes, equal in every process for equal content.
    """
    caption = " ".join(shown.caption.casefold().split()).encode()
    return tuple(
        int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
        for content in (caption, picture_of(shown.placed.sample))
    )
