"""The samples of a source with all their files, in order, for evaluation and checks; one form for every source.

    tar        000.jpg 000.txt 000.json                      ->  Sample("000", {jpg, txt, json})
    table      image,caption,place / a.jpg,a dog,Oslo        ->  Sample("00000001-a", {jpg: a.jpg's bytes, txt: b"a dog",
                                                                 json: {"image": "a.jpg", "caption": "a dog", "place": "Oslo"}})

A row of a table thus has its columns where a sample of a shard has its json. Rows count from 1 below the header. Training reads
by `reading`, which replaces bad samples; here they are yielded as they are, without the file that they lack.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data import parquet
from open_clip_zerovl.data.reading import picture_file
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.members import TEXT_EXTENSION, Sample, ShardError, read_samples
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS
from open_clip_zerovl.shards.urls import is_parquet, local_path

# keys of a json; img2dataset writes `url`
_ORIGINS = ("file", "filename", "file_name", "filepath", "image", "url")


def samples_of(source: Source, shard: int) -> Iterator[Sample]:
    """The samples of one shard of a source; of a table, those of one block of rows; of a selection, its own samples only.

    Args:
        shard: its number in `source.shards`.

    Raises:
        UserError: a remote shard, a shard or a table that cannot be read, or a table that has changed since it was opened.
    """
    where = source.shards[shard]
    path = local_path(where)
    if path is None:
        raise UserError(
            f"{where} of source {source.name!r} is remote, and local shards are read here; copy it to a disk"
        )
    try:
        if source.table is not None:
            yield from _rows(source, shard)
            return
        samples = read_samples(path)
        if is_parquet(where) and (columns := source.columns) is not None:
            rows = parquet.samples(path, columns, whole=True)
            samples = itertools.starmap(Sample, rows)
        if source.picked is None:
            yield from samples
            return
        numbers = set(source.picked[source.starts[shard] : source.starts[shard + 1]].tolist())
        yield from (sample for number, sample in enumerate(samples) if number in numbers)
    except ShardError as error:
        raise UserError(f"{where} cannot be read ({error}): fetch or write it again") from error


def origin_of(sample: Sample) -> str:
    """The file or URL of a sample's picture before it was packed, as its json names it; "" if it names none."""
    values = map(sample.about.get, _ORIGINS)
    return next((value for value in values if isinstance(value, str) and value), "")


def _rows(source: Source, block: int) -> Iterator[Sample]:
    table, first = source.table, int(source.starts[block])
    assert table is not None
    for sample in table.samples(first, first + source.sizes[block]):
        files: dict[str, bytes] = {}
        if sample.readable:
            if (content := picture_file(table.image_path(sample.image))) is not None:
                files[_extension(sample.image)] = content
            if sample.captions:
                files[TEXT_EXTENSION] = b"\n".join(sample.captions)
            about = dict(zip(table.columns, sample.rows[0], strict=False))
            files["json"] = json.dumps(about).encode()
        yield Sample(_key(sample.numbers[0], sample.image), files)


def _extension(image: str) -> str:
    """The suffix of a picture's member: that of its file, or jpg for an unknown suffix. Decoders go by the bytes."""
    suffix = Path(image).suffix.lower().removeprefix(".")
    return suffix if suffix in IMAGE_EXTENSIONS else IMAGE_EXTENSIONS[0]


def _key(row: int, image: str) -> str:
    """A key without dots or slashes, unique in its table, made of row and picture."""
    return f"{row + 1:08d}-{re.sub(r'[^A-Za-z0-9_-]+', '-', Path(image).stem)[:60]}".rstrip("-")
