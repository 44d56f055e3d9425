"""Embeddings of a collection's pictures, computed once and kept.

    CACHE/COLLECTION-MODEL/     an `embeddings.store`: 0.images (P, D) in float32

`P` pictures, `D` embedding width. The folder's name is a hash of the collection's path, the image tower and its transform, so
that another model, or the same one trained further, finds nothing of the first. A picture counts as embedded while its file has
the size and modification time with which it was embedded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable
from open_clip_zerovl.data.collection import Collection
from open_clip_zerovl.data.images import BadImage, decode_image
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.embeddings.reading import Lost, Sample
from open_clip_zerovl.embeddings.store import Rows
from open_clip_zerovl.evaluate.embedded import embedded, folder_name


@dataclass(frozen=True)
class Embedded:
    """The pictures of a collection that can be searched.

    Attributes:
        rows: (P, D), L2-normalised; a row of zeros for a picture that cannot be decoded, or is not there.
        sizes: pictures of each file of the collection.
        computed: pictures that this call has embedded or found bad; the rest was stored before.
    """

    rows: Rows
    sizes: list[int]
    computed: int

    def place(self, row: int) -> tuple[int, int]:
        """(file's number in the collection, number of the picture in the file) of a row."""
        ends = list(accumulate(self.sizes))
        file = next(number for number, end in enumerate(ends) if row < end)
        return file, row - ends[file] + self.sizes[file]


def default_cache() -> Path:
    """Where embeddings are kept unless a place is given: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zerovl" / "search"


class _Pictures:
    """The pictures of a collection (`embeddings.reading.Collection`)."""

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        self.sizes = [1] * len(collection.files)
        if collection.shards is not None:
            self.sizes = [source.sizes[shard] for source, shard in collection.shards]
        self._begins = [0, *accumulate(self.sizes)]

    def read(self, file: int) -> Iterator[Sample | Lost]:
        seen = 0
        for row, (_, content) in enumerate(self.collection.pictures(file), self._begins[file]):
            seen += 1
            if seen > self.sizes[file]:
                break
            try:
                if content is None:
                    yield Lost(self.collection.name, "no picture")
                else:
                    yield Sample(row, [decode_image(content)])
            except BadImage as error:
                yield Lost(self.collection.name, error.fault.reason)
        if seen != self.sizes[file]:
            raise UserError(
                f"{self.collection.files[file].path} does not hold the {self.sizes[file]} samples that were counted: correct "
                "its entry in sizes.json, or remove the entry to have the shard counted"
            )


def embed_collection(
    collection: Collection,
    model: FrozenModel,
    *,
    cache: Path,
    batch_size: int = 64,
    workers: int = 0,
    name: str = "model",
) -> Embedded:
    """Embeds the pictures that the cache does not hold yet, and returns all.

    Args:
        cache: the folder of all collections and models.
        workers: loader processes.
        name: name of the model, for the progress bar.

    Raises:
        UserError: a cache that cannot be written, a shard that cannot be read, no picture that can be decoded, or a model whose
            embeddings are not finite.
    """
    pictures = _Pictures(collection)
    marks = [[file.path, file.size, file.changed_ns] for file in collection.files]
    fingerprint, where = model.fingerprints["image"], os.path.abspath(os.path.expanduser(collection.name))
    check_writable(cache, folder=True)
    store, computed = embedded(
        cache / folder_name(fingerprint, where),
        "search",
        model,
        pictures,
        marks,
        [fingerprint],
        name=where,
        batch_size=batch_size,
        workers=workers,
        desc=name,
    )
    return Embedded(store.rows["0.images"], pictures.sizes, computed)
