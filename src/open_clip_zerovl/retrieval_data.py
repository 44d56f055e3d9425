"""Retrieval sets on disk: images, each with its captions.

The layout read here is CLIP_benchmark's webdataset one, so that the same folder serves both programs:

    FOLDER/dataset_type.txt     the word "retrieval"
    FOLDER/SPLIT/nshards.txt    the number n of shards
    FOLDER/SPLIT/0.tar ...      n uncompressed tars; a sample is KEY.(webp|png|jpg|jpeg) and KEY.txt, a caption a line

A set is indexed once (keys, captions, where each image's bytes lie) and images are read by position, so loader
workers share nothing and the order is that of the tars. Another format is one more entry of `RETRIEVAL_FORMATS`: a test
of what the path is and a function that makes `RetrievalSample`s of it.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from open_clip_zerovl.errors import UserError

# In the order in which CLIP_benchmark looks for a sample's image.
IMAGE_EXTENSIONS = ("webp", "png", "jpg", "jpeg")
# A set's name becomes part of metric names and of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# webdataset's rule: the key is the path up to the first dot of the file's name.
_MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")


@dataclass(frozen=True)
class RetrievalSample:
    """An image, as a range of bytes of a file, and its captions (at least one)."""

    key: str
    captions: tuple[str, ...]
    file: Path
    offset_bytes: int = 0
    size_bytes: int = -1  # to the end of the file: an image that is a file of its own


@dataclass(frozen=True)
class RetrievalSet:
    """The images and captions of one split; indexing needs no image decoded."""

    path: Path
    split: str
    samples: list[RetrievalSample] = field(repr=False)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.samples)

    def num_captions(self, captions_per_image: int | None = None) -> int:
        """Number of captions, where each image keeps its first `captions_per_image` (None: all)."""
        return sum(len(sample.captions[:captions_per_image]) for sample in self.samples)

    def read_image(self, index: int) -> Image.Image:
        """The image as RGB. UserError naming file and key if it cannot be read or decoded."""
        sample = self.samples[index]
        try:
            with open(sample.file, "rb") as file:
                file.seek(sample.offset_bytes)
                data = file.read(sample.size_bytes)
            with Image.open(BytesIO(data)) as image:
                return image.convert("RGB")
        # Pillow reports broken files as OSError, SyntaxError (PNG chunks), ValueError or as a decompression bomb.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"{sample.file}: the image of sample '{sample.key}' cannot be read ({error})") from error


def check_captions_per_image(captions_per_image: int | None) -> None:
    """UserError unless it is a positive number or None, which means all."""
    if captions_per_image is not None and captions_per_image < 1:
        raise UserError(f"captions_per_image must be at least 1, or None for all, got {captions_per_image}")


Item = tuple[Tensor, tuple[str, ...]]
Batch = tuple[Tensor, list[tuple[str, ...]]]


class _TransformedSet(Dataset):
    """Transformed images and captions of a retrieval set; a bad sample's error is an item, not an exception."""

    def __init__(self, dataset: RetrievalSet, preprocess: Callable[[Any], Tensor], captions_per_image: int | None):
        self.dataset = dataset
        self.preprocess = preprocess
        self.captions_per_image = captions_per_image

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item | UserError:
        # Raised in a loader worker, the sentence would come out wrapped into the worker's traceback.
        try:
            image = self.preprocess(self.dataset.read_image(index))
        except UserError as error:
            return error
        return image, self.dataset.samples[index].captions[: self.captions_per_image]


def _collate(items: list[Item | UserError]) -> Batch | UserError:
    good: list[Item] = []
    for item in items:
        if isinstance(item, UserError):
            return item
        good.append(item)
    return torch.stack([image for image, _ in good]), [captions for _, captions in good]


