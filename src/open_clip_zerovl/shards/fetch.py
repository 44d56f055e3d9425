"""Shards as plain local files: fetched whole, once a machine, continued where a transfer broke, kept up to a size.

    DIR/3f9c2a71-00012.tar/       one remote shard in a cache, or one that is compressed
        8d02e1b6-00012.tar        the whole file, with the hash of its version
        part, room                what has come of a file, and an empty file of the length that it will have
        version                   of the whole file or of the part; modified when the server was last asked for it
        fetching                  locked by the process that asks and fetches
    DIR/.3f9c2a71-00012.tar.used  locked by readers (shared), or to remove the folder; modified at the last use

Locks end with the process that holds them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import random
import re
import secrets
import shutil
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.error import HTTPError

from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import lock_file, locked, user_cache
from open_clip_zerovl.shards.tar import ShardError, lacks_end
from open_clip_zerovl.shards.urls import (
    Answer,
    Broken,
    ask,
    asked_wait,
    decompressor,
    is_command,
    local_path,
    reason_of,
)

_ROOM_BYTES = 1 << 26  # reserved at a time where the length is unknown
_PROGRESS_BYTES = 1 << 16  # new bytes after which the count of retries begins again
_SLOWEST_BYTES_PER_SECOND = 1024
_OTHER_FILE = "no tar or parquet"
_COMMAND_RETRIES = 3  # a command may have its own retries besides


class Unreachable(ShardError):
    """A remote file does not come.

    Attributes:
        passing: whether another attempt might help; False where the server has no such file.
    """

    def __init__(self, message: str, passing: bool) -> None:
        super().__init__("unreadable shard", message)
        self.passing = passing


@dataclass(frozen=True)
class RetryPolicy:
    """Waits and retries of one process for the shards of one source.

    Retries are made once in an outage: after a shard has failed with all its retries, the next shards get no retry until one
    succeeds.

    Attributes:
        retries: without progress in between.
        first_wait_seconds, longest_wait_seconds: wait before the first retry, and the limit of its doubling.
        stall_seconds: time without a byte after which a server is asked again.
        command_seconds: time without a byte after which a command ends the run; 0 waits for ever.
        retried: called with the reason of each retry.
        failed: files that have failed since the last success -> why, in the order in which they were asked for.
    """

    retries: int = 8
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 30
    stall_seconds: float = 30
    command_seconds: float = 600
    retried: Callable[[str], None] = lambda _: None
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def within(
        cls, timeout_seconds: float, retried: Callable[[str], None] = lambda _: None
    ) -> RetryPolicy:
        """Return the policy that gives up before a loader's time-out ends the run (0 for no time-out)."""
        # 8 waits and 9 stalls
        limit = min(30, timeout_seconds / 20) if timeout_seconds else 30
        return cls(
            longest_wait_seconds=limit,
            stall_seconds=limit,
            command_seconds=timeout_seconds,
            retried=retried,
        )


