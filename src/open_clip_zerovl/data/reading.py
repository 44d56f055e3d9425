"""Shards to raw samples: still encoded, in the order in which they lie, with what is rotten marked or stood in for.

    piece of a shard --> members of its samples --> RawSample (image bytes, caption)

Nothing here depends on where reading began: sample number i of a shard is the same whether the shard was streamed from its
first byte or entered through its index, and what stands in for it when it is lost follows from the seed. An interrupted
epoch can therefore be entered anywhere (invariant 4).

Two things can go wrong. One sample cannot be shown (it has no caption, say): it is handed on with its `Fault`, and `shares`
shows one of its neighbours instead. Or a shard gives fewer samples than were counted (it vanished, is torn, or was
miscounted): `pieces` takes as many samples from the source's other pieces of the epoch, and marks them with the `Loss`.
"""

from __future__ import annotations

import itertools
import os
import stat
import tarfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from open_clip_zerovl.data.health import Fault, Loss
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.randomness import Purpose, stream_seed
from open_clip_zerovl.tar.index import caption_lines, open_index
from open_clip_zerovl.tar.members import (
    TEXT_EXTENSION,
    Extent,
    ShardError,
    StalledShard,
    image_of,
    local_path,
    locate_samples,
    opened,
    stream_samples,
)

MAX_CAPTION_CHARACTERS = 4096  # what is longer is cut: tokenizers take time, and contexts hold 25 to 77 tokens
_LARGEST_PICTURE_BYTES = 1 << 30
_ANNOUNCED_SAMPLES = 16  # of a piece of scattered samples: what lies in the page cache before it is asked for


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in a shard: encoded bytes, and where it came from.

    Attributes:
        source: its index.
        position: in the source's endless cycle; unique over epochs and passes.
        fault: why it cannot be shown.
        stands_for: the lost sample that it replaces.
    """

    image: bytes
    caption: str
    source: int
    position: int
    key: str
    shard: str
    fault: Fault | None = None
    stands_for: Loss | None = None

    @property
    def place(self) -> int:
        """The position that the schedule asked for: its own, or that of the sample that it replaces."""
        return self.position if self.stands_for is None else self.stands_for.position


class Surplus(Exception):
    """A shard holds more samples than were counted."""


def _ignore(*_) -> None:
    pass


@dataclass(frozen=True)
class Reading:
    """How one source is read in an epoch.

    Attributes:
        source, index: what is read, and its number in the mixture.
        seed: of the run.
        fail: end with a sentence instead of replacing.
        stall_seconds: give up on a pipe that delivers nothing for so long, 0 = never.
        opens: called with the number of every shard that is opened.
        notes: called with a sentence about something odd that loses nothing.
    """

    source: Source
    index: int
    seed: int = 0
    fail: bool = True
    stall_seconds: float = 0
    opens: Callable[[int], None] = _ignore
    notes: Callable[[str], None] = _ignore

    def samples(self, shard: int, start: int, position: int) -> Generator[RawSample, None, None]:
        """The samples of a shard from number `start` on; the first one has this position.

        Raises:
            ShardError: the shard ends before it has given as many samples as were counted.
            Surplus: it goes on after that.
            UserError: nothing opens such a shard, or a pipe has stalled.
        """
        self.opens(shard)
        try:
            with closing(self._open(shard, start, position)) as samples:
                yield from samples
        except StalledShard as error:
            raise UserError(
                f"shard {self.source.shards[shard]} of source {self.source.name!r} has stalled: {error}; check where it "
                "comes from, or raise the loader's time-out"
            ) from error

    def _open(self, shard: int, start: int, position: int) -> Generator[RawSample, None, None]:
        source, size = self.source, self.source.sizes[shard]
        if source.table is not None:
            yield from self._rows(shard, start, position)
            return
        with closing(self._members(shard, start)) as members:
            for offset, (key, texts, image) in enumerate(members, start):
                if offset == size:
                    raise Surplus
                yield self._raw(image, texts, key, source.shards[shard], position + offset - start)

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
                        "unreadable row", "is a row that cannot be read (its line was told when the table was opened)"
                    )
                    yield RawSample(b"", "", self.index, position + offset - start, path, table.path, fault)
                    continue
                image = _picture_file(path)
                texts = [text for _, text in rows if text is not None]
                yield self._raw(image, texts or None, path, table.path, position + offset - start)

    def _members(self, shard: int, start: int) -> Generator[tuple[str, list[bytes] | None, bytes | None], None, None]:
        """(key, captions or None, image or None) of each sample from number `start` on; raises where too few come."""
        url, size = self.source.shards[shard], self.source.sizes[shard]
        path = local_path(url)
        if self.source.picked is not None:
            return self._picked(path or url, shard, start)
        if path is not None:
            try:
                if self.source.captions == "all":
                    return self._each_caption(path, start, size)
                return self._indexed(path, start, size) if start > 0 else self._local(path, size)
            except tarfile.ReadError:
                pass  # compressed, or no tar; streaming tells
        return self._streamed(url, start, size)

    def _streamed(self, url: str, start: int, size: int):
        number = -1
        with closing(stream_samples(url, stall_seconds=self.stall_seconds)) as samples:
            for number, (key, members) in enumerate(samples):
                if number >= start:
                    text = members.get(TEXT_EXTENSION)
                    yield key, self._captions(text), image_of(members)
        _require(number + 1, size)

    def _local(self, path: str, size: int):
        # Opened here and not in the generator below, so that a compressed tar is noticed in time.
        samples = locate_samples(path)
        first = next(samples, None)

        def read():
            count = 0
            with closing(samples), opened(path) as descriptor:
                for key, members in itertools.chain([first] if first is not None else [], samples):
                    text = _content(descriptor, members.get(TEXT_EXTENSION))
                    yield key, self._captions(text), _content(descriptor, image_of(members))
                    count += 1
            _require(count, size)

        return read()

    def _indexed(self, path: str, start: int, size: int):
        index = open_index(path)

        def read():
            with opened(path) as descriptor:
                for number in range(start, len(index)):
                    text = _content(descriptor, _extent(index.text, number))
                    yield index.key(number), self._captions(text), _content(descriptor, _extent(index.image, number))
            index.raise_if_torn()
            _require(len(index), size)

        return read()

    def _picked(self, path: str, shard: int, start: int):
        """As `_indexed`, of the samples that the source picks; the extents of no others are kept."""
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
                for key, text, image in _announced(descriptor, rows):
                    yield key, self._captions(_content(descriptor, text)), _content(descriptor, image)
            if readable < len(numbers) and torn[0]:
                raise ShardError(*torn, readable)
            _require(readable, len(numbers))

        return read()

    def _each_caption(self, path: str, start: int, size: int):
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
                        yield index.key(number), None if line is None else [line], image
            if index.torn[0]:
                raise ShardError(str(index.torn[0]), str(index.torn[1]), int(ends[-1]))
            _require(int(ends[-1]) if len(index) else 0, size)

        return read()

    def _captions(self, text: bytes | None) -> list[bytes] | None:
        if text is None:
            return None
        return [text] if self.source.captions is None else caption_lines(text)

    def _raw(self, image: bytes | None, texts: list[bytes] | None, key: str, shard: str, position: int) -> RawSample:
        fault, caption = None, ""
        if image is None:
            fault = Fault("no image", "has no image (jpg, png, jpeg or webp)")
            if self.source.table is not None:
                fault = Fault("no image", "has no image file that can be read")
        elif texts is None:
            fault = Fault("no caption", "has no caption (txt)")
        else:
            try:
                caption = self._choose(texts, position).decode("utf-8").strip("\ufeff \t\r\n\f\v")
                if not caption.strip():
                    fault = Fault("empty caption", "has an empty caption")
            except UnicodeDecodeError as error:
                fault = Fault("caption not UTF-8", f"has a caption that is not UTF-8 ({error})")
        caption = caption[:MAX_CAPTION_CHARACTERS]
        return RawSample(image or b"", caption, self.index, position, key, shard, fault)

    def _choose(self, texts: list[bytes], position: int) -> bytes:
        """The caption to show in this pass: passes show all captions of an image in turn, from one that the seed draws."""
        if len(texts) <= 1:
            return texts[0] if texts else b""
        lap, sample = divmod(position, self.source.num_samples)
        first = stream_seed(self.seed, Purpose.CAPTION, self.index, sample)
        return texts[(first + lap) % len(texts)]


def _picture_file(path: str) -> bytes | None:
    """The bytes of a picture's file; None where it cannot be read, or is a pipe or a device, which might never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_PICTURE_BYTES:
                return None
            return file.read(_LARGEST_PICTURE_BYTES)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None


