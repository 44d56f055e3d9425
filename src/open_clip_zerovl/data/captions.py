"""How many captions each sample of a source has."""

from __future__ import annotations

import tarfile

import numpy as np

from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.tar.index import open_index
from open_clip_zerovl.tar.members import ShardError
from open_clip_zerovl.tar.remote import local_path


def caption_starts(source: Source) -> np.ndarray | None:
    """(n + 1,) where the captions of each sample begin if all captions are numbered one after the other; None: one each.

    Samples have several captions with `--captions one-per-epoch` alone; with `all` each is a sample of its own. A shard that
    cannot be read counts one for each sample.

    Raises:
        UserError: remote or compressed shards, whose captions cannot be counted.
    """
    if source.captions != "one-per-epoch":
        return None
    if source.table is not None:
        return np.concatenate([[0], np.asarray(source.table.ends, dtype=np.int64)])
    counts = np.ones(source.num_samples, dtype=np.int64)
    for number, shard in enumerate(source.shards):
        begin, end = int(source.starts[number]), int(source.starts[number + 1])
        path = local_path(shard)
        if path is None:
            raise UserError(
                f"shards of source {source.name!r} are remote, first {shard}: their captions cannot be counted; copy them "
                "here, or leave '--captions one-per-epoch' out"
            )
        try:
            found = open_index(path).captions
        except ShardError:
            continue
        except tarfile.ReadError as error:
            raise UserError(
                f"shard {shard} of source {source.name!r} is no plain tar ({error}): its captions cannot be counted; unpack "
                "it, or leave '--captions one-per-epoch' out"
            ) from error
        chosen = (
            found if source.picked is None else found[source.picked[begin:end][source.picked[begin:end] < len(found)]]
        )
        counts[begin : min(end, begin + len(chosen))] = chosen[: end - begin]
    return np.concatenate([[0], np.cumsum(counts)])
