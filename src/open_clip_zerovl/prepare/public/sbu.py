"""SBU Captioned Photos (section 2.1, A.8): one million photos of one host with their captions.

There are two official forms, packed or not: `sbu-captions-all.json` with the lists `image_urls` and `captions`, and the older
text files `SBU_captioned_photo_dataset_urls.txt` and `..._captions.txt`, one entry a line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.prepare.public.download import Downloader, Limits
from open_clip_zerovl.prepare.public.inputs import described, locate
from open_clip_zerovl.prepare.public.pairs import SHARD_SIZE, Row, Work, prepare_pairs
from open_clip_zerovl.shards.archives import find_member, json_array, open_member


def prepare_sbu(
    out: str | Path,
    *,
    source: list[str] | None = None,
    shard_size: int = SHARD_SIZE,
    limits: Limits | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """Make SBU, or go on with an interrupted call; returns the manifest.

    Args:
        source: the JSON file, or the two text files, or an archive of either; without it the official one is fetched.
        shard_size: rows a shard.
        limits: of a download.
        work: threads, retries, sharing.

    Raises:
        UserError: files that hold neither form, lists of unequal length, or what `prepare_pairs` raises.
    """
    out, work = Path(out), work or Work()
    paths = locate("sbu", source, out / "downloads", progress=work.progress)
    downloader = Downloader(limits)
    try:
        return prepare_pairs(
            out,
            sbu_rows(paths),
            downloader,
            dataset="sbu",
            made_from={"files": described(paths)},
            shard_size=shard_size,
            work=work,
            total_rows=sum(1 for _ in sbu_rows(paths)) if work.progress else None,
        )
    finally:
        downloader.close()


def sbu_rows(paths: list[Path]) -> Iterator[Row]:
    """The rows of SBU's list in either form; the key is the position in the list, from 0.

    Raises:
        UserError: files that hold neither form, or lists of unequal length.
    """
    number = -1
    for number, (address, caption) in enumerate(_columns(paths)):
        if not isinstance(address, str) or not isinstance(caption, str):
            raise UserError(
                f"SBU's lists of addresses and captions differ at entry {number} (one is longer, or holds something else than "
                "text): give the official files, whole."
            )
        yield Row(f"{number:09d}", " ".join(caption.split()), address.strip())


def _columns(paths: list[Path]) -> Iterator[tuple[Any, Any]]:
    """(address, caption) of each entry; None where one list is shorter."""
    if found := find_member(paths, "captions-all.json", ".json"):
        path, name = found
        with open_member(path, name) as first, open_member(path, name) as second:
            addresses = json_array(first, str(path), key="image_urls")
            captions = json_array(second, str(path), key="captions")
            yield from itertools.zip_longest(addresses, captions)
        return
    urls, texts = find_member(paths, "urls.txt"), find_member(paths, "captions.txt")
    if urls is None or texts is None:
        raise UserError(
            "SBU is made from sbu-captions-all.json, or SBU_captioned_photo_dataset_urls.txt with ..._captions.txt (packed or "
            f"not), and {', '.join(map(str, paths))} hold neither."
        )
    with open_member(*urls) as first, open_member(*texts) as second:
        for address, caption in itertools.zip_longest(first, second):
            yield _text(address), _text(caption)


def _text(line: bytes | None) -> str | None:
    return None if line is None else line.decode("utf-8", errors="replace")
