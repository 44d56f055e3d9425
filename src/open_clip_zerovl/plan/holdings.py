"""Table 2 of the paper beside the contents of your folders (`zerovl data report`)."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.retrieval import open_retrieval_set
from open_clip_zerovl.prepare.public.manifest import MANIFEST_FILE, RECORDS, read_manifest
from open_clip_zerovl.shards.writing import SIZES_FILE, read_sizes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PaperCount:
    """A column of table 2: the dataset's name there, its images and texts."""

    name: str
    images: int
    texts: int


#: Table 2. COCO and F30K are the test sets.
TABLE_2 = {
    "sbu": PaperCount("SBU", 860_000, 860_000),
    "vg": PaperCount("VG", 500_000, 500_000),
    "cc3m": PaperCount("CC3M", 2_810_000, 2_810_000),
    "cc12m": PaperCount("CC12M", 10_060_000, 10_060_000),
    "coco test": PaperCount("MS-COCO test", 5_000, 25_000),
    "f30k test": PaperCount("F30K test", 1_000, 5_000),
}
PRE_TRAINING = ("sbu", "vg", "cc3m", "cc12m")
PAPER_TOTAL = 14_230_000


@dataclass(frozen=True)
class Holding:
    """Contents of one folder; `rows` is the length of the list that it was made from (None if not known)."""

    name: str
    folder: Path
    images: int
    texts: int
    shards: int
    rows: int | None = None
    complete: bool = True
    failures: dict[str, int] = field(default_factory=dict)


def holdings(folders: Iterable[str | Path]) -> list[Holding]:
    """Every source and retrieval set in the given folders and below them.

    A folder counts if it has a manifest of ours, img2dataset's `*_stats.json`, a `sizes.json`, or CLIP_benchmark's layout. If
    several paths are given (`DIR/*`), files are ignored, and folders without any of these are ignored with a warning.

    Raises:
        UserError: a folder that does not exist, or no folder that counts.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    found: list[Holding] = []
    empty = []
    for path in paths:
        if not path.is_dir() and (len(paths) == 1 or not path.exists()):
            raise UserError(f"{path} is no folder: give folders with prepared datasets.")
        here = list(_below(path, path.absolute().name, depth=4)) if path.is_dir() else []
        if path.is_dir() and not here:
            empty.append(
                f"{path} has no shards with a {SIZES_FILE} or a {MANIFEST_FILE}: prepare the data, or `zerovl data index` it."
            )
        found += here
    if not found:
        raise UserError(empty[0] if empty else f"there is no folder among {', '.join(map(str, paths))}.")
    for sentence in empty:
        log.warning(sentence)
    return found


def report(folders: Iterable[str | Path]) -> str:
    """Table 2 as text: the paper's numbers, yours beside them, and missing pairs by reason."""
    found = holdings(folders)
    by_name = {holding.name: holding for holding in found}
    lines = [["dataset", "paper: images", "texts", "here: images", "texts", "of paper", "of list", "shards"]]
    notes = []
    images = 0
    for name, paper in TABLE_2.items():
        holding = by_name.get(name)
        row = [paper.name, _count(paper.images), _count(paper.texts)]
        lines.append(row + (_cells(holding, paper) if holding else ["-"] * 5))
        if holding and name in PRE_TRAINING:
            images += holding.images
    total = ["Total (pre-training)", _count(PAPER_TOTAL), _count(PAPER_TOTAL)]
    share = f"{images / PAPER_TOTAL:.1%}" if images else "-"
    lines.insert(5, [*total, _count(images) if images else "-", _count(images) if images else "-", share, "", ""])
    lines += [[holding.name, "", "", *_cells(holding, None)] for holding in found if holding.name not in TABLE_2]
    for holding in found:
        if not holding.complete:
            notes.append(f"{holding.name}: not complete, call its command again to go on ({holding.folder})")
        if holding.failures:
            lost = ", ".join(f"{reason} {count:,}" for reason, count in Counter(holding.failures).most_common(8))
            notes.append(f"{holding.name}: missing by reason: {lost}")
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*(line.rstrip() for line in text), *notes])


def _cells(holding: Holding, paper: PaperCount | None) -> list[str]:
    return [
        f"{holding.images:,}",
        f"{holding.texts:,}",
        f"{holding.images / paper.images:.1%}" if paper else "",
        f"{holding.images / holding.rows:.1%}" if holding.rows else "",
        f"{holding.shards:,}",
    ]


def _count(number: int) -> str:
    """In the paper's form: 14.23M, 5K."""
    if number >= 1_000_000 or number % 1000 or number >= 100_000:
        return f"{number / 1e6:.2f}M"
    return f"{number // 1000}K"


def _below(folder: Path, name: str, depth: int) -> Iterable[Holding]:
    if (holding := _holding(folder, name)) is not None:
        yield holding
        return
    if depth:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in (RECORDS, "downloads"):
                below = entry.name if depth == 4 else f"{name}/{entry.name}"
                yield from _below(entry, below, depth - 1)


def _holding(folder: Path, name: str) -> Holding | None:
    try:
        return _known_holding(folder, name)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder} cannot be counted, because a JSON file in it has another content than its program writes "
            f"({type(error).__name__}: {error}): remove {MANIFEST_FILE} or the *_stats.json, or leave the folder out"
        ) from error


def _known_holding(folder: Path, name: str) -> Holding | None:
    manifest = read_manifest(folder)
    if manifest is not None and "dataset" in manifest and "pairs" in manifest:
        split = manifest["split"]
        known = manifest["dataset"] if split == "train" and manifest["dataset"] in PRE_TRAINING else None
        return Holding(
            known or f"{manifest['dataset']} {split}",
            folder,
            manifest["pairs"],
            manifest["captions"],
            len(manifest["shards"]),
            manifest["rows"],
            manifest["complete"],
            manifest["failures"],
        )
    if statistics := sorted(folder.glob("*_stats.json")):
        tables = [json.loads(file.read_text(encoding="utf-8")) for file in statistics]
        failures: Counter[str] = Counter()
        for table in tables:
            failures.update({k: v for k, v in table.get("status_dict", {}).items() if k != "success"})
        pairs = sum(table["successes"] for table in tables)
        rows = sum(table["count"] for table in tables)
        return Holding(name, folder, pairs, pairs, len(tables), rows, True, dict(failures))
    if (sizes := read_sizes(folder)) is not None:
        return Holding(name, folder, sum(sizes.values()), sum(sizes.values()), len(sizes))
    if (folder / "dataset_type.txt").is_file() and not any(
        (folder / s / MANIFEST_FILE).is_file() for s in ("test", "val")
    ):
        return _retrieval_holding(folder, name)
    return None


def _retrieval_holding(folder: Path, name: str) -> Holding | None:
    if not (folder / "test" / "nshards.txt").is_file():
        return None
    found = open_retrieval_set(folder)
    shards = int((folder / "test" / "nshards.txt").read_text(encoding="utf-8"))
    return Holding(
        f"{name} test" if name in ("coco", "f30k") else name, folder, len(found), found.num_captions(), shards
    )
