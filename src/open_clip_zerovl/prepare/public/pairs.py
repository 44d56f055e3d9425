"""Rows of (key, caption, place of the picture) to webdataset shards, in any number of calls.

Shard k holds the pairs of rows k*S .. (k+1)*S - 1, in their order, in whatever order the pictures arrived: the same rows and
pictures give the same bytes. A call may be killed at any moment, since its work is kept at three levels:

1. a picture, or the reason why there is none, is appended to the shard's spool (`records/00012.spool`);
2. a whole shard is written under another name and renamed;
3. then its record is written, which marks it as done, and the spool is removed.

A call on the same folder skips shards with records, continues with shards with spools, and makes the remaining shards. No pair
is lost or written twice, because a shard is always written as a whole, from its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.public import manifest
from open_clip_zerovl.prepare.public.gather import Gathering
from open_clip_zerovl.prepare.public.pictures import Encoding, Failure, Picture, encode_picture
from open_clip_zerovl.prepare.public.spool import Spool
from open_clip_zerovl.prepare.settings import Work
from open_clip_zerovl.shards.members import TEXT_EXTENSION, Sample, read_samples
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS

SHARD_SIZE = 10_000

#: A picture's bytes from its address or path; raises `Failure`.
Obtain = Callable[[str], bytes]


class DatasetRow(NamedTuple):
    """One row of a dataset's list: the sample's key, its text (several captions: one a line), the place of its picture."""

    key: str
    caption: str
    where: str


def prepare_pairs(
    out: str | Path,
    rows: Iterable[DatasetRow],
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
        dataset, split, made_from: the inputs, for the manifest; later calls must give the same.
        encoding: how pictures are stored.
        shard_size: rows a shard.
        shard_name: pattern of the file names.
        work: threads, retries, sharing.
        total_rows: length of the list, for the progress bar.

    Raises:
        UserError: an empty list, a folder of another dataset, or one that another process writes to.
    """
    out = Path(out)
    encoding = encoding or Encoding()
    work = work or Work()
    settings = {"shard_size": shard_size, "encoding": encoding.settings()}
    manifest.begin(out, dataset=dataset, split=split, made_from=made_from, settings=settings)
    with manifest.sole_writer(out, "{}-of-{}".format(*work.part)):
        shards = _Shards(
            out, obtain, encoding, work, shard_name, shard_size, total_rows, f"{dataset} {split}"
        )
        try:
            shard_count = shards.make(rows)
        finally:
            shards.gathering.close()
            if any((out / manifest.RECORDS).glob("*.json")):
                manifest.rebuild(out)
    if shard_count == 0:
        raise UserError(
            f"The list of {dataset} {split} has no rows: check the files given with --source."
        )
    result = manifest.rebuild(out, shard_count=shard_count)
    if work.progress:
        print(summary(result, out))
    return result


def summary(content: Mapping[str, Any], folder: Path) -> str:
    """A manifest in one line: `cc3m train in DIR: 2,310,000 of 3,318,333 pairs (69.6 %) in 332 shards; missing: ...`."""
    share = f" ({content['pairs'] / content['rows']:.1%})" if content["rows"] else ""
    missing = ", ".join(
        f"{reason} {count:,}" for reason, count in list(content["failures"].items())[:6]
    )
    return (
        f"{content['dataset']} {content['split']} in {folder}: {content['pairs']:,} of {content['rows']:,} pairs{share} in "
        f"{len(content['shards'])} shards, {content['size_bytes'] / 1e9:.2f} GB"
        + (f"; missing: {missing}" if missing else "")
        + ("" if content["complete"] else "; NOT COMPLETE: other parts are still to be done")
    )


