"""What data arguments hold, by which two calls have the same data (`core.claim`).

The content of training data is the bytes of its shards in their order (of a table also those of the pictures that it names),
the samples that are chosen of them, and the words of their classes. The content of a set to score is that of `IndexedSet`.
Paths, names of sources and times do not count: a copy is the same data, and another file at the same path is not.
A remote shard counts by its address.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from open_clip_zerovl.core.identity import digest_of, file_digests
from open_clip_zerovl.data.names import CLASS_NAMES, TEMPLATES, file_of_words
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.data.table import CsvTable
from open_clip_zerovl.shards.urls import shard_digests


def content_of_sources(train_data: str) -> str:
    """Digest what the components of `--train-data` hold.

    Raises:
        UserError: as `parse_sources`.
    """
    components = [parse_sources(component) for component in train_data.split("::")]
    return digest_of([[content_of_source(source) for source in sources] for sources in components])


def content_of_source(source: Source) -> str:
    """Digest what a source holds."""
    words = [
        file
        for name in (CLASS_NAMES, TEMPLATES)
        if source.class_folder and (file := file_of_words(source.class_folder, name))
    ]
    digests = file_digests(words)
    return digest_of(contents_of_shards(source), [digests[str(file)] for file in words])


def contents_of_shards(source: Source) -> list[str]:
    """Digest the samples of each shard of a source."""
    digests = shard_digests(source.shards)
    more: list[Any] = []
    pictures: list[str | None] = []
    if source.columns is not None:
        more = [source.columns.picture, *source.columns.captions]
    if source.table is not None:
        table = source.table
        numbers = (table.image_column, *table.caption_columns)
        more = [*(table.columns[number] for number in numbers), digest_of(table.members)]
        pictures = _pictures(table)
    contents = []
    blocks: Counter[str] = Counter()  # a table stands once for each block of its rows
    for shard, begin, size in zip(
        source.shards, source.starts.tolist(), source.sizes, strict=False
    ):
        blocks[shard] += 1
        samples = slice(begin, begin + size)
        picked = None if source.picked is None else source.picked[samples].tolist()
        content = [digests[shard], blocks[shard], size, picked, more, pictures[samples]]
        contents.append(digest_of(content))
    return contents


def _pictures(table: CsvTable) -> list[str | None]:
    """Digest the pictures of a table's samples."""
    paths = [table.image_path(sample.image) for sample in table.samples()]
    digests = file_digests(paths)
    return [digests[path] for path in paths]
