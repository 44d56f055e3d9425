"""The kinds of URL that name a shard: a local path, a store that fsspec opens (https:, s3: ...), a command (pipe:)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.identity import file_digests

# pipe:, s3://, https:// ...: no path of this machine
REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
HTTP = ("http", "https")
PARQUET = (".parquet", ".pq")


def local_path(url: str) -> str | None:
    """The path of a shard on this machine, or None for a remote one."""
    if url.startswith("file:"):
        return re.sub(r"^file:(//(localhost)?)?", "", url)
    return None if REMOTE.match(url) else url


def shard_digests(shards: Iterable[str]) -> dict[str, str]:
    """Digest the bytes of each shard; one that is remote, or cannot be read, counts by its address."""
    paths = {shard: local_path(shard) for shard in shards}
    digests = file_digests(path for path in paths.values() if path is not None)
    return {shard: digests.get(path or "") or shard for shard, path in paths.items()}


def check_quotes(url: str) -> None:
    """UserError for a single quote in a URL of open_clip's own pipeline, where webdataset puts it into a shell command."""
    if REMOTE.match(url) and not url.startswith(("pipe:", "file:")) and "'" in url:
        raise UserError(
            f"shard {url!r} has a single quote in its URL, which would end up in a shell; write it as %27"
        )


def is_parquet(url: str) -> bool:
    """True for the path or URL of a parquet file, whose samples are its rows."""
    name = url.partition("?")[0] if REMOTE.match(url) else url
    return not is_command(url) and name.lower().endswith(PARQUET)


def is_command(url: str) -> bool:
    """True if the bytes of a remote shard are the output of a command."""
    return url.startswith("pipe:")
