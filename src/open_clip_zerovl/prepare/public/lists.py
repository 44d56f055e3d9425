"""SBU, CC3M and CC12M (section 2.1, A.8): lists of captions and addresses to shards of the pairs that can still be fetched.

CC's lists have one pair a line, CC3M's with the caption first, CC12M's with the address; neither has a header. The order of the
columns is found from the lines, and a header that was added for another program is skipped. SBU has two official forms, packed
or not: `sbu-captions-all.json` with the lists `image_urls` and `captions`, and the older text files
`SBU_captioned_photo_dataset_urls.txt` and `..._captions.txt`, one entry a line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.public.download import Downloader
from open_clip_zerovl.prepare.public.inputs import described, locate
from open_clip_zerovl.prepare.public.pairs import SHARD_SIZE, DatasetRow, prepare_pairs
from open_clip_zerovl.prepare.settings import Limits, Work
from open_clip_zerovl.shards.archives import find_member, json_array, open_member

_LOOK_AT_LINES = 100


def prepare_list(
    dataset: str,
    out: str | Path,
    *,
    source: list[str] | None = None,
    shard_size: int = SHARD_SIZE,
    limits: Limits | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """Make SBU ("sbu"), CC3M ("cc3m") or CC12M ("cc12m"), or go on with an interrupted call; returns the manifest.

    Args:
        source: the list, plain or packed; without it the official one is fetched into `OUT/downloads`, but for CC3M's.
        shard_size: rows a shard.
        limits: the limits of a download.
        work: threads, retries, sharing.

    Raises:
        UserError: no list, files of another form, or an error that `prepare_pairs` raises.
    """
    out, work = Path(out), work or Work()
    paths = locate(dataset, source, out / "downloads", progress=work.progress)
    if dataset != "sbu" and (len(paths) != 1 or not paths[0].is_file()):
        raise UserError(
            f"{dataset} is made from one list of pairs, got {len(paths)} of --source: give the .tsv file."
        )

    def rows() -> Iterator[DatasetRow]:
        return sbu_rows(paths) if dataset == "sbu" else tsv_rows(paths[0])

    return prepare_pairs(
        out,
        rows(),
        Downloader(limits),
        dataset=dataset,
        made_from={"files": described(paths)},
        shard_size=shard_size,
        work=work,
        total_rows=sum(1 for _ in rows()) if work.progress else None,
    )


def tsv_rows(path: Path) -> Iterator[DatasetRow]:
    """The rows of a CC list; the key is the number of the line among the pairs, from 0.

    A line without an address is a row too, so that keys are numbers of the list; it fails with "no address".

    Raises:
        UserError: the first lines are not pairs of a caption and an address.
    """
    header, address_first = _form(path)
    with _lines(path) as lines:
        for number, line in enumerate(itertools.islice(lines, header, None)):
            text = _text(line).rstrip("\r\n")
            # Tabs within a caption stay on the caption's side of the split.
            if address_first:
                address, _, caption = text.partition("\t")
            else:
                caption, _, address = text.rpartition("\t")
            yield DatasetRow(f"{number:09d}", " ".join(caption.split()), address.strip())


def _lines(path: Path) -> AbstractContextManager[IO[bytes]]:
    return open_member(*(find_member([path], ".tsv", ".txt", ".csv") or (path, path.name)))


def _form(path: Path) -> tuple[int, bool]:
    """(1 with a header line else 0, whether the address is the first column)."""
    with _lines(path) as lines:
        first = [
            _text(line).rstrip("\r\n").split("\t")
            for line in itertools.islice(lines, _LOOK_AT_LINES)
        ]

    def is_address(text: str) -> bool:
        return text.strip().lower().startswith(("http://", "https://"))

    in_front = sum(is_address(fields[0]) for fields in first if len(fields) > 1)
    behind = sum(is_address(fields[-1]) for fields in first if len(fields) > 1)
    if max(in_front, behind) < len(first) / 2 or not first:
        shown = "\t".join(first[0])[:80] if first else ""
        raise UserError(
            f"{path} is not a list of captions and addresses (its first line is {shown!r}): give the official .tsv, with one "
            "pair a line and a tab between."
        )
    has_header = not is_address(first[0][0]) and not is_address(first[0][-1])
    names = {field.strip().lower() for field in first[0]}
    return int(
        has_header and bool(names & {"url", "caption", "image_url", "text"})
    ), in_front >= behind


def sbu_rows(paths: list[Path]) -> Iterator[DatasetRow]:
    """The rows of SBU's list in either form; the key is the position in the list, from 0.

    Raises:
        UserError: files that hold neither form, or lists of unequal length.
    """
    for number, (address, caption) in enumerate(_sbu_columns(paths)):
        if not isinstance(address, str) or not isinstance(caption, str):
            raise UserError(
                f"SBU's lists of addresses and captions differ at entry {number} (one is longer, or holds something else than "
                "text): give the official files, whole."
            )
        yield DatasetRow(f"{number:09d}", " ".join(caption.split()), address.strip())


def _sbu_columns(paths: list[Path]) -> Iterator[tuple[Any, Any]]:
    """(address, caption) of each entry; None if one list is shorter."""
    both = find_member(paths, "captions-all.json", ".json")
    if both is not None:
        with open_member(*both) as first, open_member(*both) as second:
            addresses = json_array(first, str(both[0]), key="image_urls")
            captions = json_array(second, str(both[0]), key="captions")
            yield from itertools.zip_longest(addresses, captions)
        return
    urls, texts = find_member(paths, "urls.txt"), find_member(paths, "captions.txt")
    if urls is None or texts is None:
        raise UserError(
            "SBU is made from sbu-captions-all.json, or SBU_captioned_photo_dataset_urls.txt with ..._captions.txt (packed or "
            f"not), and {', '.join(map(str, paths))} hold neither."
        )
    with open_member(*urls) as first, open_member(*texts) as second:
        yield from itertools.zip_longest(map(_text, first), map(_text, second))


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
