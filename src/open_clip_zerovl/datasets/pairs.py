"""What makes every dataset: rows of (key, caption, place of the picture) to webdataset shards, in any number of calls.

Shard k holds the pairs of rows k*S .. (k+1)*S - 1, in their order, in whatever order the pictures arrived: the same rows and
pictures give the same bytes. A call may be killed at any moment, since its work is kept at three levels:

1. a picture, or the reason why there is none, is appended to the shard's spool (`records/00012.spool`);
2. a whole shard is written under another name and renamed;
3. then its record is written, which marks it as done, and the spool is removed.

A call on the same folder skips shards with records, goes on with shards with spools, and makes the others. No pair is lost or
written twice, because a shard is always written as a whole, from its rows.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from open_clip_zerovl.datasets import manifest
from open_clip_zerovl.datasets.pictures import Encoding, Failure, encode_picture
from open_clip_zerovl.datasets.spool import Spool
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.tar.members import IMAGE_EXTENSIONS, TEXT_EXTENSION, Sample, read_samples
from open_clip_zerovl.tar.shards import write_shard

SHARD_SIZE = 10_000

#: A picture's bytes from its address or path; raises `Failure`.
Obtain = Callable[[str], bytes]


class Row(NamedTuple):
    """One row of a dataset's list: the sample's key, its text (several captions: one a line), the place of its picture."""

    key: str
    caption: str
    where: str


@dataclass(frozen=True)
class Work:
    """How the rows are processed. The shards do not depend on it.

    Attributes:
        threads: pictures fetched and encoded at the same time.
        attempts: attempts at a picture whose failure is transient.
        backoff_seconds: pause after the first failed attempt, doubled after each further one.
        part: (i, n): make shards i, i+n, i+2n ... only, so that n processes or machines can share a folder.
        retry_failed: try the rows again that failed for a transient reason, of finished shards too.
        progress: print a progress bar and a last line.
    """

    threads: int = 32
    attempts: int = 3
    backoff_seconds: float = 0.5
    part: tuple[int, int] = (0, 1)
    retry_failed: bool = False
    progress: bool = True


def prepare_pairs(
    out: str | Path,
    rows: Iterable[Row],
    obtain: Obtain,
    *,
    dataset: str,
    made_from: Mapping[str, Any],
    split: str = "train",
    encoding: Encoding | None = None,
    shard_size: int = SHARD_SIZE,
    shard_name: str = "{:05d}.tar",
    work: Work | None = None,
    total_rows: int | None = None,
) -> dict[str, Any]:
    """Make the shards of one split, or go on with an interrupted call; returns the manifest.

    Args:
        out: the split's folder.
        rows: the whole list, in the same order in every call; the rows of one shard are in memory at a time.
        obtain: place of a picture -> its bytes, or Failure; called from many threads.
        dataset, split, made_from: what the manifest says of the inputs; later calls must give the same.
        encoding: how pictures are stored.
        shard_size: rows a shard.
        shard_name: pattern of the file names.
        work: threads, retries, sharing.
        total_rows: length of the list, for the progress bar.

    Raises:
        UserError: a setting out of range, an empty list, a folder of another dataset, or one that another process writes to.
    """
    out, encoding, work = Path(out), encoding or Encoding(), work or Work()
    index, count = work.part
    if shard_size < 1 or work.threads < 1 or work.attempts < 1 or not 0 <= index < count:
        raise UserError(
            f"shard_size {shard_size}, threads {work.threads} and attempts {work.attempts} must be 1 or more, and part i/n "
            f"must have 0 <= i < n, got {index}/{count}."
        )
    settings = {"shard_size": shard_size, "encoding": asdict(encoding)}
    manifest.begin(out, dataset=dataset, split=split, made_from=made_from, settings=settings)
    with manifest.sole_writer(out, f"{index}-of-{count}"):
        run = _Run(out, obtain, encoding, work, shard_name, total_rows, f"{dataset} {split}")
        try:
            shard_count = run.do(_chunks(rows, shard_size), shard_size)
        except OSError as error:
            raise UserError(
                f"Writing into {out} failed ({error}): mend that and call the command again; finished work is kept."
            ) from error
        finally:
            run.close()
            if any((out / manifest.RECORDS).glob("*.json")):
                manifest.rebuild(out)
    if shard_count == 0:
        raise UserError(f"The list of {dataset} {split} has no rows: check the files given with --source.")
    result = manifest.rebuild(out, shard_count=shard_count)
    if work.progress:
        print(summary(result, out))
    return result


def summary(content: Mapping[str, Any], folder: Path) -> str:
    """A manifest in one line: `cc3m train in DIR: 2,310,000 of 3,318,333 pairs (69.6 %) in 332 shards; missing: ...`."""
    share = f" ({content['pairs'] / content['rows']:.1%})" if content["rows"] else ""
    missing = ", ".join(f"{reason} {count:,}" for reason, count in list(content["failures"].items())[:6])
    return (
        f"{content['dataset']} {content['split']} in {folder}: {content['pairs']:,} of {content['rows']:,} pairs{share} in "
        f"{len(content['shards'])} shards, {content['size_bytes'] / 1e9:.2f} GB"
        + (f"; missing: {missing}" if missing else "")
        + ("" if content["complete"] else "; NOT COMPLETE: other parts are still to be done")
    )


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


class _Shard:
    """A shard that is being made: its rows, its spool, and how many rows are still open."""

    def __init__(self, number: int, rows: list[Row], spool: Spool, first_row: int) -> None:
        self.number, self.rows, self.spool, self.first_row = number, rows, spool, first_row
        self.open_rows = 0
        self.submitted = False


class _Run:
    """One call. Threads fetch and encode pictures; only the calling thread writes."""

    def __init__(
        self,
        out: Path,
        obtain: Obtain,
        encoding: Encoding,
        work: Work,
        shard_name: str,
        total_rows: int | None,
        title: str,
    ) -> None:
        self.out, self.obtain, self.encoding, self.work, self.shard_name = out, obtain, encoding, work, shard_name
        self.pool = ThreadPoolExecutor(work.threads, thread_name_prefix="picture")
        self.results: queue.SimpleQueue[tuple[_Shard, int, tuple[str, bytes] | Failure | BaseException]] = (
            queue.SimpleQueue()
        )
        self.in_flight = 0
        self.shards: dict[int, _Shard] = {}
        self.failures: Counter[str] = Counter()
        self.pairs = 0
        self.bar = tqdm(desc=title, total=total_rows, unit="pair", disable=not work.progress, mininterval=1.0)
        self.shown = 0.0

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        for shard in self.shards.values():
            shard.spool.close()
        self.bar.close()

    def do(self, chunks: Iterator[list[Row]], shard_size: int) -> int:
        """Make all shards of this part; returns the number of shards of all parts."""
        index, count = self.work.part
        # Enough rows to keep the threads busy, and few enough that pictures do not pile up while a shard is written.
        window = 4 * self.work.threads
        number = -1
        for number, rows in enumerate(chunks):
            if number % count != index or self._is_done(number, rows):
                continue
            shard = self._open(number, rows, number * shard_size)
            for row in range(len(rows)):
                if row in shard.spool.outcomes:
                    continue
                while self.in_flight >= window:
                    self._take()
                self.in_flight += 1
                shard.open_rows += 1
                self.pool.submit(self._fetch, shard, row)
            shard.submitted = True
            if shard.open_rows == 0:
                self._finish(shard)
        while self.in_flight:
            self._take()
        return number + 1

    def _is_done(self, number: int, rows: list[Row]) -> bool:
        """Whether a shard is finished. UserError where it was made from another number of rows."""
        record = manifest.read_record(self.out, self.shard_name.format(number))
        if record is None or (self.work.retry_failed and record.transient_reasons):
            return False
        if record.rows != len(rows):
            raise UserError(
                f"shard {record.shard} of {self.out} was made from {record.rows} rows, and now it has {len(rows)}: the list "
                "has changed; give a new folder."
            )
        # A process that was killed right after it wrote the record leaves the spool behind.
        self._spool_path(record.shard).unlink(missing_ok=True)
        self._show(pairs=record.pairs, failures={r: len(lost) for r, lost in record.failures.items()}, rows=record.rows)
        return True

    def _spool_path(self, shard: str) -> Path:
        return self.out / manifest.RECORDS / f"{Path(shard).stem}.spool"

    def _open(self, number: int, rows: list[Row], first_row: int) -> _Shard:
        """Begin or go on with a shard."""
        name = self.shard_name.format(number)
        spool = Spool(self._spool_path(name))
        record = manifest.read_record(self.out, name)
        if record is not None:
            self._reopen(record, rows, spool)
        if self.work.retry_failed:
            spool.forget_transient()
        shard = self.shards[number] = _Shard(number, rows, spool, first_row)
        came = sum(not outcome.reason for outcome in spool.outcomes.values())
        lost = Counter(outcome.reason for outcome in spool.outcomes.values() if outcome.reason)
        self._show(pairs=came, failures=lost, rows=len(spool.outcomes))
        return shard

    def _reopen(self, record: manifest.ShardRecord, rows: list[Row], spool: Spool) -> None:
        """Put the pictures of a finished shard, and its failures that are not transient, back into the spool."""
        row_of = {row.key: number for number, row in enumerate(rows)}
        if record.pairs:
            for sample in read_samples(self.out / record.shard):
                extension = next(extension for extension in IMAGE_EXTENSIONS if extension in sample.files)
                if row_of[sample.key] not in spool.outcomes:
                    spool.add(row_of[sample.key], extension, sample.files[extension])
        lasting = set(record.failures) - set(record.transient_reasons)
        for reason in lasting:
            for row in record.failures[reason]:
                if row - record.first_row not in spool.outcomes:
                    spool.fail(row - record.first_row, reason, transient=False)

    def _fetch(self, shard: _Shard, number: int) -> None:
        """In a thread: put one result for a row into the queue, its picture or an error."""
        try:
            self.results.put((shard, number, self._picture(shard.rows[number])))
        except BaseException as error:  # for the calling thread, which raises it unless it is a Failure
            self.results.put((shard, number, error))

    def _picture(self, row: Row) -> tuple[str, bytes]:
        if not row.caption.strip():
            raise Failure("no caption")
        for attempt in itertools.count(1):
            try:
                return encode_picture(self.obtain(row.where), self.encoding)
            except Failure as failure:
                if not failure.transient or attempt >= self.work.attempts:
                    raise
            time.sleep(self.work.backoff_seconds * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _take(self) -> None:
        """Wait for one result and put it into the spool; finish its shard if it was the last one."""
        shard, number, result = self.results.get()
        self.in_flight -= 1
        shard.open_rows -= 1
        if isinstance(result, Failure):
            shard.spool.fail(number, result.reason, transient=result.transient)
            self._show(failures={result.reason: 1}, rows=1)
        elif isinstance(result, BaseException):
            raise result
        else:
            shard.spool.add(number, *result)
            self._show(pairs=1, rows=1)
        if shard.submitted and shard.open_rows == 0:
            self._finish(shard)

    def _finish(self, shard: _Shard) -> None:
        """Write the tar of a shard, then its record, then remove the spool. All its rows have come or failed."""
        name = self.shard_name.format(shard.number)
        path = self.out / name
        for leftover in self.out.glob(f".{name}.*.part"):  # of a call that was killed while it wrote this shard
            leftover.unlink(missing_ok=True)
        failures: dict[str, list[int]] = {}
        transient: set[str] = set()
        came = []
        for number, outcome in sorted(shard.spool.outcomes.items()):
            if outcome.reason:
                failures.setdefault(outcome.reason, []).append(shard.first_row + number)
                if outcome.transient:
                    transient.add(outcome.reason)
            else:
                came.append(number)
        # A shard that is written again (after a retry) is not done until its new record is written.
        (self.out / manifest.RECORDS / f"{path.stem}.json").unlink(missing_ok=True)
        if came:
            write_shard(path, (self._sample(shard, number) for number in came))
        record = manifest.ShardRecord(
            shard=name,
            first_row=shard.first_row,
            rows=len(shard.rows),
            pairs=len(came),
            captions=sum(len(shard.rows[number].caption.split("\n")) for number in came),
            size_bytes=path.stat().st_size if came else 0,
            sha256=manifest.sha256_of(path) if came else "",
            failures=failures,
            transient_reasons=sorted(transient),
        )
        manifest.write_record(self.out, record)
        shard.spool.close(remove=True)
        del self.shards[shard.number]

    def _sample(self, shard: _Shard, number: int) -> Sample:
        extension = shard.spool.outcomes[number].extension
        row = shard.rows[number]
        return Sample(row.key, {extension: shard.spool.read(number), TEXT_EXTENSION: row.caption.encode()})

    def _show(self, *, rows: int, pairs: int = 0, failures: Mapping[str, int] | None = None) -> None:
        self.pairs += pairs
        self.failures.update(failures or {})
        self.bar.update(rows)
        if not self.bar.disable and time.monotonic() - self.shown > 1:
            self.shown = time.monotonic()
            lost = ", ".join(f"{reason} {count}" for reason, count in self.failures.most_common(4))
            self.bar.set_postfix_str(f"{self.pairs} came" + (f"; {lost}" if lost else ""), refresh=False)
