"""Indexed sets: pictures with their captions or their class, read by position, as evaluations need them.

A set is indexed once: keys, captions or classes, and where the bytes of each picture lie. No picture is decoded. Pictures are
then read by position, so that loader workers share nothing.

`open_probe_set` reads labelled pictures:

    DIR                         a folder of class folders, `DIR/CLASS/picture.jpg` (ImageNet ...)
    DIR                         an output of `zerovl data pack` with classes: its training or test split
    DIR or DIR/{000..146}.tar   webdataset shards with `key.jpg` and `key.cls` (a number, as CLIP_benchmark writes them),
                                or with the class in a field of `key.json`
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import regular_file
from open_clip_zerovl.core.identity import digest_of, file_digests
from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data.class_words import class_order, names_beside
from open_clip_zerovl.data.components import expand_shards, kind_of
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.splits import shards_of_split
from open_clip_zerovl.data.workers import ItemSet, read_batches
from open_clip_zerovl.shards.pictures import (
    IMAGE_EXTENSIONS,
    PICTURE_WORDS,
    BadPicture,
    list_pictures,
    notes_of,
)
from open_clip_zerovl.shards.tar import (
    TEXT_EXTENSION,
    ShardError,
    content_of,
    image_of,
    locate_samples,
    opened,
    why_no_pairs,
)
from open_clip_zerovl.shards.urls import local_path


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a range of bytes of a file, with its captions or its class.

    Attributes:
        key: the key of a tar's sample, the id of the image in annotations, or the name of the file.
        size_bytes: -1 for the rest of the file, of a picture that is a file of its own.
        label: the class, by name (or by number, as text).
        source: the source or the set that the picture belongs to, where pictures of several lie together.
    """

    key: str
    file: str | os.PathLike[str]
    offset_bytes: int = 0
    size_bytes: int = -1
    captions: tuple[str, ...] = ()
    label: str = ""
    source: str = ""

    def content(self) -> bytes:
        """Read the encoded picture. OSError if it cannot be read."""
        with regular_file(self.file) as file:
            file.seek(self.offset_bytes)
            return file.read(self.size_bytes)


