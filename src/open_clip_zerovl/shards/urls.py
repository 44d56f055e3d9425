"""The kinds of URL that name a shard, and one request to each kind; `fetch` makes plain files of them.

a compressed file      its plain bytes, up to the place where it is damaged
https:, http:, hf:     a server, which is asked for the rest of a file (Range) and names its version (ETag)
s3:, gs: ...           a store that fsspec opens
pipe:COMMAND           the output of a command, which runs again from its beginning
"""

from __future__ import annotations

import bz2
import gzip
import http.client
import lzma
import os
import re
import select
import socket
import ssl
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import file_digests

# pipe:, s3://, https:// ...: no path of this machine
REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
HTTP = ("http", "https")
PARQUET = (".parquet", ".pq")
_BLOCK_BYTES = 1 << 20
# First bytes of a compressed file -> its reader, also of several compressed parts, of which bgzip and cat make one file.
_COMPRESSED: Mapping[bytes, Callable[[str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
# Types of an error, the reason in a few words, and whether a retry may help.
_REASONS: tuple[tuple[Any, str, bool], ...] = (
    (ssl.SSLCertVerificationError, "bad certificate", False),
    (FileNotFoundError, "no such file", False),
    (PermissionError, "no permission", False),
    (TimeoutError, "server sent nothing", True),
    ((ConnectionRefusedError, socket.gaierror), "no connection", True),
    ((ConnectionError, http.client.HTTPException), "cut off", True),
)


def local_path(url: str) -> str | None:
    """Return the path of a shard on this machine, None for a remote one."""
    if url.startswith("file:"):
        return re.sub(r"^file:(//(localhost)?)?", "", url)
    return None if REMOTE.match(url) else url


def decompressor(path: str) -> Callable[[str], Any] | None:
    """Return what opens a compressed file for its plain bytes, None for any other file."""
    with suppress(OSError), open(path, "rb") as file:
        beginning = file.read(max(map(len, _COMPRESSED)))
        return next(
            (_COMPRESSED[magic] for magic in _COMPRESSED if beginning.startswith(magic)), None
        )
    return None


def shard_digests(shards: Iterable[str]) -> dict[str, str]:
    """Digest the bytes of each shard, or its address if it is remote or cannot be read."""
    paths = {shard: local_path(shard) for shard in shards}
    digests = file_digests(path for path in paths.values() if path is not None)
    return {shard: digests.get(path or "") or shard for shard, path in paths.items()}


def check_quotes(url: str) -> None:
    """Refuse a single quote in a URL of open_clip's own pipeline, where webdataset puts it into a shell command."""
    if REMOTE.match(url) and not url.startswith(("pipe:", "file:")) and "'" in url:
        raise UserError(
            f"shard {url!r} has a single quote in its URL, which would end up in a shell; write it as %27"
        )


def is_parquet(url: str) -> bool:
    """Return whether a path or URL is of a parquet file, whose samples are its rows."""
    name = url.partition("?")[0] if REMOTE.match(url) else url
    return not is_command(url) and name.lower().endswith(PARQUET)


def is_command(url: str) -> bool:
    """Return whether the bytes of a remote shard are the output of a command."""
    return url.startswith("pipe:")


class Broken(Exception):
    """The error of an attempt that failed, with the reason as its message."""


@dataclass(frozen=True)
class Answer:
    """The bytes of a file from some byte on.

    Attributes:
        begins: number of the first byte.
        total: bytes of the whole file; None if unknown.
        version: a text that changes when the file is replaced by another (ETag, date, length); None if unknown.
        announced: False if the file ends where the connection does, so that a broken one looks like the end.
    """

    pieces: Iterator[bytes]
    close: Callable[[], None]
    begins: int = 0
    total: int | None = None
    version: str | None = None
    announced: bool = True


def ask(url: str, at: int, *, stall_seconds: float, command_seconds: float) -> Answer:
    """Ask for the bytes from `at` on, for an answer that begins there or before."""
    path = local_path(url)
    if path is not None:
        return _unpack(path)
    if is_command(url):
        return _ask_command(url, command_seconds)
    if url.startswith("hf:"):
        return _ask_server(*_on_the_hub(url), at, stall_seconds)
    if url.partition(":")[0].lower() in HTTP:
        return _ask_server(url, {}, at, stall_seconds)
    return _ask_store(url, at)


def _ask_server(url: str, token: dict[str, str], at: int, stall_seconds: float) -> Answer:
    """Ask a web server, without showing the token to a server that it redirects to."""
    # What is escaped stays as it is written: a signature may cover it.
    request = Request(quote(url, safe="%:/?#[]@!$&'()*+,;=~"))
    request.add_header("User-Agent", "open_clip_zerovl")
    request.add_header("Accept-Encoding", "identity")
    if at:
        request.add_header("Range", f"bytes={at}-")
    for name, value in token.items():
        request.add_unredirected_header(name, value)
    answer = urlopen(request, timeout=stall_seconds)
    given, begins = answer.headers, 0
    length = given.get("Content-Length")
    if answer.status == 206:
        answered = re.match(r"bytes (\d+)-\d+/(\d+)?", given.get("Content-Range", ""))
        begins, length = (int(answered[1]), answered[2]) if answered else (at, None)
    if begins > at:
        answer.close()
        raise Broken("another range than was asked for")
    version = given.get("ETag") or given.get("Last-Modified") or (length and f"{length} bytes")
    pieces = iter(lambda: answer.read1(_BLOCK_BYTES), b"")
    total = None if length is None else int(length)
    return Answer(pieces, answer.close, begins, total, version, announces_end(given))


def announces_end(headers: Mapping[str, str]) -> bool:
    """Return whether an answer's headers or chunks show its end. Without it a reset connection ends as a closed one."""
    return "Content-Length" in headers or "Transfer-Encoding" in headers


def _on_the_hub(url: str) -> tuple[str, dict[str, str]]:
    """Return the https URL of a file on the Hugging Face hub, and the headers with the user's token.

        hf://datasets/USER/NAME/train/00000.tar, hf://datasets/USER/NAME@REVISION/train/00000.tar

    Raises:
        UserError: a URL of another form.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    match = re.fullmatch(r"hf://(datasets/)?(?!datasets/)([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", url)
    if match is None:
        raise UserError(
            f"shard {url} names no file on the hub; write hf://datasets/USER/NAME/FILE.tar"
        )
    kind, repository, revision, file = match.groups()
    address = hf_hub_url(
        repository,
        file,
        repo_type="dataset" if kind else "model",
        revision=unquote(revision or "main"),  # refs%2Fpr%2F1
        endpoint=os.environ.get("HF_ENDPOINT"),
    )
    return address, build_hf_headers()


def _ask_store(url: str, at: int) -> Answer:
    file_system, path = _file_system_of(url)
    file_system.invalidate_cache()
    file = file_system.open(path, "rb", block_size=4 * _BLOCK_BYTES, cache_type="readahead")
    file.seek(at)
    about = getattr(file, "details", None) or file_system.info(path)
    names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created", "size")
    version = " ".join(str(about[name]) for name in names if about.get(name) is not None) or None
    pieces = iter(lambda: file.read(4 * _BLOCK_BYTES), b"")
    return Answer(pieces, file.close, at, about.get("size"), version)


def _file_system_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it.

    Raises:
        UserError: no installed package opens such URLs.
    """
    options = {"endpoint": os.environ.get("HF_ENDPOINT")} if url.startswith("hf:") else {}
    try:
        import fsspec

        return fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # ValueError: a protocol that fsspec does not know
        raise UserError(
            f"shard {url} cannot be opened ({first_line(error)}); install what fsspec asks for, or give a command that prints "
            "its bytes, as in 'pipe:aws s3 cp URL -'"
        ) from error


def matching_urls(pattern: str) -> list[str]:
    """Return the URLs of the files that a pattern with * names in a store, in order."""
    file_system, path = _file_system_of(pattern)
    return [file_system.unstrip_protocol(file) for file in sorted(file_system.glob(path))]


def _unpack(path: str) -> Answer:
    about, opener = os.stat(path), decompressor(path)
    if opener is None:
        raise Broken("no compressed file any more")
    file = opener(path)

    def pieces() -> Iterator[bytes]:
        try:
            # read1 gives what comes before the place where the file is cut off
            yield from iter(lambda: file.read1(_BLOCK_BYTES), b"")
        except (OSError, EOFError, zlib.error, lzma.LZMAError):
            yield b"?"  # no header begins so: the tar is torn here

    return Answer(pieces(), file.close, version=f"{about.st_size} {about.st_mtime_ns}")


def _ask_command(url: str, most_seconds: float) -> Answer:
    process = subprocess.Popen(
        url.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE, bufsize=0
    )
    output = process.stdout
    assert output is not None

    def read() -> bytes:
        if most_seconds and not select.select([output], [], [], most_seconds)[0]:
            raise UserError(
                f"shard {url} has stalled: nothing came for {most_seconds:g} s; check the command"
            )
        return output.read(_BLOCK_BYTES)

    def pieces() -> Iterator[bytes]:
        yield from iter(read, b"")
        if process.wait() != 0:
            raise Broken(f"command ended with status {process.returncode}")

    def close() -> None:
        output.close()
        process.kill()  # it may ignore that its output is closed
        process.wait()

    return Answer(pieces(), close)


def reason_of(error: BaseException) -> tuple[str, bool]:
    """Return a few words for an error, and whether a retry may help."""
    if isinstance(error, Broken):
        return str(error), True
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int) and status in (404, 410):
        return "no such file", False
    if isinstance(status, int) and status >= 400:
        return f"server answered {status}", status >= 500 or status in (408, 416, 425, 429)
    cause = error.reason if isinstance(error, URLError) else error
    for kinds, reason, passing in _REASONS:
        if isinstance(cause, kinds):
            return reason, passing
    of_program = isinstance(cause, (ValueError, TypeError, NotImplementedError, ImportError))
    final = of_program or "credential" in type(cause).__name__.lower()
    return f"{type(cause).__name__}: {cause}", not final


def asked_wait(error: BaseException) -> float:
    """Return the seconds that a busy server asks a client to wait (Retry-After), 0 if it does not."""
    asked = error.headers.get("Retry-After", "") if isinstance(error, HTTPError) else ""
    return float(asked) if re.fullmatch(r"\d{1,6}", asked) else 0.0
