"""CC3M and CC12M (section 2.1, A.8): from lists of captions and addresses to shards of the pairs that can still be fetched.

A list has one pair a line. CC3M's has the caption first, CC12M's the address; neither has a header. The order of the columns is
told from the lines, and a header that was added for another program is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.public.download import Downloader, Limits
from open_clip_zerovl.prepare.public.inputs import described, locate
from open_clip_zerovl.prepare.public.pairs import SHARD_SIZE, Row, Work, prepare_pairs
from open_clip_zerovl.shards.archives import find_member, open_member

_LOOK_AT_LINES = 100


def prepare_cc(
    dataset: str,
    out: str | Path,
    *,
    source: list[str] | None = None,
    shard_size: int = SHARD_SIZE,
    limits: Limits | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """Make CC3M ("cc3m") or CC12M ("cc12m"), or go on with an interrupted call; returns the manifest.

    Args:
        source: the list (`.tsv`, also `.gz`); without it CC12M's is fetched into `OUT/downloads`.
        shard_size: rows a shard.
        limits: of a download.
        work: threads, retries, sharing.

    Raises:
        UserError: no list, a file of another form, or what `prepare_pairs` raises.
    """
    out, work = Path(out), work or Work()
    paths = locate(dataset, source, out / "downloads", progress=work.progress)
    if len(paths) != 1 or not paths[0].is_file():
        raise UserError(f"{dataset} is made from one list of pairs, got {len(paths)} of --source: give the .tsv file.")
    downloader = Downloader(limits)
    try:
        return prepare_pairs(
            out,
            tsv_rows(paths[0]),
            downloader,
            dataset=dataset,
            made_from={"files": described(paths)},
            shard_size=shard_size,
            work=work,
            total_rows=sum(1 for _ in tsv_rows(paths[0])) if work.progress else None,
        )
    finally:
        downloader.close()


def tsv_rows(path: Path) -> Iterator[Row]:
    """The rows of a CC list; the key is the number of the line among the pairs, from 0.

    A line without an address is a row too, so that keys are numbers of the list; it fails with "no address".

    Raises:
        UserError: the first lines are not pairs of a caption and an address.
    """
    header, address_first = _form(path)
    with _lines(path) as lines:
        for number, line in enumerate(lines, start=-header):
            if number < 0:
                continue
            text = line.decode("utf-8", errors="replace").rstrip("\r\n")
            if address_first:
                address, _, caption = text.partition("\t")
            else:
                caption, _, address = text.rpartition("\t")
            # Tabs within a caption stay on the caption's side of the split.
            yield Row(f"{number:09d}", " ".join(caption.split()), address.strip())


def _lines(path: Path) -> Any:
    found = find_member([path], ".tsv", ".txt", ".csv") or (path, path.name)
    return open_member(*found)


def _form(path: Path) -> tuple[int, bool]:
    """(1 with a header line else 0, whether the address is the first column)."""
    first: list[list[str]] = []
    with _lines(path) as lines:
        for line in lines:
            first.append(line.decode("utf-8", errors="replace").rstrip("\r\n").split("\t"))
            if len(first) == _LOOK_AT_LINES:
                break

    def is_address(text: str) -> bool:
        return text.strip().lower().startswith(("http://", "https://"))

    in_front = sum(is_address(fields[0]) for fields in first if len(fields) > 1)
    behind = sum(is_address(fields[-1]) for fields in first if len(fields) > 1)
    if max(in_front, behind) < len(first) / 2 or not first:
        shown = "\t".join(first[0])[:80] if first else ""
        raise UserError(
            f"{path} is no list of captions and addresses (its first line is {shown!r}): give the official .tsv, with one "
            "pair a line and a tab between."
        )
    has_header = not is_address(first[0][0]) and not is_address(first[0][-1])
    names = {field.strip().lower() for field in first[0]}
    return int(has_header and bool(names & {"url", "caption", "image_url", "text"})), in_front >= behind
