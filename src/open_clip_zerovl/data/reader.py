"""The one reader of shards: samples in their order, faults as values, and the captions of a sample.

    shard --located by headers--> Sample (key, files), Sample, ..., at last its ShardError if it has one

Training's stream replaces what is lost (`sample_stream`), features leave it out or refuse it, evaluation refuses it. Sample
number i of a shard is the same wherever the shard is entered; its index says where sample number `start` begins. A remote or
compressed shard is a plain local file first (`shards/fetch`).

A shard's fault is that it is missing or torn, gives fewer samples than were counted, or more (SURPLUS). A `sizes.json` that
lists fewer samples is named at the shard's end: to see it when the source opens, all headers would be read, which it spares.

The captions of a sample are the lines of its `txt`, keys of its json, or keys of other JSON members:

    --captions txt=0.5,syn=0.5        000.txt "a dog"      000.json {"syn": ["a brown dog runs", "a dog on grass"]}
    -> captions ["a dog", "a brown dog runs", "a dog on grass"], shown with shares 0.5, 0.25, 0.25

The share of a field that a sample lacks goes to its other fields, in proportion to theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream_seed
from open_clip_zerovl.data.names import caption_fields, field_names
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache, is_shard
from open_clip_zerovl.shards.files import open_index
from open_clip_zerovl.shards.pictures import PICTURE_WORDS
from open_clip_zerovl.shards.tar import (
    TEXT_EXTENSION,
    WANTED,
    Sample,
    ShardError,
    locate_samples,
    unreadable,
    words_of,
)
from open_clip_zerovl.shards.texts import Fault, caption_lines

JSON_EXTENSION = "json"
_GONE_SHARDS = 8  # after this many failures of remote shards in a row, their host counts as down


def member_of(field: str) -> str:
    """Return the member of a sample that holds a field: `syn.json:syn_text` -> `syn.json`."""
    if field == TEXT_EXTENSION:
        return TEXT_EXTENSION
    return field.partition(":")[0] if ":" in field else JSON_EXTENSION


def members_of(captions: str | None) -> frozenset[str]:
    """Return the suffixes of pictures, and of the members that hold captions."""
    return WANTED | {member_of(field) for field in field_names(captions)}


def texts_of(
    files: Mapping[str, bytes], captions: str | None
) -> tuple[list[bytes], Sequence[float]]:
    """Return the captions of a sample, and the share with which each is drawn, or no shares where they take turns.

    Args:
        files: suffix -> content, of at least the members that `member_of` names.
        captions: `--captions`.

    Raises:
        Fault: it has none of the fields, or a member is not JSON.
    """
    if fields := caption_fields(captions):
        given = [(_texts_in(files, field), share) for field, share in fields]
        total = sum(share for texts, share in given if texts)
        if total:
            return (
                [text for texts, _ in given for text in texts],
                [share / total / len(texts) for texts, share in given for _ in texts],
            )
    elif TEXT_EXTENSION in files:
        lines = caption_lines(files[TEXT_EXTENSION])
        if captions in (None, "joined"):
            lines = [b" ".join(lines)]
        return lines[: 1 if captions == "first" else None], ()
    raise Fault("no caption", f"has no caption ({', '.join(field_names(captions)) or 'txt'})")


def _texts_in(files: Mapping[str, bytes], field: str) -> list[bytes]:
    """Return the captions of one field, [] if the sample lacks it. Fault as `texts_of`."""
    member = member_of(field)
    content = files.get(member)
    if content is None:
        return []
    if field == TEXT_EXTENSION:
        return [content]
    try:
        value: Any = json.loads(content)
    except (
        ValueError,
        RecursionError,
    ) as error:  # RecursionError: brackets within brackets, thousands deep
        raise Fault("bad json", f"has a member {member} that is not JSON ({error})") from error
    value = value.get(field.rpartition(":")[2]) if isinstance(value, dict) else None
    texts = [
        text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    ]
    # JSON may hold half of a character, "\ud83d": its bytes are not UTF-8, and the caption is refused when it is drawn.
    return [text.encode("utf-8", "surrogatepass") for text in texts]


def draw(
    texts: Sequence[bytes],
    shares: Sequence[float],
    *,
    seed: int,
    source: int,
    position: int,
    samples: int,
) -> bytes:
    """Choose the caption that a step shows, an empty one of none.

    Passes take an image's captions in turn, and the seed draws which is the first. Where captions come from several fields,
    each pass draws a field by its share.

    Args:
        texts, shares: see `texts_of`.
        source: index of the source.
        position: of the sample in the source's cycle.
        samples: of the source.
    """
    if shares:
        u = stream_seed(seed, Purpose.CAPTION_FIELD, source, position) / 2**64
        for text, share in zip(texts, shares, strict=True):
            u -= share
            if u < 0:
                return text
        return texts[-1]
    if len(texts) <= 1:
        return texts[0] if texts else b""
    lap, sample = divmod(position, samples)
    return texts[(stream_seed(seed, Purpose.CAPTION, source, sample) + lap) % len(texts)]


# ---------------------------------------------------------------------------------------------------------------------
# Shards
# ---------------------------------------------------------------------------------------------------------------------

SHORT, SURPLUS = "short shard", "surplus"  # reasons of a ShardError


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
    opens: Callable[[int], None] = lambda *_: None
    notes: Callable[[str], None] = lambda *_: None

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
                with closing(locate_samples(path, begin=begin, whole=self.whole)) as located:
                    for key, members in located:
                        files = {
                            name: member.content()
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
