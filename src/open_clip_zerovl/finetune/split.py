"""Splits a held-out part off pairs that bring none, by picture: all samples of a picture are on one side.

    OUT/NAME/train-00000.tar, sizes.json       the remaining samples of each source
    OUT/held-out/test/0.tar ...                the held-out pictures with all their captions, in CLIP_benchmark's layout
    OUT/split.json                             written last

Which pictures are held out follows from a hash of seed and bytes, so that the same data gives the same split in any order. The
shards are copies: a picture cannot be left out of a tar.
"""

from __future__ import annotations

import heapq
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import free_space, write_atomically
from open_clip_zerovl.data.held_out import MOST_HELD_OUT, held_out_count
from open_clip_zerovl.data.names import CLASS_NAMES, TEMPLATES
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.embeddings.fingerprint import describe_source
from open_clip_zerovl.finetune.data import HELD_OUT, Found, all_samples, digest_of
from open_clip_zerovl.shards.members import Sample
from open_clip_zerovl.shards.writing import SIZES_FILE, write_retrieval_set, write_shard

SPLIT_FILE = "split.json"
HELD_OUT_SHARE = 0.1  # of the pictures
SHARD_SAMPLES = 10_000


@dataclass
class HeldOut:
    """A picture that is held out, with the captions of all its samples, and the number of its class if it has one."""

    picture: bytes = b""
    captions: list[str] = field(default_factory=list)
    label: bytes | None = None


def split_off(
    sources: Sequence[Source],
    out: Path,
    *,
    seed: int,
    share: float = HELD_OUT_SHARE,
    most: int = MOST_HELD_OUT,
) -> Found:
    """Write the split, or find the one that an earlier call has finished.

    Args:
        sources: with all captions of a picture (`data.open_sources`).
        share, most: share and largest number of held-out pictures; see `held_out_count`.

    Raises:
        UserError: too few pictures, or a disk that holds no copy of the data.
    """
    found = Found(
        "::".join(f"{source.name}={out / source.name}" for source in sources),
        f"{HELD_OUT}={out / HELD_OUT}",
    )
    wanted = {
        "seed": seed,
        "share": share,
        "most": most,
        "sources": [describe_source(source) for source in sources],
    }
    file = out / SPLIT_FILE
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("of") == wanted:
        return found
    digests, total_bytes = _digests(sources, seed)
    count = held_out_count(len(digests), share, most)
    _check_space(out, total_bytes)
    held_out = {digest: HeldOut() for digest in sorted(heapq.nsmallest(count, digests))}
    shutil.rmtree(out, ignore_errors=True)  # of a call that was killed
    sizes = {
        source.name: _write_rest(source, out / source.name, held_out, seed) for source in sources
    }
    samples = [
        Sample(
            f"{number:06d}",
            {_suffix(own.picture): own.picture, "txt": "\n".join(own.captions).encode()}
            | ({} if own.label is None else {"cls": own.label}),
        )
        for number, own in enumerate(held_out.values())
    ]
    write_retrieval_set(out / HELD_OUT, samples)
    _copy_classes(sources, out)
    write_atomically(
        file, json.dumps({"of": wanted, "held out": len(samples), "train": sizes}, indent=2) + "\n"
    )
    return found


def _copy_classes(sources: Sequence[Source], out: Path) -> None:
    """Copy the names and templates of classes beside each source, and beside the held-out set if all sources share them."""
    places = {source.name: source.class_folder for source in sources}
    names = {
        None if place is None else (place / CLASS_NAMES).read_bytes() for place in places.values()
    }
    if len(names) == 1:
        places[HELD_OUT] = next(iter(places.values()))
    for name, place in places.items():
        if place is not None:
            for file in (CLASS_NAMES, TEMPLATES):
                if (place / file).is_file():
                    shutil.copyfile(place / file, out / name / file)


def _digests(sources: Sequence[Source], seed: int) -> tuple[set[bytes], int]:
    """The different pictures of all sources, and the bytes of all samples."""
    digests: set[bytes] = set()
    total = 0
    for source in sources:
        for sample, picture, _ in all_samples(source):
            digests.add(digest_of(picture, seed))
            total += sum(map(len, sample.files.values())) + 1024  # and headers
    return digests, total


def _check_space(out: Path, total_bytes: int) -> None:
    place, free = free_space(out)
    if total_bytes > 0.95 * free:
        raise UserError(
            f"holding pictures out copies the data, {total_bytes / 2**30:.1f} GiB, and {place} has {free / 2**30:.1f} GiB "
            "free; make room, or give a held-out set with --retrieval-data (`zerovl data pack` holds one out while it packs)"
        )


def _write_rest(source: Source, folder: Path, held_out: Mapping[bytes, HeldOut], seed: int) -> int:
    """Write the samples of a source that are not held out, and collect those that are. Returns the samples written."""

    def rest() -> Iterator[Sample]:
        for sample, picture, captions in all_samples(source):
            own = held_out.get(digest_of(picture, seed))
            if own is None:
                yield sample
                continue
            own.picture = picture
            own.label = sample.files.get("cls", own.label)
            own.captions += [caption for caption in captions if caption not in own.captions]

    sizes: dict[str, int] = {}
    waiting = rest()
    while (first := next(waiting, None)) is not None:
        name = f"train-{len(sizes):05d}.tar"
        part = itertools.chain([first], itertools.islice(waiting, SHARD_SAMPLES - 1))
        # New keys: those of two shards may be alike.
        sizes[name] = write_shard(
            folder / name, (replace(one, key=f"{n:06d}") for n, one in enumerate(part))
        )
    if not sizes:
        raise UserError(
            f"all pictures of source {source.name!r} are held out; give it more pictures, or leave the source out"
        )
    write_atomically(folder / SIZES_FILE, json.dumps(sizes, indent=1) + "\n")
    return sum(sizes.values())


def _suffix(picture: bytes) -> str:
    """The suffix of a picture's format, by its first bytes."""
    if picture.startswith(b"\x89PNG"):
        return "png"
    return "webp" if picture[:4] == b"RIFF" and picture[8:12] == b"WEBP" else "jpg"
