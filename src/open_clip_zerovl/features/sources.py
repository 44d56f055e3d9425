"""The pictures of sources, or all their captions, as a collection.

`n` samples of all sources, in the order of their shards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.names import PER_EPOCH, field_names
from open_clip_zerovl.data.reader import (
    ShardReader,
    members_of,
    picture_of,
    sample_sentence,
    texts_of,
)
from open_clip_zerovl.data.sources import Source, contents_of_shards
from open_clip_zerovl.shards.files import open_index
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS
from open_clip_zerovl.shards.tar import WANTED, Sample, ShardError
from open_clip_zerovl.shards.texts import BadCaption, Fault, caption_of

log = logging.getLogger(__name__)

SAMPLED_CAPTIONS = 2_000


class SourceSamples:
    """The pictures, or the captions, of sources, a shard in each part (`embed.Parts`).

    Args:
        side: "image" or "text".
    """

    def __init__(self, sources: Sequence[Source], side: str) -> None:
        self.sources, self.side = sources, side
        self._shards = [
            (index, shard)
            for index, source in enumerate(sources)
            for shard in range(len(source.shards))
        ]
        self._samples = np.cumsum([0, *(source.num_samples for source in sources)]).tolist()

    @cached_property
    def contents(self) -> list[str]:
        """Digest of each shard of all sources."""
        return [content for source in self.sources for content in contents_of_shards(source)]

    @cached_property
    def counts(self) -> list[int]:
        """Count the pictures, or captions, of each shard of all sources."""
        sizes = [size for source in self.sources for size in source.sizes]
        if self.side == "image":
            return sizes
        return np.diff(self.caption_starts[np.cumsum([0, *sizes])]).tolist()

    @cached_property
    def caption_starts(self) -> np.ndarray:
        """Number each sample's first caption (n + 1,), with the captions of all sources as the last entry."""
        counts = np.concatenate([caption_counts(source) for source in self.sources])
        return np.concatenate([[0], np.cumsum(counts)])

    def sample(self, number: int) -> list[tuple[int, Any]]:
        """Read (row, picture or caption) of a sample, and no other sample of its shard.

        Raises:
            UserError: it cannot be shown.
        """
        index = int(np.searchsorted(self._samples, number, side="right")) - 1
        source, position = self.sources[index], number - self._samples[index]
        shard = int(np.searchsorted(source.starts, position, side="right")) - 1
        reader = self._reader(source)
        with closing(reader.samples(shard, position - int(source.starts[shard]))) as samples:
            sample = next(samples)
        if isinstance(sample, ShardError):
            raise UserError(reader.sentence(shard, sample))
        try:
            return self._shown(source, number, sample)
        except Fault as fault:
            raise UserError(sample_sentence(source, sample, fault)) from fault

    def read(self, part: int) -> Iterator[tuple[int, Any] | str]:
        """Yield (number in the shard, picture or caption) of a shard's samples as they lie, at last its fault as a sentence."""
        index, shard = self._shards[part]
        source = self.sources[index]
        reader = self._reader(source, notes=log.warning)
        begin = self._samples[index] + int(source.starts[shard])
        first = begin if self.side == "image" else int(self.caption_starts[begin])
        with closing(reader.samples(shard)) as samples:
            for number, sample in enumerate(samples, begin):
                if isinstance(sample, ShardError):
                    yield reader.sentence(shard, sample)
                    return
                with suppress(Fault):
                    for row, shown in self._shown(source, number, sample):
                        yield row - first, shown

    def _reader(self, source: Source, **more: Any) -> ShardReader:
        if self.side == "image":
            return ShardReader(source, WANTED, **more)
        return ShardReader(source, members_of(source.captions) - {*IMAGE_EXTENSIONS}, **more)

    def _shown(self, source: Source, number: int, sample: Sample) -> list[tuple[int, Any]]:
        """Return the picture or the captions of a sample with their rows in the collection.

        Raises:
            Fault: it cannot be shown.
        """
        if self.side == "image":
            return [(number, decode_image(picture_of(sample)))]
        return self._captions(number, texts_of(sample.files, source.captions)[0])

    def _captions(self, number: int, texts: Sequence[bytes]) -> list[tuple[int, str]]:
        """Return the captions that can be shown, with their rows.

        Raises:
            Fault: there is none.
        """
        shown = []
        for row, text in enumerate(texts, int(self.caption_starts[number])):
            with suppress(BadCaption):
                shown.append((row, caption_of(text)))
        if not shown:
            caption_of(b"".join(texts[:1]))
        return shown


def caption_counts(source: Source) -> np.ndarray:
    """Count the captions of each sample (n,) of a source, at least 1.

    Samples have several captions with `--captions one-per-epoch` and FIELD=SHARE,...; with `all` each caption is a
    sample of its own. In a shard that cannot be read each sample counts one caption.
    """
    counts = np.ones(source.num_samples, dtype=np.int64)
    if source.captions != PER_EPOCH and not field_names(source.captions):
        return counts
    reader = ShardReader(source, members_of(source.captions) - {*IMAGE_EXTENSIONS})
    for shard, begin in enumerate(source.starts[:-1].tolist()):
        if source.captions == PER_EPOCH:  # which the shard's index has counted
            with suppress(ShardError), reader.cache.borrowed(source.shards[shard]) as path:
                each = open_index(path).captions[: source.sizes[shard]]
                counts[begin : begin + len(each)] = each
            continue
        for number, sample in enumerate(reader.samples(shard), begin):
            with suppress(Fault):
                if isinstance(sample, Sample):
                    counts[number] = max(1, len(texts_of(sample.files, source.captions)[0]))
    return counts


def cut_captions(
    tokenizer: Callable[..., Tensor], context_length: int, sources: Sequence[Source]
) -> tuple[int, int, int]:
    """Count (captions read, captions that a context cuts, tokens of the longest) in the first samples of each source.

    Args:
        tokenizer: open_clip's, which takes a `context_length`.
    """
    texts: list[str] = []
    share = -(-SAMPLED_CAPTIONS // len(sources))
    for source in sources:
        samples = SourceSamples([source], "text")
        read = (item for part in range(len(source.shards)) for item in samples.read(part))
        texts += islice((item[1] for item in read if not isinstance(item, str)), share)
    if not texts:
        return 0, 0, 0
    tokens, long_tokens = (
        tokenizer(texts, context_length=times * context_length) for times in (1, 8)
    )
    padding = getattr(getattr(tokenizer, "tokenizer", None), "pad_token_id", None) or 0
    # A cut text that ends with a token of its own moves it; where that token also pads, nothing else shows the cut.
    cut = (tokens != long_tokens[:, :context_length]).any(dim=1) | (
        long_tokens[:, context_length] != padding
    )
    lengths = ((long_tokens != padding) * torch.arange(1, long_tokens.shape[1] + 1)).amax(dim=1)
    return len(texts), int(cut.sum()), int(lengths.max())
