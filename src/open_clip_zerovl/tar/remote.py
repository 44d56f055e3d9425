"""The bytes of a shard wherever it lies: a file, a store that fsspec opens (https:, s3:, gs: ...), or a command (pipe:).

A broken transfer is retried, after a wait that doubles with each retry, and goes on at the byte where it broke. It does so by a
range request; for a command, or a server without range requests, it reads from the beginning and drops the bytes that it has.
The result is every byte of the shard, each once.

    bytes 0 .. 69,999 come, the connection is lost, "Range: bytes=70000-" brings the rest
"""

from __future__ import annotations

import functools
import random
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from open_clip_zerovl.errors import UserError

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # pipe:, s3://, https:// ...: no path of this machine
HTTP = ("http", "https")
_BLOCK_BYTES = 4 << 20  # of one request to a store
_PROGRESS_BYTES = 1 << 16  # after so many new bytes retries are counted from 0 again
_SLOWEST_BYTES_PER_SECOND = 1024
_PASSING_STATUS = (408, 425, 429)  # and 500 to 599: a retry may help; all other errors of a server are final


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


@dataclass(frozen=True)
class Wait:
    """The retries of one shard.

    Attributes:
        shard: its URL.
        seconds: that the retries took.
        reasons: reason -> number of retries.
    """

    shard: str
    seconds: float
    reasons: dict[str, int]

    @property
    def retries(self) -> int:
        """Of all reasons."""
        return sum(self.reasons.values())


def _ignore(_: Wait) -> None:
    pass


@dataclass
class Patience:
    """How long one process waits for the shards of one source.

    Retries are made once in an outage: after a shard has failed with all its retries, the next shards get no retry until one
    succeeds.

    Attributes:
        retries: of a transfer from a server or store, without progress in between.
        command_retries: of a command, which may have retries of its own.
        first_wait_seconds, longest_wait_seconds: wait before the first retry, and the limit of its doubling.
        stall_seconds: a server that sends no byte for so long is asked again.
        most_seconds: a shard without progress for so long is given up; 0 for no limit but the retries.
        command_seconds: a command without a byte for so long raises StalledShard; 0 waits forever.
        waits: called for each shard that had at least one retry, when it ends or fails.
        failed: shards that have failed since the last success -> why, in the order in which they were asked for.
    """

    retries: int = 8
    command_retries: int = 3
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 60
    stall_seconds: float = 30
    most_seconds: float = 0
    command_seconds: float = 0
    waits: Callable[[Wait], None] = _ignore
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def within(
        cls, timeout_seconds: float, *, watched: bool = True, waits: Callable[[Wait], None] = _ignore
    ) -> Patience:
        """The patience that gives up before a loader's time-out ends the run.

        Args:
            timeout_seconds: of the loader; 0 for none.
            watched: another process keeps the time-out, so that a command needs no limit of its own.
        """
        most = 0.8 * timeout_seconds
        stall = max(1.0, min(30, timeout_seconds / 10)) if timeout_seconds else 30
        return cls(
            stall_seconds=stall, most_seconds=most, command_seconds=0 if watched else timeout_seconds, waits=waits
        )


def local_path(url: str) -> str | None:
    """The path of a shard on this machine, or None for a remote one."""
    if url.startswith("file:"):
        return re.sub(r"^file:(//(localhost)?)?", "", url)
    return None if REMOTE.match(url) else url


def check_quotes(url: str) -> None:
    """UserError for a single quote in a URL: webdataset puts URLs between single quotes into a shell command (curl)."""
    if REMOTE.match(url) and not url.startswith(("pipe:", "file:")) and "'" in url:
        raise UserError(f"shard {url!r} has a single quote in its URL, which would end up in a shell; write it as %27")


def check_openable(url: str) -> None:
    """Check that an installed package opens URLs of this kind.

    Raises:
        UserError: no installed package does, or what `check_quotes` refuses.
    """
    check_quotes(url)
    if local_path(url) is None and not is_command(url):
        _filesystem(url, Patience())


def is_command(url: str) -> bool:
    """Whether the bytes of a remote shard are the output of a command."""
    return url.split(":", 1)[0] in _commands()


@functools.cache
def _commands() -> frozenset[str]:
    """pipe:, and schemes that webdataset opens by a command (sftp: ...)."""
    from webdataset.gopen import gopen_schemes  # which imports torch

    return frozenset(gopen_schemes) - {*HTTP, "gs"}


