"""The sizes of shards, looked up in the `sizes.json` of each shard's own folder. No command of a pipe is run for it.

shard                                          its sizes
/d/sbu/00000.tar                               /d/sbu/sizes.json
https://host/sbu/00000.tar?key=1               https://host/sbu/sizes.json?key=1
s3://bucket/sbu/00000.tar                      s3://bucket/sbu/sizes.json
pipe:cat /d/sbu/00000.tar | tee copy.tar       /d/sbu/sizes.json, opened as a file
pipe:fetch sbu/00000.tar@/d/sbu/sizes.json     the file named after the at sign
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.fetch import RetryPolicy, ShardCache, Unreachable
from open_clip_zerovl.shards.urls import is_command, local_path
from open_clip_zerovl.shards.writing import SIZES_FILE, parse_sizes, read_sizes

# the end of a path or URL that names a tar
_TAR = re.compile(r"(?P<name>[^/?]+\.(?:tar|tgz)\b[^/?]*)(?P<query>\?.*)?$")


def listed_sizes(
    shards: Sequence[str], file: str | None = None, cache: ShardCache | None = None
) -> dict[str, int]:
    """Shard -> samples, for the shards that a `sizes.json` lists.

    Args:
        file: one file for all shards, listed there by file name; None for the file beside each shard.
        cache: the folder of fetched files.

    Raises:
        UserError: an unreadable file, wrong numbers, or a server that does not answer.
    """
    tables: dict[str, dict[str, int]] = {}
    known: dict[str, int] = {}
    for shard in shards:
        name, place = _name_and_place(shard)
        place = file if file is not None else place
        if place is None:
            continue
        if place not in tables:
            tables[place] = _read(place, cache or ShardCache())
        if name in tables[place]:
            known[shard] = tables[place][name]
    return known


def _name_and_place(shard: str) -> tuple[str, str | None]:
    """File name of a shard, and the path or URL of the `sizes.json` beside it; None if that is unknown."""
    if shard.startswith("pipe:"):
        words = [word for word in _words(shard[len("pipe:") :]) if _TAR.search(word)]
        if len(words) != 1:
            return shard, None
        name, place = _name_and_place(words[0])
        # A relative path or another scheme in a command may mean something to that command only.
        reachable = place is not None and (
            os.path.isabs(place) or bool(re.match(r"https?://", place))
        )
        return name, place if reachable else None
    path = local_path(shard)
    if path is not None:
        return os.path.basename(path), os.path.join(os.path.dirname(path), SIZES_FILE)
    match = _TAR.search(shard)
    if match is None:
        return os.path.basename(shard), os.path.join(os.path.dirname(shard), SIZES_FILE)
    return match["name"], shard[: match.start()] + SIZES_FILE + (match["query"] or "")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # quotes that do not match
        return []


def _read(place: str, cache: ShardCache) -> dict[str, int]:
    path = local_path(place)
    if path is not None and os.path.basename(path) == SIZES_FILE:
        return read_sizes(os.path.dirname(path) or ".") or {}
    if is_command(place):
        return {}  # no command is run here
    try:
        with cache.borrowed(place, RetryPolicy()) as path:
            return parse_sizes(Path(path).read_bytes(), place)
    except Unreachable as error:
        if error.passing:
            raise UserError(
                f"{place} could not be fetched ({error}); check the host, or name a local copy (SHARDS@/path/{SIZES_FILE})"
            ) from error
        logging.warning(f"{place} cannot be read ({error}).")
        return {}
