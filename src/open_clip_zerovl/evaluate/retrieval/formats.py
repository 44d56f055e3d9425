"""How retrieval sets lie on disk: layouts, each read into images with their captions.

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

No picture is decoded here, but each is looked up, so that a missing one is named before a model is loaded.
"""

from __future__ import annotations

import csv
import filecmp
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import expand_shards
from open_clip_zerovl.data.table import EXTENSIONS, LAYOUTS, find_table
from open_clip_zerovl.prepare.public.karpathy import read_karpathy
from open_clip_zerovl.shards.members import (
    CLIP_BENCHMARK_ORDER,
    TEXT_EXTENSION,
    ShardError,
    image_of,
    locate_samples,
    opened,
)
from open_clip_zerovl.shards.writing import RETRIEVAL_MARK, SHARD_COUNT


@dataclass(frozen=True)
class RetrievalSample:
    """An image, as a range of bytes of a file, and its captions (at least one).

    Attributes:
        key: of a tar's sample, or the id of the image in annotations.
        size_bytes: -1 for the rest of the file, of an image that is a file of its own.
    """

    key: str
    captions: tuple[str, ...]
    file: Path
    offset_bytes: int = 0
    size_bytes: int = -1


@dataclass(frozen=True)
class RetrievalFormat:
    """A layout of retrieval sets.

    Attributes:
        description: for messages.
        recognises: path -> whether it is of this layout.
        read: (annotations, folder of pictures or None, split) -> samples.
    """

    description: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, Path | None, str], list[RetrievalSample]]


def split_location(location: Path) -> tuple[Path, Path | None]:
    """`/ann/dataset_coco.json@/data/coco` -> (/ann/dataset_coco.json, /data/coco); (location, None) without an at sign.

    Only after .json, .csv or .tsv does an at sign mean this; elsewhere it is part of a name.
    """
    match = re.fullmatch(r"(.+\.(?:json|csv|tsv))@(.+)", str(location), re.IGNORECASE)
    if match is None:
        return location, None
    return Path(match[1]).expanduser(), Path(match[2]).expanduser()


# ---------------------------------------------------------------------------------------------------------------------
# Annotations beside a folder of pictures
# ---------------------------------------------------------------------------------------------------------------------


def _read_karpathy(file: Path, pictures: Path | None, split: str) -> list[RetrievalSample]:
    images = read_karpathy(file, file.name)
    chosen = [image for image in images if image.split == split]
    if not chosen:
        known = ", ".join(sorted({image.split for image in images})) or "none"
        raise UserError(f"{file} has no split '{split}'; it has {known} (restval counts as train)")
    found = _Pictures(file, pictures)
    samples = [RetrievalSample(str(image.image_id), image.captions, found(image.filename)) for image in chosen]
    found.check(len(samples))
    return samples


def _read_table(file: Path, pictures: Path | None, split: str) -> list[RetrievalSample]:
    names: dict[str, str] = {}  # image id -> the picture's file, in the order of the table
    captions: dict[str, list[str]] = {}
    ids: set[tuple[str, str]] = set()
    for line, row in _table_rows(file):
        if names.setdefault(row.image_id, row.image) != row.image:
            raise UserError(
                f"{file}, line {line}: image_id {row.image_id} is {row.image} here and {names[row.image_id]} before"
            )
        if (row.image_id, row.caption_id) in ids:
            raise UserError(f"{file}, line {line}: caption_id {row.caption_id} of image {row.image_id} appears twice")
        if not row.caption.strip():
            raise UserError(f"{file}, line {line}: caption {row.caption_id} of image {row.image_id} is empty")
        ids.add((row.image_id, row.caption_id))
        captions.setdefault(row.image_id, []).append(row.caption)
    if not names:
        raise UserError(f"{file} holds no rows below its header")
    found = _Pictures(file, pictures)
    samples = [RetrievalSample(key, tuple(captions[key]), found(name)) for key, name in names.items()]
    found.check(len(samples))
    return samples


def _read_table_of(folder: Path, pictures: Path | None, split: str) -> list[RetrievalSample]:
    table = find_table(str(folder))
    assert table is not None  # as `recognises` has found
    return _read_table(Path(table), pictures, split)


@dataclass(frozen=True)
class _TableRow:
    """A caption: without a column for it, `image_id` is the picture's path and `caption_id` the line."""

    image: str
    image_id: str
    caption: str
    caption_id: str


