"""Shards to raw samples: still encoded, in the order of the shard, bad ones marked.

    piece of a shard --> members of its samples --> RawSample (image bytes, caption)

Sample number i of a shard is the same whether the shard is streamed from its first byte or entered through its index. What
replaces a lost sample follows from the seed. An epoch can therefore be entered at any step (invariant 4).

    a bad sample (no caption, say)                    is yielded with its `Fault`; `shares` shows a neighbour instead
    a shard that gives fewer samples than counted     raises ShardError; `pieces` takes as many samples of the epoch's other
    (missing, torn, miscounted)                       pieces of the source and marks them with the `Loss`
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from open_clip_zerovl.data.fields import CaptionSets, DrawnCaptions, captions_of, member_of
from open_clip_zerovl.data.health import Fault, Loss
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import regular_file
from open_clip_zerovl.randomness import Purpose, stream_seed
from open_clip_zerovl.tar.cache import FetchAhead, ShardCache
from open_clip_zerovl.tar.index import caption_lines, open_index
from open_clip_zerovl.tar.members import (
    TEXT_EXTENSION,
    WANTED,
    Extent,
    ShardError,
    image_of,
    locate_samples,
    opened,
    stream_samples,
    unreadable,
)
from open_clip_zerovl.tar.remote import Patience
from open_clip_zerovl.tar.transfers import StalledShard, Unreachable, words_of
from open_clip_zerovl.tar.urls import local_path

MAX_CAPTION_CHARACTERS = 4096  # longer captions are cut to it: contexts hold 25 to 77 tokens, and tokenizing takes time
_LARGEST_PICTURE_BYTES = 1 << 30
_GONE_SHARDS = 8  # when so many remote shards in a row fail, their host is taken to be down
_READAHEAD_SAMPLES = 16  # scattered samples that the system is asked to fetch before they are read


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in a shard: encoded bytes, and where it came from.

    Attributes:
        image: encoded bytes; empty where there is none.
        source: index of its source.
        position: number in the source's endless cycle; unique over epochs and passes.
        key, shard: name of the sample, and path or URL of its shard.
        caption_number: number of `caption` among the sample's captions, from 0.
        beside: (number, caption) of those shown in the same step beside `caption` (`--captions FIELD+FIELD`).
        captions: all captions, "" for one that cannot be shown; empty without `Reading.every_caption`.
        stored: the result of `ShardTeachers.stored_view`.
        fault: why it cannot be shown; None for a good sample.
        stands_for: the loss that it replaces; None for a sample at its own place.
    """

    image: bytes
    caption: str
    source: int
    position: int
    key: str
    shard: str
    fault: Fault | None = None
    stands_for: Loss | None = None
    caption_number: int = 0
    beside: tuple[tuple[int, str], ...] = ()
    captions: tuple[str, ...] = ()
    stored: Any = None

    @property
    def shown(self) -> tuple[tuple[int, str], ...]:
        """(number, caption) of all captions that the step shows."""
        return ((self.caption_number, self.caption), *self.beside)

    @property
    def place(self) -> int:
        """The position that the schedule asks for: the sample's own, or that of the sample that it replaces."""
        return self.position if self.stands_for is None else self.stands_for.position


class ShardTeachers(Protocol):
    """Teachers whose embeddings are members of each sample in its shard.

    Attributes:
        members: suffixes of these members.
    """

    @property
    def members(self) -> tuple[str, ...]: ...

    def stored_view(self, members: Mapping[str, bytes | None], draw: int) -> Any:
        """What is needed of a sample's members to show its view number `draw` modulo the number of views, or a Fault."""
        ...


# key, captions, picture, and the members by suffix where more than these are read
_Member = tuple[str, list[bytes] | Fault | None, bytes | None, Mapping[str, bytes | None]]


class Surplus(Exception):
    """A shard holds more samples than were counted."""


def _ignore(*_) -> None:
    pass


