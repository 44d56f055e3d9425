"""Features of a collection by a frozen model, part by part; a call that was stopped goes on with the parts that it left.

    part --pictures or captions--> batches --model--> rows (n, F) and ids (n,) --> FOLDER/CONTENT.safetensors

A part is a shard, or a run of pictures. Its batches are of its own rows alone, so that its features do not depend on the other
parts. A file is named by the digest of its part's content, and written whole, with a digest of its own; where it is absent
or damaged, the part is to do. A copy of the data thus has its features already, and changed data has none. Files are mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import digest_of, write_atomically
from open_clip_zerovl.data.images import collate_images
from open_clip_zerovl.data.sets import IndexedSet
from open_clip_zerovl.data.workers import read_batches
from open_clip_zerovl.features.encoder import FrozenModel

log = logging.getLogger(__name__)

_BLOCK_ROWS = 8192
RUN, LONGEST_RUN = 256, 1024  # pictures, in the mean and at most


class FeatureStore:
    """The features of a collection by one model.

    Args:
        folder: of the features by this model, of any collection; None holds them in memory.
        contents: digest of each part.
        counts: rows of each part.

    Attributes:
        begins: (parts + 1,) rows before each part; the last entry is the rows of all parts.
    """

    def __init__(self, folder: Path | None, contents: Sequence[str], counts: Sequence[int]) -> None:
        self.folder, self.contents, self.counts = folder, contents, counts
        self.begins = np.cumsum([0, *counts])
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}
        for number in range(len(contents) if folder else 0):
            self._open(number)

    @property
    def missing(self) -> list[int]:
        """List the parts to do, of several with one content the first."""
        first: dict[str, int] = {}
        for number, content in enumerate(self.contents):
            first.setdefault(content, number)
        return [number for content, number in first.items() if content not in self._parts]

    def write(self, number: int, rows: Tensor, ids: Tensor, *, whole: bool = True) -> None:
        """Store a part, or hold it for this call where it is not whole, so that the next call reads it again.

        Args:
            rows: (n, F).
            ids: (n,) identity of each row, 0 of one that could not be made.

        Raises:
            UserError: the file cannot be written.
        """
        if self.folder is None or not whole:
            self._parts[self.contents[number]] = rows, ids
            return
        metadata = {"digest": _digest(rows, ids)}
        write_atomically(self._file(number), save({"rows": rows, "ids": ids}, metadata))
        self._open(number)

    @property
    def digest(self) -> str:
        """Digest model and contents."""
        return digest_of(self.folder and self.folder.name, list(self.contents))[:16]

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.contents[number]}.safetensors"

    def _open(self, number: int) -> None:
        """Map a part whose file is there and intact."""
        file = self._file(number)
        if not file.is_file():
            return
        try:
            with safe_open(file, "pt") as opened:
                rows, ids = opened.get_tensor("rows"), opened.get_tensor("ids")
                intact = opened.metadata()["digest"] == _digest(rows, ids)
            if not intact or len(rows) != self.counts[number]:
                raise ValueError("its content is not what was written")
        except Exception as error:
            log.warning("%s is damaged (%s); its features are made again.", file, first_line(error))
            return
        self._parts[self.contents[number]] = rows, ids

    # -----------------------------------------------------------------------------------------------------------------
    # Of a store that lacks no part
    # -----------------------------------------------------------------------------------------------------------------

    def _rows(self, number: int) -> Tensor:
        return self._parts[self.contents[number]][0]

    @property
    def width(self) -> int:
        """Return F."""
        return self._rows(0).shape[1]

    @property
    def size_bytes(self) -> int:
        """Count the bytes of all rows."""
        return int(self.begins[-1]) * self.width * self._rows(0).element_size()

    @cached_property
    def ids(self) -> np.ndarray:
        """Return the identity of each row (n,), 0 of one that could not be made, whose features are zeros."""
        return np.concatenate([self._parts[content][1].numpy() for content in self.contents])

    def blocks(self) -> Iterator[Tensor]:
        """Iterate over all rows in order, some thousand at a time."""
        for number in range(len(self.contents)):
            yield from self._rows(number).split(_BLOCK_ROWS)

    def take(self, rows: np.ndarray) -> Tensor:
        """Copy rows (b, F) by their ascending numbers (b,)."""
        ends = np.searchsorted(rows, self.begins)
        parts = [
            # By numpy: torch starts its threads for each part.
            self._rows(number).numpy()[rows[ends[number] : ends[number + 1]] - self.begins[number]]
            for number in np.flatnonzero(np.diff(ends)).tolist()
        ]
        return torch.from_numpy(np.concatenate(parts))


def _digest(rows: Tensor, ids: Tensor) -> str:
    flat = (tensor.contiguous().view(torch.uint8).reshape(-1) for tensor in (rows, ids))
    return digest_of(str(rows.dtype), list(rows.shape), *(tensor.numpy().data for tensor in flat))


class Parts(Protocol):
    """Pictures, or captions, in parts."""

    @property
    def contents(self) -> Sequence[str]:
        """Digest of each part."""

    @property
    def counts(self) -> Sequence[int]:
        """Count the rows of each part."""

    def read(self, part: int) -> Iterator[tuple[int, Any] | str]:
        """Yield (number in the part, picture or caption), without those that cannot be shown.

        At last comes the part's fault as a sentence, if the rest of the part could not be read.

        Raises:
            UserError: reading cannot go on.
        """


class Pictures:
    """Pictures that are read one by one, in runs that depend on the pictures alone: a new picture changes one run.

    Args:
        contents: digest of each picture.
        read_one: number -> picture; None for one that cannot be shown.
    """

    def __init__(self, contents: Sequence[str], read_one: Callable[[int], Any]) -> None:
        self.read_one = read_one
        self.runs: list[range] = []
        begin = 0
        for number, content in enumerate(contents, start=1):
            at_end = int(content[:8], 16) % RUN == 0 or number - begin == LONGEST_RUN
            if at_end or number == len(contents):
                self.runs.append(range(begin, number))
                begin = number
        self.contents = [digest_of([contents[number] for number in run]) for run in self.runs]
        self.counts = [len(run) for run in self.runs]

    def read(self, part: int) -> Iterator[tuple[int, Any]]:
        """Yield the pictures of a run."""
        for row, number in enumerate(self.runs[part]):
            if (picture := self.read_one(number)) is not None:
                yield row, picture


@dataclass
class Batch:
    """Some rows of a part.

    Attributes:
        rows: their numbers in the part (b,).
        inputs: pictures (b, 3, S, S) as the model sees them, or captions.
        ids: identity of each.
        fault: why the rest of the part could not be read.
        is_last: whether the part ends with it.
    """

    part: int
    rows: list[int] = field(default_factory=list)
    inputs: Any = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    fault: str = ""
    is_last: bool = False


class Batches(IterableDataset):
    """The batches of parts, each part by one worker, or a UserError in place of a batch if it cannot continue.

    Args:
        transform: PIL image -> picture (3, S, S); None for captions.
        identify: picture or caption -> its identity.
        batch_size: b.
    """

    def __init__(
        self,
        collection: Parts,
        parts: Sequence[int],
        transform: Callable[[Any], Tensor] | None,
        identify: Callable[[Any], int],
        batch_size: int,
    ) -> None:
        self.collection, self.parts = collection, parts
        self.transform, self.identify, self.batch_size = transform, identify, batch_size

    def __iter__(self) -> Iterator[Batch | UserError]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            for part in self.parts[first::step]:
                yield from self._batches(part)
        except UserError as error:  # raised in a worker, it would come out wrapped into a traceback
            yield error

    def _batches(self, part: int) -> Iterator[Batch]:
        batch = Batch(part)
        for item in self.collection.read(part):
            if isinstance(item, str):
                batch.fault = item
                break
            if len(batch.rows) == self.batch_size:
                yield self._as_seen(batch)
                batch = Batch(part)
            row, thing = item
            batch.rows.append(row)
            batch.ids.append(self.identify(thing))
            batch.inputs.append(thing if self.transform is None else self.transform(thing))
        batch.is_last = True
        yield self._as_seen(batch)

    def _as_seen(self, batch: Batch) -> Batch:
        if self.transform is not None and batch.inputs:
            batch.inputs = collate_images(batch.inputs)
        return batch


def embed(
    store: FeatureStore,
    model: FrozenModel,
    collection: Parts,
    *,
    width: int,
    dtype: torch.dtype = torch.float32,
    identify: Callable[[Any], int] = lambda _: 1,
    batch_size: int,
    workers: int = 0,
    share: tuple[int, int] = (0, 1),
    progress: bool = True,
    desc: str = "features",
) -> int:
    """Make and store the parts that a store lacks.

    Args:
        model: of pictures, or of captions, by the collection.
        width: of the model's features.
        identify: picture or caption -> its identity, which is not 0.
        batch_size: pictures or captions in the model at once.
        workers: loader processes.
        share: (i, n): of every n-th part from number i on, so that n processes share the work.

    Returns:
        How many rows were made.

    Raises:
        UserError: reading cannot go on; a model whose features are not finite, or too large for the dtype.
    """
    number, processes = share
    todo = [part for part in store.missing if part % processes == number]
    made = sum(store.counts[part] for part in todo)
    begun: dict[int, tuple[Tensor, Tensor]] = {}  # parts of several workers
    batches = Batches(collection, todo, model.picture_transform, identify, batch_size)
    with tqdm(
        total=made, desc=desc, unit=" rows", leave=False, disable=None if progress else True
    ) as bar:
        loaded = read_batches(batches, itemgetter(0), batch_size=1, num_workers=workers)
        for batch in loaded if todo else ():
            if batch.fault:
                tqdm.write(
                    f"{batch.fault}. The rest has no features; the next call reads it again."
                )
            count = store.counts[batch.part]
            if batch.part not in begun:
                empty = (
                    torch.zeros(count, width, dtype=dtype),
                    torch.zeros(count, dtype=torch.int64),
                )
                begun[batch.part] = empty
            rows, ids = begun[batch.part]
            if batch.rows:
                rows[batch.rows] = _finite(model.features(batch.inputs).cpu(), dtype, model)
                ids[batch.rows] = torch.tensor(batch.ids)
            if batch.is_last:
                store.write(batch.part, *begun.pop(batch.part), whole=not batch.fault)
            bar.update(len(batch.rows))
    return made


def _finite(features: Tensor, dtype: torch.dtype, model: FrozenModel) -> Tensor:
    """Return features as they are stored."""
    stored = features.to(dtype)
    if bool(torch.isfinite(stored).all()):
        return stored
    if bool(torch.isfinite(features).all()):
        raise UserError(
            f"the model {model.name} makes features up to {float(features.abs().max()):g}, too large for {dtype}; "
            "store them in float32 (--dtype)"
        )
    raise UserError(
        f"the model {model.name} makes NaN or infinite features: its training has diverged; look at its weights, or leave "
        "--amp out"
    )


def picture_features(
    model: FrozenModel,
    images: IndexedSet,
    folder: Path | None,
    *,
    batch_size: int,
    workers: int = 0,
    name: str = "features",
    progress: bool = True,
) -> Tensor:
    """Make, or read, the features (N, F) of a set's pictures, on the CPU.

    Args:
        folder: of any sets and models; None stores nothing.
        name: name of the set, for the progress bar, which `progress` shows.

    Raises:
        UserError: a picture that cannot be read, features that are not finite.
    """
    pictures = Pictures(images.contents(), images.image)
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "progress": progress}
    store, _ = embed_pictures(model, pictures, folder, desc=f"{name} features", **reading)
    return torch.cat([*store.blocks()])


def embed_pictures(
    model: FrozenModel, pictures: Parts, folder: Path | None, **reading: Any
) -> tuple[FeatureStore, int]:
    """Make the features (n, D) of pictures that are not stored yet below a folder of any pictures and models.

    Args:
        folder: None stores nothing.
        reading: arguments of `embed`.

    Returns:
        The features, and how many were made.

    Raises:
        UserError: as `embed`.
    """
    place = folder and folder / model.fingerprints["image"][:16]
    store = FeatureStore(place, pictures.contents, pictures.counts)
    return store, embed(store, model, pictures, width=model.image_width(), **reading)
