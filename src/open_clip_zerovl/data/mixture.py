"""The data engine: webdataset shards of several sources in, micro-batches of (images, texts) out (section 3.1).

    schedule (schedule.py) --> this reader's pieces of each source --> raw samples (reading.py)
        --> shuffled, bad ones replaced (shares.py) --> decode, transform, tokenize, collate
        --> (images (B, C, H, W), texts (B, L))

Each (rank, worker) reads its own stretch of every source and emits the micro-batches that the schedule gives to it, so that
homogeneity (invariant 2) and exactly-once (invariant 3) hold together for any number of shards, ranks and workers, without
communication. All randomness derives from (seed, epoch, source, position): the same seed gives the same batches.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from open_clip_zerovl.data.dealing import deal
from open_clip_zerovl.data.health import Report
from open_clip_zerovl.data.images import collate_images, crop_of
from open_clip_zerovl.data.names import POLICIES
from open_clip_zerovl.data.pieces import PieceReader
from open_clip_zerovl.data.pixels import pictures
from open_clip_zerovl.data.reading import RawSample, Reading
from open_clip_zerovl.data.schedule import (
    Batching,
    Schedule,
    epoch_pieces,
    slice_pieces,
    source_schedule,
)
from open_clip_zerovl.data.shares import LocalOrder, Share
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.workers import SharedNumbers
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.randomness import Purpose, preserved, reseed, stream, stream_seed

SHUFFLE_WINDOW_SAMPLES = 5000  # in memory, encoded, over all sources of a worker; open_clip's figure


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
        augment_caption: (caption, seed of its stream) -> caption, before the tokenizer.
        on_bad_sample: "replace" it by a neighbour of the same source and count it, or "fail" with a sentence.
        pixel_path: of PIXEL_PATHS; "arrays" shows the same pictures to rounding (`pixels`), and is PIL's with a line in the log
            where the decoder is not installed or the transform has a step that takes PIL images only.
        reduce_jpegs: decode JPEGs at a reduced size where no crop of the transform loses by it (`decoding.Crop`).
        with_origin: also yield the (source, position) of each sample, as a third item (B, 2).
        with_content: let that item have two more columns (B, 4): numbers of the caption, as it was before augmentation, and of
            the image file; the same text (but for case and white space) or the same bytes have the same number.

    Yields:
        (images (B, C, H, W), texts (B, L), `Report`) or a `Failure`; `MixtureLoader` keeps both to itself.
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
        augment_caption: Callable[[str, int], str] | None = None,
        on_bad_sample: str = "replace",
        pixel_path: str = "pil",
        reduce_jpegs: bool = True,
        shuffle_window_samples: int = SHUFFLE_WINDOW_SAMPLES,
        with_origin: bool = False,
        with_content: bool = False,
    ) -> None:
        super().__init__()
        if on_bad_sample not in POLICIES:
            raise UserError(f"unknown way {on_bad_sample!r} to treat bad samples; use one of {', '.join(POLICIES)}")
        self.sources = tuple(sources)
        self.batching = batching
        self.rank = rank
        self.sampling = sampling
        self.seed = seed
        self.transform, self.decode = pictures(transform, pixel_path)
        self.tokenizer = tokenizer
        self.augment_caption = augment_caption
        self.on_bad_sample = on_bad_sample
        self.crop = crop_of(transform) if reduce_jpegs else None
        self.shuffle_window_samples = shuffle_window_samples
        self.with_origin, self.with_content = with_origin or with_content, with_content
        self.stall_seconds = 0.0  # set by a loader without worker processes, which nobody else can watch
        self.start = SharedNumbers(0, 0)  # epoch and step that the next iteration begins with
        self.activity = [SharedNumbers(-1, -1, -1) for _ in range(batching.workers)]  # process, source, shard

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
            epoch, step = self.start.get()
            yield from self._micro_batches(epoch, step, worker)
        except UserError as error:
            yield Failure(str(error))

    def _micro_batches(self, epoch: int, step: int, worker: int) -> Iterator[Any]:
        """The micro-batches that loader process number `worker` delivers of an epoch that begins at a step.

        A DataLoader asks process 0 first, wherever the epoch begins, and an epoch's micro-batch j belongs to reader j % V. An
        epoch that is entered at micro-batch j0 therefore has process v read as reader (j0 + v) % V, from its place there:

            V = 2, from the start    process 0 is reader 0: micro-batches 0, 2, 4 ...    process 1 is reader 1: 1, 3, 5 ...
            V = 2, entered at 3      process 0 is reader 1: micro-batches 3, 5 ...       process 1 is reader 0: 4, 6 ...
        """
        workers = self.batching.workers
        schedule = self.schedule(epoch)
        dealt = deal(schedule, self.batching)
        reader = (step * self.batching.dga_steps + worker) % workers
        before, mine = dealt.before(self.rank, reader), dealt.quota(self.rank, reader)  # (S,) each
        done = dealt.quota(self.rank, reader, step)  # (S,) delivered before the jump
        notes: list[str] = []
        shares = [
            self._share(schedule, index, int(before[index]), int(mine[index]), reader, int(done[index]), worker, notes)
            for index in range(len(self.sources))
        ]
        left = dealt.of_reader(reader) - dealt.of_reader(reader, step * self.batching.dga_steps)
        for number, row in enumerate(dealt.counts(self.rank, reader, step), start=1):
            batch = self._batch([shares[source] for source in np.flatnonzero(row) for _ in range(int(row[source]))])
            if number == left:
                for share in shares:
                    share.finish()
            batch[-1].delivered = {int(source): int(row[source]) for source in np.flatnonzero(row)}
            batch[-1].notes, notes[:] = list(notes), []
            yield batch

    def _share(
        self,
        schedule: Schedule,
        index: int,
        before: int,
        quota: int,
        reader: int,
        done: int,
        worker: int,
        notes: list[str],
    ) -> Share:
        """What reader `reader` of this rank delivers of a source, in loader process `worker`.

        These are `quota` samples after the first `before` of the epoch; `done` of them are delivered already.
        """
        source, epoch = self.sources[index], schedule.epoch
        of_all = self.rank * self.batching.workers + reader
        pieces = epoch_pieces(source.sizes, schedule, index, resampled=self.sampling.resampled)
        mine = slice_pieces(pieces, before, quota)
        window = int(self.shuffle_window_samples * schedule.taken[index] / schedule.taken.sum())
        draws = partial(stream, self.seed, Purpose.ORDER, epoch, index, of_all)
        order = LocalOrder(quota, max(window, self.batching.micro_batch), draws)
        reading = Reading(
            source,
            index,
            seed=self.seed,
            fail=self.on_bad_sample == "fail",
            stall_seconds=self.stall_seconds,
            opens=lambda shard: self.activity[worker].set(os.getpid(), index, shard),
            notes=notes.append,
        )
        return Share(PieceReader(reading, mine, pieces), order, done)

    def _batch(self, shares: Sequence[Share]) -> tuple[Any, ...]:
        """The next sample of each share, as (images, texts, origin if asked for, report)."""
        images, captions, origins, report = [], [], [], Report()
        with preserved():
            for share in shares:
                sample, image, loss = share.take(self._decode)
                reseed(stream_seed(self.seed, Purpose.IMAGE, sample.source, sample.place))
                images.append(self.transform(image))  # at once: decoded images are large
                captions.append(self._caption(sample))
                content = content_numbers(sample) if self.with_content else ()
                origins.append((sample.source, sample.position, *content))
                if loss is not None:
                    report.losses.append(loss)
        texts = self.tokenizer(captions)
        origin = (torch.tensor(origins),) if self.with_origin else ()
        return (collate_images(images), texts, *origin, report)

    def _caption(self, sample: RawSample) -> str:
        if self.augment_caption is None:
            return sample.caption
        return self.augment_caption(sample.caption, stream_seed(self.seed, Purpose.WORDS, sample.source, sample.place))

    def _decode(self, sample: RawSample) -> Any:
        return self.decode(sample.image, self.crop)


def content_numbers(sample: RawSample) -> tuple[int, int]:
    """(number of the caption, number of the image file), both int64: hashes, so that all readers agree without talking."""
    caption = " ".join(sample.caption.casefold().split()).encode()
    return tuple(  # type: ignore[return-value]
        int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
        for content in (caption, sample.image)
    )
