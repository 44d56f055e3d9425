"""Rows and pictures into the store: each picture is read once, decoded, hashed, and made smaller where asked.

Pictures are numbered as they come, and each 2,000 share a spool (`.pack/00012.spool`), in which their bytes stay until the
shards are written: shards and the report are made from there, and a call that continues after a kill takes them from there
unless their files have changed. Threads fetch and encode, the calling thread reads rows and writes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import ADVICE, file_digests
from open_clip_zerovl.data.splits import split_of_word
from open_clip_zerovl.prepare.columns import texts_of
from open_clip_zerovl.prepare.pictures import Downloader, Failure, Picture, encode_picture
from open_clip_zerovl.prepare.rows import Reader, Row, SourceNames, is_address, is_utf8
from open_clip_zerovl.prepare.settings import Encoding, Limits, Work
from open_clip_zerovl.prepare.store import PairDatabase, RowOutcome, Stored
from open_clip_zerovl.shards.pictures import LARGEST_PICTURE_BYTES


class Spool:
    """The outcomes of a batch of rows.

    Not thread-safe: one thread appends.

    Attributes:
        number: number of the batch.
        open_rows: rows whose pictures are under way.
        submitted: True once no more rows come.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.number = number
        self.open_rows, self.submitted = 0, False
        self.outcomes: dict[int, RowOutcome] = {}
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  # closed by `close`
        self._recover()

    def add(self, row: int, content: bytes = b"", **facts: Any) -> None:
        """Keep the picture of a row, or why it has none, and `facts` about it (fields of RowOutcome)."""
        head = {"row": row, "size": len(content), **facts}
        line = json.dumps(head).encode() + b"\n"
        self._keep(head, self._end + len(line))
        # One write: a kill in the middle of it leaves a partial last record, which the next opening cuts off.
        self._file.write(line + content)
        self._file.flush()
        self._end += len(line) + len(content)

    def forget_transient(self) -> None:
        """Treat rows with a transient failure as not tried."""
        self.outcomes = {
            row: outcome for row, outcome in self.outcomes.items() if not outcome.transient
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep(self, head: dict[str, Any], offset: int) -> None:
        facts = {name: value for name, value in head.items() if name != "row"}
        self.outcomes[head["row"]] = RowOutcome(offset=offset, **facts)

    def _recover(self) -> None:
        total = self._file.seek(0, os.SEEK_END)
        self._end = 0
        self._file.seek(0)
        while line := self._file.readline():
            try:
                head = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                head = None
            if head is None or self._file.tell() + head["size"] > total:
                break
            self._keep(head, self._file.tell())
            self._end = self._file.seek(head["size"], os.SEEK_CUR)
        self._file.truncate(self._end)
        self._file.seek(0, os.SEEK_END)


PICTURES_A_SPOOL = 2_000
UNREADABLE_FILE = ""  # in place of a hash
#: A picture, why there is none, an error that ends the call, or None for one that is in its spool.
Result = Picture | BaseException | None


class Collecting:
    """One call: the readers' rows go into the store, their pictures into spools.

    Args:
        readers: the inputs.
        names: how rows get the names of their sources.
        store: an empty one.
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
        self.pool = ThreadPoolExecutor(work.threads, thread_name_prefix="picture")
        self.results: queue.SimpleQueue[tuple[Spool, int, Result, dict[str, Any]]] = (
            queue.SimpleQueue()
        )
        self.in_flight = 0
        self.spools: dict[int, Spool] = {}  # that are open
        self.last: Spool | None = None
        self.failures: Counter[str] = Counter()
        self.pairs = 0
        totals = [reader.total for reader in readers]
        self.bar = tqdm(
            desc="reading pictures",
            total=None if None in totals else sum(total or 0 for total in totals),
            unit=" pairs",
            disable=not work.progress,
            mininterval=1.0,
        )
        self.shown = 0.0

    def run(self) -> None:
        """Read all rows, get all pictures."""
        try:
            for judged in judged_rows(self.readers, self.names):
                self._add(*judged)
            self._end()
            while self.in_flight:
                self._take()
        finally:
            self.pool.shutdown(wait=True, cancel_futures=True)
            for spool in self.spools.values():
                spool.close()
            self._show(last=True)
            self.bar.close()

    def _add(
        self, input: int, row: Row, source: str | None, captions: list[str], reason: str
    ) -> None:
        number, new = None, False
        if not reason:
            number, new = self.store.number_of(
                row.content if row.content is not None else row.place, input, row.name
            )
        if new and number is not None:
            self._submit(number, input, row)
        else:
            self._count(rows=1, failures={reason: 1} if reason else None)
        self.store.add_row(input, row, source, number, captions, reason)

    def _submit(self, number: int, input: int, row: Row) -> None:
        """Read a picture, or the file of one that its spool has, and wait while enough are under way."""
        index, place = divmod(number, PICTURES_A_SPOOL)
        if self.last is None or self.last.number != index:
            self._end()
            self.last = self._begin(index)
        spool = self.last
        known = spool.outcomes.get(place)
        if known is not None and not self._has_file(input, row):
            return
        # Enough rows to keep the threads busy, and few enough that pictures do not pile up while they are written.
        while self.in_flight >= 4 * self.work.threads:
            self._take()
        self.in_flight += 1
        spool.open_rows += 1
        self.pool.submit(self._fetch, spool, place, input, row, known)

    def _begin(self, index: int) -> Spool:
        """Open a spool, and count the rows that it holds from an earlier call."""
        spool = self.spools[index] = Spool(spool_path(self.folder, index), index)
        if self.work.retry_failed:
            spool.forget_transient()
        outcomes = spool.outcomes.values()
        lost = Counter(outcome.reason for outcome in outcomes if outcome.reason)
        self._count(pairs=len(outcomes) - lost.total(), failures=lost, rows=len(outcomes))
        return spool

    def _end(self) -> None:
        """Note that no more rows come to the last spool."""
        if self.last is not None:
            self.last.submitted = True
            if self.last.open_rows == 0:
                self._finish(self.last)

    def _take(self) -> None:
        """Wait for one result and put it into its spool, which is finished with its last row."""
        spool, number, result, about = self.results.get()
        self.in_flight -= 1
        spool.open_rows -= 1
        if isinstance(result, Failure):
            spool.add(number, reason=result.reason, transient=result.transient, about=about)
            self._count(failures={result.reason: 1}, rows=1)
        elif isinstance(result, BaseException):
            raise result
        elif result is not None:
            facts = {**result.about, **about}
            spool.add(number, result.content, extension=result.extension, about=facts)
            self._count(pairs=1, rows=1)
        if spool.submitted and spool.open_rows == 0:
            self._finish(spool)

    def _finish(self, spool: Spool) -> None:
        self.store.add_outcomes(spool.number * PICTURES_A_SPOOL, spool.outcomes)
        spool.close()
        del self.spools[spool.number]

    def _count(
        self, *, rows: int, pairs: int = 0, failures: Mapping[str, int] | None = None
    ) -> None:
        """Count rows in the progress bar."""
        self.pairs += pairs
        self.failures.update(failures or {})
        self.bar.update(rows)
        if time.monotonic() - self.shown > 1:
            self.shown = time.monotonic()
            self._show(last=False)

    def _show(self, *, last: bool) -> None:
        if not self.bar.disable:
            lost = ", ".join(f"{why} {count}" for why, count in self.failures.most_common(4))
            words = f"{self.pairs:,} read" + (f"; {lost}" if lost else "")
            self.bar.set_postfix_str(words, refresh=last)

    def _fetch(
        self, spool: Spool, number: int, input: int, row: Row, known: RowOutcome | None
    ) -> None:
        """Put the picture of a row into the queue, or an error, which the calling thread raises unless it is a Failure.

        Args:
            known: the row's outcome in the spool. Its file is then only compared, and None put.
        """
        about: dict[str, Any] = {}
        result: Result = None
        for attempt in itertools.count(1):
            try:
                content = self._bytes(input, row, about)
                if known is None:
                    result = self._encoded(content, row)
            except BaseException as error:
                result = error
            passing = isinstance(result, Failure) and result.transient
            if not passing or attempt >= self.work.attempts:
                break
            time.sleep(self.work.backoff_seconds * 2 ** (attempt - 1))
        if known is not None and (result is None or isinstance(result, Failure)):
            result = None
            if about["sum"] != known.about["sum"]:
                result = UserError(
                    f"{self.folder.parent} was begun before {row.place} changed; {ADVICE}"
                )
        self.results.put((spool, number, result, about))

    def _bytes(self, input: int, row: Row, about: dict[str, Any]) -> bytes:
        """Read the bytes of a row's picture, and note a hash of them in `about` if they are those of a file."""
        if row.content is not None:
            return row.content
        if is_address(row.place):
            return self.downloader(row.place)
        if self._has_file(input, row):
            about["sum"] = UNREADABLE_FILE
        try:
            content = self.readers[input].obtain(row.place)
        except Failure as failure:
            if failure.reason == "picture missing" and not is_utf8(row.place):
                raise Failure("path not UTF-8") from failure
            raise
        if self._has_file(input, row):
            about["sum"] = hashlib.sha256(content).hexdigest()
        return content

    def _encoded(self, content: bytes, row: Row) -> Picture:
        held_out = split_of_word(row.split) in ("val", "test")
        encoding = replace(self.encoding, shorter_side_px=None) if held_out else self.encoding
        return encode_picture(content, encoding)

    def _has_file(self, input: int, row: Row) -> bool:
        return has_file(self.readers[input], row)


def judged_rows(
    readers: Sequence[Reader], names: Sequence[SourceNames]
) -> Iterator[tuple[int, Row, str | None, list[str], str]]:
    """Yield (number of the input, row, source, captions, why the row is refused or "") of each row."""
    for input, reader in enumerate(readers):
        for row in reader.rows():
            captions, problem = ([], row.refused) if row.refused else texts_of(row.captions)
            source, unnamed = names[input].of(row.source)
            reason = problem or unnamed or ("" if row.place else "no picture named")
            yield input, row, source, captions, reason


def has_file(reader: Reader, row: Row) -> bool:
    """Return whether the picture of a row is a file of its own on this disk."""
    return reader.names_pictures and row.content is None and not is_address(row.place)


def sums_of_files(readers: Sequence[Reader], names: Sequence[SourceNames]) -> list[str]:
    """Hash the files of pictures as they are now, in the order and form of `PairDatabase.sums`."""
    rows = judged_rows(readers, names)
    places = dict.fromkeys(
        row.place for input, row, *_, reason in rows if not reason and has_file(readers[input], row)
    )
    digests = file_digests(places)
    for place, digest in digests.items():
        if digest is None or os.path.getsize(place) > LARGEST_PICTURE_BYTES:
            digests[place] = UNREADABLE_FILE
    return [str(digests[place]) for place in places]


def spooled(folder: Path, sample: Stored) -> bytes:
    """Read the bytes of a sample's picture from their spool."""
    with open(spool_path(folder, sample.number // PICTURES_A_SPOOL), "rb") as file:
        file.seek(sample.offset)
        return file.read(sample.size)


def spool_path(folder: Path, number: int) -> Path:
    """Name the spool of pictures 2,000 * number and on."""
    return folder / f"{number:05d}.spool"
