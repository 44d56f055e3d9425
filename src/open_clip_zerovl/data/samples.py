"""The samples of a source with all their files, in order, for evaluation and checks.

Training reads by `reading`, which replaces bad samples. Here they are yielded as they are, without the file that they lack.
"""

from __future__ import annotations

from collections.abc import Iterator

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.members import Sample, ShardError, read_samples
from open_clip_zerovl.shards.urls import local_path

# keys of a json; img2dataset writes `url`
_ORIGINS = ("file", "filename", "file_name", "filepath", "image", "url")


def samples_of(source: Source, shard: int) -> Iterator[Sample]:
    """Iterate over the samples of one shard of a source.

    Args:
        shard: its number in `source.shards`.

    Raises:
        UserError: a remote shard, or one that cannot be read.
    """
    where = source.shards[shard]
    path = local_path(where)
    if path is None:
        raise UserError(
            f"{where} of source {source.name!r} is remote, and local shards are read here; copy it to a disk"
        )
    try:
        yield from read_samples(path)
    except ShardError as error:
        raise UserError(f"{where} cannot be read ({error}): fetch or write it again") from error


def origin_of(sample: Sample) -> str:
    """The file or URL of a sample's picture before it was packed, as its json names it; "" if it names none."""
    values = map(sample.about.get, _ORIGINS)
    return next((value for value in values if isinstance(value, str) and value), "")
