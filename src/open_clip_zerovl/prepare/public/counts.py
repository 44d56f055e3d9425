"""The sources and retrieval sets in folders, with counts (`zerovl data report`)."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.prepare.public.manifest import MANIFEST_FILE, RECORDS, read_manifest
from open_clip_zerovl.report.tables import text_table
from open_clip_zerovl.shards.writing import SIZES_FILE, read_sizes

log = logging.getLogger(__name__)
DEPTH = 4  # folders below the one that is given


@dataclass(frozen=True)
class Dataset:
    """Contents of one folder; `rows` is the length of the list that it was made from (None if not known)."""

    name: str
    folder: Path
    images: int
    texts: int
    shards: int
    rows: int | None = None
    complete: bool = True
    failures: Mapping[str, int] = field(default_factory=dict)


def find_datasets(folders: Iterable[str | Path]) -> list[Dataset]:
    """Every source and retrieval set in the given folders and below them.

    A folder counts if it has a manifest of ours, img2dataset's `*_stats.json`, a `sizes.json`, or CLIP_benchmark's layout. If
    several paths are given (`DIR/*`), files are ignored, and folders without any of these are ignored with a warning.

    Raises:
        UserError: no folder that counts.
    """
    datasets: list[Dataset] = []
    empty = []
    for path in (Path(folder).expanduser() for folder in folders):
        here = list(_below(path, path.absolute().name, DEPTH)) if path.is_dir() else []
        if not here and not path.is_file():
            empty.append(
                f"{path} has no shards with a {SIZES_FILE} or a {MANIFEST_FILE}: prepare the data, or `zerovl data index` it."
            )
        datasets += here
    if not datasets:
        raise UserError(empty[0] if empty else "there is no folder among the paths; give one")
    for sentence in empty:
        log.warning(sentence)
    return datasets


def report(folders: Iterable[str | Path]) -> str:
    """The datasets as a table, and missing pairs by reason."""
    datasets = find_datasets(folders)
    rows = []
    for dataset in datasets:
        share = f"{dataset.images / dataset.rows:.1%}" if dataset.rows else ""
        rows.append(
            [
                dataset.name,
                f"{dataset.images:,}",
                f"{dataset.texts:,}",
                share,
                f"{dataset.shards:,}",
            ]
        )
    lines = text_table(["dataset", "images", "texts", "of list", "shards"], rows).splitlines()
    for dataset in datasets:
        if not dataset.complete:
            lines.append(
                f"{dataset.name}: not complete, call its command again to go on ({dataset.folder})"
            )
        if dataset.failures:
            lost = ", ".join(
                f"{reason} {count:,}" for reason, count in Counter(dataset.failures).most_common(8)
            )
            lines.append(f"{dataset.name}: missing by reason: {lost}")
    return "\n".join(lines)


def _below(folder: Path, name: str, depth: int) -> Iterable[Dataset]:
    try:
        dataset = _dataset(folder, name)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder} cannot be counted, because a JSON file in it has another content than its program writes "
            f"({type(error).__name__}: {error}): remove {MANIFEST_FILE} or the *_stats.json, or leave the folder out"
        ) from error
    if dataset is not None:
        yield dataset
    elif depth:
        for entry in sorted(folder.iterdir()):
            if (
                entry.is_dir()
                and not entry.name.startswith(".")
                and entry.name not in (RECORDS, "downloads")
            ):
                yield from _below(
                    entry, entry.name if depth == DEPTH else f"{name}/{entry.name}", depth - 1
                )


def _dataset(folder: Path, name: str) -> Dataset | None:
    manifest = read_manifest(folder)
    if manifest is not None and "dataset" in manifest and "pairs" in manifest:
        return Dataset(
            f"{manifest['dataset']} {manifest['split']}",
            folder,
            manifest["pairs"],
            manifest["captions"],
            len(manifest["shards"]),
            manifest["rows"],
            manifest["complete"],
            manifest["failures"],
        )
    tables = [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*_stats.json"))
    ]
    if tables:
        failures: Counter[str] = Counter()
        for table in tables:
            failures.update(
                {k: v for k, v in table.get("status_dict", {}).items() if k != "success"}
            )
        pairs, rows = (sum(table[key] for table in tables) for key in ("successes", "count"))
        return Dataset(name, folder, pairs, pairs, len(tables), rows, True, failures)
    if (sizes := read_sizes(folder)) is not None:
        return Dataset(name, folder, sum(sizes.values()), sum(sizes.values()), len(sizes))
    if (folder / "dataset_type.txt").is_file() and (folder / "test" / "nshards.txt").is_file():
        if (folder / "test" / MANIFEST_FILE).is_file():
            return None  # test/ counts by itself
        opened = open_retrieval_set(folder)
        shards = int((folder / "test" / "nshards.txt").read_text(encoding="utf-8"))
        return Dataset(name, folder, len(opened), opened.num_captions(), shards)
    return None
