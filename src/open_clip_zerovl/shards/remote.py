"""The bytes of a shard wherever it lies: a file, a store that fsspec opens (https:, s3:, hf: ...), or a command (pipe:).

A broken transfer is retried, after a wait that doubles with each retry, and continues at the byte where it broke, by a range
request; for a command, or a server without range requests, it reads from the beginning and drops the bytes that it has.
The result is every byte of the shard, each once.

    bytes 0 .. 69,999 come, the connection is lost, "Range: bytes=70000-" brings the rest
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.transfers import (
    Broken,
    StalledShard,
    Transfer,
    Unreachable,
    asked_wait,
    begin_transfer,
    detail_of,
    file_system_of,
    reason_of,
)
from open_clip_zerovl.shards.urls import is_command, local_path

_PROGRESS_BYTES = 1 << 16  # new bytes after which the count of retries begins again
_SLOWEST_BYTES_PER_SECOND = 1024


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


def _ignore(_: Wait) -> None:
    pass


@dataclass
class RetryPolicy:
    """Waits and retries of one process for the shards of one source.

    Retries are made once in an outage: after a shard has failed with all its retries, the next shards get no retry until one
    succeeds.

    Attributes:
        retries: for a transfer from a server or store, without progress in between.
        command_retries: retries of a command, which may have its own retries besides.
        first_wait_seconds, longest_wait_seconds: wait before the first retry, and the limit of its doubling.
        stall_seconds: time without a byte after which a server is asked again.
        most_seconds: time without progress after which a shard is given up; 0 for no limit but the retries.
        command_seconds: time without a byte after which a command raises StalledShard; 0 waits forever.
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
        cls,
        timeout_seconds: float,
        *,
        watched: bool = True,
        waits: Callable[[Wait], None] = _ignore,
    ) -> RetryPolicy:
        """The policy that gives up before a loader's time-out ends the run.

        Args:
            timeout_seconds: time-out of the loader; 0 for none.
            watched: another process keeps the time-out, so that a command needs no limit of its own.
        """
        most = 0.8 * timeout_seconds
        stall = max(1.0, min(30, timeout_seconds / 10)) if timeout_seconds else 30
        return cls(
            stall_seconds=stall,
            most_seconds=most,
            command_seconds=0 if watched else timeout_seconds,
            waits=waits,
        )

    def begin(self, url: str, at: int = 0) -> Transfer:
        """`begin_transfer` with these limits."""
        return begin_transfer(
            url, at, stall_seconds=self.stall_seconds, command_seconds=self.command_seconds
        )


def check_openable(url: str) -> None:
    """Check that an installed package opens URLs of this kind.

    Raises:
        UserError: no installed package does.
    """
    if local_path(url) is None and not is_command(url):
        file_system_of(url, RetryPolicy().stall_seconds)


@contextmanager
def open_url(url: str, policy: RetryPolicy | None = None) -> Iterator[BinaryIO]:
    """The bytes of a shard as a file whose `read` retries. Reading may raise these errors too.

    Raises:
        Unreachable: a remote shard cannot be read, or has changed on the server since its first byte.
        UserError: no installed package opens such a URL.
        StalledShard: see `RetryPolicy.command_seconds`.
    """
    path = local_path(url)
    if path is not None:
        with open(path, "rb") as file:
            yield file
        return
    with RemoteStream(url, policy or RetryPolicy()) as stream:
        yield cast(BinaryIO, stream)


