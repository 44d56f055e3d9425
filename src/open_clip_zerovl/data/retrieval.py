"""Retrieval sets: images, each with its captions, as a loader reads them.

**CLIP_benchmark's webdataset layout**, so that one folder serves both programs:

    FOLDER/dataset_type.txt     the word "retrieval"
    FOLDER/SPLIT/nshards.txt    the number n of shards
    FOLDER/SPLIT/0.tar ...      n uncompressed tars; a sample is KEY.(webp|png|jpg|jpeg) and KEY.txt, a caption a line

**Shards as training reads them**, a folder of *.tar or a list like `/d/{00000..00003}.tar`: samples as above.

**Karpathy's JSON** (`dataset_coco.json`, `dataset_flickr30k.json`) and **tables** (CSV or TSV, with the columns
`image,image_id,caption,caption_id` of ZeroVL or `filepath,title` of open_clip), both with the pictures as files in a folder:

    ANNOTATIONS@PICTURES        the file of annotations, and the folder of its pictures
    ANNOTATIONS                 the pictures lie beside it, or in `images/` beside it
    FOLDER                      with one table and no tar

Rows with one image_id are captions of one image; in a table without that column, rows with one path. Shards and tables are one
split; `--split` does not matter for them.

A set is indexed once: keys, captions, and where the bytes of each image lie. No picture is decoded, but each is looked up, so
that a missing one is named before a model is loaded. Images are then read by position, so that loader workers share nothing.
"""

from __future__ import annotations

import filecmp
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
from open_clip_zerovl.data.annotations import read_karpathy
from open_clip_zerovl.data.components import Component, expand_shards, kind_of, packed_folders
from open_clip_zerovl.data.images import read_picture
from open_clip_zerovl.data.table import open_table
from open_clip_zerovl.data.workers import ItemSet, read_batches
from open_clip_zerovl.shards.index import caption_lines
from open_clip_zerovl.shards.members import (
    CLIP_BENCHMARK_ORDER,
    TEXT_EXTENSION,
    image_of,
    indexed_members,
)
from open_clip_zerovl.shards.pictures import BadPicture
from open_clip_zerovl.shards.urls import REMOTE
from open_clip_zerovl.shards.writing import RETRIEVAL_MARK, SHARD_COUNT

# A set's name becomes part of metric names and of file names.
_NAME = re.compile(r"[^\W_][\w.-]*")  # as of sources


@dataclass(frozen=True)
class RetrievalSample:
    """An image, as a range of bytes of a file, and its captions (at least one).

    Attributes:
        key: the key of a tar's sample, or the id of the image in annotations.
        size_bytes: -1 for the rest of the file, of an image that is a file of its own.
    """

    key: str
    captions: tuple[str, ...]
    file: Path
    offset_bytes: int = 0
    size_bytes: int = -1


@dataclass(frozen=True)
class RetrievalSet:
    """The images and captions of one split.

    Attributes:
        path: the path of the set, for messages.
        split: test, val or train.
        samples: one for each image.
    """

    path: Path
    split: str
    samples: list[RetrievalSample] = field(repr=False)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.samples)

    def captions(self, captions_per_image: int | None = None) -> list[tuple[str, ...]]:
        """The captions of each image, or the first `captions_per_image` of them."""
        return [sample.captions[:captions_per_image] for sample in self.samples]

    def num_captions(self, captions_per_image: int | None = None) -> int:
        """Number of these captions."""
        return sum(map(len, self.captions(captions_per_image)))

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
        """The image as RGB. UserError with file and key if it cannot be read or decoded."""
        sample = self.samples[index]
        try:
            return read_picture(sample.file, sample.offset_bytes, sample.size_bytes)
        except (OSError, BadPicture) as error:
            raise UserError(
                f"{sample.file}: the image of sample '{sample.key}' cannot be read ({error})"
            ) from error


Item = tuple[Tensor, tuple[str, ...]]
Batch = tuple[Tensor, list[tuple[str, ...]]]


