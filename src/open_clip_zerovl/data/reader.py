"""The one reader of shards: samples in their order, and faults as values.

    shard --located by headers--> Sample (key, files), Sample, ..., at last its ShardError if it has one

Training's stream replaces what is lost (`sample_stream`), features leave it out or refuse it, evaluation refuses it. Sample
number i of a shard is the same wherever the shard is entered; its index says where sample number `start` begins. A remote or
compressed shard is a plain local file first (`shards/fetch`).

A shard's fault is that it is missing or torn, gives fewer samples than were counted, or more (SURPLUS). A `sizes.json` that
lists fewer samples is named at the shard's end: to see it when the source opens, all headers would be read, which it spares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.captions import members_of
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache, is_shard
from open_clip_zerovl.shards.index import open_index
from open_clip_zerovl.shards.pictures import PICTURE_WORDS
from open_clip_zerovl.shards.tar import (
    TEXT_EXTENSION,
    Sample,
    ShardError,
    content_of,
    locate_samples,
    opened,
    unreadable,
    words_of,
)
from open_clip_zerovl.shards.texts import Fault, caption_lines

SHORT, SURPLUS = "short shard", "surplus"  # reasons of a ShardError
_GONE_SHARDS = 8  # after this many failures of remote shards in a row, their host counts as down


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class ShardReader:
    """Reads the shards of one source.

    Attributes:
        wanted: suffixes of the files that are read; None for all.
        policy: waits and retries of remote shards.
        cache: the folder of fetched shards.
        whole: a shard without its end mark is torn, even if it holds as many samples as were counted.
        opens: called with the number of every shard that is opened.
        notes: called with a sentence about something odd through which no sample is lost.
    """

    source: Source
    wanted: Collection[str] | None = None
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    cache: ShardCache = field(default_factory=ShardCache)
    whole: bool = False
    opens: Callable[[int], None] = _ignore
    notes: Callable[[str], None] = _ignore

    @classmethod
    def of_pairs(cls, source: Source, **more: Any) -> ShardReader:
        """Make a reader of the pictures and of the files that hold the source's captions."""
        return cls(source, members_of(source.captions), **more)

    def samples(self, shard: int, start: int = 0) -> Generator[Sample | ShardError, None, None]:
        """Yield the samples of a shard from number `start` on, at last the shard's fault if it has one.

        Raises:
            UserError: several remote shards in a row do not come, a shard's URL cannot be opened, or too many files are open.
        """
        self.opens(shard)
        url, size, number = self.source.shards[shard], self.source.sizes[shard], 0
        try:
            with self.cache.borrowed(url, self.policy, self.notes, check=is_shard) as path:
                number, begin, skipped = self._entry(path, start)
                with (
                    opened(path) as descriptor,
                    closing(locate_samples(path, begin=begin, whole=self.whole)) as located,
                ):
                    for key, members in located:
                        files = {
                            name: content_of(descriptor, member)
                            for name, member in members.items()
                            if self.wanted is None or name in self.wanted
                        }
                        for shown in self._shown(files)[skipped:]:
                            if number == size:
                                yield ShardError(
                                    SURPLUS, f"it holds more than {size} samples", size
                                )
                                return
                            yield Sample(key, shown, url)
                            number += 1
                        skipped = 0
            if number < size:
                yield ShardError(SHORT, f"it holds {number} of {size} samples", number)
        except ShardError as error:
            self._raise_if_gone(error)
            yield ShardError(error.reason, str(error), number)
        except OSError as error:
            unreadable(error)  # UserError for too many open files, which is not the disk's fault
            words = f"sample {number}: {words_of(error)}"
            yield ShardError("truncated shard", words, number)

    def strict(self, shard: int) -> Iterator[Sample]:
        """Yield the samples of a shard.

        Raises:
            UserError: the shard has a fault.
        """
        with closing(self.samples(shard)) as samples:
            for sample in samples:
                if isinstance(sample, ShardError):
                    raise UserError(self.sentence(shard, sample)) from sample
                yield sample

    def _entry(self, path: str, start: int) -> tuple[int, int, int]:
        """Find where the headers of sample `start` begin: (number, place, samples to skip there).

        Returns:
            Of a shard that holds fewer samples the number of all of them.
        """
        if not start:
            return 0, 0, 0
        index = open_index(path)
        if not len(index):
            return 0, 0, 0
        each = index.captions if self._each_caption else np.ones(len(index), dtype=np.int64)
        ends = np.concatenate([[0], np.cumsum(each)])
        number = min(start, int(ends[-1]))
        at = min(int(np.searchsorted(ends, number, side="right")), len(index)) - 1
        return number, int(index.headers[at]), number - int(ends[at])

    @property
    def _each_caption(self) -> bool:
        return self.source.captions == "all"

    def _shown(self, files: Mapping[str, bytes]) -> list[Mapping[str, bytes]]:
        """List the samples that a tar's sample stands for: with `--captions all` one for each caption."""
        if not self._each_caption or TEXT_EXTENSION not in files:
            return [files]
        lines = caption_lines(files[TEXT_EXTENSION]) or [b""]
        return [{**files, TEXT_EXTENSION: line} for line in lines]

    def _raise_if_gone(self, error: ShardError) -> None:
        """Raise UserError if the host of the remote shards seems down: no other shard could replace a lost one."""
        failed = self.policy.failed
        if len(failed) >= min(_GONE_SHARDS, len(self.source.shards)):
            shard, why = next(iter(failed.items()))
            others = (
                f", nor could {len(failed) - 1} shards that were requested after it"
                if len(failed) > 1
                else ""
            )
            raise UserError(
                f"source {self.source.name!r} is unreachable: shard {shard} could not be fetched ({why}){others}; check its "
                "host, and go on with --resume latest"
            ) from error

    def sentence(self, shard: int, error: ShardError) -> str:
        """Name the fault of a shard, and what to do."""
        named = f"shard {self.source.shards[shard]} of source {self.source.name!r}"
        if error.reason in (SHORT, SURPLUS):
            count = "more" if error.reason == SURPLUS else error.readable
            return (
                f"{named} was counted with {self.source.sizes[shard]} samples and holds {count}; correct its entry in "
                "sizes.json, or remove the entry to have the shard counted"
            )
        return f"{named} cannot be read ({error}); fetch or write it again"


def sample_sentence(source: Source, sample: Sample, fault: Fault) -> str:
    """Name the fault of a sample, and what to do."""
    return (
        f"sample {sample.key!r} in {sample.shard} (source {source.name!r}) {fault.detail}; remove the sample or write the "
        "shard again"
    )


def picture_of(sample: Sample) -> bytes:
    """Return the encoded picture of a sample.

    Raises:
        Fault: it has none.
    """
    if (image := sample.image) is None:
        named = f"{PICTURE_WORDS} after the first dot of a file's name, where its key ends"
        raise Fault("no image", f"has no image ({named})")
    return image


def samples_of(source: Source, shard: int) -> Iterator[Sample]:
    """Yield the samples of a shard of a source with all their files, for evaluation and checks.

    Raises:
        UserError: the shard has a fault.
    """
    yield from ShardReader(source, whole=True).strict(shard)