@dataclass(frozen=True)
class Reading:
    """How one source is read in an epoch.

    Attributes:
        source, index: what is read, and its index in the mixture.
        seed: of the run.
        fail: raise UserError for a bad sample or shard, instead of replacing it.
        patience: how long to wait for its remote shards.
        cache: keeps remote shards on a local disk; None reads them from their server.
        ahead: fetches shards into the cache before they are read; None to fetch each when it is read.
        every_caption: give samples all their captions, besides the one to show.
        teachers: those whose embeddings are in the shards.
        opens: called with the number of every shard that is opened.
        notes: called with a sentence about something odd through which no sample is lost.
    """

    source: Source
    index: int
    seed: int = 0
    fail: bool = True
    patience: Patience = field(default_factory=Patience)
    cache: ShardCache | None = None
    ahead: FetchAhead | None = None
    every_caption: bool = False
    teachers: ShardTeachers | None = None
    opens: Callable[[int], None] = _ignore
    notes: Callable[[str], None] = _ignore

    def announce(self, shard: int) -> None:
        """A shard will be read soon: a remote one is fetched meanwhile."""
        if self.ahead is not None and local_path(self.source.shards[shard]) is None:
            self.ahead.want(self.source.shards[shard])

    def samples(self, shard: int, start: int, position: int) -> Generator[RawSample, None, None]:
        """The samples of a shard from number `start` on; the first one has this position.

        Raises:
            ShardError: the shard cannot be read, or ends before it has given as many samples as were counted.
            Surplus: it has more samples than were counted.
            UserError: no installed package opens such a URL, a pipe has stalled, several remote shards in a row do not come, or
                a table has changed.
        """
        self.opens(shard)
        try:
            with closing(_from_disk(self._open(shard, start, position), start)) as samples:
                yield from samples
        except StalledShard as error:
            raise UserError(
                f"shard {self.source.shards[shard]} of source {self.source.name!r} has stalled: {error}; check where it "
                "comes from, or raise the loader's time-out"
            ) from error
        except ShardError as error:
            self._raise_if_gone(error)
            raise

    def _raise_if_gone(self, error: ShardError) -> None:
        """UserError where so many remote shards have failed that their host must be down, and no shard can replace another."""
        failed = self.patience.failed
        if len(failed) >= min(_GONE_SHARDS, len(self.source.shards)):
            shard, why = next(iter(failed.items()))
            others = f", nor have {len(failed) - 1} others that were asked for after it" if len(failed) > 1 else ""
            raise UserError(
                f"source {self.source.name!r} is out of reach: shard {shard} has not come ({why}){others}; check where it "
                "comes from, and go on with --resume latest"
            ) from error

    def _open(self, shard: int, start: int, position: int) -> Generator[RawSample, None, None]:
        source, size = self.source, self.source.sizes[shard]
        if source.table is not None:
            yield from self._rows(shard, start, position)
            return
        with closing(self._members(shard, start)) as members:
            for offset, (key, texts, image, others) in enumerate(members, start):
                if offset == size:
                    raise Surplus
                place = position + offset - start
                sample = self._raw(image, texts, key, source.shards[shard], place)
                if self.teachers is not None and sample.fault is None:
                    draw = stream_seed(self.seed, Purpose.VIEW, self.index, place)
                    stored = self.teachers.stored_view(others, draw)
                    sample = replace(sample, **({"fault": stored} if isinstance(stored, Fault) else {"stored": stored}))
                yield sample

    def _rows(self, block: int, start: int, position: int) -> Iterator[RawSample]:
        table, first = self.source.table, int(self.source.starts[block])
        assert table is not None
        with opened(table.path) as descriptor:
            table.check_unchanged(descriptor)
            for offset in range(start, self.source.sizes[block]):
                numbers = table.rows_of(first + offset).tolist()
                rows = [table.read_row(descriptor, row) for row in numbers]
                path = table.image_path(rows[0][0])
                if not table.is_readable(numbers[0]):
                    fault = Fault(
                        "unreadable row",
                        "is a row that cannot be read (a warning named its line when the table was opened)",
                    )
                    yield RawSample(b"", "", self.index, position + offset - start, path, table.path, fault)
                    continue
                image = picture_file(path)
                texts = [text for _, text in rows if text is not None]
                yield self._raw(image, texts or None, path, table.path, position + offset - start)

    def _members(self, shard: int, start: int) -> Generator[_Member, None, None]:
        """(key, captions, image, further members) of each sample from number `start` on; ShardError where there are too few."""
        url = self.source.shards[shard]
        path = local_path(url)
        if path is None and self.cache is not None:
            return self._cached(self.cache, url, shard, start)
        return self._members_of(path, url, shard, start)

    def _cached(self, cache: ShardCache, url: str, shard: int, start: int):
        """`_members` of a remote shard, through the cache."""
        with contextlib.ExitStack() as stack:
            try:
                path = stack.enter_context(cache.borrowed(url, self.patience, self.notes))
            except Unreachable as error:
                raise unreadable(error) from error
            yield from self._members_of(path, url, shard, start)

    def _members_of(self, path: str | None, url: str, shard: int, start: int):
        size = self.source.sizes[shard]
        if path is not None and self._wanted != WANTED:
            with contextlib.suppress(tarfile.ReadError):
                return self._located(path, shard, start, size)
        if self.source.picked is not None:
            return self._picked(path or url, shard, start)
        if path is not None:
            try:
                if self.source.captions == "all":
                    return self._each_caption(path, start, size)
                return self._indexed(path, start, size) if start > 0 else self._local(path, size)
            except tarfile.ReadError:
                pass  # compressed, or no tar; streaming reads it or says why not
        return self._streamed(url, start, size)

    def _streamed(self, url: str, start: int, size: int):
        """`_members` of any tar, read from its first byte on."""
        number = -1
        with closing(stream_samples(url, patience=self.patience, wanted=self._wanted)) as samples:
            for number, (key, members) in enumerate(samples):
                if number >= start:
                    yield self._member(key, members)
        _require(number + 1, size)

    def _local(self, path: str, size: int):
        """`_members` of a plain local tar from its beginning. tarfile.ReadError for another one, before anything is read."""
        # The first header is read here and not in the generator below, whose error would come too late.
        samples = locate_samples(path)
        first = next(samples, None)

        def read():
            count = 0
            with closing(samples), opened(path) as descriptor:
                for key, members in itertools.chain([first] if first is not None else [], samples):
                    text = _content(descriptor, members.get(TEXT_EXTENSION))
                    yield key, self._captions(text), _content(descriptor, image_of(members)), {}
                    count += 1
            _require(count, size)

        return read()

    def _located(self, path: str, shard: int, start: int, size: int):
        """`_members` of a plain local tar by its headers, where members are wanted that the index does not have.

        tarfile.ReadError for another tar, before anything is read.
        """
        samples, picked, wanted = locate_samples(path), self.source.picked, self._wanted
        numbers = None if picked is None else picked[self.source.starts[shard] : self.source.starts[shard + 1]].tolist()
        first = next(samples, None)

        def read():
            seen = 0  # of the source's own samples
            try:
                with closing(samples), opened(path) as descriptor:
                    for number, (key, members) in enumerate(
                        itertools.chain([first] if first is not None else [], samples)
                    ):
                        if numbers is not None and (seen == len(numbers) or number != numbers[seen]):
                            continue
                        seen += 1
                        if seen > start:
                            yield self._member(
                                key, {name: _content(descriptor, at) for name, at in members.items() if name in wanted}
                            )
            except ShardError as error:
                raise ShardError(error.reason, str(error), seen) from error
            _require(seen, size)

        return read()

    def _member(self, key: str, members: Mapping[str, bytes | None]) -> _Member:
        """What `_members` yields of a sample."""
        if self._fields:
            return key, captions_of(members, self.source.captions), image_of(members), members
        return key, self._captions(members.get(TEXT_EXTENSION)), image_of(members), members

    @property
    def _fields(self) -> tuple[str, ...]:
        """The fields that `--captions` names; () for none."""
        return field_names(self.source.captions)

    @property
    def _wanted(self) -> frozenset[str]:
        """Suffixes of the members that are read of a sample."""
        others = () if self.teachers is None else self.teachers.members
        return WANTED | {member_of(field) for field in self._fields} | frozenset(others)

    def _indexed(self, path: str, start: int, size: int):
        """`_members` of a plain local tar, by its index."""
        index = open_index(path)

        def read():
            with opened(path) as descriptor:
                for number in range(start, len(index)):
                    text = _content(descriptor, _extent(index.text, number))
                    image = _content(descriptor, _extent(index.image, number))
                    yield index.key(number), self._captions(text), image, {}
            index.raise_if_torn()
            _require(len(index), size)

        return read()

    def _picked(self, path: str, shard: int, start: int):
        """`_members` of the samples that the source picks out of a plain local tar, by its index."""
        source = self.source
        assert source.picked is not None
        numbers = source.picked[source.starts[shard] : source.starts[shard + 1]]
        try:
            index = open_index(path)
        except tarfile.ReadError as error:
            raise ShardError("unreadable shard", str(error)) from error
        readable = int(np.searchsorted(numbers, len(index)))
        rows = [
            (index.key(number), _extent(index.text, number), _extent(index.image, number))
            for number in numbers[start:readable].tolist()
        ]
        torn = (str(index.torn[0]), str(index.torn[1]))

        def read():
            with opened(path) as descriptor:
                for key, text, image in _read_ahead(descriptor, rows):
                    yield key, self._captions(_content(descriptor, text)), _content(descriptor, image), {}
            if readable < len(numbers) and torn[0]:
                raise ShardError(*torn, readable)
            _require(readable, len(numbers))

        return read()

    def _each_caption(self, path: str, start: int, size: int):
        """`_members` of a plain local tar where each caption of an image is a sample of its own."""
        index = open_index(path)

        def read():
            ends = np.cumsum(index.captions)
            first = int(np.searchsorted(ends, start, side="right"))
            with opened(path) as descriptor:
                for number in range(first, len(index)):
                    text = _content(descriptor, _extent(index.text, number))
                    image = _content(descriptor, _extent(index.image, number))
                    lines = caption_lines(text) or [b""] if text is not None else [None]
                    begin = start - int(ends[number] - index.captions[number]) if number == first else 0
                    for line in lines[begin:]:
                        yield index.key(number), None if line is None else [line], image, {}
            if index.torn[0]:
                raise ShardError(str(index.torn[0]), str(index.torn[1]), int(ends[-1]))
            _require(int(ends[-1]) if len(index) else 0, size)

        return read()

    def _captions(self, text: bytes | None) -> list[bytes] | None:
        """The captions in a `txt` member: the whole text, or one a line where the source has several an image."""
        if text is None:
            return None
        return [text] if self.source.captions is None else caption_lines(text)

    def _raw(
        self, image: bytes | None, texts: list[bytes] | Fault | None, key: str, shard: str, position: int
    ) -> RawSample:
        """The sample, with its fault where it has no image or no usable caption."""
        fault: Fault | None = None
        shown: tuple[tuple[int, str], ...] = ((0, ""),)
        if image is None:
            named = "jpg, png, jpeg or webp after the first dot of a file's name, where its key ends"
            fault = Fault("no image", f"has no image ({named})")
            if self.source.table is not None:
                fault = Fault("no image", "has no image file that can be read")
        elif texts is None:
            fault = Fault("no caption", f"has no caption ({', '.join(self._fields) or 'txt'})")
        elif isinstance(texts, Fault):
            fault = texts
        else:
            numbers = self._choose(texts, position)
            found = [_caption(texts[number] if texts else b"") for number in numbers]
            fault = next((one for one in found if isinstance(one, Fault)), None)
            if fault is None:
                shown = tuple(zip(numbers, found, strict=True))  # type: ignore[arg-type]
        every: tuple[str, ...] = ()
        if self.every_caption and not isinstance(texts, Fault):
            every = tuple("" if isinstance(one, Fault) else one for one in map(_caption, texts or ()))
        (number, caption), *beside = shown
        return RawSample(
            image or b"",
            caption,
            self.index,
            position,
            key,
            shard,
            fault,
            caption_number=number,
            beside=tuple(beside),
            captions=every,
        )

    def _choose(self, texts: list[bytes], position: int) -> tuple[int, ...]:
        """The numbers of this pass's captions: one, or one of each of several sets.

        Passes take an image's captions in turn, and the seed draws which is the first. Where captions come from several fields,
        each pass draws: a field by its probability, or a caption of each field.
        """
        if isinstance(texts, CaptionSets):
            return texts.shown(lambda one: stream_seed(self.seed, Purpose.CAPTION_FIELD, self.index, position, one))
        if isinstance(texts, DrawnCaptions):
            return (texts.at(stream_seed(self.seed, Purpose.CAPTION_FIELD, self.index, position) / 2**64),)
        if len(texts) <= 1:
            return (0,)
        lap, sample = divmod(position, self.source.num_samples)
        return ((stream_seed(self.seed, Purpose.CAPTION, self.index, sample) + lap) % len(texts),)


