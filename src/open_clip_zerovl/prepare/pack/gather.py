"""Pictures are fetched and encoded by threads and kept in spools as they come, before shards are written.

A row's picture, or the reason why there is none, is appended to the spool of its batch. A batch is finished when all its rows
have come or failed. Only the calling thread writes.

A spool is a file that is appended to, and readable after the process is killed: a record is a line of JSON, followed by the
bytes of the picture if there is one. Opening a spool reads the whole records and cuts off a partial last one.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tqdm.auto import tqdm

from open_clip_zerovl.prepare.pack.encode import Failure, Picture
from open_clip_zerovl.prepare.settings import Work


@dataclass(frozen=True)
class RowOutcome:
    """The picture of one row, or the reason why there is none.

    Attributes:
        extension, offset_bytes, size_bytes: file ending of the picture, and place of its bytes in the spool.
        reason: why there is no picture; empty if there is one.
        transient: whether a retry may help.
        about: further facts about the picture.
    """

    extension: str = ""
    offset_bytes: int = 0
    size_bytes: int = 0
    reason: str = ""
    transient: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


class Spool:
    """The outcomes of a batch of rows. Not thread-safe: one thread appends.

    Attributes:
        number: of the batch.
        open_rows: rows whose pictures are under way.
        submitted: whether no more rows come.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.number = number
        self.open_rows, self.submitted = 0, False
        self.outcomes: dict[int, RowOutcome] = {}
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  # closed by `close`
        self._recover()

    def add(
        self, row: int, extension: str, content: bytes, about: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the picture of a row, and further facts about it (values of JSON)."""
        head = {"row": row, "extension": extension, "size": len(content)}
        self._append({**head, "about": dict(about)} if about else head, content)

    def fail(self, row: int, reason: str, *, transient: bool) -> None:
        """Keep why a row has no picture."""
        self._append({"row": row, "reason": reason, "transient": transient}, b"")

    def forget_transient(self) -> None:
        """Treat rows with a transient failure as not tried. The last record of a row counts."""
        self.outcomes = {
            row: outcome for row, outcome in self.outcomes.items() if not outcome.transient
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, head: dict, content: bytes) -> None:
        line = json.dumps(head).encode() + b"\n"
        self._keep(head, self._end + len(line))
        # One write: a kill in the middle of it leaves a partial last record, which the next opening cuts off.
        self._file.write(line + content)
        self._file.flush()
        self._end += len(line) + len(content)

    def _keep(self, head: dict, offset: int) -> None:
        self.outcomes[int(head["row"])] = RowOutcome(
            head.get("extension", ""),
            offset,
            head.get("size", 0),
            head.get("reason", ""),
            head.get("transient", False),
            head.get("about", {}),
        )

    def _recover(self) -> None:
        total = self._file.seek(0, os.SEEK_END)
        self._end = 0
        self._file.seek(0)
        while line := self._file.readline():
            try:
                head = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                head = None
            if head is None or self._file.tell() + head.get("size", 0) > total:
                break
            self._keep(head, self._file.tell())
            self._end = self._file.seek(head.get("size", 0), os.SEEK_CUR)
        self._file.truncate(self._end)
        self._file.seek(0, os.SEEK_END)


class Gathering:
    """The threads of one call.

    Args:
        fetch: a row -> its picture, or Failure; called from many threads, and again after a transient failure.
        finish: called in the calling thread with each batch when all its rows have come or failed.
        work: threads and attempts.
        title, total_rows: text and length of the progress bar.
    """

    def __init__(
        self,
        fetch: Callable[[Any], Picture],
        finish: Callable[[Spool], None],
        work: Work,
        *,
        title: str,
        total_rows: int | None,
    ) -> None:
        self.fetch = fetch
        self.finish = finish
        self.work = work
        self.pool = ThreadPoolExecutor(work.threads, thread_name_prefix="picture")
        self.results: queue.SimpleQueue[tuple[Spool, int, Picture | BaseException]] = (
            queue.SimpleQueue()
        )
        # Enough rows to keep the threads busy, and few enough that pictures do not pile up while a shard is written.
        self.window = 4 * work.threads
        self.in_flight = 0
        self.batches: dict[int, Spool] = {}
        self.failures: Counter[str] = Counter()
        self.pairs = 0
        self.bar = tqdm(
            desc=title, total=total_rows, unit=" pairs", disable=not work.progress, mininterval=1.0
        )
        self.shown = 0.0

    def begin(self, batch: Spool) -> None:
        """Begin or go on with a batch; rows that its spool holds are counted."""
        if self.work.retry_failed:
            batch.forget_transient()
        self.batches[batch.number] = batch
        outcomes = batch.outcomes.values()
        lost = Counter(outcome.reason for outcome in outcomes if outcome.reason)
        self.show(pairs=len(outcomes) - lost.total(), failures=lost, rows=len(outcomes))

    def submit(self, batch: Spool, number: int, row: Any) -> None:
        """Fetch the picture of row `number` of a batch, unless it has come; waits while enough rows are under way."""
        if number in batch.outcomes:
            return
        while self.in_flight >= self.window:
            self._take()
        self.in_flight += 1
        batch.open_rows += 1
        self.pool.submit(self._fetch, batch, number, row)

    def end(self, batch: Spool) -> None:
        """No more rows come to this batch."""
        batch.submitted = True
        if batch.open_rows == 0:
            self._finish(batch)

    def drain(self) -> None:
        """Wait until all submitted rows have come or failed."""
        while self.in_flight:
            self._take()

    def close(self) -> None:
        """End the threads, and close the spools that are still open."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        for batch in self.batches.values():
            batch.close()
        if not self.bar.disable:
            self._count(refresh=True)
        self.bar.close()

    def show(self, *, rows: int, pairs: int = 0, failures: Mapping[str, int] | None = None) -> None:
        """Count rows in the progress bar."""
        self.pairs += pairs
        self.failures.update(failures or {})
        self.bar.update(rows)
        if not self.bar.disable and time.monotonic() - self.shown > 1:
            self.shown = time.monotonic()
            self._count(refresh=False)

    def _count(self, *, refresh: bool) -> None:
        lost = ", ".join(f"{reason} {count}" for reason, count in self.failures.most_common(4))
        self.bar.set_postfix_str(
            f"{self.pairs:,} read" + (f"; {lost}" if lost else ""), refresh=refresh
        )

    def _fetch(self, batch: Spool, number: int, row: Any) -> None:
        """Put one result for a row into the queue, its picture or an error (in a thread)."""
        try:
            self.results.put((batch, number, self._picture(row)))
        except (
            BaseException
        ) as error:  # for the calling thread, which raises it unless it is a Failure
            self.results.put((batch, number, error))

    def _picture(self, row: Any) -> Picture:
        for attempt in itertools.count(1):
            try:
                return self.fetch(row)
            except Failure as failure:
                if not failure.transient or attempt >= self.work.attempts:
                    raise
            time.sleep(self.work.backoff_seconds * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _take(self) -> None:
        """Wait for one result and put it into the spool; finish its batch if it was the last one."""
        batch, number, result = self.results.get()
        self.in_flight -= 1
        batch.open_rows -= 1
        if isinstance(result, Failure):
            batch.fail(number, result.reason, transient=result.transient)
            self.show(failures={result.reason: 1}, rows=1)
        elif isinstance(result, BaseException):
            raise result
        else:
            batch.add(number, *result)
            self.show(pairs=1, rows=1)
        if batch.submitted and batch.open_rows == 0:
            self._finish(batch)

    def _finish(self, batch: Spool) -> None:
        self.finish(batch)
        del self.batches[batch.number]
