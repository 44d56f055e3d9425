"""Sets of pictures with their captions or their class, read by position, as evaluations need them.

A set is indexed once: keys, captions or classes, and where the bytes of each picture lie. No picture is decoded. Pictures are
then read by position, so that loader workers share nothing.

`open_probe_set` reads labelled pictures:

    DIR                         a folder of class folders, `DIR/CLASS/picture.jpg` (ImageNet ...)
    DIR                         an output of `zerovl data pack` with classes: its training or test split
    DIR or DIR/{000..146}.tar   webdataset shards with `key.jpg` and `key.cls` (a number, as CLIP_benchmark writes them),
                                or with the class in a field of `key.json`

`open_retrieval_set` reads pictures with captions:

    FOLDER                      CLIP_benchmark's layout, so that one folder serves both programs: `dataset_type.txt` with the
                                word "retrieval", the number of shards in `SPLIT/nshards.txt`, `SPLIT/0.tar` ... with samples of
                                KEY.(webp|png|jpg|jpeg) and KEY.txt, a caption a line
    DIR or DIR/{000..146}.tar   shards as training reads them, one split unless their names say several (`splits`)
    ANNOTATIONS@PICTURES        Karpathy's `dataset_coco.json` or `dataset_flickr30k.json`, and the folder of its pictures;
                                without it they lie beside the file, or in `images/` beside it

Tables become shards before they come here (`prepare.door`). Each picture is looked up, so that a missing one is named before a
model is loaded.
"""

from __future__ import annotations