def _caption(text: bytes) -> str | Fault:
    """A caption as it is shown, or why it cannot be shown."""
    try:
        caption = text.decode("utf-8").strip("\ufeff \t\r\n\f\v")
    except UnicodeDecodeError as error:
        return Fault("caption not UTF-8", f"has a caption that is not UTF-8 ({error})")
    return caption[:MAX_CAPTION_CHARACTERS] if caption.strip() else Fault("empty caption", "has an empty caption")


def picture_file(path: str) -> bytes | None:
    """The bytes of a picture's file; None where it cannot be read, or is no regular file. UserError as `members.unreadable`."""
    try:
        with regular_file(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_PICTURE_BYTES:
                return None
            return file.read(_LARGEST_PICTURE_BYTES)
    except OSError as error:
        unreadable(error)  # too many open files are no fault of the picture
        return None
    except ValueError:  # a NUL in the path
        return None


def _from_disk(samples: Generator[RawSample, None, None], start: int) -> Generator[RawSample, None, None]:
    """The samples from number `start` on; ShardError where the disk fails while the bytes of one are read."""
    count = start
    with closing(samples):
        try:
            for sample in samples:
                yield sample
                count += 1
        except OSError as error:
            unreadable(error)  # too many open files are no fault of the disk
            raise ShardError("truncated shard", f"sample {count}: {words_of(error)}", count) from error


def _require(count: int, size: int) -> None:
    """ShardError where a shard gave fewer samples than were counted."""
    if count < size:
        raise ShardError("short shard", f"it holds {count} of {size} samples", count)


def _read_ahead(descriptor: int, rows: Sequence[tuple[str, Extent, Extent]]) -> Iterator[tuple[str, Extent, Extent]]:
    """The rows (key, text, image) of scattered samples, whose bytes the system is asked to fetch a little ahead.

    The system then fetches several samples at a time. Its own read-ahead is switched off: it would fetch what lies between
    them.
    """
    advise = getattr(os, "posix_fadvise", None)  # Linux
    if advise is None:
        yield from rows
        return
    advise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    asked = 0
    for number, row in enumerate(rows):
        for _, *extents in rows[asked : number + _READAHEAD_SAMPLES]:
            for offset, size in extents:
                if size > 0:  # 0 would mean the rest of the file
                    advise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        asked = number + _READAHEAD_SAMPLES
        yield row


def _extent(extents: np.ndarray, number: int) -> Extent:
    offset, size = extents[number].tolist()
    return offset, size


def _content(descriptor: int, extent: Extent | None) -> bytes | None:
    """The bytes of a member, None where there is none."""
    if extent is None or extent[0] < 0:
        return None
    return os.pread(descriptor, extent[1], extent[0])


def wrong_size(source: Source, shard: int, found: int | str) -> str:
    """The sentence for a shard that does not hold as many samples as were counted."""
    if source.picked is not None:
        return (
            f"shard {source.shards[shard]} held {source.sizes[shard]} samples of source {source.name!r} when it was clustered "
            f"and holds {found}; fetch it again, or cluster again"
        )
    return (
        f"shard {source.shards[shard]} of source {source.name!r} was counted with {source.sizes[shard]} samples and holds "
        f"{found}; correct its entry in sizes.json, or remove the entry to have the shard counted"
    )


def shard_sentence(source: Source, shard: int, error: ShardError) -> str:
    """The sentence for a shard that cannot be read to its end."""
    if error.reason == "short shard":
        return wrong_size(source, shard, error.readable)
    return f"shard {source.shards[shard]} of source {source.name!r} cannot be read ({error}); fetch or write it again"


def sample_sentence(source: Source, sample: RawSample, fault: Fault) -> str:
    """The sentence for a sample that cannot be shown."""
    return (
        f"sample {sample.key!r} in {sample.shard} (source {source.name!r}) {fault.detail}; remove the sample or write the "
        "shard again"
    )