@dataclass(frozen=True)
class ShardCache:
    """A folder of remote and of unpacked shards on a local disk, shared by all processes of the machine.

    Attributes:
        folder: by default in the user's cache.
        limit_bytes: the largest size of all its files together.
        since: a server is asked whether a shard has changed if it was last asked before this time. By default the time at which
            this object is made, so that each run asks once a shard.
    """

    folder: str = field(default_factory=lambda: str(user_cache("open_clip_zerovl") / "shards"))
    limit_bytes: int = 100 << 30
    since: float = field(default_factory=time.time)

    @contextmanager
    def borrowed(
        self,
        url: str,
        policy: RetryPolicy | None = None,
        notes: Callable[[str], None] = lambda _: None,
        *,
        check: Callable[[Path], bool] | None = None,
    ) -> Iterator[str]:
        """Yield the path of a plain file that is kept until the block ends: a local one, or the copy of another one.

        Args:
            notes: called with a sentence where a server does not answer whether a file has changed.
            check: says whether a file that came whole is the right one, as `is_shard`; None takes any.

        Raises:
            Unreachable: the file does not come.
            UserError: the cache cannot be written, or is full of shards that are being read.
        """
        path = local_path(url)
        if path is not None and decompressor(path) is None:
            yield path
            return
        # A hash of the URL, which may hold a token.
        name = re.sub(r"[^\w.-]", "_", url.partition("?")[0].rstrip("/ ").rpartition("/")[2])[-60:]
        folder = Path(self.folder, f"{_hash(url)}-{name}")
        try:
            held = hold(folder)
        except OSError as error:
            raise UserError(
                f"the shard cache {self.folder} cannot be used ({error.strerror}): give another folder with --shard-cache"
            ) from error
        policy = policy or RetryPolicy()
        transfer = _Transfer(
            url,
            folder / "part",
            folder / "version",
            policy,
            check if path is None else None,  # a damaged file is read as far as it goes
            reserve=self._reserve,
        )
        try:
            with locked(folder, name="fetching"):
                whole = Path(folder, f"{_hash(transfer.version)}-{name}")
                if not whole.is_file() or self._changed(transfer, notes):
                    transfer.run()
                    whole = Path(folder, f"{_hash(transfer.version)}-{name}")
                    transfer.part.replace(whole)
                    Path(folder, "room").unlink(missing_ok=True)
            if decompressor(str(whole)) is None:
                yield str(whole)
                return
            with self.borrowed(str(whole), policy, notes, check=check) as plain:
                yield plain
        finally:
            os.close(held)

    def _changed(self, transfer: _Transfer, notes: Callable[[str], None]) -> bool:
        """Return whether the server, which is asked once a run, has another version. A command runs again in each run."""
        if transfer.mark.stat().st_mtime >= self.since:
            return False
        if is_command(transfer.url):
            return True
        current = True
        try:
            current = transfer.is_current()
        except Unreachable as error:
            notes(
                f"shards are taken from the cache without asking whether they have changed ({error})"
            )
        transfer.mark.touch()
        return not current

    def _reserve(self, folder: Path, size: int, seconds: float) -> None:
        """Reserve `size` bytes for a shard. The least recently used ones that nobody reads make room.

        Raises:
            UserError: there is no room for `seconds`.
        """
        begin = time.monotonic()
        while True:
            with locked(self.folder, name=".lock"):
                Path(folder, "room").touch()
                os.truncate(folder / "room", size)
                used = {
                    each: used_bytes(each) for each in Path(self.folder).iterdir() if each.is_dir()
                }
                total = sum(used.values())
                most = min(self.limit_bytes, total - size + shutil.disk_usage(folder).free)
                if total - sum(used[each] for each in make_room(used, most)) <= most:
                    return
                Path(folder, "room").unlink()
            if time.monotonic() - begin > seconds:
                raise UserError(
                    f"the shard cache {self.folder} of {self.limit_bytes / 2**30:.3g} GiB has no room for a shard of "
                    f"{size / 2**30:.3g} GiB besides those that are being read (each loader process reads a shard of each "
                    "source): raise --shard-cache-gib, or give a larger disk with --shard-cache"
                )
            time.sleep(0.1)


def used_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files, of a shard that is being fetched those that it will have."""
    sizes: Counter[str] = Counter()
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process has removed or renamed it
                sizes[name] += os.stat(os.path.join(place, name)).st_size
    return sizes.total() - min(sizes["part"], sizes["room"])


def hold(folder: Path) -> int:
    """Note that a folder of a cache is used, and return a lock that keeps it from `make_room` until it is closed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _marker(folder).touch()
    held = lock_file(_marker(folder), shared=True)
    assert held is not None  # nobody removes the file
    return held


def make_room(sizes: Mapping[Path, int], most_bytes: int) -> list[Path]:
    """Remove folders of a cache, the least recently used ones first, until the others have so few bytes.

    Args:
        sizes: folder -> its bytes.

    Returns:
        The folders that were removed. Those that a process holds stay.
    """
    removed: list[Path] = []
    over = sum(sizes.values()) - most_bytes
    for folder in sorted(sizes, key=_last_use):
        unused = lock_file(_marker(folder), wait=False, create=True) if over > 0 else None
        if unused is not None:
            shutil.rmtree(folder)
            os.close(unused)
            removed.append(folder)
            over -= sizes[folder]
    return removed