@dataclass(frozen=True)
class IndexedSet:
    """The pictures of a set.

    Attributes:
        path: the path of the set, for messages and stored features.
        names: class label -> the words for it in pictures, if they differ from the label.
    """

    path: str
    samples: Sequence[Picture] = field(repr=False)
    names: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Count the pictures."""
        return len(self.samples)

    def image(self, index: int) -> Image.Image:
        """Decode the picture as RGB. UserError with file and key if it cannot be read or decoded."""
        sample = self.samples[index]
        try:
            return decode_image(sample.content())
        except (OSError, BadPicture) as error:
            raise UserError(
                f"{sample.file}: the image of sample {sample.key!r} cannot be read ({error}); mend or remove it"
            ) from error

    @cached_property
    def labels(self) -> list[str]:
        """List the class of each picture."""
        return [sample.label for sample in self.samples]

    @cached_property
    def files(self) -> list[str]:
        """List the files that hold the pictures, each once."""
        return list(dict.fromkeys(os.fspath(sample.file) for sample in self.samples))

    def captions(self, captions_per_image: int | None = None) -> list[tuple[str, ...]]:
        """List the captions of each picture, or the first `captions_per_image` of them."""
        return [sample.captions[:captions_per_image] for sample in self.samples]

    def part(self, rank: int, world_size: int) -> IndexedSet:
        """Take the share of a rank: consecutive pictures, so that the parts of all ranks in order are the set."""
        begin, end = (len(self) * r // world_size for r in (rank, rank + 1))
        return replace(self, samples=self.samples[begin:end])

    def in_files(self, paths: Iterable[str]) -> int:
        """Count the pictures that lie in one of these files, all of them if the set itself is one (a table)."""
        files = {os.path.realpath(path) for path in set(paths)}
        if os.path.realpath(self.path) in files:
            return len(self)
        # Pictures in files of their own are left out: there may be very many of them, and no path of a source is a picture.
        tars = {sample.file for sample in self.samples if sample.size_bytes >= 0}
        shared = {file for file in tars if os.path.realpath(file) in files}
        return sum(sample.file in shared for sample in self.samples)

    def contents(self) -> list[str]:
        """Digest each picture, by its file and its place there."""
        digests = file_digests(self.files)
        return [
            digest_of(digests[os.fspath(sample.file)], sample.offset_bytes)
            for sample in self.samples
        ]

    def content(self) -> str:
        """Digest pictures, captions and classes, so that a copy is the same set."""
        samples = [[sample.captions, sample.label, sample.source] for sample in self.samples]
        return digest_of(self.contents(), samples, dict(self.names))


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


class _Transformed(ItemSet):
    """(transformed picture, its number) of the pictures of a set."""

    def __init__(
        self,
        dataset: IndexedSet,
        transform: Callable[[Any], Tensor],
        seed_of: Callable[[int], int] | None,
    ) -> None:
        self.dataset = dataset
        self.transform = transform
        self.seed_of = seed_of

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Tensor, int]:
        image = self.dataset.image(index)
        with nullcontext() if self.seed_of is None else seeded(self.seed_of(index)):
            return self.transform(image), index


def _collate(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, list[int]]:
    return torch.stack([image for image, _ in items]), [index for _, index in items]


def picture_batches(
    dataset: IndexedSet,
    transform: Callable[[Any], Tensor],
    *,
    seed_of: Callable[[int], int] | None = None,
    **loader_options: Any,
) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield (pictures (b, 3, H, W), their numbers), in the set's order unless `loader_options` order them in another way.

    Args:
        transform: image -> (3, H, W).
        seed_of: number of a picture -> the seed under which it is transformed; None for a transform that draws nothing.
        loader_options: keyword arguments of torch's DataLoader: `batch_size` or `batch_sampler`, `num_workers`.

    Raises:
        UserError: a picture that cannot be read, named by file and key.
    """
    yield from read_batches(_Transformed(dataset, transform, seed_of), _collate, **loader_options)


# ---------------------------------------------------------------------------------------------------------------------
# Tars
# ---------------------------------------------------------------------------------------------------------------------


