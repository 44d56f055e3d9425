"""What a folder of teachers' embeddings says they are of (teacher.json), and how it differs from what a run needs.

Other data, views, augmentations or teachers are told by name, so that no embedding is taken for another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import ToBytes
from open_clip_zerovl.data.pixels import decode_pixels, pictures
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.writing import shard_mark

MANIFEST_FILE = "teacher.json"
FORMAT = 1
UNIT_SAMPLES = 1024  # least samples of a unit, the work that a killed call may lose; it ends where a shard does

Unit = tuple[int, int]  # first shard, and the one after the last


def units_of(source: Source) -> list[Unit]:
    """The source's shards in runs of at least UNIT_SAMPLES samples, as far as they reach."""
    units, begin, held = [], 0, 0
    for shard, size in enumerate(source.sizes):
        held += size
        if held >= UNIT_SAMPLES or shard + 1 == len(source.sizes):
            units.append((begin, shard + 1))
            begin, held = shard + 1, 0
    return units


def augmentation_of(transform: Any, pixel_path: str) -> list[str]:
    """What makes a view of a picture, in words: the pixel path, and the transform's steps before the pixels become numbers."""
    steps = [step for step in getattr(transform, "transforms", [transform]) if not isinstance(step, ToBytes)]
    # "pil" also where the fast path was asked for and cannot be had.
    used = "arrays" if pictures(transform, pixel_path)[1] is decode_pixels else "pil"
    return [f"pixel path {used}", *map(repr, steps)]


def describe_source(source: Source) -> dict[str, Any]:
    """What embeddings of a source are of: its name, how many samples, and marks by which other data is noticed."""
    own = source.picked
    if source.table is not None and len(source.table.members) < len(source.table.rows):  # a cluster of a table
        own = source.table.members
    picked = None if own is None else hashlib.blake2b(own.tobytes(), digest_size=16).hexdigest()
    marks = [shard_mark(shard) for shard in dict.fromkeys(source.shards)]
    return {
        "name": source.name,
        "samples": source.num_samples,
        "sizes": list(source.sizes) if source.table is None else [source.num_samples],
        "picked": picked,
        "shards": marks,
    }


def difference_of_sources(stored: dict[str, Any], found: dict[str, Any]) -> str | None:
    """In words, why embeddings of one source are not of another; None where they are."""
    if stored == found:
        return None
    if stored["samples"] != found["samples"]:
        return f"they are of {stored['samples']} samples of {found['name']!r}, and it holds {found['samples']}"
    if stored["picked"] != found["picked"]:
        return f"they are of another clustering's {found['name']!r}"
    before = {tuple(mark) for mark in stored["shards"]}
    # A shard that is gone now has no size to compare.
    changed = next((mark[0] for mark in found["shards"] if tuple(mark) not in before and len(mark) > 1), None)
    if changed is not None:
        return f"they are of other data: shard {changed} of {found['name']!r} differs, or was not there"
    if [mark[0] for mark in stored["shards"]] != [mark[0] for mark in found["shards"]] or stored["sizes"] != found[
        "sizes"
    ]:
        return f"they are of {found['name']!r} with its shards in another order or of other sizes"
    return None


def rows_of_cluster(source: Source, stored: dict[str, Any]) -> np.ndarray | None:
    """(n,) where the samples of a cluster stand in a stored source of all the shards it picks from; None for another source."""
    if source.picked is None or stored["picked"] is not None or len(stored["sizes"]) != len(stored["shards"]):
        return None
    begins = np.concatenate([[0], np.cumsum(stored["sizes"], dtype=np.int64)])
    place = {tuple(mark): int(begin) for mark, begin in zip(stored["shards"], begins, strict=False)}
    rows = source.picked.astype(np.int64)
    for number, shard in enumerate(source.shards):
        begin = place.get(tuple(shard_mark(shard)))
        if begin is None:
            return None
        rows[source.starts[number] : source.starts[number + 1]] += begin
    return rows


@dataclass(frozen=True)
class Manifest:
    """What teacher.json says.

    Attributes:
        views: V.
        seed: of the views' augmentations.
        dtype: of `store.DTYPES`.
        augmentation: see `augmentation_of`.
        captions: `--captions`, as for training.
        teachers: of each its "model", "width" and "fingerprint".
        sources: see `describe_source`; and "captions", how many the source has (T).
    """

    views: int
    seed: int
    dtype: str
    augmentation: list[str]
    captions: str | None
    teachers: list[dict[str, Any]]
    sources: list[dict[str, Any]]

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **self.__dict__}, indent=1) + "\n"

    @property
    def bytes_of_embeddings(self) -> int:
        """What the embeddings take on the disk."""
        width = sum(teacher["width"] for teacher in self.teachers)
        return 2 * width * sum(source["samples"] * self.views + source["captions"] for source in self.sources)


def difference(stored: Manifest, wanted: Manifest) -> str | None:
    """In words, in what a stored folder differs from what is wanted; None where it does not."""
    for name, words in (
        ("views", "views"),
        ("seed", "a seed of"),
        ("dtype", "numbers of type"),
        ("captions", "--captions"),
    ):
        if getattr(stored, name) != getattr(wanted, name):
            return f"{words} {getattr(stored, name)} and not {getattr(wanted, name)}"
    if stored.augmentation != wanted.augmentation:
        return "another augmentation: " + difference_of_steps(stored.augmentation, wanted.augmentation)
    for index in range(max(len(stored.teachers), len(wanted.teachers))):
        one, other = (of.teachers[index] if index < len(of.teachers) else None for of in (stored, wanted))
        if one is None or other is None or one["model"] != other["model"]:
            names = [", ".join(teacher["model"] for teacher in of.teachers) for of in (stored, wanted)]
            return f"other teachers: {names[0]} and not {names[1]}"
        if one != other:
            return f"other weights, preprocessing or precision of the teacher {one['model']}"
    held, asked = ([source["name"] for source in of.sources] for of in (stored, wanted))
    if held != asked:
        return f"the sources {', '.join(held)} and not {', '.join(asked)}"
    for one, other in zip(stored.sources, wanted.sources, strict=True):
        without = [{key: value for key, value in of.items() if key != "captions"} for of in (one, other)]
        if (found := difference_of_sources(*without)) is not None:
            return f"other data: {found}"
    return None


def difference_of_steps(stored: Sequence[str], wanted: Sequence[str]) -> str:
    """The first step of two augmentations that is not the same, in words."""
    for index in range(max(len(stored), len(wanted))):
        one, other = (steps[index] if index < len(steps) else "nothing" for steps in (stored, wanted))
        if one != other:
            return f"{one} and not {other}"
    return "the same"


def read_manifest(folder: Path) -> Manifest | None:
    """What teacher.json says; None where there is none.

    Raises:
        UserError: it cannot be read, or is of a later release.
    """
    file = folder / MANIFEST_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise UserError(f"{file} is of another release of this program; make the embeddings anew in another folder")
        return Manifest(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} cannot be read ({error}); make the embeddings anew in another folder") from error
