"""What data arguments hold, by which two calls have the same data (`core.identity`).

The content of training data is the bytes of its shards in their order, and the words of their classes. The content of a set
to score is that of `IndexedSet`.
Paths, names of sources and times do not count: a copy is the same data, and another file at the same path is not.
A remote shard counts by its address.
"""

from __future__ import annotations

from open_clip_zerovl.core.identity import digest_of, file_digests
from open_clip_zerovl.data.names import CLASS_NAMES, TEMPLATES, file_of_words
from open_clip_zerovl.data.sources import Source, parse_sources
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
    numbered = zip(source.shards, source.sizes, strict=True)
    return [digest_of([digests[shard], size]) for shard, size in numbered]
