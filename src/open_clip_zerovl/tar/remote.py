"""The bytes of a shard wherever it lies: a file, a store that fsspec opens (https:, s3:, gs: ...), or a command (pipe:).

A remote shard whose transfer breaks is asked for again, after a wait that doubles from retry to retry, and goes on at the
byte where it broke: by a range request, or, where the server knows none and with a command, by reading from the beginning and
dropping what is known. The bytes that come out are those of the whole shard, none lost and none twice.

    bytes 0 .. 69,999 come, the connection is lost, "Range: bytes=70000-" brings the rest
"""

from __future__ import annotations

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

from webdataset.gopen import Pipe, gopen, gopen_schemes

from open_clip_zerovl.errors import UserError

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # pipe:, s3://, https:// ...: no path of this machine
HTTP = ("http", "https")
_COMMANDS = frozenset(gopen_schemes) - {*HTTP, "gs"}  # pipe: and what webdataset makes a command of (sftp:, ais: ...)
_BLOCK_BYTES = 4 << 20  # of one request to a store
_PROGRESS_BYTES = 1 << 16  # so many new bytes, and the retries are counted anew
_SLOWEST_BYTES_PER_SECOND = 1024
_PASSING_STATUS = (408, 425, 429)  # and 500 to 599; all other answers of a server are final


class StalledShard(Exception):
    """A command gave nothing for too long."""


class Unreachable(OSError):
    """The bytes of a remote shard do not come, or no longer.

    Attributes:
        reason: in a few words, the same for all of its kind: "server answered 503".
        passing: whether waiting longer might help; not where the server says that there is no such shard.
    """

    def __init__(self, message: str, reason: str, passing: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.passing = passing


@dataclass(frozen=True)
class Wait:
    """What one shard was waited for: the seconds that retries took, and how many there were for each reason."""

    shard: str
    seconds: float
    reasons: dict[str, int]

    @property
    def retries(self) -> int:
        return sum(self.reasons.values())


def _ignore(_: Wait) -> None:
    pass


@dataclass
class Patience:
    """How long the shards of one source are waited for in one process.

    An outage is waited out once: after a shard that has not come with all its retries, others are asked once each until one
    comes.

    Attributes:
        retries: of a store, without progress in between; `command_retries` of a command, which may retry by itself.
        first_wait_seconds, longest_wait_seconds: before the first retry, and the most that doubling makes of it.
        stall_seconds: without a byte from a server, after which it is asked again.
        most_seconds: without progress, after which a shard is given up; 0: as many as the retries take.
        command_seconds: without a byte from a command, after which StalledShard is raised; 0 waits forever.
        waits: told of each shard that came, or did not, after at least one retry.
        failed: shards that have not come since one last did, and why, in the order in which they were asked for.
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
        """One that gives up before a loader's time-out (0: none) ends the run.

        Args:
            watched: another process watches the time-out, which for a command is then enough.
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
    """UserError for a single quote in a URL: webdataset puts it between single quotes into a shell's command (curl)."""
    if REMOTE.match(url) and not url.startswith(("pipe:", "file:")) and "'" in url:
        raise UserError(f"shard {url!r} has a single quote in its URL, which would end up in a shell; write it as %27")


def check_openable(url: str) -> None:
    """Make sure that something installed opens URLs of this kind.

    Raises:
        UserError: nothing does, or what `check_quotes` refuses.
    """
    check_quotes(url)
    if local_path(url) is None and not is_command(url):
        _filesystem(url, Patience())


def is_command(url: str) -> bool:
    """Whether the bytes of a remote shard are the output of a command."""
    return url.split(":", 1)[0] in _COMMANDS


@contextmanager
def open_url(url: str, patience: Patience | None = None) -> Iterator[BinaryIO]:
    """The bytes of a shard, with a `read` that retries.

    Raises (the reading too):
        Unreachable: a remote shard does not come, or has changed on the server meanwhile.
        UserError: nothing installed opens such a URL.
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
    """One attempt at the bytes of a shard from some byte on.

    Attributes:
        read: (size) -> at least one byte and at most so many; none at the end.
        end: called at the end; raises where the transfer has not ended well.
        begins: the byte that comes first.
        total: bytes of the whole shard, None where nobody tells.
        identity: tells the shard from one that is written in its place; None where nobody tells.
        md5: of the whole, in base64 or hexadecimal digits, where the server gives it.
    """

    read: Callable[[int], bytes]
    close: Callable[[], None]
    begins: int = 0
    total: int | None = None
    identity: str | None = None
    md5: str | None = None
    end: Callable[[], None] = lambda: None


class _Broken(Exception):
    """A transfer that has not ended well, with the reason in a few words."""


class RemoteStream:
    """The bytes of a remote shard from the first to the last; see the module's text.

    Attributes:
        position: bytes that have been read.
        total, identity, md5: see `_Transfer`; known after the first byte.
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
        self._since = time.monotonic()  # the time of it
        self._began, self._began_at = 0.0, 0  # time and position of the transfer's beginning

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transfer, and tell what was waited for."""
        self._hang_up()
        if self._reasons:
            self.patience.waits(Wait(self.url, self._lost_seconds, self._reasons))
            self._reasons, self._lost_seconds = {}, 0.0

    def open(self) -> None:
        """Begin the transfer, so that `total` and `identity` are known."""
        while self._transfer is None:
            begin = time.monotonic()
            try:
                self._transfer = self._begin()
            except (UserError, StalledShard):
                raise
            except Exception as error:  # fsspec's file systems raise what they like
                self._broke(error, begin)

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
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
                        break  # what has come first; the next call asks how it ended
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
        """Begin again with the first byte, as after a broken transfer: what has come is not the shard."""
        self._hang_up()
        self.position = self._kept = 0
        self.identity = self.md5 = self.total = None
        self._broke(_Broken(reason), time.monotonic())

    def _begin(self) -> _Transfer:
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
        return transfer

    def _came(self, count: int) -> None:
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
            most = 0  # this outage has been waited for
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
    """What tells the shard behind a URL from one written in its place, asked for once; None where nobody tells.

    Raises:
        Unreachable: the server does not answer.
    """
    if is_command(url):
        return None
    try:
        transfer = _transfer(url, 0, patience)
    except UserError:
        raise
    except Exception as error:  # fsspec's file systems raise what they like
        reason, passing = reason_of(error)
        raise Unreachable(_detail(error, reason), reason, passing) from error
    transfer.close()
    return transfer.identity


def reason_of(error: BaseException) -> tuple[str, bool]:
    """Why bytes do not come, in a few words, the same for all of a kind; and whether that may pass."""
    if isinstance(error, Unreachable):
        return error.reason, error.passing
    if isinstance(error, _Broken):
        return str(error), True
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 8:
        causes.append(cause)
    # fsspec makes "no such file" of whatever a server answers to a question about one; the answer itself is below.
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
    """What an error says, or its name."""
    return str(error.args[-1] if isinstance(error, OSError) and error.args else error) or type(error).__name__


def _detail(error: Exception, reason: str) -> str:
    """The reason, and what is behind it where the reason is a mere name."""
    return f"{reason}: {words_of(error)}" if reason == type(error).__name__ else words_or(reason, error)


def words_or(reason: str, error: Exception) -> str:
    """The sentence of an error of ours, else the reason alone: a library's texts name its internals."""
    return words_of(error) if isinstance(error, (Unreachable, _Broken)) else reason


def _asked_wait(error: BaseException) -> float:
    """Seconds that a busy server asks to wait."""
    headers = getattr(error, "headers", None)
    asked = headers.get("Retry-After", "") if headers is not None and hasattr(headers, "get") else ""
    return float(asked) if re.fullmatch(r"\d{1,6}", str(asked)) else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# One attempt: a server, another store, a command
# ---------------------------------------------------------------------------------------------------------------------


def _transfer(url: str, at: int, patience: Patience) -> _Transfer:
    if is_command(url):
        return _from_command(url, patience)
    file_system, path = _filesystem(url, patience)
    if url.split(":", 1)[0] in HTTP:
        return _from_server(file_system, path, at)
    return _from_store(file_system, path, at, patience)


def _filesystem(url: str, patience: Patience) -> tuple[Any, str]:
    scheme = url.split(":", 1)[0]
    try:
        import fsspec

        options = {}
        if scheme in HTTP:
            from aiohttp import ClientTimeout

            limit = patience.stall_seconds
            timeout = ClientTimeout(total=None, sock_connect=limit, sock_read=limit)
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}  # proxies, as curl takes them
        return fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # ValueError: a protocol that fsspec does not know
        command = {"s3": f"aws s3 cp {url} -", "gs": f"gcloud storage cat {url}", "hdfs": f"hdfs dfs -cat {url}"}
        raise UserError(
            f"shard {url} cannot be opened ({words_of(error)}); install what fsspec asks for, or write it as "
            f"'pipe:{command.get(scheme, f'COMMAND {url}')}'"
        ) from error


