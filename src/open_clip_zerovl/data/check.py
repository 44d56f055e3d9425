"""`zerovl data check` of a table: every row with its picture. Shards are checked by `datasets.index`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from tqdm.auto import tqdm

from open_clip_zerovl.data.samples import samples_of
from open_clip_zerovl.data.sources import Source, table_source
from open_clip_zerovl.data.table import CsvFormat
from open_clip_zerovl.shards.faults import (
    FolderCheck,
    ShardCheck,
    caption_fault,
    picture_fault,
)
from open_clip_zerovl.shards.members import TEXT_EXTENSION, Sample


def check_table(
    path: str,
    style: CsvFormat | None = None,
    *,
    threads: int = 4,
    decode: bool = False,
    progress: bool = True,
) -> FolderCheck:
    """Check every row of a table of pairs: that it can be read, its caption, and its picture's file.

    Faults that are found are rows with more fields than the header, rows without a picture's file or a caption, captions that
    are empty or not UTF-8, pictures of an unknown format, and pictures without the end mark of their format. The format of a
    picture is found from its bytes, not its name. Stray quotes are logged by line.

    Args:
        style: columns and separator; None for those that the header shows.
        threads: blocks of rows read at the same time.
        decode: also decode every picture.

    Raises:
        UserError: no such table, or one without usable columns or rows.
    """
    begin = time.perf_counter()
    source = table_source("table", path, style)
    check = ShardCheck(os.path.basename(path), size_bytes=os.path.getsize(path))
    with ThreadPoolExecutor(threads) as pool:
        blocks = pool.map(lambda block: _block(source, block, decode), range(len(source.shards)))
        for faults, size_bytes in tqdm(
            blocks, total=len(source.shards), unit="block", disable=not progress
        ):
            check.size_bytes += size_bytes
            for key, kinds in faults:
                check.samples += 1
                for kind in kinds:
                    check.fault(kind, key)
    return FolderCheck([check], time.perf_counter() - begin)


def _block(source: Source, block: int, decode: bool) -> tuple[list[tuple[str, list[str]]], int]:
    """(key, faults) of each row of a block, and the bytes of their pictures."""
    rows, size_bytes = [], 0
    for sample in samples_of(source, block):
        rows.append((sample.key, _faults(sample, decode)))
        size_bytes += len(sample.image or b"")
    return rows, size_bytes


def _faults(sample: Sample, decode: bool) -> list[str]:
    if not sample.files:
        return ["row has more fields than the header, or is too long"]
    caption, picture = sample.files.get(TEXT_EXTENSION), sample.image
    faults = ["no caption" if caption is None else caption_fault(caption)]
    no_file = "no picture file that can be read"
    faults.append(no_file if picture is None else picture_fault(picture, decode=decode))
    return [fault for fault in faults if fault]
