"""The store's samples to shards: a source's training pairs, and its held-out set in CLIP_benchmark's layout.

OUT/train/00000.tar, sizes.json ...                  one source
OUT/dataset_type.txt, test/0.tar, test/nshards.txt
OUT/NAME/train, OUT/NAME/test ...                    several
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.prepare.pack.store import Store, Stored
from open_clip_zerovl.prepare.public import manifest
from open_clip_zerovl.shards.members import TEXT_EXTENSION, Sample
from open_clip_zerovl.shards.writing import SIZES_FILE


@dataclass(frozen=True)
class Written:
    """What was written of one source and split: samples, captions, shards, bytes, and its folder."""

    source: str
    split: str
    folder: Path
    pictures: int
    captions: int
    shards: int
    size_bytes: int


def folder_of(out: Path, source: str, several: bool) -> Path:
    """Where a source is written."""
    return out / source if several else out


def write_split(
    store: Store,
    contents: Callable[[Stored], bytes],
    folder: Path,
    source: str,
    split: str,
    *,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    shard_size: int,
) -> Written:
    """Write the shards of a source and split that are not yet written; they differ by at most one sample in size.

    Args:
        store: with `samples` split.
        contents: a sample's bytes.
        folder: of the source; the split is a folder in it.
        made_from, settings: for the manifest.
        shard_size: samples a shard at most.
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
    samples = store.samples(source, split)
    for number in range(shards):
        name = f"{number}.tar" if split == "test" else f"{number:05d}.tar"
        chunk = [next(samples) for _ in range(bounds[number], bounds[number + 1])]
        known_record = manifest.read_record(here, name)
        if known_record is not None and known_record.pairs == len(chunk):
            continue
        captions = [store.captions_of(source, sample.key) for sample in chunk]
        record = manifest.ShardRecord(name, bounds[number], len(chunk), len(chunk), sum(map(len, captions)))
        pairs = zip(chunk, captions, strict=True)
        manifest.write_recorded_shard(here, record, (_sample(sample, texts, contents) for sample, texts in pairs))
    content = manifest.rebuild(here, shard_count=shards)
    if split == "test":
        # Last: a folder without nshards.txt is no retrieval set, so that an incomplete one is never scored.
        write_atomically(here / "nshards.txt", f"{shards}\n")
        write_atomically(folder / "dataset_type.txt", "retrieval\n")
    return Written(source, split, here, content["pairs"], content["captions"], shards, content["size_bytes"])


def _sample(sample: Stored, captions: list[str], contents: Callable[[Stored], bytes]) -> Sample:
    return Sample(sample.key, {sample.extension: contents(sample), TEXT_EXTENSION: "\n".join(captions).encode("utf-8")})


def _digest(store: Store, source: str, split: str) -> str:
    """A hash of all samples in their order: keys and captions."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in store.samples(source, split):
        digest.update("\n".join((sample.key, *store.captions_of(source, sample.key), "")).encode())
    return digest.hexdigest()


def _forget(folder: Path, known: Mapping[str, Any]) -> None:
    """Remove what this program wrote of a split, the manifest last."""
    recorded = {f"{file.stem}.tar" for file in (folder / manifest.RECORDS).glob("*.json")}
    for name in ("nshards.txt", SIZES_FILE, *sorted(recorded | set(known["shards"]))):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / manifest.RECORDS, ignore_errors=True)
    (folder / manifest.MANIFEST_FILE).unlink(missing_ok=True)
