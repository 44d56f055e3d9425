"""The pairs of a fine-tuning: training sources, held-out sets, and two checks of them.

`--data` is named sources, as `--train-data` takes them, or a folder:

    FOLDER/*.tar, or a table in it                          one source
    FOLDER/train/                                           one source (`zerovl data pack`, `zerovl data coco`)
    FOLDER/NAME/ or FOLDER/NAME/train/, several             a source each (`zerovl data pack`)

A held-out set in CLIP_benchmark's layout is found in FOLDER itself, in FOLDER/NAME or in FOLDER/test/NAME.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import did_you_mean, regular_file
from open_clip_zerovl.data.labelled import ProbeSet
from open_clip_zerovl.data.names import CLASS_NAMES, NAME, is_named
from open_clip_zerovl.data.retrieval import (
    RetrievalSample,
    RetrievalSet,
    open_retrieval_set,
    parse_retrieval_data,
)
from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.table import EXTENSIONS
from open_clip_zerovl.shards.index import caption_lines, open_index
from open_clip_zerovl.shards.members import (
    TEXT_EXTENSION,
    Sample,
    ShardError,
    image_of,
    indexed_members,
)
from open_clip_zerovl.shards.urls import local_path

CAPTIONS = "one-per-epoch"
SPLITS = ("test", "val", "train")  # folders with these names are not sources
HELD_OUT = "held-out"


@dataclass(frozen=True)
class Found:
    """Training sources and held-out sets of `--data`.

    Attributes:
        train_data: for `--train-data`, each source with a name.
        held_out: retrieval sets that came with it, as `parse_retrieval_data` reads them; "" if there are none.
    """

    train_data: str
    held_out: str


def find_data(data: str) -> Found:
    """Training sources and held-out sets that `--data` names.

    Raises:
        UserError: a folder that holds neither shards nor a table.
    """
    alone = not (
        is_named(data) or "::" in data or local_path(data) is None or re.search(r"[{}*]", data)
    )
    if alone and not Path(data).expanduser().exists():
        raise UserError(f"--data {data} does not exist" + did_you_mean(data, "; correct the path"))
    if not alone or not Path(data).expanduser().is_dir():
        parts = [
            part if NAME.fullmatch(part) else f"{_name_of(part)}={part}"
            for part in data.split("::")
        ]
        return Found("::".join(parts), "")
    folder = Path(data).expanduser().absolute()
    sources = _source_in(folder) or {
        name: place
        for entry in _folders(folder)
        if entry.name not in SPLITS
        for name, place in _source_in(entry).items()
    }
    if not sources:
        raise UserError(
            f"{folder} holds no shards (*.tar), no table (.csv, .tsv) and no folders with them; `zerovl data pack` makes "
            "shards of pictures and captions"
        )
    places = [folder, *_folders(folder), *_folders(folder / "test")]
    sets = [
        place
        for place in places
        if (place / "dataset_type.txt").is_file() and (place / "test").is_dir()
    ]
    return Found(
        "::".join(f"{name}={place}" for name, place in sources.items()),
        "::".join(f"{HELD_OUT if place == folder else _name_of(place)}={place}" for place in sets),
    )


def _source_in(folder: Path) -> dict[str, Path]:
    """Name -> place of the source that a folder is, or holds in `train/`; {} for none."""
    return next(
        ({_name_of(folder): place} for place in (folder, folder / "train") if _is_source(place)), {}
    )


def _is_source(folder: Path) -> bool:
    if (
        folder / "pack.json"
    ).is_file():  # an output of `zerovl data pack`, whose table lists refused rows
        return False
    if not folder.is_dir() or (
        (folder / "dataset_type.txt").is_file() and not any(folder.glob("*.tar"))
    ):
        return False
    return any(entry.suffix in (".tar", *EXTENSIONS) for entry in folder.iterdir())


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _name_of(path: Path | str) -> str:
    """A source's name from its path; characters that a name cannot have are dashes."""
    last = re.sub(r"\{.*", "", str(path)).rstrip("/").rpartition("/")[2] or "pairs"
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(last).stem).lstrip("-._") or "pairs"


def open_sources(train_data: str) -> tuple[Source, ...]:
    """The sources, a sample for each picture with all its captions. UserError as `parse_sources`."""
    return parse_sources(train_data, captions=CAPTIONS)


def all_samples(source: Source) -> Iterator[tuple[Sample, bytes, list[str]]]:
    """The samples of a source that have a picture and a caption: (sample, picture, captions). UserError as `samples_of`."""
    for shard in range(len(source.shards)):
        for sample in samples_of(source, shard):
            picture = image_of(sample.files)
            lines = caption_lines(sample.files.get(TEXT_EXTENSION, b""))
            captions = [line.decode("utf-8", errors="replace") for line in lines]
            if picture is not None and captions:
                yield sample, picture, captions