def _from_server(file_system: Any, url: str, at: int) -> _Transfer:
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={at}-"} if at else {})}
    # block_size 0 is a stream; it does not use the size, but would ask the server for it.
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

    limit = 4 * patience.stall_seconds  # stores have time-outs and retries of their own
    file, about = _in_time(opened, limit)
    total = about.get("size")
    marks = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")
    identity = " ".join(str(about[mark]) for mark in (*marks, "size") if about.get(mark) is not None)
    md5 = about.get("md5Hash")  # S3's ETag is no checksum of what is encrypted or was sent in parts
    return _Transfer(
        lambda size: _in_time(lambda: file.read(min(size, _BLOCK_BYTES)), limit), file.close, at, total, identity, md5
    )


def _in_time(call: Callable[[], Any], seconds: float) -> Any:
    """What a call gives, in a thread that may be left behind: not every file system has a time-out."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # handed to the waiting thread
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
    stream = gopen(url)
    assert isinstance(stream, Pipe)
    # Past Pipe.read: it raises on the command's exit status although all bytes came, or not, as the race falls.
    process, output = stream.proc, stream.stream

    def read(size: int) -> bytes:
        if patience.command_seconds and not select.select([output], [], [], patience.command_seconds)[0]:
            raise StalledShard(f"nothing came for {patience.command_seconds:g} s")
        return output.read1(size)

    def end() -> None:
        try:
            status = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return  # it has closed its output, and does something else
        if status != 0:
            raise _Broken(f"command ended with status {status}")

    def close() -> None:
        output.close()
        process.kill()  # Pipe.close would wait two hours for a command that ignores a closed pipe
        process.wait()

    return _Transfer(read, close, end=end)