class _Shards:
    """The shards of one call."""

    def __init__(
        self,
        out: Path,
        obtain: Obtain,
        encoding: Encoding,
        work: Work,
        shard_name: str,
        shard_size: int,
        total_rows: int | None,
        title: str,
    ) -> None:
        self.out = out
        self.obtain = obtain
        self.encoding = encoding
        self.work = work
        self.shard_name, self.shard_size = shard_name, shard_size
        self.gathering = Gathering(
            self._picture, self._finish, work, title=title, total_rows=total_rows
        )

    def make(self, rows: Iterable[DatasetRow]) -> int:
        """Make all shards of this part; returns the number of shards of all parts."""
        index, count = self.work.part
        iterator, number = iter(rows), -1
        while chunk := list(itertools.islice(iterator, self.shard_size)):
            number += 1
            if number % count != index:
                continue
            name = self.shard_name.format(number)
            record = manifest.read_record(self.out, name)
            spool = self.out / manifest.RECORDS / f"{Path(name).stem}.spool"
            if record is not None and self._is_done(record, chunk):
                # A process that was killed right after it wrote the record leaves the spool behind.
                spool.unlink(missing_ok=True)
                continue
            shard = Spool(spool, number, chunk)
            if record is not None:
                self._reopen(record, shard)
            self.gathering.begin(shard)
            for row, wanted in enumerate(chunk):
                self.gathering.submit(shard, row, wanted)
            self.gathering.end(shard)
        self.gathering.drain()
        return number + 1

    def _is_done(self, record: manifest.ShardRecord, rows: list[DatasetRow]) -> bool:
        """True where a shard with a record stays as it is. UserError if it was made from another number of rows."""
        if self.work.retry_failed and record.transient_reasons:
            return False
        if record.rows != len(rows):
            raise UserError(
                f"shard {record.shard} of {self.out} was made from {record.rows} rows, and now it has {len(rows)}: the list "
                "has changed; give a new folder."
            )
        lost = {reason: len(rows_lost) for reason, rows_lost in record.failures.items()}
        self.gathering.show(pairs=record.pairs, failures=lost, rows=record.rows)
        return True

    def _reopen(self, record: manifest.ShardRecord, shard: Spool) -> None:
        """Put the pictures of a finished shard, and its failures that are not transient, back into the spool."""
        row_of = {row.key: number for number, row in enumerate(shard.rows)}
        for sample in read_samples(self.out / record.shard) if record.pairs else ():
            extension = next(
                extension for extension in IMAGE_EXTENSIONS if extension in sample.files
            )
            if row_of[sample.key] not in shard.outcomes:
                shard.add(row_of[sample.key], extension, sample.files[extension])
        for reason in set(record.failures) - set(record.transient_reasons):
            for row in record.failures[reason]:
                if row - record.first_row not in shard.outcomes:
                    shard.fail(row - record.first_row, reason, transient=False)

    def _picture(self, row: DatasetRow) -> Picture:
        if not row.caption.strip():
            raise Failure("no caption")
        return encode_picture(self.obtain(row.where), self.encoding)

    def _finish(self, shard: Spool) -> None:
        """Write the tar of a shard, then its record, then remove the spool. All its rows have come or failed."""
        outcomes, first_row = dict(sorted(shard.outcomes.items())), shard.number * self.shard_size
        came = [number for number, outcome in outcomes.items() if not outcome.reason]
        failures: dict[str, list[int]] = {}
        for number, outcome in outcomes.items():
            if outcome.reason:
                failures.setdefault(outcome.reason, []).append(first_row + number)
        record = manifest.ShardRecord(
            shard=self.shard_name.format(shard.number),
            first_row=first_row,
            rows=len(shard.rows),
            pairs=len(came),
            captions=sum(len(shard.rows[number].caption.split("\n")) for number in came),
            failures=failures,
            transient_reasons=sorted(
                {outcome.reason for outcome in outcomes.values() if outcome.transient}
            ),
        )
        manifest.write_recorded_shard(self.out, record, (_sample(shard, number) for number in came))
        shard.close(remove=True)


def _sample(shard: Spool, number: int) -> Sample:
    row, extension = shard.rows[number], shard.outcomes[number].extension
    return Sample(row.key, {extension: shard.read(number), TEXT_EXTENSION: row.caption.encode()})


def shuffled_apart(counts: Sequence[int], *, seed: int) -> list[tuple[int, int]]:
    """An order of all (picture, text) pairs in which the texts of one picture are far apart.

    Pass p holds the p-th text of every picture that has one. Pictures are divided into two halves once. Each pass is the first
    half in a new shuffled order, then the second half in a new shuffled order, so that at least half of the pictures lie
    between two texts of one picture. A picture has other neighbours in each pass: readers that interleave shards do not bring
    the same pictures together again.

        4 pictures of 2 texts, halves {0, 3} and {1, 2}:    3a 0a | 1a 2a | 0b 3b | 2b 1b

    Args:
        counts: number of texts of each picture.
        seed: the seed of the shuffles.

    Returns:
        (picture, text) index pairs, `sum(counts)` of them. A pure function of the arguments.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(counts))
    halves = order[: len(counts) // 2], order[len(counts) // 2 :]
    pairs: list[tuple[int, int]] = []
    for text in range(max(counts, default=0)):
        for half in halves:
            pairs += [
                (int(picture), text) for picture in rng.permutation(half) if counts[picture] > text
            ]
    return pairs
