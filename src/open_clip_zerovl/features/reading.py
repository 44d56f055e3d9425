"""A collection to batches: pictures as each model sees them, and captions, with the numbers of their rows.

A collection is made of files with some samples each. Files are read in units, runs of files with at least UNIT_SAMPLES samples:
a unit is the work that a killed call may lose, and its batches do not depend on where a call began.

`b` samples of a batch, `V` pictures (views) of a sample, `S` side of a model's pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import collate_images
from open_clip_zerovl.features.fingerprint import plain_repr

UNIT_SAMPLES = 1024


@dataclass(frozen=True)
class Embeddable:
    """A sample that can be embedded.

    Attributes:
        row: its number in the collection.
        pictures: V of them; none where only captions are asked for.
        captions: (number among the collection's captions, caption) of each.
    """

    row: int
    pictures: Sequence[Image.Image] = ()
    captions: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class Lost:
    """Samples that cannot be shown: their source, how many, a few words to count by; and perhaps a sentence."""

    source: str
    reason: str
    count: int = 1
    note: str | None = None


class EmbeddableFiles(Protocol):
    """Files with samples."""

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of each file."""
        ...

    def read(self, file: int) -> Iterator[Embeddable | Lost]:
        """The samples of a file in order, those that are lost as such. UserError if reading cannot go on."""
        ...


class Listed:
    """Samples that are read one by one, as a `EmbeddableFiles`.

    Args:
        count: samples.
        read_one: number of a sample -> the sample.
        part: samples that count as a file.
    """

    def __init__(self, count: int, read_one: Callable[[int], Embeddable], part: int) -> None:
        self.read_one, self.part = read_one, part
        self.sizes = [min(part, count - begin) for begin in range(0, count, part)]

    def read(self, file: int) -> Iterator[Embeddable]:
        """The samples of a file."""
        begin = file * self.part
        return map(self.read_one, range(begin, begin + self.sizes[file]))


@dataclass
class EmbeddableBatch:
    """Samples of one unit, in order; those that cannot be shown are left out.

    Attributes:
        rows: numbers of the samples (b,).
        pictures: for each model (b * V, 3, S, S); models that see alike share one tensor.
        captions, caption_rows: captions of the samples, and their numbers.
        finished: the unit's files, set in its last batch.
        lost: samples that cannot be shown.
    """

    rows: list[int] = field(default_factory=list)
    pictures: list[Tensor] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    caption_rows: list[int] = field(default_factory=list)
    finished: Sequence[int] = ()
    lost: list[Lost] = field(default_factory=list)


def units_of(sizes: Sequence[int]) -> list[range]:
    """Files of these sizes in runs of at least UNIT_SAMPLES samples, as far as they reach."""
    units, begin, held = [], 0, 0
    for number, size in enumerate(sizes):
        held += size
        if held >= UNIT_SAMPLES or number + 1 == len(sizes):
            units.append(range(begin, number + 1))
            begin, held = number + 1, 0
    return units


class Batches(IterableDataset):
    """The batches of units, each unit by one worker; a UserError in place of a batch if it cannot continue.

    Args:
        units: the files of each.
        transforms: for each model, PIL image -> picture (3, S, S).
        batch_size: b.
    """

    def __init__(
        self,
        collection: EmbeddableFiles,
        units: Sequence[Sequence[int]],
        transforms: Sequence[Callable[[Any], Tensor]],
        batch_size: int,
    ) -> None:
        self.collection = collection
        self.units = units
        self.transforms = transforms
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[EmbeddableBatch | UserError]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            for unit in self.units[first::step]:
                yield from self._batches(unit)
        except UserError as error:  # raised in a worker, it would come out wrapped into a traceback
            yield error

    def _batches(self, unit: Sequence[int]) -> Iterator[EmbeddableBatch]:
        batch = EmbeddableBatch()
        shown: list[Image.Image] = []
        for seen, sample in enumerate(chain.from_iterable(map(self.collection.read, unit))):
            if seen and seen % self.batch_size == 0:
                yield self._with_pictures(batch, shown)
                batch, shown = EmbeddableBatch(), []
            if isinstance(sample, Lost):
                batch.lost.append(sample)
                continue
            batch.rows.append(sample.row)
            shown += sample.pictures
            batch.caption_rows += [row for row, _ in sample.captions]
            batch.captions += [caption for _, caption in sample.captions]
        batch.finished = unit
        yield self._with_pictures(batch, shown)

    def _with_pictures(
        self, batch: EmbeddableBatch, shown: Sequence[Image.Image]
    ) -> EmbeddableBatch:
        """The batch with its pictures as each model sees them."""
        seen: dict[str, Tensor] = {}
        for transform in self.transforms if shown else ():
            name = plain_repr(transform)
            if name not in seen:
                seen[name] = collate_images([transform(picture) for picture in shown])
            batch.pictures.append(seen[name])
        return batch
