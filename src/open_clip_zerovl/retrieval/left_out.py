"""Pictures of a test set, left out of what `zerovl data pack` writes: `--drop-near`."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator

from open_clip_zerovl.datasets.near import NEAR, hash_all
from open_clip_zerovl.datasets.pack.split import Candidate, Exclusion
from open_clip_zerovl.retrieval.overlap import check_distance, open_test_sets

_AT_ONCE = 256  # pictures that are hashed and compared together


def near_exclusion(tests: str, *, within: int = NEAR, threads: int = 4, progress: bool = True) -> Exclusion:
    """The exclusion of training pictures that are near to a picture of test sets. What is held out itself is left alone.

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
        waiting: deque[str] = deque()

        def contents() -> Iterator[bytes]:
            for candidate in candidates:
                if candidate.split == "train":
                    waiting.append(candidate.key)
                    yield candidate.content()

        for _, found in hash_all(contents(), threads, _AT_ONCE):
            key = waiting.popleft()
            if found is not None and sets.index.nearest(found[None], within)[0][0] >= 0:
                yield key

    return Exclusion(f"near {names}", keys, f"{names}: {len(sets.pictures)} pictures {digest}, within {within}")