import filecmp
import json
import logging
import os
import re
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
from open_clip_zerovl.core.files import digest_of, file_digests, regular_file
from open_clip_zerovl.core.randomness import seeded
from open_clip_zerovl.data.components import Component, expand_shards, kind_of, packed_folders
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.names import class_order, names_beside
from open_clip_zerovl.data.splits import shards_of_split, split_of_word
from open_clip_zerovl.data.workers import ItemSet, read_batches
from open_clip_zerovl.shards.files import RETRIEVAL_MARK, SHARD_COUNT
from open_clip_zerovl.shards.pictures import (
    IMAGE_EXTENSIONS,
    PICTURE_WORDS,
    BadPicture,
    list_pictures,
    notes_of,
)
from open_clip_zerovl.shards.tar import (
    CLIP_BENCHMARK_ORDER,
    TEXT_EXTENSION,
    ShardError,
    image_of,
    locate_samples,
    why_no_pairs,
)
from open_clip_zerovl.shards.texts import (
    BadCaption,
    caption_lines,
    caption_of,
    json_array,
    open_member,
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
            for key, members in locate_samples(path, whole=True):
                image = image_of(members, order)
                if image is None or member not in members:
                    lacks = f"image ({PICTURE_WORDS})" if image is None else f".{member}"
                    why = why_no_pairs(path) if member == TEXT_EXTENSION else ""
                    raise UserError(f"{path}: sample {key!r} has no {lacks}; {why or advice}")
                sample = Picture(key, Path(path), image.offset, image.size)
                yield sample, members[member].content()
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
    return _read_labelled(spec, shards_of_split(expand_shards(str(path)), role), label)


def _read_folder(path: Path) -> IndexedSet:
    classes = sorted(
        entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    listed = {name: list_pictures(path / name, path) for name in classes}
    pictures = [
        Picture(file.name, file, label=name)
        for name, each in listed.items()
        for file in each.pictures
    ]
    if not pictures:
        raise UserError(
            f"{path} is not a folder of class folders (no picture in {', '.join(classes[:5]) or 'a folder'}); expected "
            f"{path}/CLASS/PICTURE.jpg"
        )
    for note in notes_of(listed):
        logging.warning(f"{path}: {note}")
    labels = sorted({picture.label for picture in pictures}, key=class_order)
    return IndexedSet(str(path), pictures, names_beside(path, labels))


# ---------------------------------------------------------------------------------------------------------------------
# Shards
# ---------------------------------------------------------------------------------------------------------------------


def _read_labelled(spec: str, shards: Sequence[str], label: str) -> IndexedSet:
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


# ---------------------------------------------------------------------------------------------------------------------
# Retrieval sets
# ---------------------------------------------------------------------------------------------------------------------

CaptionedBatch = tuple[Tensor, list[tuple[str, ...]]]


def retrieval_batches(
    dataset: IndexedSet,
    preprocess: Callable[[Any], Tensor],
    *,
    captions_per_image: int | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
) -> Iterator[CaptionedBatch]:
    """Yield (images (b, 3, H, W), for each image its captions) in the set's order. The last batch may be smaller.

    Args:
        preprocess: image -> (3, H, W).
        captions_per_image: captions to keep of each image, from the first on; None keeps all.
        batch_size: images of a batch.
        num_workers: loader processes.

    Raises:
        UserError: an image that cannot be read, named by file and key; captions_per_image below 1.
    """
    loading: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
    captions = dataset.captions(captions_per_image)
    for images, rows in picture_batches(dataset, preprocess, **loading):
        yield images, [captions[row] for row in rows]


def parse_retrieval_data(spec: str) -> dict[str, Path]:
    """Parse `"coco=/data/coco::f30k=/data/f30k"`, also of labelled sets, to {"coco": Path, "f30k": Path}.

    A set without a name takes that of its folder, of its file of annotations without the ending, or of its shards' folder.

    Raises:
        UserError: an empty entry, or a name given twice.
    """
    sets: dict[str, Path] = {}
    for entry in spec.split("::"):
        name, equals, path = entry.strip().partition("=")
        # After a slash an equals sign is part of the path.
        if not equals or "/" in name:
            name, path = "", entry.strip()
        if not path:
            raise UserError(
                f"the list of sets '{spec}' has an empty entry: write name=folder::name=folder"
            )
        folder = Path(path).expanduser()
        named = bool(name)
        if not named:
            place = folder if folder.is_dir() else Path(kind_of(str(folder)).path)
            place = place.absolute()
            place = place.parent if place.suffix == ".tar" or "{" in place.name else place
            name = re.sub(r"\.(json|csv|tsv)$", "", place.name, flags=re.IGNORECASE)
        places = {name: folder}
        if folder.is_dir() and kind_of(str(folder)).kind == "packed":
            places = {
                (f"{name}-{source}" if named and source else source or name): place
                for source, place in packed_folders(folder).items()
            }
        for of_set, place in places.items():
            if of_set in sets:
                raise UserError(
                    f"two sets are named '{of_set}' ({sets[of_set]} and {place}): name them, a={sets[of_set]}::b=..."
                )
            sets[of_set] = place
    return sets


def open_retrieval_set(path: str | os.PathLike[str], split: str = "test") -> IndexedSet:
    """Index a retrieval set.

    Args:
        path: a set, see the module's text; `ANNOTATIONS@PICTURES` names the folder of an annotation file's pictures.
        split: test, val or train.

    Raises:
        UserError: a path that does not exist or is of no known form, a missing or wrong number of shards, a shard that is not a
            tar, annotations of another form, a sample without captions or image; the sentence names file and key.
    """
    component = kind_of(os.fspath(path))
    if component.kind == "shards":
        samples = list(_samples(shards_of_split(expand_shards(component.path), split)))
    else:
        read = _read_annotations if component.kind == "annotations" else _read_benchmark
        samples = list(read(component, split))
    if not samples:
        raise UserError(
            f"{component.path} holds no sample: expected KEY.png (or jpg, webp) and KEY.txt in its shards"
        )
    return IndexedSet(component.path, samples)


# ---------------------------------------------------------------------------------------------------------------------
# Annotations beside a folder of pictures
# ---------------------------------------------------------------------------------------------------------------------


def _read_annotations(component: Component, split: str) -> Iterator[Picture]:
    file = Path(component.path)
    images = read_karpathy(file, file.name)
    chosen = [image for image in images if image.split == split]
    if not chosen:
        known = ", ".join(sorted({image.split for image in images})) or "none"
        raise UserError(f"{file} has no split '{split}'; it has {known} (restval counts as train)")
    places = _find_pictures(component, [image.filename for image in chosen])
    for image, place in zip(chosen, places, strict=True):
        yield Picture(str(image.image_id), place, captions=image.captions)


def _find_pictures(component: Component, names: Sequence[str]) -> list[Path]:
    """Find the files of pictures by name, in a folder and its subfolders (COCO's train2014, val2014), or by relative path.

    Raises:
        UserError: pictures that are missing, or that are in two folders and differ.
    """
    annotations = Path(component.path)
    folders = [annotations.parent, annotations.parent / "images"]
    if component.beside is not None:
        folders = [Path(component.beside)]
    direct: dict[str, list[Path]] = {}
    below: dict[str, list[Path]] = {}
    # Each folder is listed once: asking for 5,000 files one by one is slow on a network file system.
    for folder in filter(Path.is_dir, folders):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_file():
                direct.setdefault(entry.name, []).append(Path(entry.path))
            elif entry.is_dir():
                for inner in os.scandir(entry.path):
                    if inner.is_file():
                        below.setdefault(inner.name, []).append(Path(inner.path))
    files, missing, doubtful = [], [], []
    for name in names:
        places = (
            direct.get(name)
            or below.get(name)
            or [place for f in folders if (place := f / name).is_file()][:1]
        )
        missing += [] if places else [name]
        files += places[:1]
        if any(not filecmp.cmp(places[0], other, shallow=False) for other in places[1:]):
            doubtful.append(places)
    count = f"of the {len(names)} pictures of {annotations}"
    if doubtful:
        raise UserError(
            f"{len(doubtful)} {count} are in two folders with different contents (first: {doubtful[0][0]} and "
            f"{doubtful[0][1]}): name the right folder, {annotations.name}@FOLDER"
        )
    if missing:
        raise UserError(
            f"{len(missing)} {count} are not in {' or '.join(map(str, folders))} (first: {missing[0]}): name their folder, "
            f"{annotations.name}@FOLDER; scores on a part of a set cannot be compared"
        )
    return files


# ---------------------------------------------------------------------------------------------------------------------
# Tars
# ---------------------------------------------------------------------------------------------------------------------


def _read_benchmark(component: Component, split: str) -> Iterator[Picture]:
    folder = Path(component.path)
    mark, count_file = folder / RETRIEVAL_MARK, folder / split / SHARD_COUNT
    if not mark.is_file() or mark.read_text(encoding="utf-8").strip().lower() != "retrieval":
        raise UserError(
            f"{folder} is not a retrieval set: shards, or a {RETRIEVAL_MARK} with the word 'retrieval' are missing "
            "(`zerovl data pack` writes it with --test-share; docs/data.md shows the layouts)"
        )
    if not count_file.is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / SHARD_COUNT).is_file())
        raise UserError(
            f"{folder} has no split '{split}' with {SHARD_COUNT}; it has {', '.join(splits) or 'none'}"
        )
    count = count_file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("0*[1-9][0-9]{0,8}", count):
        raise UserError(f"{count_file} must hold the number of shards, got '{count[:40]}'")
    yield from _samples(str(folder / split / f"{i}.tar") for i in range(int(count)))


