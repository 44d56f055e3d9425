"""Samples to what teachers look at: the views of each picture, as each teacher sees them, and all captions.

`b` samples of a batch, `V` views, `S` side of a teacher's own pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import preserved
from open_clip_zerovl.data.captions import caption_starts
from open_clip_zerovl.data.images import BadImage, collate_images, crop_of
from open_clip_zerovl.data.pixels import pictures
from open_clip_zerovl.data.reading import RawSample, Reading, Surplus, sample_sentence, shard_sentence, wrong_size
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.views import view_picture
from open_clip_zerovl.distill.manifest import Unit, augmentation_of, units_of
from open_clip_zerovl.shards.members import ShardError


@dataclass
class Batch:
    """Samples of one unit that lie one after the other; those that cannot be shown are left out.

    Attributes:
        rows: the samples' numbers in their source (b,).
        views: of each teacher, (b * V, 3, S, S) uint8; teachers that see alike share one tensor.
        captions: of the samples, all of them, and `caption_rows` where they belong.
        last: whether the unit ends with it.
        lost: reason -> samples that cannot be shown.
        notes: sentences about shards.
    """

    source: int
    unit: int
    rows: list[int] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    caption_rows: list[int] = field(default_factory=list)
    last: bool = False
    lost: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Units(IterableDataset):
    """The batches of units, each unit by one worker; a UserError in place of a batch where it cannot go on.

    Args:
        todo: (source, unit) of each.
        transform: picture -> view (3, S, S) uint8.
        eyes: of each teacher, PIL image -> uint8 picture of the teacher's own size.
        views, seed: V, and the seed of their augmentations.
        strict: a sample or shard that cannot be shown is an error.
        batch_size: b.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        todo: Sequence[tuple[int, int]],
        transform: Callable[[Any], Tensor],
        eyes: Sequence[Callable[[Image.Image], Tensor]],
        *,
        views: int,
        seed: int,
        pixel_path: str,
        strict: bool,
        batch_size: int,
    ) -> None:
        self.sources, self.todo, self.batch_size = sources, todo, batch_size
        self.views, self.seed, self.strict = views, seed, strict
        self.transform, self.decode = pictures(transform, pixel_path)
        self.crop = crop_of(transform)
        self.eyes = eyes
        self.starts = [caption_starts(source) for source in sources]

    def __iter__(self) -> Iterator[Batch | UserError]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            for source, unit in self.todo[first::step]:
                yield from self._batches(source, unit)
        except UserError as error:  # raised in a worker, it would come out wrapped into a traceback
            yield error

    def _batches(self, source: int, unit: int) -> Iterator[Batch]:
        batch, of_shards = Batch(source, unit), Batch(source, unit)
        for seen, sample in enumerate(self._samples(source, units_of(self.sources[source])[unit], of_shards)):
            if seen and seen % self.batch_size == 0:
                yield self._finished(batch)
                batch = Batch(source, unit)
            self._add(batch, sample)
        for reason, count in of_shards.lost.items():
            batch.lost[reason] = batch.lost.get(reason, 0) + count
        batch.last, batch.notes = True, of_shards.notes
        yield self._finished(batch)

    def _samples(self, index: int, unit: Unit, told: Batch) -> Iterator[RawSample]:
        """The unit's samples as they lie; what is wrong with its shards is noted in `told`."""
        source = self.sources[index]
        reading = Reading(source, index, fail=self.strict, every_caption=True, notes=told.notes.append)
        for shard in range(*unit):
            begin, end = int(source.starts[shard]), int(source.starts[shard + 1])
            try:
                with closing(reading.samples(shard, 0, begin)) as samples:
                    yield from samples
            except Surplus:
                message = wrong_size(source, shard, "more")
                if self.strict:
                    raise UserError(message) from None
                told.notes.append(message)
            except ShardError as error:
                message = shard_sentence(source, shard, error)
                if self.strict:
                    raise UserError(message) from error
                told.notes.append(message)
                told.lost[error.reason] = told.lost.get(error.reason, 0) + end - begin - error.readable

    def _add(self, batch: Batch, sample: RawSample) -> None:
        """The sample's views and captions, or a count of why it has none."""
        source = self.sources[batch.source]
        starts = self.starts[batch.source]
        row = sample.position
        captions = [(number, caption) for number, caption in enumerate(sample.captions) if caption]
        fault = sample.fault if not captions else None
        image: Any = None
        if fault is None:
            try:
                # No picture is a fault of the sample; an empty file is one that the decoder finds.
                missing = sample.fault is not None and not sample.image
                image = None if missing else self.decode(sample.image, self.crop)
            except BadImage as error:
                fault = error.fault
            if image is None and fault is None:
                fault = sample.fault
        if fault is not None:
            if self.strict:
                raise UserError(sample_sentence(source, sample, fault))
            batch.lost[fault.reason] = batch.lost.get(fault.reason, 0) + 1
            return
        batch.rows.append(row)
        begin = row if starts is None else int(starts[row])
        for number, caption in captions:
            batch.captions.append(caption)
            batch.caption_rows.append(begin + number)
        with preserved():
            for view in range(self.views):
                picture = view_picture(
                    self.transform, image, seed=self.seed, source=batch.source, sample=row, view=view
                )
                batch.views.append(picture)

    def _finished(self, batch: Batch) -> Batch:
        """The batch with its views as each teacher sees them."""
        seen: dict[str, Tensor] = {}
        shown = [Image.fromarray(view.permute(1, 2, 0).contiguous().numpy()) for view in batch.views]
        views = []
        for eye in self.eyes:
            name = repr(augmentation_of(eye, "pil"))
            if shown and name not in seen:
                seen[name] = collate_images([eye(picture) for picture in shown])
            if shown:
                views.append(seen[name])
        return replace(batch, views=views)
