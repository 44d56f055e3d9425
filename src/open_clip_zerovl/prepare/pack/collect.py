"""Rows and pictures into the store: each place is read once, its picture decoded, hashed, and made smaller where asked.

Pictures are numbered as they come, and each 2,000 share a spool (`.pack/00012.spool`), which is kept until the shards are
written: a call that continues after a kill takes them from there. A spool holds a picture's bytes if they are not those of a
local file that can be read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.identity import digest_of
from open_clip_zerovl.data.splits import split_of_word
from open_clip_zerovl.prepare.pack.columns import is_utf8, texts_of
from open_clip_zerovl.prepare.pack.download import Downloader
from open_clip_zerovl.prepare.pack.encode import Encoding, Failure, Picture, encode_picture
from open_clip_zerovl.prepare.pack.gather import Gathering, Spool
from open_clip_zerovl.prepare.pack.rows import ADDRESS, Reader, Row, SourceNames
from open_clip_zerovl.prepare.pack.store import PairDatabase, Stored
from open_clip_zerovl.prepare.settings import Limits, Work

PICTURES_A_SPOOL = 2_000


class Collecting:
    """One call: the readers' rows go into the store, their pictures into spools.

    Args:
        readers: the inputs.
        names: how rows get the names of their sources.
        store: empty.
        folder: the folder of the spools.
        encoding: how pictures are stored.
        limits: the limits of downloads.
        work: threads, attempts.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        names: Sequence[SourceNames],
        store: PairDatabase,
        folder: Path,
        *,
        encoding: Encoding,
        limits: Limits,
        work: Work,
    ) -> None:
        self.readers = readers
        self.names = names
        self.store = store
        self.folder = folder
        self.encoding = encoding
        self.work = work
        self.downloader = Downloader(limits)
        totals = [reader.total for reader in readers]
        self.gathering = Gathering(
            self._fetch,
            self._finish,
            work,
            title="reading pictures",
            total_rows=None if None in totals else sum(total or 0 for total in totals),
        )
        self._batch: Spool | None = None

    def run(self) -> None:
        """Read all rows, get all pictures."""
        try:
            for number, reader in enumerate(self.readers):
                for row in reader.rows():
                    self._add(number, row)
            if self._batch is not None:
                self.gathering.end(self._batch)
            self.gathering.drain()
        finally:
            self.gathering.close()

    def _add(self, input: int, row: Row) -> None:
        captions, problem = ([], row.refused) if row.refused else texts_of(row.captions)
        source, unnamed = self.names[input].of(row.source)
        reason = problem or unnamed or ("" if row.place else "no picture named")
        number, new = None, False
        if not reason:
            number, new = self.store.number_of(
                row.content if row.content is not None else row.place, input, row.name
            )
        if new and number is not None:
            self._submit(number, input, row)
        else:
            self.gathering.show(rows=1, failures={reason: 1} if reason else None)
        self.store.add_row(input, row, source, number, captions, reason)

    def _submit(self, number: int, input: int, row: Row) -> None:
        index, place = divmod(number, PICTURES_A_SPOOL)
        if self._batch is None or self._batch.number != index:
            if self._batch is not None:
                self.gathering.end(self._batch)
            self._batch = Spool(spool_path(self.folder, index), index)
            self.gathering.begin(self._batch)
        self.gathering.submit(self._batch, place, (input, row))

    def _fetch(self, wanted: tuple[int, Row]) -> Picture:
        input, row = wanted
        local = row.content is None and not is_address(row.place)
        if row.content is not None:
            content = row.content
        elif local:
            content = self._local(input, row.place)
        else:
            content = self.downloader(row.place)
        held_out = split_of_word(row.split) in ("val", "test")
        encoding = replace(self.encoding, shorter_side_px=None) if held_out else self.encoding
        stored = encode_picture(content, encoding, hashed=True)
        about = {**stored.about, "bytes": len(stored.content), "sum": sum_of(stored.content)}
        again = local and stored.content is content  # it can be read again from its file
        return Picture(stored.extension, b"" if again else stored.content, about)

    def _local(self, input: int, place: str) -> bytes:
        try:
            return self.readers[input].obtain(place)
        except Failure as failure:
            if failure.reason == "picture missing" and not is_utf8(place):
                raise Failure("path not UTF-8") from failure
            raise

    def _finish(self, batch: Spool) -> None:
        self.store.add_outcomes(batch.number * PICTURES_A_SPOOL, batch.outcomes)
        batch.close()


@dataclass(frozen=True)
class Contents:
    """The bytes of samples: `contents(sample)` takes them from their spool, or from their input."""

    readers: Sequence[Reader]
    folder: Path

    def __call__(self, sample: Stored) -> bytes:
        """The bytes of a picture as it is stored.

        Raises:
            UserError: the input has changed since it was read.
        """
        if sample.size:
            with open(spool_path(self.folder, sample.number // PICTURES_A_SPOOL), "rb") as file:
                file.seek(sample.offset)
                content = file.read(sample.size)
        else:
            try:
                content = self.readers[sample.input].obtain(sample.place)
            except Failure as failure:
                raise UserError(
                    f"{sample.place} was read and is gone now ({failure.reason}): {_AGAIN}"
                ) from failure
        if sum_of(content) != sample.sum:
            raise UserError(
                f"{sample.place or 'a picture'} has changed since it was read: {_AGAIN}"
            )
        return content


_AGAIN = "leave the inputs as they are while they are packed, remove the folder given with --out, and call it again"


def sum_of(content: bytes) -> str:
    """A hash of a picture's bytes."""
    return digest_of(content)


def is_address(place: str) -> bool:
    """True for a picture that is fetched from the web."""
    return place.lower().startswith(ADDRESS)


def spool_path(folder: Path, number: int) -> Path:
    """The spool of pictures 2,000 * number and on."""
    return folder / f"{number:05d}.spool"