class _TransformedSet(ItemSet):
    """Transformed images and captions of a retrieval set."""

    def __init__(
        self,
        dataset: RetrievalSet,
        preprocess: Callable[[Any], Tensor],
        captions_per_image: int | None,
    ):
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
        captions_per_image: captions to keep of each image, from the first on; None keeps all.
        batch_size: images of a batch.
        num_workers: loader processes.

    Raises:
        UserError: an image that cannot be read, named by file and key; captions_per_image below 1.
    """
    transformed = _TransformedSet(dataset, preprocess, captions_per_image)
    yield from read_batches(transformed, _collate, batch_size=batch_size, num_workers=num_workers)


def parse_retrieval_data(spec: str) -> dict[str, Path]:
    """`"coco=/data/coco::f30k=/data/f30k"` -> {"coco": Path, "f30k": Path}, in open_clip's `::` syntax; labelled sets, too.

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
            raise UserError(
                f"the list of sets '{spec}' has an empty entry: write name=folder::name=folder"
            )
        folder = Path(path).expanduser()
        if not name:
            named = (
                Path(kind_of(str(folder)).path).absolute()
                if not folder.is_dir()
                else folder.absolute()
            )
            named = named.parent if named.suffix == ".tar" or "{" in named.name else named
            name = re.sub(r"\.(json|csv|tsv)$", "", named.name, flags=re.IGNORECASE)
        if not _NAME.fullmatch(name):
            raise UserError(
                f"'{name}' cannot name a set: begin with a letter or digit, then letters, digits, '.', '_' and '-'"
            )
        for of_set, place in _sets_of(name, folder, named=bool(equals)).items():
            if of_set in sets:
                raise UserError(
                    f"two sets are named '{of_set}' ({sets[of_set]} and {place}): name them, a={sets[of_set]}::b=..."
                )
            sets[of_set] = place
    return sets


def _sets_of(name: str, folder: Path, *, named: bool) -> dict[str, Path]:
    """The sets of an entry: of an output of `zerovl data pack` with several sources, one each; else the entry itself."""
    if not folder.is_dir() or kind_of(str(folder)).kind != "packed":
        return {name: folder}
    return {
        (f"{name}-{source}" if named and source else source or name): place
        for source, place in packed_folders(folder).items()
    }


def open_retrieval_set(path: str | os.PathLike[str], split: str = "test") -> RetrievalSet:
    """Indexes a retrieval set.

    Args:
        path: a set, see the module's text; `ANNOTATIONS@PICTURES` names the folder of an annotation file's pictures.
        split: test, val or train.

    Raises:
        UserError: a path that does not exist or is of no known form, a missing or wrong number of shards, a shard that is not a
            tar, annotations of another form, a sample without captions or image; the sentence names file and key.
    """
    text = os.path.expanduser(os.fspath(path))
    if REMOTE.match(text):
        raise UserError(
            f"retrieval set {text} is remote, and its images are read by position; copy it to a disk"
        )
    found = kind_of(text)
    if not os.path.exists(found.path) and "{" not in found.path:
        raise UserError(f"retrieval set {found.path} does not exist; correct the path")
    if (
        os.path.isfile(found.path)
        and found.kind == "shards"
        and not found.path.lower().endswith(".tar")
    ):
        raise UserError(
            f"{text} is not a retrieval set in a known format; known: a folder of webdataset shards, or a list of them "
            "(/d/{00000..00003}.tar); a .csv or .tsv with its pictures; a folder in CLIP_benchmark's webdataset layout; "
            "Karpathy's .json with a folder of pictures (dataset_coco.json@/data/coco)"
        )
    read = {"shards": _read_shards, "table": _read_table, "annotations": _read_annotations}.get(
        found.kind, _read_benchmark
    )
    return RetrievalSet(Path(found.path), split, read(found, split))


# ---------------------------------------------------------------------------------------------------------------------
# Annotations beside a folder of pictures
# ---------------------------------------------------------------------------------------------------------------------


def _read_annotations(component: Component, split: str) -> list[RetrievalSample]:
    file = Path(component.path)
    images = read_karpathy(file, file.name)
    chosen = [image for image in images if image.split == split]
    if not chosen:
        known = ", ".join(sorted({image.split for image in images})) or "none"
        raise UserError(f"{file} has no split '{split}'; it has {known} (restval counts as train)")
    places = _find_pictures(component, [image.filename for image in chosen])
    return [
        RetrievalSample(str(image.image_id), image.captions, place)
        for image, place in zip(chosen, places, strict=True)
    ]


