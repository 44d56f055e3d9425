"""Embed a collection by frozen models into a store, unit by unit.

    batches (reading) --pictures--> N.images (n, [V,] D)     N: number of the model
                      --captions--> N.texts (T, D)

`n` samples, `V` views of each picture, `T` captions, `D` width of a model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import free_space
from open_clip_zerovl.data.workers import read_batches
from open_clip_zerovl.features.encoder import CPU_PICTURES, FrozenModel
from open_clip_zerovl.features.reading import Batches, EmbeddableBatch, EmbeddableFiles, units_of
from open_clip_zerovl.features.store import Manifest, Store


def missing_units(
    store: Store, sizes: Sequence[int], part: tuple[int, int] = (0, 1)
) -> list[list[int]]:
    """The files of each unit that lack rows in a store.

    Args:
        sizes: samples of each file.
        part: (i, n): of every n-th unit from number i on, so that n calls share the work.
    """
    begins = np.cumsum([0, *sizes])
    number, parts = part
    todo = (
        [file for file in unit if not store.done[begins[file] : begins[file + 1]].all()]
        for unit in units_of(sizes)[number::parts]
    )
    return [unit for unit in todo if unit]


def embed(
    store: Store,
    models: Sequence[FrozenModel],
    collection: EmbeddableFiles,
    *,
    batch_size: int,
    workers: int = 0,
    part: tuple[int, int] = (0, 1),
    progress: bool = True,
    desc: str = "embeddings",
) -> dict[str, dict[str, int]]:
    """Write the rows that a store lacks. A call that was killed continues when it is made again.

    Args:
        store: made with "r+"; its arrays `N.images` and `N.texts` are the outputs of model N.
        batch_size: samples, and captions, in a model at once.
        workers: loader processes.
        part: see `missing_units`.

    Returns:
        Samples that could not be shown: source -> reason -> count.

    Raises:
        UserError: a sample that cannot be read, where the collection is strict; a model whose embedding of one is not finite,
            or too large for the store's dtype.
    """
    units = missing_units(store, collection.sizes, part)
    transforms = [
        model.picture_transform for model in models if model.picture_transform is not None
    ]
    begins = np.cumsum([0, *collection.sizes])
    lost: dict[str, dict[str, int]] = {}
    total = sum(collection.sizes[file] for unit in units for file in unit)
    bar = tqdm(
        total=total, desc=desc, unit=" samples", leave=False, disable=None if progress else True
    )
    try:
        batches = Batches(collection, units, transforms, batch_size)
        for batch in read_batches(batches, itemgetter(0), batch_size=1, num_workers=workers):
            for missing in batch.lost:
                if missing.note is not None:
                    tqdm.write(f"{missing.note}. Its samples get no embeddings.")
                of_source = lost.setdefault(missing.source, {})
                of_source[missing.reason] = of_source.get(missing.reason, 0) + missing.count
            for number, model in enumerate(models):
                _encode(store, number, model, batch, batch_size)
            for file in batch.finished:
                store.finish(slice(int(begins[file]), int(begins[file + 1])))
            bar.update(len(batch.rows))
    finally:
        bar.close()
        store.flush()
    return lost


def _encode(
    store: Store, number: int, model: FrozenModel, batch: EmbeddableBatch, size: int
) -> None:
    images, texts = store.rows.get(f"{number}.images"), store.rows.get(f"{number}.texts")
    if images is not None and batch.rows:
        parts = [model.images(part).cpu() for part in batch.pictures[number].split(size)]
        features = _finite(torch.cat(parts), images.dtype, model, batch)
        images[batch.rows] = features.reshape(len(batch.rows), *images.array.shape[1:])
    if texts is not None and batch.captions:
        parts = [
            model.texts(batch.captions[at : at + size]).cpu()
            for at in range(0, len(batch.captions), size)
        ]
        texts[batch.caption_rows] = _finite(torch.cat(parts), texts.dtype, model, batch)


def _finite(rows: Tensor, dtype: torch.dtype, model: FrozenModel, batch: EmbeddableBatch) -> Tensor:
    """The rows as they are stored."""
    stored = rows.to(dtype)
    if not bool(torch.isfinite(stored).all()):
        if bool(torch.isfinite(rows).all()):
            raise UserError(
                f"the model {model.name} makes embeddings up to {float(rows.abs().max()):g}, too large for {dtype}; "
                "store them in float32 (--dtype)"
            )
        raise UserError(
            f"the model {model.name} makes NaN or infinite embeddings of a sample between numbers {batch.rows[0]} and "
            f"{batch.rows[-1]}: its training has diverged; look at its weights, or leave --amp out"
        )
    return stored


# ---------------------------------------------------------------------------------------------------------------------
# Before the work
# ---------------------------------------------------------------------------------------------------------------------


def require_room(folder: Path, manifest: Manifest) -> None:
    """UserError if the embeddings do not fit on the disk of a folder that need not exist yet."""
    place, free = free_space(folder)
    if manifest.bytes > free:
        raise UserError(
            f"the embeddings take {size_words(manifest.bytes)}, and {place} has {size_words(free)} free; take fewer views, or "
            "a larger disk"
        )


def estimated_seconds(
    model: FrozenModel, collection: EmbeddableFiles, units: Sequence[Sequence[int]], batch_size: int
) -> float:
    """Seconds in which one process reads and encodes some units, from those of the first batch of the first unit.

    That batch is encoded twice, since the first time warms up; on a CPU as many samples as one forward pass takes.
    """
    if model.device.type == "cpu":
        batch_size = min(batch_size, CPU_PICTURES)
    transforms = [] if model.picture_transform is None else [model.picture_transform]
    begin = time.perf_counter()
    for _ in range(2):
        begin = time.perf_counter()
        batch = next(iter(Batches(collection, units[:1], transforms, batch_size)))
        if isinstance(batch, UserError):
            return 0.0  # `embed` raises it
        if batch.pictures:
            model.images(batch.pictures[0]).cpu()
        if model.text_tower is not None and batch.captions:
            model.texts(batch.captions).cpu()
    seconds = time.perf_counter() - begin
    left = sum(collection.sizes[file] for unit in units for file in unit)
    return seconds * left / min(batch_size, left)


def size_words(count: int) -> str:
    """Bytes in words: "3.5 GiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