@contextmanager
def open_url(url: str, patience: Patience | None = None) -> Iterator[BinaryIO]:
    """The bytes of a shard as a file whose `read` retries. Reading may raise these errors too.

    Raises:
        Unreachable: a remote shard cannot be read, or has changed on the server since its first byte.
        UserError: no installed package opens such a URL.
        StalledShard: see `Patience.command_seconds`.
    """
    path = local_path(url)
    if path is not None:
        with open(path, "rb") as file:
            yield file
        return
    with RemoteStream(url, patience or Patience()) as stream:
        yield cast(BinaryIO, stream)


@dataclass
class _Transfer:
    """One attempt to read a shard, from some byte on.

    Attributes:
        read: size -> between one byte and so many; b"" at the end.
        close: ends the transfer.
        begins: number of the first byte that it delivers.
        total: bytes of the whole shard; None if unknown.
        identity: a text that changes when the shard is replaced by another (ETag, date, size); None if unknown.
        md5: of the whole shard, in base64 or hexadecimal digits; None if unknown.
        end: called at the end; raises where the transfer failed.
    """

    read: Callable[[int], bytes]
    close: Callable[[], None]
    begins: int = 0
    total: int | None = None
    identity: str | None = None
    md5: str | None = None
    end: Callable[[], None] = lambda: None


class _Broken(Exception):
    """A transfer failed; the message is the reason in a few words."""