def _marker(folder: Path) -> Path:
    """Return the file whose time is that of a folder's last use, and which its readers lock."""
    return folder.with_name(f".{folder.name}.used")


def _last_use(folder: Path) -> float:
    return _marker(folder).stat().st_mtime if _marker(folder).exists() else 0.0


def ahead_of_reading(cache: ShardCache, policy: RetryPolicy) -> Callable[[str | None], None]:
    """Start a thread that fetches shards one after the other, without retries, which are their reader's.

    Only in a process that does not fork: a child would inherit the lock on a shard that is being fetched.

    Returns:
        A function that takes the URL of a shard to fetch; with None the thread ends after the shard that it fetches.
    """
    policy = replace(policy, retries=0, retried=lambda _: None, failed={})
    wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run() -> None:
        for url in iter(wanted.get, None):
            with (
                suppress(UserError, OSError, ShardError),
                cache.borrowed(url, policy, check=is_shard),
            ):
                pass

    threading.Thread(target=run, daemon=True, name="shards ahead").start()
    return wanted.put


def is_shard(path: Path) -> bool:
    """Return whether a file begins as a tar, compressed or not, or as parquet, unlike a web page in place of a shard."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PAR1" or tarfile.is_tarfile(path)
    except (
        Exception
    ):  # tarfile raises errors of any type for bytes that only begin like a compressed tar
        return False


def fetch_file(
    url: str, path: Path, *, advice: str, progress: bool = False, policy: RetryPolicy | None = None
) -> None:
    """Fetch one file, from where an earlier call stopped. Of several processes one fetches, and the others find the file.

    Args:
        advice: the end of the sentence.

    Raises:
        UserError: it does not come; the sentence names the URL and the last reason.
    """
    with locked(path.parent, name=f".{path.name}.lock"):
        if not path.is_file():
            transfer = _of_file(url, path, policy or RetryPolicy(), progress)
            try:
                transfer.run()
            except Unreachable as error:
                raise UserError(f"{url} cannot be fetched ({error}); {advice}") from error
            transfer.part.replace(path)


def is_current(url: str, path: Path) -> bool:
    """Return False if the server has another version of a fetched file by now.

    Raises:
        Unreachable: the server does not answer.
    """
    return _of_file(url, path, RetryPolicy()).is_current()


def _of_file(url: str, path: Path, policy: RetryPolicy, progress: bool = False) -> _Transfer:
    part, mark = (path.with_name(f"{path.name}.{kind}") for kind in ("part", "version"))
    return _Transfer(url, part, mark, policy, progress=progress)


@dataclass
class _Transfer:
    """The attempts at one file.

    Attributes:
        part, mark: the file of what has come, and the file of its version.
        check: as in `ShardCache.borrowed`.
        reserve: makes room in a folder for a number of bytes, within some seconds.
    """

    url: str
    part: Path
    mark: Path
    policy: RetryPolicy
    check: Callable[[Path], bool] | None = None
    reserve: Callable[[Path, int, float], None] | None = None
    progress: bool = False
    _retries: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)  # since the last progress
    _progressed: int = field(default=0, init=False)  # bytes then

    @property
    def version(self) -> str:
        """Return the version of the part, or of the whole file that it became, "" if unknown."""
        return self.mark.read_text(encoding="utf-8") if self.mark.is_file() else ""

    def run(self) -> None:
        """Fetch the whole file into `part`, with retries.

        Raises:
            Unreachable: it does not come.
            UserError: the disk is full.
        """
        while True:
            try:
                self._attempt()
            except UserError:
                raise
            except Exception as error:  # fsspec's file systems raise errors of any type
                self._wait(error)
            else:
                self.policy.failed.clear()
                return

    def is_current(self) -> bool:
        """Return False if the server, which is asked without retries, has another version by now.

        Raises:
            Unreachable: the server does not answer.
        """
        try:
            with closing(self._ask(0)) as answer:
                return answer.version == self.version
        except UserError:
            raise
        except Exception as error:  # fsspec's file systems raise errors of any type
            raise Unreachable(*reason_of(error)) from error

    def _ask(self, at: int) -> Answer:
        policy = self.policy
        return ask(
            self.url, at, stall_seconds=policy.stall_seconds, command_seconds=policy.command_seconds
        )

    def _came(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def _wait(self, error: Exception) -> None:
        """Wait before the next attempt, or raise Unreachable."""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{self.part} cannot be written ({error.strerror}): make room, or choose another folder"
            ) from error
        policy, came = self.policy, self._came()
        if came >= self._progressed + _PROGRESS_BYTES:
            self._failures, self._progressed = 0, came
        reason, passing = reason_of(error)
        passing &= (
            reason != _OTHER_FILE or not self._retries
        )  # a page in place of a shard is asked for twice
        most = 0 if policy.failed else policy.retries  # an outage is waited out once
        if is_command(self.url):
            most = min(most, _COMMAND_RETRIES)
        if not passing or self._failures >= most:
            at = f" at byte {came}" if came else ""
            retries = f"{self._retries} retr{'y' if self._retries == 1 else 'ies'}"
            sentence = f"{reason}{at}" + (f" after {retries}" if self._retries else "")
            if passing:
                policy.failed.setdefault(self.url, sentence)
            raise Unreachable(sentence, passing) from error
        wait = policy.first_wait_seconds * 2**self._failures * random.SystemRandom().uniform(0.5, 1)
        time.sleep(min(policy.longest_wait_seconds, max(wait, asked_wait(error))))
        policy.retried(reason)
        self._retries += 1
        self._failures += 1

    def _attempt(self) -> None:
        """Fetch the rest of the file."""
        at = self._came() if self.version else 0
        try:
            answer = self._ask(at)
        except HTTPError as error:
            if error.code == 416:  # no byte follows: the part is whole, or of another version
                self.part.unlink(missing_ok=True)
            raise
        with closing(answer):
            if answer.version != self.version:
                # before the new version is noted: else a kill leaves bytes of the old one as its beginning
                self.part.unlink(missing_ok=True)
                # without a version each copy is one of its own
                self.mark.write_text(answer.version or secrets.token_hex(8), encoding="utf-8")
                if answer.begins:
                    raise Broken("changed on its server")
            self._receive(answer)
        if answer.total not in (None, self._came()):
            raise Broken("cut off")
        fault = "cut off" if not answer.announced and lacks_end(self.part) else None
        if fault is None and self.check is not None and not self.check(self.part):
            fault = _OTHER_FILE
        if fault is not None:
            self.part.unlink()
            raise Broken(fault)

    def _receive(self, answer: Answer) -> None:
        """Write an answer behind the bytes that it follows."""
        stall_seconds = self.policy.stall_seconds
        room, size = answer.total or 0, answer.begins
        begin, began_at = time.monotonic(), size
        bar = tqdm(
            desc=self.part.stem,
            total=answer.total,
            initial=size,
            unit="B",
            unit_scale=True,
            disable=not self.progress,
        )
        if self.reserve is not None:
            self.reserve(self.part.parent, room, stall_seconds)
        with open(self.part, "ab") as file, bar:
            file.truncate(size)
            for piece in answer.pieces:
                size += len(piece)
                if self.reserve is not None and size > room:
                    room = size + _ROOM_BYTES
                    self.reserve(self.part.parent, room, stall_seconds)
                bar.update(file.write(piece))
                seconds = time.monotonic() - begin
                if seconds > stall_seconds and not is_command(self.url):
                    if size - began_at < _SLOWEST_BYTES_PER_SECOND * seconds:
                        raise Broken(f"came slower than {_SLOWEST_BYTES_PER_SECOND} bytes/s")
                    begin, began_at = time.monotonic(), size
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave an empty file


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
