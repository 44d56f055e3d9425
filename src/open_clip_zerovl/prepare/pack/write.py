"""The store's samples to shards: a source's training pairs, and its held-out set in CLIP_benchmark's layout.

OUT/train/00000.tar, sizes.json ...                  one source
OUT/dataset_type.txt, test/0.tar, test/nshards.txt
OUT/NAME/train, OUT/NAME/test ...                    several

A sample is `key.jpg` (png, webp), `key.txt` with its captions, one a line, and `key.json` with the name of its file. A picture
of a class has `key.cls`, too, the number of a line of `classnames.txt`: each split is a labelled set as CLIP_benchmark lays
them out, with its templates in `zeroshot_classification_templates.txt`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, starmap
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.core.identity import digest_of_all
from open_clip_zerovl.data.names import CLASS_NAMES, TEMPLATES
from open_clip_zerovl.prepare.pack import manifest
from open_clip_zerovl.prepare.pack.store import PairDatabase, Stored
from open_clip_zerovl.shards.tar import TEXT_EXTENSION, Sample
from open_clip_zerovl.shards.writing import SHARD_COUNT, SIZES_FILE, mark_retrieval_set

SILENT_SECONDS = 2.0  # longer work shows a bar or a line


def write_split(
    store: PairDatabase,
    contents: Callable[[Stored], bytes],
    folder: Path,
    source: str,
    split: str,
    *,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    shard_size: int,
    classes: Mapping[str, int],
    templates: Sequence[str],
    progress: bool = False,
) -> dict[str, Any]:
    """Write the shards of a source and split that are not yet written; they differ by at most one sample in size.

    Returns:
        Source, split, pictures, captions, shards, bytes.

    Args:
        store: with `samples` split.
        contents: a sample's bytes.
        folder: the folder of the source; the split is a folder in it.
        made_from, settings: for the manifest.
        shard_size: samples a shard at most.
        classes: class -> its number; {} if no picture of the source has one.
        templates: for zero-shot classification.
        progress: show a bar.
    """
    here = folder / split
    made_from = {**made_from, "samples": _digest(store, source, split)}
    known = manifest.read_manifest(here)
    if known is not None and known.get("made_from") != made_from:
        _forget(here, known)  # with --retry-failed there are more samples than before
    count = store.count(source, split)
    shards = -(-count // shard_size)
    bounds = [number * count // shards for number in range(shards + 1)]
    manifest.begin(here, dataset=source, split=split, made_from=made_from, settings=settings)
    pairs = store.pairs(source, split)

    def sample_of(stored: Stored, captions: list[str], label: str | None) -> Sample:
        bar.update()
        text = "\n".join(captions)
        about = json.dumps({"file": stored.name}) if stored.name else None
        files = {
            stored.extension: contents(stored),
            TEXT_EXTENSION: text.encode(),
            **({"json": about.encode()} if about else {}),
        }
        if label is not None:
            files["cls"] = str(classes[label]).encode()
        return Sample(stored.key, files)

    bar = tqdm(
        desc=f"writing {source} {split}",
        total=count,
        unit=" pairs",
        disable=not progress,
        delay=SILENT_SECONDS,
    )
    for number in range(shards):
        name = f"{number}.tar" if split != "train" else f"{number:05d}.tar"
        chunk = list(islice(pairs, bounds[number + 1] - bounds[number]))
        known_record = manifest.read_record(here, name)
        if known_record is not None and known_record.pairs == len(chunk):
            bar.update(len(chunk))
            continue
        record = manifest.ShardRecord(
            name,
            bounds[number],
            len(chunk),
            sum(len(captions) for _, captions, _ in chunk),
        )
        manifest.write_recorded_shard(here, record, starmap(sample_of, chunk))
    bar.close()
    content = manifest.rebuild(here, shard_count=shards)
    if classes:
        write_atomically(folder / CLASS_NAMES, "".join(f"{name}\n" for name in classes))
        lines = "".join(f"{template.replace('{}', '{c}')}\n" for template in templates)
        write_atomically(folder / TEMPLATES, lines)
    if split != "train":
        mark_retrieval_set(folder, split, shards)
    counts = {
        "pictures": content["pairs"],
        "captions": content["captions"],
        "shards": shards,
        "bytes": content["size_bytes"],
    }
    return {"source": source, "split": split, "folder": str(here), **counts}


def _digest(store: PairDatabase, source: str, split: str) -> str:
    """A hash of all samples in their order: keys, captions, names of files, classes."""
    pairs = store.pairs(source, split)
    return digest_of_all(
        [stored.key, captions, stored.name, label] for stored, captions, label in pairs
    )


def _forget(folder: Path, known: Mapping[str, Any]) -> None:
    """Remove the files of a split that this program wrote, the manifest last."""
    recorded = {f"{file.stem}.tar" for file in (folder / manifest.RECORDS).glob("*.json")}
    for name in (SHARD_COUNT, SIZES_FILE, *sorted(recorded | set(known["shards"]))):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / manifest.RECORDS, ignore_errors=True)
    (folder / manifest.MANIFEST_FILE).unlink(missing_ok=True)