def _read_table(component: Component, split: str) -> list[RetrievalSample]:
    table = open_table(component.path, by_image=True, strict=True)
    numbers = {name: number for number, name in enumerate(table.columns)}
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for sample in table.samples():
        where = f"{table.path}, row {sample.numbers[0] + 1}"
        if any(len(row) < len(table.columns) for row in sample.rows):
            raise UserError(f"{where}: the row has fewer fields than the header")
        key = sample.rows[0][numbers["image_id"]] if "image_id" in numbers else sample.image
        ids = [row[numbers["caption_id"]] for row in sample.rows] if "caption_id" in numbers else []
        if len(set(ids)) < len(ids):
            raise UserError(
                f"{where}: a caption_id of image {key} appears twice ({', '.join(ids)})"
            )
        try:
            captions = tuple(caption.decode("utf-8") for caption in sample.captions)
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: a caption of image {key} is not UTF-8 ({error})") from error
        if not all(caption.strip() for caption in captions):
            raise UserError(f"{where}: a caption of image {key} is empty")
        found.append((key, sample.image, captions))
    places = _find_pictures(component, [image for _, image, _ in found])
    return [
        RetrievalSample(key, captions, place)
        for (key, _, captions), place in zip(found, places, strict=True)
    ]


def _find_pictures(component: Component, names: Sequence[str]) -> list[Path]:
    """The files of pictures by name, in a folder and in its subfolders (COCO's train2014, val2014), or by relative path.

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
                places = direct.setdefault(entry.name, [])
                # A table's paths begin at its own folder, for training too; annotations name no folder.
                if not places or component.kind == "annotations":
                    places.append(Path(entry.path))
            elif entry.is_dir():
                for inner in os.scandir(entry.path):
                    if inner.is_file():
                        below.setdefault(inner.name, []).append(Path(inner.path))
    found, missing, doubtful = [], [], []
    for name in names:
        places = (
            direct.get(name)
            or below.get(name)
            or [place for f in folders if (place := f / name).is_file()][:1]
        )
        missing += [] if places else [name]
        found += places[:1]
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
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Tars
# ---------------------------------------------------------------------------------------------------------------------


def _read_benchmark(component: Component, split: str) -> list[RetrievalSample]:
    folder = Path(component.path)
    kind = _read_text(folder / RETRIEVAL_MARK).lower()
    if kind != "retrieval":
        raise UserError(
            f"{folder / RETRIEVAL_MARK} holds '{kind}', but that of a retrieval set holds 'retrieval'"
        )
    count_file = folder / split / SHARD_COUNT
    if not count_file.parent.is_dir():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / SHARD_COUNT).is_file())
        raise UserError(f"{folder} has no split '{split}'; it has {', '.join(splits) or 'none'}")
    count = _read_text(count_file)
    if not count.isdecimal() or len(count) > 9 or int(count) == 0:
        raise UserError(f"{count_file} must hold the number of shards, got '{count[:40]}'")
    return _samples([folder / split / f"{i}.tar" for i in range(int(count))], folder / split)


def _read_shards(component: Component, split: str) -> list[RetrievalSample]:
    return _samples([Path(shard) for shard in expand_shards(component.path)], component.path)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError as error:
        raise UserError(
            f"{file} is missing; CLIP_benchmark's layout needs it (docs/data.md shows it); `zerovl data pack` writes it with "
            "--test-share"
        ) from error


def _samples(shards: Sequence[Path], where: str | Path) -> list[RetrievalSample]:
    samples = []
    for shard, key, members, content in indexed_members(shards, TEXT_EXTENSION):
        image = image_of(members, CLIP_BENCHMARK_ORDER)
        if image is None:
            has = "captions but no image" if content is not None else "neither image nor captions"
            raise UserError(
                f"{shard}: sample {key!r} has {has} ({', '.join(CLIP_BENCHMARK_ORDER)}); remove or mend it"
            )
        if content is None:
            raise UserError(
                f"{shard}: sample {key!r} has no captions: {key}.txt is missing behind its image"
            )
        samples.append(RetrievalSample(key, _captions(content, shard, key), shard, *image))
    if not samples:
        raise UserError(
            f"the shards of {where} hold no sample: expected KEY.png (or jpg, webp) and KEY.txt"
        )
    return samples


def _captions(data: bytes, shard: Path, key: str) -> tuple[str, ...]:
    """The captions of a `txt` member, divided as training divides them."""
    try:
        captions = tuple(line.decode("utf-8") for line in caption_lines(data))
    except UnicodeDecodeError as error:
        raise UserError(f"{shard}: {key}.txt is not UTF-8 ({error})") from error
    if not captions:
        raise UserError(f"{shard}: sample {key!r} has no captions: {key}.txt is empty")
    return captions
