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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.public import manifest
from open_clip_zerovl.prepare.public.gather import Batch, Gathering, Picture, Work, check_work
from open_clip_zerovl.prepare.public.pictures import Encoding, Failure, encode_picture
from open_clip_zerovl.prepare.public.spool import Spool
from open_clip_zerovl.shards.members import IMAGE_EXTENSIONS, TEXT_EXTENSION, Sample, read_samples

__all__ = ["SHARD_SIZE", "Obtain", "Row", "Work", "prepare_pairs", "summary"]

SHARD_SIZE = 10_000

#: A picture's bytes from its address or path; raises `Failure`.
Obtain = Callable[[str], bytes]


class Row(NamedTuple):
    """One row of a dataset's list: the sample's key, its text (several captions: one a line), the place of its picture."""

    key: str
    caption: str
    where: str


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
    check_work(work, shard_size)
    index, count = work.part
    settings = {"shard_size": shard_size, "encoding": encoding.settings()}
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


class _Shard(Batch):
    """A shard that is being made, from its rows."""

    def __init__(self, number: int, rows: list[Row], spool: Spool, first_row: int) -> None:
        super().__init__(number, spool)
        self.rows, self.first_row = rows, first_row


class _Run:
    """One call."""

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
        self.gathering = Gathering(self._picture, self._finish, work, title=title, total_rows=total_rows)

    def close(self) -> None:
        self.gathering.close()

    def do(self, chunks: Iterator[list[Row]], shard_size: int) -> int:
        """Make all shards of this part; returns the number of shards of all parts."""
        index, count = self.work.part
        number = -1
        for number, rows in enumerate(chunks):
            if number % count != index or self._is_done(number, rows):
                continue
            shard = self._open(number, rows, number * shard_size)
            for row in range(len(rows)):
                if row not in shard.spool.outcomes:
                    self.gathering.submit(shard, row, rows[row])
            self.gathering.end(shard)
        self.gathering.drain()
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
        lost = {reason: len(rows_lost) for reason, rows_lost in record.failures.items()}
        self.gathering.show(pairs=record.pairs, failures=lost, rows=record.rows)
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
        shard = _Shard(number, rows, spool, first_row)
        self.gathering.begin(shard)
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

    def _picture(self, row: Row) -> Picture:
        if not row.caption.strip():
            raise Failure("no caption")
        return Picture(*encode_picture(self.obtain(row.where), self.encoding))

    def _finish(self, shard: Batch) -> None:
        """Write the tar of a shard, then its record, then remove the spool. All its rows have come or failed."""
        assert isinstance(shard, _Shard)
        name = self.shard_name.format(shard.number)
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
        manifest.write_recorded_shard(
            self.out,
            name,
            (self._sample(shard, number) for number in came),
            first_row=shard.first_row,
            rows=len(shard.rows),
            pairs=len(came),
            captions=sum(len(shard.rows[number].caption.split("\n")) for number in came),
            failures=failures,
            transient_reasons=sorted(transient),
        )
        shard.spool.close(remove=True)

    def _sample(self, shard: _Shard, number: int) -> Sample:
        extension = shard.spool.outcomes[number].extension
        row = shard.rows[number]
        return Sample(row.key, {extension: shard.spool.read(number), TEXT_EXTENSION: row.caption.encode()})
