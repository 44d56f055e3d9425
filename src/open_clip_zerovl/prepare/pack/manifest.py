"""Records and manifest of a split: a shard's record is written when the shard is whole, the manifest sums up the records.

DIR/00000.tar ...           the shards
DIR/records/00000.json      pairs, captions, bytes, sha256
DIR/manifest.json           inputs with their hashes, settings, counts, every shard's hash
DIR/sizes.json              samples a shard, as open_clip reads it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import locked, write_atomically
from open_clip_zerovl.core.identity import ADVICE, difference, read_claim, sha256_of
from open_clip_zerovl.shards.tar import Sample
from open_clip_zerovl.shards.writing import SIZES_FILE, write_shard

MANIFEST_FILE = "manifest.json"
RECORDS = "records"

#: Raised by one when the same inputs and settings give other shards than before.
_FORMAT = 1


@dataclass(frozen=True)
class ShardRecord:
    """The counts of one shard.

    Attributes:
        shard: file name.
        first: number of its first sample among those of the split.
        pairs, captions: samples in it, and lines of text (a retrieval set has several an image).
        size_bytes, sha256: size and hash of the tar.
    """

    shard: str
    first: int
    pairs: int
    captions: int
    size_bytes: int = 0
    sha256: str = ""


def write_recorded_shard(folder: Path, record: ShardRecord, samples: Iterable[Sample]) -> None:
    """Write a shard, then its record.

    Args:
        record: size and hash are filled in.
    """
    path = folder / record.shard
    # A shard that is written again (after a retry) is not done until its new record is written.
    _record_file(folder, record.shard).unlink(missing_ok=True)
    write_shard(path, samples)
    record = replace(record, size_bytes=path.stat().st_size, sha256=sha256_of(path))
    write_record(folder, record)


def write_record(folder: Path, record: ShardRecord) -> None:
    """Write a shard's record, which marks the shard as done."""
    write_atomically(
        _record_file(folder, record.shard), json.dumps(asdict(record), separators=(",", ":")) + "\n"
    )


def _record_file(folder: Path, shard: str) -> Path:
    return folder / RECORDS / f"{Path(shard).stem}.json"


def read_record(folder: Path, shard: str) -> ShardRecord | None:
    """The record of a shard, None if it has none. The record of a tar that is missing or has another size is removed."""
    file = _record_file(folder, shard)
    if not file.is_file():
        return None
    record = ShardRecord(**(read_claim(file) or {}))
    tar = folder / shard
    if not (tar.is_file() and tar.stat().st_size == record.size_bytes):
        file.unlink()
        return None
    return record


def read_manifest(folder: str | Path) -> dict[str, Any] | None:
    """The manifest of a folder, None if there is none. UserError for a file of another form."""
    file = Path(folder) / MANIFEST_FILE
    manifest = read_claim(file)
    shards = (manifest or {}).get("shards", {})
    if not isinstance(shards, dict) or not all(
        isinstance(entry, dict) and "sha256" in entry for entry in shards.values()
    ):
        raise UserError(
            f"{file} was not written by this program: remove it and call the command again."
        )
    return manifest


def begin(
    folder: Path,
    *,
    dataset: str,
    split: str,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Claim a folder for one dataset, or check that it is claimed for the same inputs and settings.

    Args:
        dataset, split, made_from, settings: all that must be the same in later calls.

    Raises:
        UserError: the folder holds another dataset, or was made from other inputs or with other settings.
    """
    head = {
        "format": _FORMAT,
        "dataset": dataset,
        "split": split,
        "made_from": made_from,
        "settings": settings,
    }
    head = json.loads(json.dumps(head))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / RECORDS):
        known = read_manifest(folder)
        if known is None:
            if any(folder.glob("*.tar")):
                raise UserError(
                    f"{folder} holds shards without a manifest of this program: give a new folder."
                )
            head.update(complete=False, pairs=0, captions=0, size_bytes=0, shards={})
            write_atomically(folder / MANIFEST_FILE, json.dumps(head, indent=1) + "\n")
            return
    changed = difference({name: known.get(name) for name in head}, head)
    if changed is not None:
        raise UserError(f"{folder} {changed}; {ADVICE}")


def rebuild(folder: Path, *, shard_count: int | None = None) -> dict[str, Any]:
    """Write `manifest.json` and `sizes.json` from the records; returns the manifest.

    Args:
        shard_count: number of all shards, if it is known; the manifest's `complete` is true when all of them are done.
    """
    with locked(folder / RECORDS):
        manifest = read_claim(folder / MANIFEST_FILE) or {}
        records = [
            ShardRecord(**(read_claim(file) or {}))
            for file in sorted((folder / RECORDS).glob("*.json"))
        ]
        records.sort(key=lambda record: record.first)
        if shard_count is None:
            shard_count = manifest.get("shard_count")
        manifest.update(
            complete=shard_count is not None and len(records) == shard_count,
            shard_count=shard_count,
            pairs=sum(record.pairs for record in records),
            captions=sum(record.captions for record in records),
            size_bytes=sum(record.size_bytes for record in records),
            shards={
                r.shard: {"pairs": r.pairs, "bytes": r.size_bytes, "sha256": r.sha256}
                for r in records
            },
        )
        write_atomically(
            folder / SIZES_FILE, json.dumps({r.shard: r.pairs for r in records}, indent=1) + "\n"
        )
        write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
    return manifest


@contextmanager
def sole_writer(out: Path, scratch: Path) -> Iterator[None]:
    """Make this process the only one that writes an output; the lock lies in its scratch folder.

    Raises:
        UserError: another process writes it.
    """
    busy = f"Another process is writing {out}: wait for it."
    with locked(scratch / RECORDS, name=".writer-pack", busy=busy):
        yield
