"""The number of captions of each sample of a source."""

from __future__ import annotations

import os
import tarfile

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.fields import captions_of, member_of
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.index import open_index
from open_clip_zerovl.shards.members import ShardError, locate_samples, opened
from open_clip_zerovl.shards.urls import local_path


def caption_starts(source: Source) -> np.ndarray | None:
    """(n + 1,) number of each sample's first caption where all captions are numbered through; None where each sample has one.

        samples of 1, 3 and 2 captions  ->  [0, 1, 4, 6]

    Samples have several captions with `--captions one-per-epoch`, FIELD=SHARE,... and FIELD+FIELD; with `all` each caption is a
    sample of its own. In a shard that cannot be read each sample counts one caption.

    Raises:
        UserError: remote or compressed shards, whose captions cannot be counted.
    """
    fields = field_names(source.captions)
    if source.captions != "one-per-epoch" and not fields:
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
                f"here, or leave '--captions {source.captions}' out"
            )
        try:
            found = _counts_of_fields(path, source.captions) if fields else open_index(path).captions
        except ShardError:
            continue
        except tarfile.ReadError as error:
            raise UserError(
                f"shard {shard} of source {source.name!r} is no plain tar ({error}): its captions cannot be counted; unpack "
                f"it, or leave '--captions {source.captions}' out"
            ) from error
        chosen = (
            found if source.picked is None else found[source.picked[begin:end][source.picked[begin:end] < len(found)]]
        )
        counts[begin : min(end, begin + len(chosen))] = chosen[: end - begin]
    return np.concatenate([[0], np.cumsum(counts)])


def _counts_of_fields(path: str, captions: str | None) -> np.ndarray:
    """(n,) number of captions of each whole sample of a plain local tar, at least 1."""
    wanted, counts = {member_of(field) for field in field_names(captions)}, []
    with opened(path) as descriptor:
        try:
            for _, members in locate_samples(path):
                content = {name: os.pread(descriptor, at[1], at[0]) for name, at in members.items() if name in wanted}
                found = captions_of(content, captions)
                counts.append(max(1, len(found)) if isinstance(found, list) else 1)
        except ShardError:
            if not counts:
                raise
    return np.array(counts, dtype=np.int64)
