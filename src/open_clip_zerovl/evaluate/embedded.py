"""Embeddings that an evaluation computes once and keeps on disk (`features.store`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from open_clip_zerovl.core.identity import digest_of
from open_clip_zerovl.data.indexed import IndexedSet
from open_clip_zerovl.features import reading
from open_clip_zerovl.features.embed import embed
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.features.reading import Embeddable, EmbeddableFiles, Listed
from open_clip_zerovl.features.store import WEIGHTS, ArraySpec, Manifest, Store


def embedded(
    folder: Path,
    use: str,
    model: FrozenModel,
    collection: EmbeddableFiles,
    file_versions: Sequence[Any],
    fingerprints: Sequence[str],
    *,
    name: str,
    captions: int = 0,
    batch_size: int = 64,
    workers: int = 0,
    desc: str | None = None,
    progress: bool = True,
) -> tuple[Store, int]:
    """Embed a collection by one model: read from a folder, and complete where rows are missing or out of date.

    Args:
        folder: folder of these embeddings alone.
        use: name of the program that reads them.
        file_versions: one for each file of the collection, which changes with the file.
        fingerprints: digests of model, transform and precision.
        name: name of the collection.
        captions: number of its captions; 0 embeds pictures alone.
        workers: loader processes.
        desc: for the progress bar, which `progress` shows.

    Returns:
        The store, with `0.images` (n, D) and `0.texts` (captions, D) in float32, and how many samples this call embedded.

    Raises:
        UserError: a folder that cannot be written, a sample that cannot be read, embeddings that are not finite.
    """
    width = model.image_width()
    arrays: dict[str, ArraySpec] = {"0.images": ("float32", (sum(collection.sizes), width))}
    if captions:
        arrays["0.texts"] = ("float32", (captions, width))
    source = {
        "name": name,
        "marks": list(file_versions),
        "sizes": list(collection.sizes),
        "picked": None,
    }
    manifest = Manifest({"use": use, WEIGHTS: list(fingerprints)}, [source], arrays)
    # Each sample has a caption at least, so that as many captions as samples are one each, and their rows are by sample.
    store = Store.create(folder, manifest, cache=True)
    if left := int((~store.done).sum()):
        embed(
            store,
            [model],
            collection,
            batch_size=batch_size,
            workers=workers,
            desc=desc or name,
            progress=progress,
        )
    return store, left


def picture_features(
    model: FrozenModel,
    images: IndexedSet,
    folder: Path,
    *,
    batch_size: int,
    workers: int = 0,
    name: str = "features",
    progress: bool = True,
) -> Tensor:
    """Embed the pictures (N, D) of a labelled set, on the CPU.

    Computed once and kept below `folder`.

    The name of their folder has a hash of the model's digest and of the set's content.

    Args:
        name: name of the set, for the folder and the progress bar, which `progress` shows.

    Raises:
        UserError: an image that cannot be read, embeddings that are not finite.
    """
    digests = [images.content(), model.fingerprints["image"]]
    pictures = Listed(
        len(images), lambda row: Embeddable(row, [images.image(row)]), reading.UNIT_SAMPLES
    )
    store, _ = embedded(
        Path(folder) / f"{name}-{digest_of(digests)[:16]}",
        "a labelled set",
        model,
        pictures,
        [[digests[0]]] * len(pictures.sizes),
        digests,
        name=name,
        batch_size=batch_size,
        workers=workers,
        desc=f"{name} features",
        progress=progress,
    )
    return store.rows["0.images"][:]