def _samples(shards: Iterable[str]) -> Iterator[Picture]:
    for sample, content in index_shards(shards, TEXT_EXTENSION, CLIP_BENCHMARK_ORDER):
        # A `txt` is divided as training divides it.
        where = f"{sample.file}: sample {sample.key!r}"
        yield replace(sample, captions=_captions(caption_lines(content), where))


def _captions(texts: Sequence[bytes], where: str) -> tuple[str, ...]:
    """Return the captions of a picture. UserError if there are none, an empty one, or one that is not UTF-8."""
    try:
        return tuple(map(caption_of, texts or [b""]))
    except BadCaption as error:
        raise UserError(f"{where} {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Karpathy's splits of MS-COCO and Flickr30K: `images` with `filename`, `split`, ids and `sentences`, as one JSON file
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptionedImage:
    """An image of Karpathy's file, of the split train, val or test."""

    filename: str
    split: str
    image_id: int
    captions: tuple[str, ...]


def read_karpathy(path: Path, name: str) -> list[CaptionedImage]:
    """Read the images of a Karpathy file, in its order.

    Raises:
        UserError: an entry of another form, a split that is unknown, or an image without captions.
    """
    images = []
    with open_member(path, name) as stream:
        for number, entry in enumerate(json_array(stream, str(path), key="images")):
            try:
                # MS-COCO's own id if there is one, as in published results.
                image_id = int(entry["cocoid"] if "cocoid" in entry else entry["imgid"])
                captions = [" ".join(sentence["raw"].split()) for sentence in entry["sentences"]]
                split = split_of_word(entry["split"])
                if split is None:
                    raise ValueError(f"unknown split {entry['split']!r}")
                image = CaptionedImage(
                    str(entry["filename"]),
                    split,
                    image_id,
                    tuple(filter(None, captions)),
                )
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise UserError(
                    f"entry {number} of {path} does not have the form of Karpathy's images ({type(error).__name__} {error}): "
                    "give dataset_coco.json or dataset_flickr30k.json."
                ) from error
            if not image.captions:
                raise UserError(
                    f"entry {number} of {path}, {image.filename}, has no caption: give the official file."
                )
            images.append(image)
    return images