def retrieval_batches(
    dataset: RetrievalSet,
    preprocess: Callable[[Any], Tensor],
    *,
    captions_per_image: int | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Yields (images (b, 3, H, W), for each image its captions) in the set's order, the last batch as it comes.

    Args:
        preprocess: image -> (3, H, W).
        captions_per_image: keep that many captions of each image, the first ones; None keeps all.

    Raises:
        UserError: an image that cannot be read, named by file and key.
    """
    check_captions_per_image(captions_per_image)
    transformed = _TransformedSet(dataset, preprocess, captions_per_image)
    for batch in DataLoader(transformed, batch_size=batch_size, num_workers=num_workers, collate_fn=_collate):
        if isinstance(batch, UserError):
            raise batch
        yield batch


def parse_retrieval_data(spec: str) -> dict[str, Path]:
    """`"coco=/data/coco::f30k=/data/f30k"` -> {"coco": Path, "f30k": Path}, in open_clip's `::` syntax.

    A name defaults to the folder's. UserError for an empty entry, a name that is no plain word, or one given twice.
    """
    sets: dict[str, Path] = {}
    for entry in spec.split("::"):
        name, equals, path = entry.strip().partition("=")
        # An equals sign further down a path does not name anything.
        if not equals or "/" in name:
            name, path = "", entry.strip()
        if not path:
            raise UserError(f"retrieval data '{spec}' has an empty entry: write name=folder::name=folder")
        folder = Path(path).expanduser()
        name = name or folder.absolute().name
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

    Raises:
        UserError: a path that is not there or of no known format, a missing or wrong count of shards, a shard that is
            no tar, a sample without captions or without an image; the sentence names file and key.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"retrieval set {path} does not exist")
    for retrieval_format in RETRIEVAL_FORMATS:
        if retrieval_format.recognises(path):
            return RetrievalSet(path=path, split=split, samples=retrieval_format.read(path, split))
    known = "; ".join(retrieval_format.description for retrieval_format in RETRIEVAL_FORMATS)
    raise UserError(f"{path} is no retrieval set in a known format; known: {known}")


def _read_clip_benchmark(folder: Path, split: str) -> list[RetrievalSample]:
    kind = _read_text(folder / "dataset_type.txt").strip().lower()
    if kind != "retrieval":
        raise UserError(f"{folder / 'dataset_type.txt'} says '{kind}', a retrieval set says 'retrieval'")
    count_file = folder / split / "nshards.txt"
    if not count_file.parent.is_dir():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "nshards.txt").is_file())
        raise UserError(f"{folder} has no split '{split}'; it has {', '.join(splits) or 'none'}")
    count = _read_text(count_file).strip()
    if not count.isdecimal() or int(count) == 0:
        raise UserError(f"{count_file} must hold the number of shards, got '{count}'")
    samples = [sample for i in range(int(count)) for sample in _read_shard(folder / split / f"{i}.tar")]
    if not samples:
        raise UserError(f"the shards of {folder / split} hold no sample: expected KEY.png (or jpg, webp) and KEY.txt")
    return samples


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing; CLIP_benchmark's layout needs it (docs/evaluation.md shows it)") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error})") from error


def _read_shard(shard: Path) -> list[RetrievalSample]:
    if not shard.is_file():
        raise UserError(f"shard {shard} is missing; nshards.txt beside it counts it")
    captions: dict[str, tuple[str, ...]] = {}
    images: dict[str, dict[str, tuple[int, int]]] = {}  # key -> extension -> (offset, size); keeps the tar's order
    try:
        # Uncompressed only ("r:"): images are read by their position in the file.
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                match = _MEMBER.fullmatch(member.name)
                if match is None or not member.isfile():
                    continue
                key, extension = match[1], match[2].lower()
                if extension == "txt":
                    text = tar.extractfile(member)
                    assert text is not None  # a regular file
                    captions[key] = _captions(text.read(), shard, key)
                elif extension in IMAGE_EXTENSIONS:
                    images.setdefault(key, {})[extension] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{shard} is not a readable, uncompressed tar ({error})") from error

    if bare := captions.keys() - images.keys():
        raise UserError(f"{shard}: sample '{min(bare)}' has captions but no image ({', '.join(IMAGE_EXTENSIONS)})")
    samples = []
    for key, found in images.items():
        if key not in captions:
            raise UserError(f"{shard}: sample '{key}' has no captions: {key}.txt is missing")
        offset, size = next(found[extension] for extension in IMAGE_EXTENSIONS if extension in found)
        samples.append(RetrievalSample(key, captions[key], shard, offset, size))
    return samples


def _captions(data: bytes, shard: Path, key: str) -> tuple[str, ...]:
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{shard}: {key}.txt is not UTF-8 ({error})") from error
    captions = tuple(line for line in lines if line.strip())
    if not captions:
        raise UserError(f"{shard}: sample '{key}' has no captions: {key}.txt is empty")
    return captions


@dataclass(frozen=True)
class RetrievalFormat:
    """How a kind of retrieval set is told by its path, and read."""

    description: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, str], list[RetrievalSample]]


RETRIEVAL_FORMATS: list[RetrievalFormat] = [
    RetrievalFormat(
        description="a folder in CLIP_benchmark's webdataset layout (dataset_type.txt, test/nshards.txt, test/0.tar)",
        recognises=Path.is_dir,
        read=_read_clip_benchmark,
    ),
]
