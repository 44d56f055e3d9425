"""Pieces of a source's shards to raw samples. Each piece gives its full number of samples, whatever its shard has lost.

    piece (shard 7, samples 100..199), shard 7 torn after sample 149  ->  samples 100..149, then 50 of other pieces

The replacements follow from the seed and the lost sample's position, wherever reading began.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.randomness import Purpose, stream
from open_clip_zerovl.data.health import Loss
from open_clip_zerovl.data.reading import RawSample, Reading, Surplus, sample_sentence, shard_sentence, wrong_size
from open_clip_zerovl.data.schedule import Piece
from open_clip_zerovl.shards.members import ShardError


@dataclass
class PieceReader:
    """Reads pieces of a source; see the module's text.

    Args:
        reading: how the source is read.
        pieces: what this reader reads, in order.
        epoch_pieces: all pieces of the source in the epoch; samples of them replace lost ones.
    """

    reading: Reading
    pieces: Sequence[Piece]
    epoch_pieces: Sequence[Piece]
    substitutes: Substitutes = field(init=False)

    def __post_init__(self) -> None:
        self.substitutes = Substitutes(self.reading, self.epoch_pieces)

    def samples(self, begin: int = 0) -> Generator[RawSample, None, None]:
        """The samples of all pieces, from sample number `begin` on.

        Raises:
            UserError: with `reading.fail`, anything wrong with a shard; without, no readable sample to replace a lost one.
        """
        for number, piece in enumerate(self.pieces, start=1):
            if begin >= len(piece):
                begin -= len(piece)
                continue
            if number < len(self.pieces):
                self.reading.announce(self.pieces[number].shard)
            yield from self._piece(piece, piece.start + begin)
            begin = 0

    def _piece(self, piece: Piece, offset: int) -> Iterator[RawSample]:
        """The samples of a piece from sample `offset` of its shard on."""
        reading, source = self.reading, self.reading.source
        size = source.sizes[piece.shard]
        try:
            with closing(reading.samples(piece.shard, offset, piece.position + offset - piece.start)) as samples:
                while offset < piece.stop:
                    sample = next(samples)
                    if reading.fail and sample.fault is not None:
                        if offset + 1 < size:
                            _raise_if_short(samples, offset + 1)
                        raise UserError(sample_sentence(source, sample, sample.fault))
                    yield sample
                    offset += 1
                if piece.stop == size:
                    next(samples, None)  # raises where the shard does not end here
            return
        except Surplus:
            message = wrong_size(source, piece.shard, "more")
            if reading.fail:
                raise UserError(message) from None
            reading.notes(f"{message}. The samples beyond this number are not read")
            return
        except ShardError as error:
            if reading.fail:
                raise UserError(shard_sentence(source, piece.shard, error)) from error
            loss = Loss(reading.index, error.reason, "", source.shards[piece.shard], str(error), 0)
            readable = error.readable
        for lost in range(offset, piece.stop):
            stands_for = replace(loss, position=piece.position + lost - piece.start)
            yield replace(self.substitutes.get(piece, lost, readable), stands_for=stands_for)


def _raise_if_short(samples: Iterator[RawSample], count: int) -> None:
    """Raise the ShardError of a shard that ends after `count` samples: its last sample is then torn, not bad."""
    try:
        next(samples, None)
    except ShardError as error:
        if error.readable == count:
            raise
    except Surplus:
        pass


@dataclass
class Substitutes:
    """Samples of the epoch's other pieces that replace lost ones.

    Pieces are tried in an order that the seed draws. Sample i of a lost piece is replaced by sample i, modulo its length, of
    the first piece that can be read; where none can, by a readable sample of its own shard.
    """

    reading: Reading
    pieces: Sequence[Piece]
    _readable: dict[int, int] = field(default_factory=dict, init=False)  # shards known to be torn -> whole samples
    _open: tuple[int, int, Generator[RawSample, None, None]] | None = field(default=None, init=False)
    _drawn: tuple[int, list[int]] = field(default=(-1, []), init=False)

    def get(self, piece: Piece, offset: int, readable: int, *, attempt: int = 0) -> RawSample:
        """The sample that replaces sample `offset` of a piece.

        Args:
            readable: how many samples of the piece's own shard can be read.
            attempt: 0 for the first choice, 1 for the second ...

        Raises:
            UserError: nothing of the source can be read.
        """
        for number in self._order(piece.position)[attempt:]:
            other = self.pieces[number]
            if other.shard == piece.shard:
                continue
            found = self._read(other, other.start + (offset - piece.start) % len(other))
            if found is not None:
                return found
        if readable > 0:
            own = Piece(piece.shard, 0, readable, piece.position - piece.start)
            found = self._read(own, (offset + attempt) % readable)
            if found is not None:
                return found
        source = self.reading.source
        raise UserError(
            f"none of the {len(source.shards)} shards of source {source.name!r} can be read, so that nothing replaces the lost "
            "samples; check that they are there and whole"
        )

    def _order(self, position: int) -> list[int]:
        """Numbers of all pieces, in the order in which they are tried for the lost piece at this position."""
        if self._drawn[0] != position:
            rng = stream(self.reading.seed, Purpose.SUBSTITUTES, self.reading.index, position)
            self._drawn = position, rng.permutation(len(self.pieces)).tolist()
        return self._drawn[1]

    def _read(self, piece: Piece, offset: int) -> RawSample | None:
        """Sample `offset` of a piece's shard, None where it cannot be read. The shard stays open for the next sample."""
        if offset >= self._readable.get(piece.shard, offset + 1):
            return None
        position = piece.position + offset - piece.start
        try:
            if self._open is None or self._open[:2] != (piece.shard, position):
                self.close()
                samples = self.reading.samples(piece.shard, offset, position)
            else:
                samples = self._open[2]
            sample = next(samples)
        except ShardError as error:
            self._readable[piece.shard] = error.readable
            self._open = None
            return None
        self._open = piece.shard, position + 1, samples
        return sample

    def close(self) -> None:
        """Close the shard that is open."""
        if self._open is not None:
            self._open[2].close()
            self._open = None