# ---------------------------------------------------------------------------------------------------------------------
# Pictures that are both trained on and tested on
# ---------------------------------------------------------------------------------------------------------------------


def digest_of(picture: bytes, seed: int = 0) -> bytes:
    """A picture's identity: a hash of its bytes, another one for each seed."""
    return blake2b(picture, digest_size=16, key=str(seed).encode()).digest()


def places_of(dataset: RetrievalSet | ProbeSet) -> list[RetrievalSample]:
    """The pictures of a set as ranges of bytes; those of a labelled set have no captions."""
    if isinstance(dataset, RetrievalSet):
        return dataset.samples
    files = [Path(file) for file in dataset.files]
    shards = [file for file in files if file.suffix == ".tar"]
    places = [RetrievalSample(file.name, (), file) for file in files if file.suffix != ".tar"]
    for shard, key, members, _ in indexed_members(shards, "cls"):
        if (place := image_of(members)) is not None:
            places.append(RetrievalSample(key, (), shard, *place))
    return places


def mark_of(dataset: RetrievalSet | ProbeSet) -> str:
    """A digest of the names, sizes and times of the files with a set's pictures."""
    digest = blake2b(digest_size=16)
    for file in dict.fromkeys(
        dataset.files if isinstance(dataset, ProbeSet) else (one.file for one in dataset.samples)
    ):
        status = os.stat(file) if os.path.exists(file) else None  # None: a link to nothing
        digest.update(f"{file} {status and (status.st_size, status.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


def refuse_test_pictures(
    sources: Sequence[Source], sets: Mapping[str, RetrievalSet | ProbeSet]
) -> None:
    """Compare the bytes of the pictures; only training pictures as large as one of a set are read.

    Raises:
        UserError: a set has pictures that are trained on.
    """
    of_set: dict[bytes, tuple[str, str]] = {}
    places = {name: places_of(dataset) for name, dataset in sets.items()}
    for name, samples in places.items():
        for sample in samples:
            with regular_file(sample.file) as file:
                file.seek(sample.offset_bytes)
                of_set.setdefault(digest_of(file.read(sample.size_bytes)), (name, sample.key))
    lengths = {_size(sample) for samples in places.values() for sample in samples}
    seen: dict[str, list[tuple[str, str]]] = {}  # set -> (its key, where it is trained on)
    for source in sources:
        for where, picture in _pictures(source, lengths):
            if (found := of_set.pop(digest_of(picture), None)) is not None:
                seen.setdefault(found[0], []).append((found[1], where))
    for name, pictures in seen.items():
        key, where = pictures[0]
        raise UserError(
            f"{len(pictures)} of the {len(sets[name])} pictures of {name} are trained on (first: {key}, in {where}), so that "
            "its scores would measure memorisation; take them out of the training data"
        )


def _size(sample: Any) -> int:
    return (
        sample.size_bytes
        if sample.size_bytes >= 0
        else sample.file.stat().st_size - sample.offset_bytes
    )


def _pictures(source: Source, lengths: set[int]) -> Iterator[tuple[str, bytes]]:
    """(where it lies, bytes) of a source's pictures of one of these lengths."""
    if source.table is not None or source.picked is not None or source.columns is not None:
        for sample, picture, _ in all_samples(source):
            if len(picture) in lengths:
                yield f"{sample.key} of source {source.name}", picture
        return
    for shard in source.shards:
        path = local_path(shard)
        if path is None:
            raise UserError(
                f"shard {shard} is remote, and its pictures cannot be compared with those of the test sets; copy the "
                "shards here, or give --skip-overlap"
            )
        try:
            index = open_index(path)
        except (ShardError, OSError) as error:
            raise UserError(
                f"shard {shard} of source {source.name!r} cannot be read ({error})"
            ) from error
        with open(path, "rb") as file:
            for number, (offset, size) in enumerate(index.image.tolist()):
                if offset >= 0 and size in lengths:
                    file.seek(offset)
                    yield f"sample {index.key(number)} of {shard}", file.read(size)


def all_classes(data: str) -> bool:
    """True if all sets have classes, as `zerovl data pack` writes them: their pictures share captions, which caps RSUM."""
    return all((place / CLASS_NAMES).is_file() for place in parse_retrieval_data(data).values())


def sets_of(data: str) -> dict[str, RetrievalSet]:
    """The retrieval sets by name. UserError as `parse_retrieval_data` and `open_retrieval_set`."""
    return {name: open_retrieval_set(path) for name, path in parse_retrieval_data(data).items()}