class RemoteStream:
    """The bytes of a remote shard from the first to the last, or from any place as a file's; see the module's text.

    Attributes:
        position: number of bytes read. Given one to begin with, and a server that sends no parts of a file, it is 0 once the
            transfer has begun: the bytes of an earlier call may be those of another version.
        total, identity, md5, unannounced: see `Transfer`; known once the transfer has begun.
    """

    closed = False  # for pyarrow, which takes it for a file

    def __init__(self, url: str, policy: RetryPolicy, position: int = 0) -> None:
        self.url, self.policy = url, policy
        self.position = position
        self.total: int | None = None
        self.unannounced = False
        self.identity: str | None = None
        self.md5: str | None = None
        self._transfer: Transfer | None = None
        self._lost_seconds = 0.0
        self._reasons: dict[str, int] = {}  # reason -> retries
        self._opened = False
        self._in_a_row = 0  # retries since the last progress
        self._progress_position = position  # at the last progress
        self._since = time.monotonic()  # time of the last progress
        self._began, self._began_at = 0.0, 0  # time and position at which the transfer began
        self._left = self._since  # time at which the reader was last served

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self) -> int:
        """`position`, by the name that files have for it."""
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on at another byte, in a new transfer; counted from the shard's end with os.SEEK_END.

        Raises:
            Unreachable: the server does not name the length.
        """
        if whence == os.SEEK_END:
            self.open()
            if self.total is None:
                raise Unreachable("its server does not name its length", "no length", False)
            offset += self.total
        if offset != self.position:
            self._hang_up()
            self.position = self._progress_position = offset
        return offset

    def close(self) -> None:
        """End the transfer, and report its retries to `RetryPolicy.waits`."""
        self._hang_up()
        if self._reasons:
            self.policy.waits(Wait(self.url, self._lost_seconds, self._reasons))
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
        # A source with few requested samples rests for minutes, which is not a stall of its server.
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
                        raise Broken("cut off")
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
        """Begin again with the first byte, as after a broken transfer, because the bytes already received are wrong."""
        self._hang_up()
        self.position = self._progress_position = 0
        self.identity = self.md5 = self.total = None
        self._broke(Broken(reason), time.monotonic())

    def _begin(self) -> Transfer:
        """A transfer that continues at `position`."""
        transfer = self.policy.begin(self.url, self.position)
        try:
            if (
                self.position
                and None not in (self.identity, transfer.identity)
                and transfer.identity != self.identity
            ):
                raise Unreachable(
                    "it has changed on the server while it was read", "changed while read", False
                )
            if not self._opened:
                self.position = self._progress_position = min(self.position, transfer.begins)
            while transfer.begins < self.position:
                dropped = transfer.read(min(1 << 20, self.position - transfer.begins))
                if not dropped:
                    transfer.end()
                    raise Broken("ended earlier than before")
                transfer.begins += len(dropped)
        except BaseException:
            transfer.close()
            raise
        self._opened = True
        self.identity, self.md5 = transfer.identity or self.identity, transfer.md5 or self.md5
        self.total = transfer.total if transfer.total is not None else self.total
        self.unannounced = transfer.unannounced
        self._began, self._began_at = time.monotonic(), self.position
        self._left = self._began
        return transfer

    def _came(self, count: int) -> None:
        """Count new bytes; a transfer that is too slow counts as broken."""
        self.position += count
        now = time.monotonic()
        if (
            self.position - self._progress_position >= _PROGRESS_BYTES
            or self.position == self.total
        ):
            self._progress_position = self.position
            self._since = now
            self._in_a_row = 0
            self.policy.failed.clear()
        elif not is_command(self.url):
            seconds = now - max(self._since, self._began)
            slow = (
                self.position - max(self._progress_position, self._began_at)
                < _SLOWEST_BYTES_PER_SECOND * seconds
            )
            if slow and seconds > self.policy.stall_seconds:
                self._broke(Broken(f"came slower than {_SLOWEST_BYTES_PER_SECOND} bytes/s"), now)

    def _broke(self, error: Exception, begin: float) -> None:
        """Wait before the next attempt, or raise Unreachable."""
        self._hang_up()
        reason, passing = reason_of(error)
        policy = self.policy
        most = policy.command_retries if is_command(self.url) else policy.retries
        if policy.failed:
            most = 0  # another shard has had its retries in this outage
        wait = min(policy.longest_wait_seconds, policy.first_wait_seconds * 2**self._in_a_row)
        wait = max(
            wait * random.SystemRandom().uniform(0.5, 1),
            min(asked_wait(error), policy.longest_wait_seconds),
        )
        now = time.monotonic()
        late = policy.most_seconds and now + wait - self._since > policy.most_seconds
        if not passing or self._in_a_row >= most or late:
            count = sum(self._reasons.values())
            retries = "1 retry" if count == 1 else f"{count} retries"
            tried = f" after {retries} in {self._lost_seconds:.0f} s" if count else ""
            at = f" at byte {self.position}" if self.position else ""
            sentence = f"{detail_of(error, reason)}{at}{tried}"
            if passing:
                policy.failed.setdefault(self.url, sentence)
            raise Unreachable(sentence, reason, passing) from error
        self._in_a_row += 1
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        time.sleep(wait)
        self._lost_seconds += time.monotonic() - begin

    def _hang_up(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()


def identity_of(url: str, policy: RetryPolicy) -> str | None:
    """The identity (see `Transfer`) of the shard behind a URL, asked for without retries; None if unknown.

    Raises:
        Unreachable: the server does not answer.
        UserError: no installed package opens such a URL.
    """
    if is_command(url):
        return None
    try:
        transfer = policy.begin(url)
    except UserError:
        raise
    except Exception as error:  # fsspec's file systems raise errors of any type
        reason, passing = reason_of(error)
        raise Unreachable(detail_of(error, reason), reason, passing) from error
    transfer.close()
    return transfer.identity
