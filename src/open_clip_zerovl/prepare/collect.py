"""Rows and pictures into the store: each picture is read once, decoded, hashed, and made smaller where asked.

Pictures are numbered as they come. Their bytes stay in a spool until the shards are written: shards and the report are made of
it, and a call that continues after a kill takes them from it unless their files have changed. Threads fetch and encode, the
calling thread reads rows and writes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import ADVICE, file_digests
from open_clip_zerovl.data.splits import split_of_word
from open_clip_zerovl.prepare.columns import texts_of
from open_clip_zerovl.prepare.pictures import Downloader, Failure, Picture, encode_picture
from open_clip_zerovl.prepare.rows import Reader, Row, SourceNames, is_address, is_utf8
from open_clip_zerovl.prepare.settings import Limits, PackSettings, Work
from open_clip_zerovl.prepare.store import PairDatabase
from open_clip_zerovl.shards.pictures import LARGEST_PICTURE_BYTES

UNREADABLE_FILE = ""  # in place of a hash
#: A picture, why there is none, an error that ends the call, or None for one that is in the spool.
Result = Picture | BaseException | None


class Collecting:
    """One call: the readers' rows go into the store, their pictures into its spool.

    Args:
        readers: the inputs.
        names: how rows get the names of their sources.
        store: an empty one.
        out: the folder of the shards, for messages.
        settings: how pictures are stored.
        limits: the limits of downloads.
        work: threads, attempts.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        names: Sequence[SourceNames],
        store: PairDatabase,
        out: Path,
        *,
        settings: PackSettings,
        limits: Limits,
        work: Work,
    ) -> None:
        self.readers = readers
        self.names = names
        self.store = store
        self.out = out
        self.settings = settings
        self.work = work
        self.downloader = Downloader(limits)
        self.pool = ThreadPoolExecutor(work.threads, thread_name_prefix="picture")
        #: Number of a picture, the picture, the hash of its file if it is one.
        self.results: queue.SimpleQueue[tuple[int, Result, str | None]] = queue.SimpleQueue()
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()  # by reason, "" for a picture
        totals = [reader.total for reader in readers]
        self.bar = tqdm(
            desc="reading pictures",
            total=None if None in totals else sum(total or 0 for total in totals),
            unit=" pairs",
            disable=not work.progress,
            mininterval=1.0,
        )

    def run(self) -> None:
        """Read all rows, get all pictures."""
        try:
            for facts in self.store.spool.recovered():
                if not (self.work.retry_failed and facts.get("transient")):
                    self.store.add_facts(facts.pop("number"), facts)
            known = "SELECT COALESCE(reason, ''), COUNT(*) FROM pictures GROUP BY reason"
            for reason, count in self.store.db.execute(known):
                self._count(count, reason)
            for judged in judged_rows(self.readers, self.names):
                self._add(*judged)
            while self.in_flight:
                self._take()
        finally:
            self.pool.shutdown(wait=True, cancel_futures=True)
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
            self._count(1, reason or None)
        self.store.add_row(input, row, source, number, captions, reason)

    def _submit(self, number: int, input: int, row: Row) -> None:
        """Read a picture, or the file of one that the spool has, and wait while enough are under way."""
        known = self.store.db.execute(
            "SELECT sum FROM pictures WHERE number = ? AND size IS NOT NULL", (number,)
        ).fetchone()
        if known is not None and not has_file(self.readers[input], row):
            return
        # Enough rows to keep the threads busy, and few enough that pictures do not pile up while they are written.
        while self.in_flight >= 4 * self.work.threads:
            self._take()
        self.in_flight += 1
        self.pool.submit(self._fetch, number, input, row, known and known[0])

    def _take(self) -> None:
        """Wait for one result and put it into the spool."""
        number, result, file_sum = self.results.get()
        self.in_flight -= 1
        if result is None:
            return
        facts: dict[str, Any] = {"number": number, "sum": file_sum}
        if isinstance(result, Picture):
            facts.update(result.about, extension=result.extension, reason=None, transient=False)
        elif isinstance(result, Failure):
            facts.update(reason=result.reason, transient=result.transient)
        else:
            raise result
        content = result.content if isinstance(result, Picture) else b""
        facts = self.store.spool.add(content, **facts)
        self.store.add_facts(facts.pop("number"), facts)
        self._count(1, facts["reason"] or "")

    def _count(self, rows: int, outcome: str | None = None) -> None:
        """Count rows in the progress bar, and their outcome unless their picture is counted already."""
        if outcome is not None:
            self.outcomes[outcome] += rows
        self.bar.update(rows)
        if not self.bar.disable:
            lost = [f"{why} {count}" for why, count in self.outcomes.most_common(5) if why]
            words = f"{self.outcomes['']:,} read" + f"; {', '.join(lost[:4])}" * bool(lost)
            self.bar.set_postfix_str(words, refresh=False)

    def _fetch(self, number: int, input: int, row: Row, known: str | None) -> None:
        """Put the picture of a row into the queue, or an error, which the calling thread raises unless it is a Failure.

        Args:
            known: the hash of the file whose picture the spool has. It is then only compared, and None put.
        """
        about: dict[str, str] = {}
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
            if about["sum"] != known:
                result = UserError(f"{self.out} was begun before {row.place} changed; {ADVICE}")
        self.results.put((number, result, about.get("sum")))

    def _bytes(self, input: int, row: Row, about: dict[str, str]) -> bytes:
        """Read the bytes of a row's picture, and note a hash of them in `about` if they are those of a file."""
        if row.content is not None:
            return row.content
        if is_address(row.place):
            return self.downloader(row.place)
        is_file = has_file(self.readers[input], row)
        if is_file:
            about["sum"] = UNREADABLE_FILE
        try:
            content = self.readers[input].obtain(row.place)
        except Failure as failure:
            if failure.reason == "picture missing" and not is_utf8(row.place):
                raise Failure("path not UTF-8") from failure
            raise
        if is_file:
            about["sum"] = hashlib.sha256(content).hexdigest()
        return content

    def _encoded(self, content: bytes, row: Row) -> Picture:
        held_out = split_of_word(row.split) in ("val", "test")
        settings = replace(self.settings, shorter_side_px=None) if held_out else self.settings
        return encode_picture(content, settings)


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
