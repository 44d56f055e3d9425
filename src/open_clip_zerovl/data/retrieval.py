"""Retrieval sets: images, each with its captions, as a loader reads them.

**CLIP_benchmark's webdataset layout**, so that one folder serves both programs:

    FOLDER/dataset_type.txt     the word "retrieval"
    FOLDER/SPLIT/nshards.txt    the number n of shards
    FOLDER/SPLIT/0.tar ...      n uncompressed tars; a sample is KEY.(webp|png|jpg|jpeg) and KEY.txt, a caption a line

**Shards as training reads them**, a folder of *.tar or a list like `/d/{00000..00003}.tar`: samples as above.

**Karpathy's JSON** (`dataset_coco.json`, `dataset_flickr30k.json`) with the pictures as files in a folder:

    ANNOTATIONS@PICTURES        the file of annotations, and the folder of its pictures
    ANNOTATIONS                 the pictures lie beside it, or in `images/` beside it

Shards are one split, unless their names say several (`splits`). Tables become shards before they come here (`prepare.door`).

Each picture is looked up, so that a missing one is named before a model is loaded; `indexed` reads them.
"""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.components import Component, expand_shards, kind_of, packed_folders
from open_clip_zerovl.data.indexed import (
    IndexedSet,
    Picture,
    index_shards,
    picture_batches,
)
from open_clip_zerovl.data.splits import shards_of_split, split_of_word
from open_clip_zerovl.shards.archives import json_array, open_member
from open_clip_zerovl.shards.tar import CLIP_BENCHMARK_ORDER, TEXT_EXTENSION
from open_clip_zerovl.shards.texts import BadCaption, caption_lines, caption_of
from open_clip_zerovl.shards.writing import RETRIEVAL_MARK, SHARD_COUNT

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
        if not name:
            named = (
                Path(kind_of(str(folder)).path).absolute()
                if not folder.is_dir()
                else folder.absolute()
            )
            named = named.parent if named.suffix == ".tar" or "{" in named.name else named
            name = re.sub(r"\.(json|csv|tsv)$", "", named.name, flags=re.IGNORECASE)
        for of_set, place in _sets_of(name, folder, named=bool(equals)).items():
            if of_set in sets:
                raise UserError(
                    f"two sets are named '{of_set}' ({sets[of_set]} and {place}): name them, a={sets[of_set]}::b=..."
                )
            sets[of_set] = place
    return sets


def _sets_of(name: str, folder: Path, *, named: bool) -> dict[str, Path]:
    """List the sets of an entry: one a source of an output of `zerovl data pack`, else the entry itself."""
    if not folder.is_dir() or kind_of(str(folder)).kind != "packed":
        return {name: folder}
    return {
        (f"{name}-{source}" if named and source else source or name): place
        for source, place in packed_folders(folder).items()
    }


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
    read = {"shards": _read_shards, "annotations": _read_annotations}
    samples = list(read.get(component.kind, _read_benchmark)(component, split))
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


def _read_shards(component: Component, split: str) -> Iterator[Picture]:
    yield from _samples(shards_of_split(expand_shards(component.path), split))


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
    caption_ids: tuple[int, ...]


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
                sentences = [
                    (" ".join(s["raw"].split()), int(s["sentid"])) for s in entry["sentences"]
                ]
                sentences = [(caption, i) for caption, i in sentences if caption]
                split = split_of_word(entry["split"])
                if split is None:
                    raise ValueError(f"unknown split {entry['split']!r}")
                image = CaptionedImage(
                    str(entry["filename"]),
                    split,
                    image_id,
                    tuple(caption for caption, _ in sentences),
                    tuple(i for _, i in sentences),
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
