"""Retrieval sets as a loader reads them: images, each with its captions.

A set is indexed once: keys, captions, and where the bytes of each image lie. Images are then read by position, so that loader
workers share nothing. `formats` reads the layouts on disk; a new layout is one more entry of `RETRIEVAL_FORMATS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import regular_file
from open_clip_zerovl.data.images import BadImage, decode_image
from open_clip_zerovl.data.items import ItemSet, read_batches
from open_clip_zerovl.evaluate.retrieval.formats import (
    RETRIEVAL_FORMATS,
    RetrievalFormat,
    RetrievalSample,
    split_location,
)
from open_clip_zerovl.shards.urls import REMOTE

__all__ = [
    "RETRIEVAL_FORMATS",
    "RetrievalFormat",
    "RetrievalSample",
    "RetrievalSet",
    "check_captions_per_image",
    "open_retrieval_set",
    "parse_retrieval_data",
    "retrieval_batches",
]

# A set's name becomes part of metric names and of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class RetrievalSet:
    """The images and captions of one split.

    Attributes:
        path: of the set, for messages.
        split: test, val or train.
        samples: one for each image.
    """

    path: Path
    split: str
    samples: list[RetrievalSample] = field(repr=False)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.samples)

    def num_captions(self, captions_per_image: int | None = None) -> int:
        """Number of captions, counting the first `captions_per_image` of each image (None: all)."""
        return sum(len(sample.captions[:captions_per_image]) for sample in self.samples)

    def part(self, rank: int, world_size: int) -> RetrievalSet:
        """The share of a rank: consecutive images, so that the parts of all ranks in order are the set."""
        begin, end = (len(self) * r // world_size for r in (rank, rank + 1))
        return replace(self, samples=self.samples[begin:end])

    def in_files(self, paths: Iterable[str]) -> int:
        """Number of images that lie in one of these files; all, if the set itself is one of them (a table)."""
        files = {os.path.realpath(path) for path in set(paths)}
        if os.path.realpath(self.path) in files:
            return len(self)
        # Pictures in files of their own are left out: there may be very many of them, and no path of a source is a picture.
        tars = {sample.file for sample in self.samples if sample.size_bytes >= 0}
        held = {file for file in tars if os.path.realpath(file) in files}
        return sum(sample.file in held for sample in self.samples)

    def read_image(self, index: int) -> Image.Image:
        """The image as RGB. UserError with file and key where it cannot be read or decoded."""
        sample = self.samples[index]
        try:
            with regular_file(sample.file) as file:
                file.seek(sample.offset_bytes)
                return decode_image(file.read(sample.size_bytes))
        except (OSError, BadImage) as error:
            raise UserError(f"{sample.file}: the image of sample '{sample.key}' cannot be read ({error})") from error


def check_captions_per_image(captions_per_image: int | None) -> None:
    """UserError for a number below 1; None means all captions."""
    if captions_per_image is not None and captions_per_image < 1:
        raise UserError(f"captions_per_image must be at least 1, or None for all, got {captions_per_image}")


Item = tuple[Tensor, tuple[str, ...]]
Batch = tuple[Tensor, list[tuple[str, ...]]]


class _TransformedSet(ItemSet):
    """Transformed images and captions of a retrieval set."""

    def __init__(self, dataset: RetrievalSet, preprocess: Callable[[Any], Tensor], captions_per_image: int | None):
        self.dataset = dataset
        self.preprocess = preprocess
        self.captions_per_image = captions_per_image

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> Item:
        image = self.preprocess(self.dataset.read_image(index))
        return image, self.dataset.samples[index].captions[: self.captions_per_image]


def _collate(items: Sequence[Item]) -> Batch:
    return torch.stack([image for image, _ in items]), [captions for _, captions in items]


def retrieval_batches(
    dataset: RetrievalSet,
    preprocess: Callable[[Any], Tensor],
    *,
    captions_per_image: int | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Yields (images (b, 3, H, W), for each image its captions) in the set's order; the last batch may be smaller.

    Args:
        preprocess: image -> (3, H, W).
        captions_per_image: keep the first so many captions of each image; None keeps all.
        batch_size: images of a batch.
        num_workers: loader processes.

    Raises:
        UserError: an image that cannot be read, named by file and key.
    """
    check_captions_per_image(captions_per_image)
    transformed = _TransformedSet(dataset, preprocess, captions_per_image)
    yield from read_batches(transformed, _collate, batch_size=batch_size, num_workers=num_workers)


def parse_retrieval_data(spec: str) -> dict[str, Path]:
    """`"coco=/data/coco::f30k=/data/f30k"` -> {"coco": Path, "f30k": Path}, in open_clip's `::` syntax.

    A set without a name takes that of its folder, of its file of annotations without the ending, or of its shards' folder.

    Raises:
        UserError: an empty entry, a name with other characters than letters, digits and ._-, or a name given twice.
    """
    sets: dict[str, Path] = {}
    for entry in spec.split("::"):
        name, equals, path = entry.strip().partition("=")
        # After a slash an equals sign is part of the path.
        if not equals or "/" in name:
            name, path = "", entry.strip()
        if not path:
            raise UserError(f"retrieval data '{spec}' has an empty entry: write name=folder::name=folder")
        folder = Path(path).expanduser()
        annotations, _ = split_location(folder)
        named = annotations.absolute()
        named = named.parent if named.suffix == ".tar" or "{" in named.name else named
        name = name or re.sub(r"\.(json|csv|tsv)$", "", named.name, flags=re.IGNORECASE)
        if not _NAME.fullmatch(name):
            raise UserError(f"'{name}' cannot name a retrieval set: use letters, digits, '.', '_' and '-'")
        if name in sets:
            raise UserError(
                f"two retrieval sets are named '{name}' ({sets[name]} and {folder}): name them, a={sets[name]}::b=..."
            )
        sets[name] = folder
    return sets


def open_retrieval_set(path: str | os.PathLike[str], split: str = "test") -> RetrievalSet:
    """Indexes a retrieval set.

    Args:
        path: of one of `RETRIEVAL_FORMATS`; for annotations `ANNOTATIONS@PICTURES` names the folder of pictures.
        split: test, val or train.

    Raises:
        UserError: a path that does not exist or is of no known format, a missing or wrong number of shards, a shard that is no
            tar, annotations of another form, a sample without captions or image; the sentence names file and key.
    """
    if REMOTE.match(os.fspath(path)):
        raise UserError(f"retrieval set {path} is remote, and its images are read by position; copy it to a disk")
    path, pictures = split_location(Path(path).expanduser())
    if not path.exists() and "{" not in str(path):
        raise UserError(f"retrieval set {path} does not exist")
    for retrieval_format in RETRIEVAL_FORMATS:
        if retrieval_format.recognises(path):
            return RetrievalSet(path=path, split=split, samples=retrieval_format.read(path, pictures, split))
    known = "; ".join(retrieval_format.description for retrieval_format in RETRIEVAL_FORMATS)
    raise UserError(f"{path} is no retrieval set in a known format; known: {known}")