class RemoteStream:
    """The bytes of a remote shard from the first to the last; see the module's text.

    Attributes:
        position: number of bytes read.
        total, identity, md5: see `_Transfer`; known once the transfer has begun.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        self.url, self.patience = url, patience
        self.position = 0
        self.total: int | None = None
        self.identity: str | None = None
        self.md5: str | None = None
        self._transfer: _Transfer | None = None
        self._lost_seconds = 0.0
        self._reasons: dict[str, int] = {}  # reason -> retries
        self._in_a_row = 0  # retries since the last progress
        self._kept = 0  # position at the last progress
        self._since = time.monotonic()  # time of the last progress
        self._began, self._began_at = 0.0, 0  # time and position at which the transfer began
        self._left = self._since  # time at which the reader was last served

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transfer, and report its retries to `Patience.waits`."""
        self._hang_up()
        if self._reasons:
            self.patience.waits(Wait(self.url, self._lost_seconds, self._reasons))
            self._reasons, self._lost_seconds = {}, 0.0

    def open(self) -> None:
        """Begin the transfer; `total` and `identity` are known afterwards."""
        while self._transfer is None:
            begin = time.monotonic()
            try:
                self._transfer = self._begin()
            except (UserError, StalledShard):
                raise
            except Exception as error:  # fsspec's file systems raise errors of any type
                self._broke(error, begin)

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        # A source of which few samples are asked for is left alone for minutes: that is no silence of its server.
        idle = time.monotonic() - self._left
        self._since, self._began = self._since + idle, self._began + idle
        try:
            return self._read(size)
        finally:
            self._left = time.monotonic()

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing > 0:
            self.open()
            transfer, begin = self._transfer, time.monotonic()
            assert transfer is not None
            try:
                part = transfer.read(missing)
                if not part:
                    if parts:
                        break  # return these bytes; the next call checks how the transfer ended
                    if self.total is not None and self.position < self.total:
                        raise _Broken("cut off")
                    transfer.end()
                    break
            except (UserError, StalledShard):
                raise
            except Exception as error:  # as in `open`
                self._broke(error, begin)
                continue
            parts.append(part)
            missing -= len(part)
            self._came(len(part))
        return b"".join(parts)

    def rewind(self, reason: str) -> None:
        """Begin again with the first byte, as after a broken transfer, because the bytes so far are wrong."""
        self._hang_up()
        self.position = self._kept = 0
        self.identity = self.md5 = self.total = None
        self._broke(_Broken(reason), time.monotonic())

    def _begin(self) -> _Transfer:
        """A transfer that goes on at `position`."""
        transfer = _transfer(self.url, self.position, self.patience)
        try:
            if self.position and None not in (self.identity, transfer.identity) and transfer.identity != self.identity:
                raise Unreachable("it has changed on the server while it was read", "changed while read", False)
            while transfer.begins < self.position:
                dropped = transfer.read(min(1 << 20, self.position - transfer.begins))
                if not dropped:
                    transfer.end()
                    raise _Broken("ended earlier than before")
                transfer.begins += len(dropped)
        except BaseException:
            transfer.close()
            raise
        self.identity, self.md5 = transfer.identity or self.identity, transfer.md5 or self.md5
        self.total = transfer.total if transfer.total is not None else self.total
        self._began, self._began_at = time.monotonic(), self.position
        self._left = self._began
        return transfer

    def _came(self, count: int) -> None:
        """Count new bytes; a transfer that is too slow counts as broken."""
        self.position += count
        now = time.monotonic()
        if self.position - self._kept >= _PROGRESS_BYTES or self.position == self.total:
            self._kept, self._since, self._in_a_row = self.position, now, 0
            self.patience.failed.clear()
        elif not is_command(self.url):
            seconds = now - max(self._since, self._began)
            slow = self.position - max(self._kept, self._began_at) < _SLOWEST_BYTES_PER_SECOND * seconds
            if slow and seconds > self.patience.stall_seconds:
                self._broke(_Broken(f"came slower than {_SLOWEST_BYTES_PER_SECOND} bytes/s"), now)

    def _broke(self, error: Exception, begin: float) -> None:
        """Wait before the next attempt, or raise Unreachable."""
        self._hang_up()
        reason, passing = reason_of(error)
        patience = self.patience
        most = patience.command_retries if is_command(self.url) else patience.retries
        if patience.failed:
            most = 0  # another shard has had its retries in this outage
        wait = min(patience.longest_wait_seconds, patience.first_wait_seconds * 2**self._in_a_row)
        wait = max(wait * random.SystemRandom().uniform(0.5, 1), min(_asked_wait(error), patience.longest_wait_seconds))
        now = time.monotonic()
        late = patience.most_seconds and now + wait - self._since > patience.most_seconds
        if not passing or self._in_a_row >= most or late:
            count = sum(self._reasons.values())
            retries = "1 retry" if count == 1 else f"{count} retries"
            tried = f" after {retries} in {self._lost_seconds:.0f} s" if count else ""
            at = f" at byte {self.position}" if self.position else ""
            sentence = f"{_detail(error, reason)}{at}{tried}"
            if passing:
                patience.failed.setdefault(self.url, sentence)
            raise Unreachable(sentence, reason, passing) from error
        self._in_a_row += 1
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        time.sleep(wait)
        self._lost_seconds += time.monotonic() - begin

    def _hang_up(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()


def identity_of(url: str, patience: Patience) -> str | None:
    """The identity (see `_Transfer`) of the shard behind a URL, asked for without retries; None if unknown.

    Raises:
        Unreachable: the server does not answer.
        UserError: no installed package opens such a URL.
    """
    if is_command(url):
        return None
    try:
        transfer = _transfer(url, 0, patience)
    except UserError:
        raise
    except Exception as error:  # fsspec's file systems raise errors of any type
        reason, passing = reason_of(error)
        raise Unreachable(_detail(error, reason), reason, passing) from error
    transfer.close()
    return transfer.identity


def reason_of(error: BaseException) -> tuple[str, bool]:
    """(reason, passing) of an error, as in `Unreachable`."""
    if isinstance(error, Unreachable):
        return error.reason, error.passing
    if isinstance(error, _Broken):
        return str(error), True
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 8:
        causes.append(cause)
    # fsspec raises FileNotFoundError for any answer of a server to a question about a file; the answer is among the causes.
    status = next((found for each in causes if isinstance(found := getattr(each, "status", None), int)), None)
    if status is not None and status >= 400:
        return f"server answered {status}", status >= 500 or status in _PASSING_STATUS
    if isinstance(error, FileNotFoundError):
        return "no such file", False
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)):
        return (error.strerror or type(error).__name__).lower(), False
    if any("credential" in type(each).__name__.lower() for each in causes):
        return "no credentials", False
    if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
        return "server said nothing", True
    names = " ".join(type(each).__name__ for each in causes)
    if re.search("Connector|Refused|gaierror|EndpointConnection", names):
        return "no connection", True
    if any(isinstance(each, ConnectionError) for each in causes) or re.search("Disconnect|Payload|Incomplete", names):
        return "cut off", True
    if isinstance(error, (ValueError, TypeError, NotImplementedError, ImportError)):
        return type(error).__name__, False
    return type(error).__name__, True


def words_of(error: BaseException) -> str:
    """The message of an error, or its type's name."""
    return str(error.args[-1] if isinstance(error, OSError) and error.args else error) or type(error).__name__


def _detail(error: Exception, reason: str) -> str:
    """The reason, with the error's message where the reason is only the error's type."""
    return f"{reason}: {words_of(error)}" if reason == type(error).__name__ else words_or(reason, error)


