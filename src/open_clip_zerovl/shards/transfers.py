"""One attempt to read a remote shard: from a server, another store, or a command; and why it failed. Retries are `remote`'s."""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.threads import call_within
from open_clip_zerovl.shards.urls import HTTP, is_command

_BLOCK_BYTES = 4 << 20  # of one request to a store
# and 500 to 599: a retry may help; all other errors of a server are final
_PASSING_STATUS = (408, 425, 429)


class StalledShard(Exception):
    """A command delivered no byte for too long."""


class Unreachable(OSError):
    """A remote shard cannot be read, or not to its end.

    Attributes:
        reason: a few words to count by ("server answered 503").
        passing: whether a retry might help; False where the server has no such shard.
    """

    def __init__(self, message: str, reason: str, passing: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.passing = passing


@dataclass
class Transfer:
    """One attempt to read a shard, from some byte on.

    Attributes:
        read: size -> at least one and at most `size` bytes; b"" at the end.
        close: ends the transfer.
        begins: number of the first byte that it delivers.
        total: bytes of the whole shard; None if unknown.
        identity: a text that changes when the shard is replaced by another (ETag, date, size); None if unknown.
        md5: MD5 of the whole shard, in base64 or hexadecimal digits; None if unknown.
        end: called at the end; raises where the transfer failed.
        unannounced: the shard ends where the connection does, so that a broken transfer looks like a whole one.
    """

    read: Callable[[int], bytes]
    close: Callable[[], None]
    begins: int = 0
    total: int | None = None
    identity: str | None = None
    md5: str | None = None
    end: Callable[[], None] = lambda: None
    unannounced: bool = False


class Broken(Exception):
    """A transfer failed; the message is the reason in a few words."""


def begin_transfer(url: str, at: int, *, stall_seconds: float, command_seconds: float) -> Transfer:
    """A transfer that begins at byte `at`, or before it where the server or command cannot do so.

    Args:
        stall_seconds: time without a byte after which a server has failed.
        command_seconds: time without a byte after which a command raises StalledShard; 0 waits forever.
    """
    if is_command(url):
        return _from_command(url, command_seconds)
    file_system, path, headers = file_system_of(url, stall_seconds)
    if path.split(":", 1)[0] in HTTP:
        return _from_server(file_system, path, at, headers)
    return _from_store(file_system, path, at, stall_seconds)


def _on_the_hub(url: str) -> tuple[str, dict[str, str]]:
    """The https URL of a file on the Hugging Face hub, and the headers that carry the user's token.

        hf://datasets/USER/NAME/train/00000.tar, hf://datasets/USER/NAME@REVISION/train/00000.tar

    A server that the hub redirects to gets no token.

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
    revision = unquote(revision or "main")  # refs%2Fpr%2F1
    kind = "dataset" if kind else "model"
    address = hf_hub_url(
        repository,
        file,
        repo_type=kind,
        revision=revision,
        endpoint=os.environ.get("HF_ENDPOINT"),
    )
    return address, {
        name: value for name, value in build_hf_headers().items() if name == "authorization"
    }


def matching_urls(pattern: str) -> list[str]:
    """The URLs of the files that a pattern with * names in a store, in order.

    Raises:
        UserError: the store cannot be listed.
    """
    options = {"endpoint": os.environ.get("HF_ENDPOINT")} if pattern.startswith("hf:") else {}
    try:
        import fsspec

        file_system, path = fsspec.core.url_to_fs(pattern, **options)
        return [file_system.unstrip_protocol(file) for file in sorted(file_system.glob(path))]
    except Exception as error:  # fsspec's file systems raise errors of any type
        raise UserError(
            f"the files of {pattern} cannot be listed ({reason_of(error)[0]}: {first_line(error)}); check the address, or "
            "write the names with braces, as {00000..00099}"
        ) from error


def file_system_of(url: str, stall_seconds: float) -> tuple[Any, str, dict[str, str]]:
    """fsspec's file system of a URL, the path in it, and headers for a server.

    Raises:
        UserError: no installed package opens such URLs.
    """
    url, headers = _on_the_hub(url) if url.startswith("hf:") else (url, {})
    scheme = url.split(":", 1)[0]
    try:
        import fsspec

        options = {}
        if scheme in HTTP:
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=stall_seconds, sock_read=stall_seconds)
            # trust_env: proxies of the environment; encoded: escapes in a URL, which may be signed, are sent as written.
            client = {"timeout": timeout, "trust_env": True, "read_bufsize": 1 << 20}
            options = {"client_kwargs": client, "encoded": "%" in url}
        return *fsspec.core.url_to_fs(url, **options), headers
    except (ImportError, ValueError) as error:  # ValueError: a protocol that fsspec does not know
        raise UserError(
            f"shard {url} cannot be opened ({words_of(error)}); install what fsspec asks for, or give a command that prints "
            "its bytes, as in 'pipe:aws s3 cp URL -'"
        ) from error


def _from_server(file_system: Any, url: str, at: int, headers: dict[str, str]) -> Transfer:
    headers = {
        **headers,
        "Accept-Encoding": "identity",
        **({"Range": f"bytes={at}-"} if at else {}),
    }
    # block_size 0 makes a stream. It does not use `size`, but would ask the server for it if it were not given.
    file = file_system.open(url, "rb", block_size=0, size=1, headers=headers)
    given, begins = file.r.headers, 0
    encoded = given.get("Content-Encoding", "identity") != "identity"
    length = None if encoded or "Content-Length" not in given else int(given["Content-Length"])
    if file.r.status == 206:
        range_ = re.match(r"bytes (\d+)-\d+/(\d+|\*)", given.get("Content-Range", ""))
        begins = int(range_[1]) if range_ else at
        length = int(range_[2]) if range_ and range_[2] != "*" else None
        if begins > at:
            file.close()
            raise Broken("another range than was asked for")
    identity = (
        given.get("ETag")
        or given.get("Last-Modified")
        or (None if length is None else f"{length} bytes")
    )
    md5 = given.get("Content-MD5") if not begins else None
    return Transfer(
        file.read, file.close, begins, length, identity, md5, unannounced=not announces_end(given)
    )


def announces_end(headers: Mapping[str, str]) -> bool:
    """True if an answer's end can be known from its headers or its chunks; else a reset connection ends as a closed one."""
    return "Content-Length" in headers or "Transfer-Encoding" in headers


def _from_store(file_system: Any, path: str, at: int, stall_seconds: float) -> Transfer:
    def opened() -> tuple[Any, dict[str, Any]]:
        file_system.invalidate_cache()
        file = file_system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead")
        file.seek(at)
        return file, getattr(file, "details", None) or file_system.info(path)

    limit = 4 * stall_seconds  # longer, since stores have time-outs and retries of their own
    file, about = call_within(limit, opened, "remote shard")
    total = about.get("size")
    identity_fields = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")
    identity = " ".join(
        str(about[field]) for field in (*identity_fields, "size") if about.get(field) is not None
    )
    md5 = about.get("md5Hash")  # S3's ETag of an encrypted or multipart object is not an MD5

    def read(size: int) -> bytes:
        return call_within(limit, lambda: file.read(min(size, _BLOCK_BYTES)), "remote shard")

    return Transfer(read, file.close, at, total, identity, md5)


def _from_command(url: str, command_seconds: float) -> Transfer:
    process = subprocess.Popen(
        url.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE, bufsize=0
    )
    output = process.stdout
    assert output is not None

    def read(size: int) -> bytes:
        if command_seconds and not select.select([output], [], [], command_seconds)[0]:
            raise StalledShard(f"nothing came for {command_seconds:g} s")
        # no buffer, which `select` would not see: the bytes that are there
        return output.read(size)

    def end() -> None:
        try:
            status = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return  # it has closed its output and still runs
        if status != 0:
            raise Broken(f"command ended with status {status}")

    def close() -> None:
        output.close()
        process.kill()  # it may ignore that its output is closed
        process.wait()

    return Transfer(read, close, end=end)


def reason_of(error: BaseException) -> tuple[str, bool]:
    """(reason, passing) of an error, as in `Unreachable`."""
    if isinstance(error, Unreachable):
        return error.reason, error.passing
    if isinstance(error, Broken):
        return str(error), True
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < 8:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    # fsspec raises FileNotFoundError for any answer of a server to a question about a file; the answer is among the causes.
    answers = [getattr(cause, "status", None) for cause in causes]
    status = next((answer for answer in answers if isinstance(answer, int)), None)
    if status is not None and status >= 400:
        needed = (
            ", which asks for a token: for the hub `hf auth login` or HF_TOKEN"
            if status == 401
            else ""
        )
        return f"server answered {status}{needed}", status >= 500 or status in _PASSING_STATUS
    if isinstance(error, FileNotFoundError):
        return "no such file", False
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)):
        return (error.strerror or type(error).__name__).lower(), False
    if any("credential" in type(each).__name__.lower() for each in causes):
        return "no credentials", False
    if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
        return "server sent nothing", True
    names = " ".join(type(each).__name__ for each in causes)
    if re.search("Connector|Refused|gaierror|EndpointConnection", names):
        return "no connection", True
    if any(isinstance(each, ConnectionError) for each in causes) or re.search(
        "Disconnect|Payload|Incomplete", names
    ):
        return "cut off", True
    if isinstance(error, (ValueError, TypeError, NotImplementedError, ImportError)):
        return type(error).__name__, False
    return type(error).__name__, True


def words_of(error: BaseException) -> str:
    """The message of an error, or its type's name."""
    return (
        str(error.args[-1] if isinstance(error, OSError) and error.args else error)
        or type(error).__name__
    )


def detail_of(error: Exception, reason: str) -> str:
    """The reason, with the error's message where the reason is only the error's type."""
    return (
        f"{reason}: {words_of(error)}"
        if reason == type(error).__name__
        else words_or(reason, error)
    )


def words_or(reason: str, error: Exception) -> str:
    """The message of an error of this module; for any other the reason, since a library's message names its internals."""
    return words_of(error) if isinstance(error, (Unreachable, Broken)) else reason


def asked_wait(error: BaseException) -> float:
    """Seconds that a busy server asks a client to wait (Retry-After); 0 if it does not."""
    headers = getattr(error, "headers", None)
    asked = (
        headers.get("Retry-After", "") if headers is not None and hasattr(headers, "get") else ""
    )
    return float(asked) if re.fullmatch(r"\d{1,6}", str(asked)) else 0.0
