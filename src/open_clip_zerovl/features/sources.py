"""The samples of sources as a collection: their pictures and all their captions.

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
from open_clip_zerovl.features.reading import Embeddable, Lost
from open_clip_zerovl.shards.members import ShardError
from open_clip_zerovl.shards.pictures import BadPicture

SAMPLED_CAPTIONS = 2_000


class SourceSamples:
    """The samples of sources (`reading.EmbeddableFiles`).

    Args:
        images, captions: which of the two are read; a sample that lacks one of them is lost.
        strict: a sample or shard that cannot be shown is an error.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        images: bool = True,
        captions: bool = True,
        strict: bool = True,
    ) -> None:
        self.sources, self.strict = sources, strict
        self.images = images
        self.captions = captions
        self._files = [
            (index, shard)
            for index, source in enumerate(sources)
            for shard in range(len(source.shards))
        ]
        self._begins = np.cumsum([0, *(source.num_samples for source in sources)]).tolist()

    @property
    def sizes(self) -> list[int]:
        """Samples of each shard of all sources."""
        return [size for source in self.sources for size in source.sizes]

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

    def sample(self, row: int) -> Embeddable:
        """A sample by its number, of a strict collection; of a local shard no other sample is read.

        Raises:
            UserError: it cannot be shown.
        """
        index = int(np.searchsorted(self._begins, row, side="right")) - 1
        source, position = self.sources[index], row - self._begins[index]
        shard = int(np.searchsorted(source.starts, position, side="right")) - 1
        reading = Reading(source, index, fail=self.strict, every_caption=True)
        try:
            with closing(
                reading.samples(shard, position - int(source.starts[shard]), position)
            ) as samples:
                sample = self._sample(index, next(samples))
        except ShardError as error:
            raise UserError(shard_sentence(source, shard, error)) from error
        assert isinstance(sample, Embeddable)
        return sample

    def read(self, file: int) -> Iterator[Embeddable | Lost]:
        """The samples of a shard as they lie."""
        index, shard = self._files[file]
        source = self.sources[index]
        notes: list[str] = []
        reading = Reading(source, index, fail=self.strict, every_caption=True, notes=notes.append)
        begin, end = int(source.starts[shard]), int(source.starts[shard + 1])
        try:
            with closing(reading.samples(shard, 0, begin)) as samples:
                for sample in samples:
                    yield self._sample(index, sample)
        except Surplus:
            notes.append(self._refused_if_strict(wrong_size(source, shard, "more")))
        except ShardError as error:
            message = self._refused_if_strict(shard_sentence(source, shard, error))
            yield Lost(source.name, error.reason, end - begin - error.readable, message)
        yield from (Lost(source.name, "", 0, note) for note in notes)

    def _refused_if_strict(self, message: str) -> str:
        if self.strict:
            raise UserError(message)
        return message

    def _sample(self, index: int, sample: RawSample) -> Embeddable | Lost:
        source = self.sources[index]
        row = self._begins[index] + sample.position
        captions = [(number, caption) for number, caption in enumerate(sample.captions) if caption]
        fault = sample.fault if self.captions and not captions else None
        image: Any = None
        if fault is None and self.images:
            try:
                # No picture is a fault of the sample; an empty file is one that the decoder finds.
                missing = sample.fault is not None and not sample.image
                image = None if missing else decode_image(sample.image)
            except BadPicture as error:
                fault = Fault(error.reason, error.detail)
            if image is None and fault is None:
                fault = sample.fault
        if fault is not None:
            if self.strict:
                raise UserError(sample_sentence(source, sample, fault))
            return Lost(source.name, fault.reason)
        if self.captions:
            begin = int(self.caption_starts[row])
            captions = [(begin + number, caption) for number, caption in captions]
        return Embeddable(row, [image] if self.images else (), captions if self.captions else ())


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
        samples = SourceSamples([source], images=False, strict=False)
        read = (sample for file in range(len(samples.sizes)) for sample in samples.read(file))
        texts += islice(
            (caption for sample in read for _, caption in getattr(sample, "captions", ())), share
        )
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
