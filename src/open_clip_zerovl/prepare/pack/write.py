"""The store's samples to shards: a source's training pairs, and its held-out set in CLIP_benchmark's layout.

OUT/train/00000.tar, sizes.json, manifest.json ...   one source
OUT/dataset_type.txt, test/0.tar, test/nshards.txt
OUT/NAME/train, OUT/NAME/test ...                    several

A sample is `key.jpg` (png, webp), `key.txt` with its captions, one a line, and `key.json` with the name of its file. A picture
of a class has `key.cls`, too, the number of a line of `classnames.txt`: each split is a labelled set as CLIP_benchmark lays
them out, with its templates in `zeroshot_classification_templates.txt`. A shard is whole or not there; a split's manifest names
the samples it is made of, so that a later call writes the shards that are missing, and at the end each shard's hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, starmap
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import digest_of_all, read_claim, sha256_of, write_atomically
from open_clip_zerovl.data.names import CLASS_NAMES, TEMPLATES
from open_clip_zerovl.prepare.pack.store import PairDatabase, Stored
from open_clip_zerovl.shards.files import SHARD_COUNT, SIZES_FILE, mark_retrieval_set, write_shard
from open_clip_zerovl.shards.tar import TEXT_EXTENSION, Sample

MANIFEST_FILE = "manifest.json"
#: Raised by one when the same samples and settings give other shards than before.
_FORMAT = 2
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
    """Write the shards of a source and split that are not yet written. They differ by at most one sample in size.

    Returns:
        Source, split, pictures, captions, shards, bytes.

    Args:
        store: with `samples` split.
        contents: a sample's bytes.
        folder: the folder of the source. The split is a folder in it.
        made_from, settings: for the manifest.
        shard_size: samples a shard at most.
        classes: class -> its number. {} if no picture of the source has one.
        templates: for zero-shot classification.
        progress: show a bar.
    """
    here = folder / split
    count = store.count(source, split)
    shards = -(-count // shard_size)
    bounds = [number * count // shards for number in range(shards + 1)]
    claim = {"format": _FORMAT, "dataset": source, "split": split, "settings": settings}
    claim["made_from"] = {**made_from, "samples": _digest(store, source, split)}
    _begin(here, json.loads(json.dumps(claim)))
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
    written: dict[str, dict[str, Any]] = {}
    captions = 0
    for number in range(shards):
        file = here / (f"{number}.tar" if split != "train" else f"{number:05d}.tar")
        chunk = list(islice(pairs, bounds[number + 1] - bounds[number]))
        if file.is_file():  # whole, and of these samples
            bar.update(len(chunk))
        else:
            write_shard(file, starmap(sample_of, chunk))
        captions += sum(len(texts) for _, texts, _ in chunk)
        size = file.stat().st_size
        written[file.name] = {"pairs": len(chunk), "bytes": size, "sha256": sha256_of(file)}
    bar.close()
    sizes = {name: entry["pairs"] for name, entry in written.items()}
    counts = {"pictures": count, "captions": captions, "shards": shards}
    counts["bytes"] = sum(entry["bytes"] for entry in written.values())
    write_atomically(here / SIZES_FILE, json.dumps(sizes, indent=1) + "\n")
    _write_manifest(here, {**claim, **counts, "shards": written})
    if classes:
        write_atomically(folder / CLASS_NAMES, "".join(f"{name}\n" for name in classes))
        lines = "".join(f"{template.replace('{}', '{c}')}\n" for template in templates)
        write_atomically(folder / TEMPLATES, lines)
    if split != "train":
        mark_retrieval_set(folder, split, shards)
    return {"source": source, "split": split, "folder": str(here), **counts}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Read the manifest of a folder, {} if there is none.

    Raises:
        UserError: a file of another form.
    """
    file = Path(folder) / MANIFEST_FILE
    manifest = read_claim(file) or {}
    shards = manifest.get("shards", {})
    if not isinstance(shards, dict) or not all(
        isinstance(entry, dict) and "sha256" in entry for entry in shards.values()
    ):
        raise UserError(
            f"{file} was not written by this program: remove it and call the command again."
        )
    return manifest


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")


def _begin(folder: Path, claim: dict[str, Any]) -> None:
    """Claim the folder of a split, and remove shards of other samples, as before `--retry-failed`."""
    known = read_manifest(folder)
    if {name: known.get(name) for name in claim} != claim:
        for file in (*folder.glob("*.tar"), folder / SHARD_COUNT, folder / SIZES_FILE):
            file.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        _write_manifest(folder, claim)


def _digest(store: PairDatabase, source: str, split: str) -> str:
    """Hash all samples in their order: keys, captions, names of files, classes."""
    pairs = store.pairs(source, split)
    return digest_of_all(
        [stored.key, captions, stored.name, label] for stored, captions, label in pairs
    )