def index_shards(
    shards: Iterable[str],
    member: str,
    order: Sequence[str] = IMAGE_EXTENSIONS,
    advice: str = "mend or remove it",
) -> Iterator[tuple[Picture, bytes]]:
    """Yield (picture, content of its member of this suffix) of each sample of local tars, from their headers.

    Args:
        order: which of several pictures of a sample is taken.
        advice: what to do about a sample without the member.

    Raises:
        UserError: a shard that is missing, or not a whole, uncompressed tar; a sample without a picture or without the member.
    """
    for shard in shards:
        path = local_path(shard)
        if path is None:
            raise UserError(
                f"{shard} is remote, and its images are read by position; copy it to a disk"
            )
        if not os.path.isfile(path):
            raise UserError(
                f"shard {path} does not exist; correct the path, or the number or the list of shards"
            )
        try:
            with opened(path) as descriptor:
                for key, members in locate_samples(path, whole=True):
                    image = image_of(members, order)
                    if image is None or member not in members:
                        lacks = f"image ({PICTURE_WORDS})" if image is None else f".{member}"
                        why = why_no_pairs(path) if member == TEXT_EXTENSION else ""
                        raise UserError(f"{path}: sample {key!r} has no {lacks}; {why or advice}")
                    sample = Picture(key, Path(path), image.offset, image.size)
                    yield sample, content_of(descriptor, members[member])
        except ShardError as error:
            raise UserError(
                f"{path} is not a readable, uncompressed tar ({error}): fetch or write it again; pairs of another "
                f"form become tars with `zerovl data pack {path} --out DIR`"
            ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Labelled pictures
# ---------------------------------------------------------------------------------------------------------------------


def class_list(train: IndexedSet, test: IndexedSet) -> list[str]:
    """Return the classes of the training set in the order of `class_order`.

    Raises:
        UserError: one class only, or a class of the test set that the training set lacks.
    """
    classes = sorted(set(train.labels), key=class_order)
    if len(classes) < 2:
        raise UserError(
            f"{train.path} has the one class {classes[0]!r}; a probe needs at least two to tell apart"
        )
    if unknown := sorted(set(test.labels) - set(classes)):
        raise UserError(
            f"{test.path} has {len(unknown)} classes that {train.path} lacks, first {unknown[0]!r}; give a training and "
            "a test set of the same classes"
        )
    return classes


def open_probe_set(spec: str | os.PathLike[str], role: str, *, label: str = "cls") -> IndexedSet:
    """Index a labelled set of one of the forms that the module's text lists.

    Args:
        role: `train` or `test`; it chooses the split of a packed folder.
        label: where shards keep the class: `cls`, or `json:FIELD`.

    Raises:
        UserError: a path that is not there or holds nothing, a sample without image or class.
    """
    spec = os.fspath(spec)
    path = Path(spec).expanduser()
    if path.is_dir() and kind_of(str(path)).kind == "packed":
        path = path / role
    in_folders = path.is_dir() and not any(path.glob("*.tar"))
    if label != "cls" and in_folders:
        raise UserError(
            f"--label {label} is for shards, and {spec} has a folder for each class; leave it out"
        )
    if in_folders:
        return _read_folder(path)
    return _read_shards(spec, shards_of_split(expand_shards(str(path)), role), label)


def _of_files(
    path: str, files: Sequence[str | os.PathLike[str]], labels: Sequence[str]
) -> IndexedSet:
    """Make a set of pictures that are files of their own."""
    pairs = zip(files, labels, strict=True)
    return IndexedSet(
        path, [Picture(os.path.basename(file), file, label=label) for file, label in pairs]
    )


def _read_folder(path: Path) -> IndexedSet:
    classes = sorted(
        entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    listed = {name: list_pictures(path / name, path) for name in classes}
    pictures = [(file, name) for name, each in listed.items() for file in each.pictures]
    if not pictures:
        raise UserError(
            f"{path} is not a folder of class folders (no picture in {', '.join(classes[:5]) or 'a folder'}); expected "
            f"{path}/CLASS/PICTURE.jpg"
        )
    for note in notes_of(listed):
        logging.warning(f"{path}: {note}")
    labels = sorted({name for _, name in pictures}, key=class_order)
    files = _of_files(str(path), [file for file, _ in pictures], [name for _, name in pictures])
    return replace(files, names=names_beside(path, labels))


# ---------------------------------------------------------------------------------------------------------------------
# Shards
# ---------------------------------------------------------------------------------------------------------------------


def _read_shards(spec: str, shards: Sequence[str], label: str) -> IndexedSet:
    """Index the pictures of shards. Only tar headers and classes are read here, and a picture on access."""
    kind, _, name = label.partition(":")
    other = "json:FIELD" if kind == "cls" else "cls"
    advice = f"if the class is elsewhere, give --label {other} (zero-shot and linear-probe have it)"
    samples = [
        replace(sample, label=_class(content, name, f"{sample.key}.{kind} of {sample.file}"))
        for sample, content in index_shards(shards, kind, advice=advice)
    ]
    if not samples:
        raise UserError(f"the shards of {spec} hold no image ({PICTURE_WORDS})")
    names = names_beside(Path(shards[0]).parent) if kind == "cls" else {}
    return IndexedSet(spec, samples, names)


def _class(content: bytes, name: str, where: str) -> str:
    try:
        if not name:
            return str(int(content.decode().strip()))
        value = json.loads(content)[name]
    except (ValueError, KeyError, TypeError) as error:
        expected = f"JSON with a field {name!r}" if name else "a class number"
        raise UserError(f"{where} is not {expected}") from error
    if not isinstance(value, (str, int)):
        raise UserError(
            f"the field {name!r} of {where} is {value!r}; a class is a word or a number"
        )
    return str(value)