def _table_rows(file: Path) -> Iterator[tuple[int, _TableRow]]:
    """(line, row) of each row. UserError for a table of another form."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            separator = "\t" if "\t" in text.readline() else ","
            text.seek(0)
            reader = csv.DictReader(text, delimiter=separator, strict=True)
            header = list(reader.fieldnames or [])
            layout = next((one for one in LAYOUTS if one[0] in header and one[1] in header), None)
            if layout is None:
                known = " or ".join(f"{image!r} and {caption!r}" for image, caption, _ in LAYOUTS)
                raise UserError(
                    f"{file} has no columns {known}, but {', '.join(header) or 'none'}; rename its columns so"
                )
            for row in reader:
                line = reader.line_num
                if any(row.get(None) or ()):  # DictReader's key for fields without a column
                    raise UserError(
                        f"{file}, line {line}: the row has more fields than the header; put quotes around a caption "
                        "with commas"
                    )
                if None in row.values():
                    raise UserError(f"{file}, line {line}: the row has fewer fields than the header")
                image = row[layout[0]]
                yield (
                    line,
                    _TableRow(image, row.get("image_id", image), row[layout[1]], row.get("caption_id", f"{line}")),
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} cannot be read as a table ({error})") from error


class _Pictures:
    """Finds pictures by name in a folder and in its subfolders (COCO's train2014, val2014), or by relative path.

    Missing ones, and several of one name, are collected; `check` raises one sentence for all of them.
    """

    def __init__(self, annotations: Path, pictures: Path | None) -> None:
        self.folders = [annotations.parent, annotations.parent / "images"] if pictures is None else [pictures]
        if pictures is not None and not pictures.is_dir():
            raise UserError(f"the folder of pictures {pictures} of {annotations} does not exist")
        self.annotations = annotations
        self.places: dict[str, Path] = {}
        self.again: dict[
            str, Path
        ] = {}  # the second place of names that are in two subfolders, and in no folder itself
        direct: set[str] = set()
        # Each folder is listed once: asking for 5,000 files one by one is slow on a network file system.
        for folder in filter(Path.is_dir, self.folders):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if entry.is_dir():
                    for inner in os.scandir(entry.path):
                        if not inner.is_file() or inner.name in direct:
                            continue
                        if (place := Path(inner.path)) != self.places.setdefault(inner.name, place):
                            self.again.setdefault(inner.name, place)
            own = {entry.name: Path(entry.path) for entry in os.scandir(folder) if entry.is_file()}
            self.places |= own
            direct |= own.keys()
        self.again = {name: place for name, place in self.again.items() if name not in direct}
        self.missing: list[str] = []
        self.doubtful: list[tuple[Path, Path]] = []

    def __call__(self, name: str) -> Path:
        if (place := self.places.get(name)) is not None:
            if (other := self.again.get(name)) is not None and not filecmp.cmp(place, other, shallow=False):
                self.doubtful.append((place, other))
            return place
        for folder in self.folders:
            if "/" in name and (folder / name).is_file():
                return folder / name
        self.missing.append(name)
        return self.folders[0] / name

    def check(self, total: int) -> None:
        """UserError where some of the `total` pictures are missing, or are two pictures of one name."""
        if self.doubtful:
            raise UserError(
                f"{len(self.doubtful)} of the {total} pictures of {self.annotations} are in two folders, and are not the same "
                f"there (first: {self.doubtful[0][0]} and {self.doubtful[0][1]}): name the one folder, "
                f"{self.annotations.name}@FOLDER"
            )
        if self.missing:
            raise UserError(
                f"{len(self.missing)} of the {total} pictures of {self.annotations} are not in "
                f"{' or '.join(map(str, self.folders))} (first: {self.missing[0]}): name their folder, "
                f"{self.annotations.name}@FOLDER; scores on a part of a set cannot be compared"
            )


# ---------------------------------------------------------------------------------------------------------------------
# CLIP_benchmark's tars
# ---------------------------------------------------------------------------------------------------------------------


def _read_clip_benchmark(folder: Path, pictures: Path | None, split: str) -> list[RetrievalSample]:
    kind = _read_text(folder / RETRIEVAL_MARK).strip().lower()
    if kind != "retrieval":
        raise UserError(f"{folder / 'dataset_type.txt'} says '{kind}', a retrieval set says 'retrieval'")
    count_file = folder / split / SHARD_COUNT
    if not count_file.parent.is_dir():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / SHARD_COUNT).is_file())
        raise UserError(f"{folder} has no split '{split}'; it has {', '.join(splits) or 'none'}")
    count = _read_text(count_file).strip()
    if not count.isdecimal() or len(count) > 9 or int(count) == 0:
        raise UserError(f"{count_file} must hold the number of shards, got '{count[:40]}'")
    samples = [sample for i in range(int(count)) for sample in _read_shard(folder / split / f"{i}.tar")]
    if not samples:
        raise UserError(f"the shards of {folder / split} hold no sample: expected KEY.png (or jpg, webp) and KEY.txt")
    return samples


def _read_shards(pattern: Path, pictures: Path | None, split: str) -> list[RetrievalSample]:
    samples = [sample for shard in expand_shards(str(pattern)) for sample in _read_shard(Path(shard))]
    if not samples:
        raise UserError(f"the shards of {pattern} hold no sample: expected KEY.png (or jpg, webp) and KEY.txt")
    return samples


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing; CLIP_benchmark's layout needs it (docs/data.md shows it)") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error})") from error


def _read_shard(shard: Path) -> list[RetrievalSample]:
    if not shard.is_file():
        raise UserError(
            f"shard {shard} is missing; fetch it, or correct the number in nshards.txt or the list of shards"
        )
    samples = []
    try:
        with opened(shard) as descriptor:
            for key, members in locate_samples(shard, whole=True):
                image = image_of(members, CLIP_BENCHMARK_ORDER)
                if image is None and TEXT_EXTENSION not in members:
                    raise UserError(f"{shard}: sample {key!r} has neither image nor captions; remove it")
                if image is None:
                    raise UserError(
                        f"{shard}: sample {key!r} has captions but no image ({', '.join(CLIP_BENCHMARK_ORDER)})"
                    )
                if TEXT_EXTENSION not in members:
                    raise UserError(f"{shard}: sample {key!r} has no captions: {key}.txt is missing behind its image")
                offset, size = members[TEXT_EXTENSION]
                captions = _captions(os.pread(descriptor, size, offset), shard, key)
                samples.append(RetrievalSample(key, captions, shard, *image))
    except (ShardError, tarfile.ReadError) as error:
        raise UserError(f"{shard} is not a readable, uncompressed tar ({error}): fetch or write it again") from error
    return samples


def _captions(data: bytes, shard: Path, key: str) -> tuple[str, ...]:
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{shard}: {key}.txt is not UTF-8 ({error})") from error
    captions = tuple(line for line in lines if line.strip())
    if not captions:
        raise UserError(f"{shard}: sample {key!r} has no captions: {key}.txt is empty")
    return captions


# ---------------------------------------------------------------------------------------------------------------------
# The table of formats
# ---------------------------------------------------------------------------------------------------------------------

RETRIEVAL_FORMATS: list[RetrievalFormat] = [
    RetrievalFormat(
        description="a folder of webdataset shards, or a list of them (/d/{00000..00003}.tar)",
        recognises=lambda path: (
            any(path.glob("*.tar")) if path.is_dir() else path.suffix.lower() == ".tar" or "{" in path.name
        ),
        read=_read_shards,
    ),
    RetrievalFormat(
        description="a folder with one table (.csv or .tsv) and its pictures",
        recognises=lambda path: (
            path.is_dir() and not (path / RETRIEVAL_MARK).is_file() and find_table(str(path)) is not None
        ),
        read=_read_table_of,
    ),
    RetrievalFormat(
        description="a folder in CLIP_benchmark's webdataset layout (dataset_type.txt, test/nshards.txt, test/0.tar)",
        recognises=Path.is_dir,
        read=_read_clip_benchmark,
    ),
    RetrievalFormat(
        description="Karpathy's .json with a folder of pictures (dataset_coco.json@/data/coco)",
        recognises=lambda path: path.suffix.lower() == ".json",
        read=_read_karpathy,
    ),
    RetrievalFormat(
        description="a .csv or .tsv with a folder of pictures (valid_anno.csv@/data/coco)",
        recognises=lambda path: path.suffix.lower() in EXTENSIONS,
        read=_read_table,
    ),
]
