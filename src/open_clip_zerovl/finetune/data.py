"""The pairs of a fine-tuning: training sources and held-out sets.

`--data` is named sources, as `--train-data` takes them, or a folder:

    FOLDER/*.tar, or a table in it                          one source
    FOLDER/train/                                           one source (`zerovl data pack`, `zerovl data coco`)
    FOLDER/NAME/ or FOLDER/NAME/train/, several             a source each (`zerovl data pack`)

A held-out set in CLIP_benchmark's layout is found in FOLDER itself, in FOLDER/NAME or in FOLDER/test/NAME.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.claim import CONTENT
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import did_you_mean
from open_clip_zerovl.core.identity import digest_of
from open_clip_zerovl.data.components import kind_of
from open_clip_zerovl.data.content import content_of_sources
from open_clip_zerovl.data.indexed import IndexedSet
from open_clip_zerovl.data.names import CLASS_NAMES, NAME, is_named
from open_clip_zerovl.data.retrieval import open_retrieval_set, parse_retrieval_data
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.evaluate.zero_shot.sets import open_labelled_set
from open_clip_zerovl.shards.urls import local_path

CAPTIONS = "one-per-epoch"
SPLITS = ("test", "val", "train")  # folders with these names are not sources
HELD_OUT = "held-out"


@dataclass(frozen=True)
class FinetuneData:
    """Training sources and held-out sets of `--data`.

    Attributes:
        train_data: for `--train-data`, each source with a name.
        held_out: retrieval sets that came with it, as `parse_retrieval_data` reads them; "" if there are none.
    """

    train_data: str
    held_out: str


def find_data(data: str) -> FinetuneData:
    """Training sources and held-out sets that `--data` names.

    Raises:
        UserError: a folder that holds neither shards nor a table.
    """
    alone = not (
        is_named(data) or "::" in data or local_path(data) is None or re.search(r"[{}*]", data)
    )
    if alone and not Path(data).expanduser().exists():
        raise UserError(f"--data {data} does not exist" + did_you_mean(data, "; correct the path"))
    if not Path(data).expanduser().is_dir():
        parts = [
            part if NAME.fullmatch(part) else f"{_name_of(part)}={part}"
            for part in data.split("::")
        ]
        return FinetuneData("::".join(parts), "")
    folder = Path(data).expanduser().absolute()
    sources = _source_in(folder)
    if not sources:
        for entry in _folders(folder):
            if entry.name not in SPLITS:
                sources |= _source_in(entry)
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
    return FinetuneData(
        "::".join(f"{name}={place}" for name, place in sources.items()),
        "::".join(f"{HELD_OUT if place == folder else _name_of(place)}={place}" for place in sets),
    )


def named_sets(data: str | None) -> str:
    """Give each set of `--retrieval-data` its name.

    Returns:
        "" without sets.
    """
    sets = parse_retrieval_data(data) if data else {}
    return "::".join(f"{name}={place}" for name, place in sets.items())


def contents(
    *,
    sources: Mapping[str, str | None] | None = None,
    retrieval: Mapping[str, str | None] | None = None,
    labelled: Mapping[str, str | None] | None = None,
) -> dict[str, str]:
    """Digest what data arguments hold, for `core.claim`.

    Args:
        sources: flag -> training data.
        retrieval, labelled: flag -> sets.

    Returns:
        "content of FLAG" -> digest, for the flags with data.

    Raises:
        UserError: data that cannot be opened.
    """
    digests = {flag: content_of_sources(data) for flag, data in (sources or {}).items() if data}
    for flag, data in (retrieval or {}).items():
        if data:
            digests[flag] = digest_of([dataset.content() for dataset in sets_of(data).values()])
    for flag, data in (labelled or {}).items():
        if data:
            places = parse_retrieval_data(data).values()
            opened = [open_labelled_set(str(place)) for place in places]
            digests[flag] = digest_of([dataset.content() for dataset in opened])
    return {f"{CONTENT}{flag}": digest for flag, digest in digests.items()}


def named_as(data: str, earlier: str | None) -> str:
    """Give the components of a data argument the names that they had in an earlier call."""
    if not earlier:
        return data
    names, places = (
        [component.partition("=")[part] for component in argument.split("::")]
        for argument, part in ((earlier, 0), (data, 2))
    )
    return "::".join(f"{name}={place}" for name, place in zip(names, places, strict=True))


def _source_in(folder: Path) -> dict[str, Path]:
    """Name -> place of the source that a folder is, or holds in `train/`; {} for none."""
    for place in (folder, folder / "train"):
        if place.is_dir() and kind_of(str(place)).kind in ("shards", "table"):
            return {_name_of(folder): place}
    return {}


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _name_of(path: Path | str) -> str:
    """A source's name from its path; characters that a name cannot have are dashes."""
    last = re.sub(r"\{.*", "", str(path)).rstrip("/").rpartition("/")[2] or "pairs"
    return re.sub(r"[^\w.-]+", "-", Path(last).stem).lstrip("-._") or "pairs"


def open_sources(train_data: str) -> tuple[Source, ...]:
    """The sources, a sample for each picture with all its captions. UserError as `parse_sources`."""
    return parse_sources(train_data, captions=CAPTIONS)


def all_classes(data: str) -> bool:
    """True if all sets have classes, as `zerovl data pack` writes them: their pictures share captions, which caps RSUM."""
    return all((place / CLASS_NAMES).is_file() for place in parse_retrieval_data(data).values())


def sets_of(data: str) -> dict[str, IndexedSet]:
    """The retrieval sets by name. UserError as `parse_retrieval_data` and `open_retrieval_set`."""
    return {name: open_retrieval_set(path) for name, path in parse_retrieval_data(data).items()}