def words_or(reason: str, error: Exception) -> str:
    """The message of an error of this module; for any other the reason, since a library's message names its internals."""
    return words_of(error) if isinstance(error, (Unreachable, _Broken)) else reason


def _asked_wait(error: BaseException) -> float:
    """Seconds that a busy server asks a client to wait (Retry-After); 0 if it does not."""
    headers = getattr(error, "headers", None)
    asked = headers.get("Retry-After", "") if headers is not None and hasattr(headers, "get") else ""
    return float(asked) if re.fullmatch(r"\d{1,6}", str(asked)) else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# One attempt: a server, another store, a command
# ---------------------------------------------------------------------------------------------------------------------


def _transfer(url: str, at: int, patience: Patience) -> _Transfer:
    """A transfer that begins at byte `at`, or before it where the server or command cannot do so."""
    if is_command(url):
        return _from_command(url, patience)
    file_system, path = _filesystem(url, patience)
    if url.split(":", 1)[0] in HTTP:
        return _from_server(file_system, path, at)
    return _from_store(file_system, path, at, patience)


def _filesystem(url: str, patience: Patience) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. UserError where no installed package opens such URLs."""
    scheme = url.split(":", 1)[0]
    try:
        import fsspec

        options = {}
        if scheme in HTTP:
            from aiohttp import ClientTimeout

            limit = patience.stall_seconds
            timeout = ClientTimeout(total=None, sock_connect=limit, sock_read=limit)
            # trust_env: proxies of the environment; encoded: escapes in a URL, which may be signed, are sent as written.
            client = {"timeout": timeout, "trust_env": True, "read_bufsize": 1 << 20}
            options = {"client_kwargs": client, "encoded": "%" in url}
        return fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # ValueError: a protocol that fsspec does not know
        command = {"s3": f"aws s3 cp {url} -", "gs": f"gcloud storage cat {url}", "hdfs": f"hdfs dfs -cat {url}"}
        raise UserError(
            f"shard {url} cannot be opened ({words_of(error)}); install what fsspec asks for, or write it as "
            f"'pipe:{command.get(scheme, f'COMMAND {url}')}'"
        ) from error


def _from_server(file_system: Any, url: str, at: int) -> _Transfer:
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={at}-"} if at else {})}
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
            raise _Broken("another range than was asked for")
    identity = given.get("ETag") or given.get("Last-Modified") or (None if length is None else f"{length} bytes")
    md5 = given.get("Content-MD5") if not begins else None
    return _Transfer(file.read, file.close, begins, length, identity, md5)


def _from_store(file_system: Any, path: str, at: int, patience: Patience) -> _Transfer:
    def opened() -> tuple[Any, dict[str, Any]]:
        file_system.invalidate_cache()
        file = file_system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead")
        file.seek(at)
        return file, getattr(file, "details", None) or file_system.info(path)

    limit = 4 * patience.stall_seconds  # longer, since stores have time-outs and retries of their own
    file, about = _in_time(opened, limit)
    total = about.get("size")
    marks = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")
    identity = " ".join(str(about[mark]) for mark in (*marks, "size") if about.get(mark) is not None)
    md5 = about.get("md5Hash")  # not S3's ETag, which for encrypted or multipart objects is no MD5
    return _Transfer(
        lambda size: _in_time(lambda: file.read(min(size, _BLOCK_BYTES)), limit), file.close, at, total, identity, md5
    )


def _in_time(call: Callable[[], Any], seconds: float) -> Any:
    """The result of a call, made in a thread since not every file system has a time-out; a late thread is left to itself."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # raised in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="remote shard")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"nothing came for {seconds:g} s")
    if failed:
        raise failed[0]
    return found[0]


def _from_command(url: str, patience: Patience) -> _Transfer:
    from webdataset.gopen import Pipe, gopen

    stream = gopen(url)
    assert isinstance(stream, Pipe)
    # Not Pipe.read: after the last byte it may raise for the command's exit status, depending on a race.
    process, output = stream.proc, stream.stream

    def read(size: int) -> bytes:
        if patience.command_seconds and not select.select([output], [], [], patience.command_seconds)[0]:
            raise StalledShard(f"nothing came for {patience.command_seconds:g} s")
        return output.read1(size)

    def end() -> None:
        try:
            status = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return  # it has closed its output and still runs
        if status != 0:
            raise _Broken(f"command ended with status {status}")

    def close() -> None:
        output.close()
        process.kill()  # Pipe.close would wait two hours for a command that ignores a closed pipe
        process.wait()

    return _Transfer(read, close, end=end)
