"""The pictures of sources, or all their captions, as a collection.

`n` samples of all sources, in the order of their shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.captions import caption_starts
from open_clip_zerovl.data.content import contents_of_shards
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.reading import (
    RawSample,
    Reading,
    Surplus,
    sample_sentence,
    shard_sentence,
    wrong_size,
)
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.data.stats import Fault
from open_clip_zerovl.shards.members import ShardError
from open_clip_zerovl.shards.pictures import BadPicture

SAMPLED_CAPTIONS = 2_000


class SourceSamples:
    """The pictures, or the captions, of sources; a part is a shard (`embed.Parts`).

    Args:
        side: "image" or "text".
        strict: a sample or shard that cannot be shown is an error.
    """

    def __init__(self, sources: Sequence[Source], side: str, *, strict: bool = True) -> None:
        self.sources, self.side, self.strict = sources, side, strict
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
        """Pictures, or captions, of each shard of all sources."""
        sizes = [size for source in self.sources for size in source.sizes]
        if self.side == "image":
            return sizes
        return np.diff(self.caption_starts[np.cumsum([0, *sizes])]).tolist()

    @cached_property
    def caption_starts(self) -> np.ndarray:
        """(n + 1,) number of each sample's first caption; the last entry is the captions of all sources."""
        counts = []
        for source in self.sources:
            starts = caption_starts(source)
            counts.append(
                np.ones(source.num_samples, np.int64) if starts is None else np.diff(starts)
            )
        return np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])

    def sample(self, number: int) -> list[tuple[int, Any]]:
        """Read (row, picture or caption) of a sample of a strict collection; of a local shard no other sample is read.

        Raises:
            UserError: it cannot be shown.
        """
        index = int(np.searchsorted(self._samples, number, side="right")) - 1
        source, position = self.sources[index], number - self._samples[index]
        shard = int(np.searchsorted(source.starts, position, side="right")) - 1
        reading = Reading(source, index, fail=self.strict, every_caption=True)
        try:
            with closing(
                reading.samples(shard, position - int(source.starts[shard]), position)
            ) as samples:
                return self._shown(index, next(samples))
        except ShardError as error:
            raise UserError(shard_sentence(source, shard, error)) from error

    def read(self, part: int) -> Iterator[tuple[int, Any] | str]:
        """Yield (number in the shard, picture or caption) of a shard's samples as they lie."""
        index, shard = self._shards[part]
        source = self.sources[index]
        notes: list[str] = []
        reading = Reading(source, index, fail=self.strict, every_caption=True, notes=notes.append)
        begin = int(source.starts[shard])
        first = self._samples[index] + begin
        first = first if self.side == "image" else int(self.caption_starts[first])
        try:
            with closing(reading.samples(shard, 0, begin)) as samples:
                for sample in samples:
                    yield from ((row - first, shown) for row, shown in self._shown(index, sample))
        except Surplus:
            notes.append(self._refused_if_strict(wrong_size(source, shard, "more")))
        except ShardError as error:
            notes.append(self._refused_if_strict(shard_sentence(source, shard, error)))
        yield from notes

    def _refused_if_strict(self, message: str) -> str:
        if self.strict:
            raise UserError(message)
        return message

    def _shown(self, index: int, sample: RawSample) -> list[tuple[int, Any]]:
        """Return the picture or the captions of a sample with their rows in the collection; [] if it cannot be shown."""
        row, fault = self._samples[index] + sample.position, None
        shown: list[tuple[int, Any]] = []
        if self.side == "text":
            begin = int(self.caption_starts[row])
            shown = [(begin + place, text) for place, text in enumerate(sample.captions) if text]
        elif (
            sample.fault is None or sample.image
        ):  # an empty file is a fault that the decoder finds
            try:
                shown = [(row, decode_image(sample.image))]
            except BadPicture as error:
                fault = Fault(error.reason, error.detail)
        fault = fault or sample.fault
        if not shown and fault is not None and self.strict:
            raise UserError(sample_sentence(self.sources[index], sample, fault))
        return shown


def cut_captions(
    tokenizer: Callable[..., Tensor], context_length: int, sources: Sequence[Source]
) -> tuple[int, int, int]:
    """(captions read, captions that a context cuts, tokens of the longest), from the first samples of each source.

    Args:
        tokenizer: open_clip's, which takes a `context_length`.
    """
    texts: list[str] = []
    share = -(-SAMPLED_CAPTIONS // len(sources))
    for source in sources:
        samples = SourceSamples([source], "text", strict=False)
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
