"""Pictures of a test set, left out of what `zerovl data pack` writes: `--drop-near`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from open_clip_zerovl.prepare.dedup.near import BITS, NEAR
from open_clip_zerovl.prepare.dedup.overlap import Overlap, Place, check_distance, match, open_test_sets, write_overlap
from open_clip_zerovl.prepare.pack.split import Candidate, Exclusion


def near_exclusion(tests: str, out: Path, *, within: int = NEAR, threads: int = 4, progress: bool = True) -> Exclusion:
    """The exclusion of training pictures that are near to a picture of test sets. What is held out itself is left alone.

    What is left out is listed in `near.json` and shown on `near.html` in the folder `out`.

    Args:
        tests: `NAME=SET::NAME=SET`, as `overlap.open_test_sets` takes them.
        within: largest distance of a copy (`datasets.near`).

    Raises:
        UserError: a missing package, a set that cannot be read, a distance out of range.
    """
    check_distance(within)
    sets = open_test_sets(tests, threads=threads, progress=progress)
    names = ", ".join(sets.counts())
    digest = hashlib.blake2b(sets.index.words.tobytes(), digest_size=8).hexdigest()

    def keys(candidates: Iterator[Candidate]) -> Iterator[str]:
        found = Overlap(sets.counts(), within)
        pictures = ((Place(c.source, "", c.key), c.content()) for c in candidates if c.split == "train")
        match(pictures, sets, found, threads)
        write_overlap(found, out)
        yield from dict.fromkeys(pair.key for pair in found.pairs)

    return Exclusion(
        f"near {names}", keys, f"{names}: {len(sets.pictures)} pictures {digest}, {BITS} bits, within {within}"
    )