def _require(count: int, size: int) -> None:
    if count < size:
        raise ShardError("short shard", f"it holds {count} of {size} samples", count)


def _announced(descriptor: int, rows: Sequence[tuple[str, Extent, Extent]]) -> Iterator[tuple[str, Extent, Extent]]:
    """(key, text, image) of scattered samples, each told to the system a little before it is read.

    It then fetches several at a time, and not what lies between them, which its own reading ahead would bring along.
    """
    announce = getattr(os, "posix_fadvise", None)  # Linux
    if announce is None:
        yield from rows
        return
    announce(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    told = 0
    for number, row in enumerate(rows):
        for _, *extents in rows[told : number + _ANNOUNCED_SAMPLES]:
            for offset, size in extents:
                if size > 0:  # fadvise takes 0 for the rest of the file
                    announce(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        told = number + _ANNOUNCED_SAMPLES
        yield row


def _extent(extents: np.ndarray, number: int) -> Extent:
    offset, size = extents[number].tolist()
    return offset, size


def _content(descriptor: int, extent: Extent | None) -> bytes | None:
    if extent is None or extent[0] < 0:
        return None
    return os.pread(descriptor, extent[1], extent[0])


def wrong_size(source: Source, shard: int, found: int | str) -> str:
    """The sentence for a shard that does not hold what was counted."""
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
    """The sentence for a shard that cannot be read, or not to its end."""
    if error.reason == "short shard":
        return wrong_size(source, shard, error.readable)
    return f"shard {source.shards[shard]} of source {source.name!r} cannot be read ({error}); fetch or write it again"


def sample_sentence(source: Source, sample: RawSample, fault: Fault) -> str:
    """The sentence for a sample that cannot be shown."""
    return (
        f"sample {sample.key!r} in {sample.shard} (source {source.name!r}) {fault.detail}; remove the sample or write the "
        "shard again"
    )
