"""Remote shards kept whole on a local disk, up to a size: one process of the machine fetches a shard, all read it as a local
one.

    DIR/3f9c2a71-00012.tar                    a whole shard
    DIR/3f9c2a71-00012.tar.part               one that is being fetched; its length is the space reserved for it
    DIR/.about/3f9c2a71-00012.tar.json        bytes, identity, last check with the server; its modification time is the last use
    DIR/.zerovl-index/3f9c2a71-00012.tar.npz  its index (`tar.index`), built when the shard is complete

Processes coordinate by locks on these files (flock), which end with the process that holds them. A shard is locked while it is
read. Shards that no process reads are removed to make room for new ones, least recently used first.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import queue
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import lock_file, locked, write_atomically
from open_clip_zerovl.shards.index import FOLDER as INDEX_FOLDER
from open_clip_zerovl.shards.index import open_index
from open_clip_zerovl.shards.members import ShardError, lacks_end
from open_clip_zerovl.shards.remote import RemoteStream, RetryPolicy, identity_of
from open_clip_zerovl.shards.transfers import StalledShard, Unreachable
from open_clip_zerovl.shards.urls import is_command

_FETCHES = 3  # attempts at a shard that arrives whole but has another checksum, or is not a tar
_READ_BYTES = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ShardCache:
    """A folder of remote shards.

    Attributes:
        folder: on a local disk; shared by all processes of the machine.
        limit_bytes: largest size of all its files together.
        since: a server is asked whether a shard has changed if it was last asked before this time. By default the time at which
            this object is made, so that each run asks once a shard.
    """

    folder: str
    limit_bytes: int
    since: float = field(default_factory=time.time)

    @contextlib.contextmanager
    def borrowed(
        self, url: str, policy: RetryPolicy, notes: Callable[[str], None] = lambda _: None
    ) -> Iterator[str | None]:
        """The path of a whole copy of a shard, which is kept until the block ends; None without room for it.

        Args:
            policy: waits and retries of the transfer.
            notes: called with a sentence where the cache cannot be used.

        Raises:
            Unreachable: the shard cannot be fetched.
            StalledShard: another process has been fetching it for longer than `policy.most_seconds`.
        """
        entry = _Entry(self.folder, url)
        try:
            descriptor = self._obtain(entry, policy, notes)
        except Unreachable:
            raise
        except (OSError, UserError) as error:
            words = error.strerror if isinstance(error, OSError) else error
            notes(
                f"the shard cache {self.folder} cannot be used ({words}); shards are read without it"
            )
            descriptor = None
        if descriptor is None:
            yield None
            return
        try:
            yield entry.path
        finally:
            os.close(descriptor)

    def _obtain(
        self, entry: _Entry, policy: RetryPolicy, notes: Callable[[str], None]
    ) -> int | None:
        """A descriptor that holds a shared lock on the whole shard, fetched if necessary; None without room."""
        os.makedirs(os.path.join(self.folder, ".about"), exist_ok=True)
        begin = time.monotonic()
        while True:
            descriptor = lock_file(entry.path, shared=True)
            if descriptor is not None:
                about = entry.about(os.fstat(descriptor).st_size)
                if about is not None and not self._changed(entry, about, policy, notes):
                    os.utime(entry.about_path)
                    return descriptor
                os.close(descriptor)
                if not _remove(entry):
                    notes(
                        "a shard has changed on its server while another run reads it from the cache; this run reads it "
                        "without the cache"
                    )
                    return None
                continue
            descriptor = lock_file(entry.part, wait=False, create=True)
            if descriptor is None:  # another process is fetching it
                if policy.most_seconds and time.monotonic() - begin > policy.most_seconds:
                    raise StalledShard(
                        f"another process has been fetching it for {policy.most_seconds:g} s"
                    )
                time.sleep(_POLL_SECONDS)
                continue
            fetched = False
            try:
                if os.path.exists(entry.path):  # fetched by another process since it was looked for
                    continue
                fetched = self._fetch(entry, descriptor, policy)
                if not fetched:
                    notes(
                        f"the shard cache of {self.limit_bytes / 2**30:.3g} GiB is full of shards that are being read; more "
                        "shards are read without it: raise --shard-cache-gib"
                    )
                    return None
            finally:
                if not fetched:
                    os.unlink(entry.part)
                os.close(descriptor)

    def _changed(
        self, entry: _Entry, about: _About, policy: RetryPolicy, notes: Callable[[str], None]
    ) -> bool:
        """True if the server has another shard under this URL now; the server is asked once per run."""
        if about.checked >= self.since or is_command(entry.url):
            return False
        if not policy.failed:
            try:
                identity = identity_of(entry.url, policy)
            except Unreachable as error:
                notes(
                    f"shards are taken from the cache without asking whether they have changed ({error})"
                )
            else:
                if (
                    identity is not None
                    and about.identity is not None
                    and identity != about.identity
                ):
                    return True
        entry.write(_About(about.bytes, about.identity, time.time()))
        return False

    def _fetch(self, entry: _Entry, descriptor: int, policy: RetryPolicy) -> bool:
        """Fetch the shard into its open, locked `part`, then give it its name; False without room."""
        with RemoteStream(entry.url, policy) as stream:
            for attempt in range(1, _FETCHES + 1):
                stream.open()
                md5 = self._receive(stream, descriptor)
                if md5 is None:
                    return False
                fault = _fault(entry.part, stream.md5, md5)
                if fault is None and stream.unannounced and lacks_end(entry.part):
                    fault = "cut off"
                if fault is None:
                    break
                if attempt == _FETCHES:
                    raise Unreachable(f"{fault}, {_FETCHES} times", fault, False)
                stream.rewind(fault)
            os.fsync(descriptor)
            entry.write(_About(stream.position, stream.identity, time.time()))
        os.rename(entry.part, entry.path)
        # A shard without an index is compressed, or torn before its first sample; its reader reports that.
        with contextlib.suppress(ShardError, tarfile.ReadError, UserError):
            open_index(entry.path)
        return True

    def _receive(self, stream: RemoteStream, descriptor: int) -> bytes | None:
        """Write the whole stream to a file; returns its MD5 (of no bytes where the server gives none), None without room."""
        # reserved at a time where the length is unknown
        step = min(1 << 26, max(1 << 16, self.limit_bytes >> 6))
        room = stream.total if stream.total is not None else step
        if not self._reserve(descriptor, room):
            return None
        digest = hashlib.md5(usedforsecurity=False)
        with open(descriptor, "wb", closefd=False) as file:
            file.seek(0)
            while part := stream.read(_READ_BYTES):
                if stream.position > room:
                    room = stream.position + step
                    if not self._reserve(descriptor, room):
                        return None
                if stream.md5 is not None:
                    digest.update(part)
                file.write(part)
        os.ftruncate(descriptor, stream.position)
        return digest.digest()

    def _reserve(self, descriptor: int, size: int) -> bool:
        """Make the file `size` bytes long, and reserve the space; False without room."""
        with locked(self.folder, name=".lock"):
            wanted = size - os.fstat(descriptor).st_size
            if wanted > 0:
                index = size // 32 + (1 << 13)
                free = self.limit_bytes - self._used() - wanted - index
                if free < 0 and not self._make_room(-free):
                    return False
                os.ftruncate(descriptor, size)
            return True

    def _used(self) -> int:
        """Bytes of all files.

        Other processes give fetched shards their names meanwhile: a file that has gone since its folder was listed is there
        under another name, so that all are counted again.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):
                return sum(
                    file.stat().st_size
                    for name in ("", ".about", INDEX_FOLDER)
                    for file in _files(os.path.join(self.folder, name))
                )

    def _make_room(self, wanted: int) -> bool:
        """Remove partial files of killed processes, then unread shards, least recently used first, until `wanted` bytes are
        free.

        Returns:
            Whether `wanted` bytes were freed.
        """
        for file in _files(self.folder):
            if (
                file.name.endswith(".part")
                and (descriptor := lock_file(file.path, wait=False)) is not None
            ):
                wanted -= os.fstat(descriptor).st_size
                os.unlink(file.path)
                os.close(descriptor)
        entries = [
            _Entry.of(self.folder, file.name)
            for file in _files(self.folder)
            if file.name.endswith(".tar")
        ]
        for entry in sorted(entries, key=_Entry.used):
            if wanted <= 0:
                break
            wanted -= _remove(entry)
        return wanted <= 0


class FetchAhead:
    """Fetches shards into a cache before they are read, one after the other, in a thread. It does not retry; the reader does.

    Only for processes that do not fork: a child would inherit the lock on a shard that is being fetched.
    """

    def __init__(self, cache: ShardCache, policy: RetryPolicy) -> None:
        self._cache = cache
        self._policy = replace(
            policy, retries=0, command_retries=0, waits=lambda _: None, failed={}
        )
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="shards ahead").start()

    def want(self, url: str) -> None:
        """Add a shard to those to fetch."""
        self._wanted.put(url)

    def close(self) -> None:
        """Stop after the shard that is being fetched now."""
        self._wanted.put(None)

    def _run(self) -> None:
        while (url := self._wanted.get()) is not None:
            with (
                contextlib.suppress(UserError, OSError, StalledShard),
                self._cache.borrowed(url, self._policy),
            ):
                self._policy.failed.clear()


@dataclass(frozen=True)
class _About:
    """Facts about a whole shard: bytes, identity (see `Transfer`), and the time of the last check with the server."""

    bytes: int
    identity: str | None
    checked: float


class _Entry:
    """The files of one shard in a cache."""

    def __init__(self, folder: str, url: str, name: str | None = None) -> None:
        if name is None:
            # A hash and not the URL, which may hold a token.
            last = re.sub(
                r"[^A-Za-z0-9._-]", "_", url.partition("?")[0].rstrip("/ ").rpartition("/")[2]
            )[-60:]
            name = (
                f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{last.removesuffix('.tar')}.tar"
            )
        self.url = url
        self.path = os.path.join(folder, name)
        self.part = f"{self.path}.part"
        self.about_path = os.path.join(folder, ".about", f"{name}.json")
        self.index_path = os.path.join(folder, INDEX_FOLDER, f"{name}.npz")

    @classmethod
    def of(cls, folder: str, name: str) -> _Entry:
        """The entry of a file in the cache, whose URL is unknown."""
        return cls(folder, "", name)

    def about(self, size_bytes: int) -> _About | None:
        """The stored facts; None if they are unreadable, or of a shard with another size."""
        try:
            with open(self.about_path, encoding="utf-8") as file:
                stored = json.load(file)
            about = _About(int(stored["bytes"]), stored["identity"], float(stored["checked"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return about if about.bytes == size_bytes else None

    def write(self, about: _About) -> None:
        write_atomically(self.about_path, json.dumps(about.__dict__))

    def used(self) -> float:
        """Time of the last use."""
        try:
            return os.stat(self.about_path).st_mtime
        except OSError:
            return 0.0


def _fault(path: str, announced: str | None, md5: bytes) -> str | None:
    """The fault of a fetched shard, or None."""
    if announced is not None and announced not in (md5.hex(), base64.b64encode(md5).decode()):
        return "another checksum than announced"
    try:
        with open(path, "rb") as file:
            parquet = file.read(4) == b"PAR1"
        whole = parquet or tarfile.is_tarfile(path)
    except (
        Exception
    ):  # of bytes that only begin like a tar, or a compressed one, it raises errors of any type
        whole = False
    return None if whole else "no tar or parquet"


def _remove(entry: _Entry) -> int:
    """Remove a shard unless a process reads it; returns the bytes that this frees."""
    descriptor = lock_file(entry.path, wait=False)
    if descriptor is None:
        return 0
    freed = 0
    for path in (entry.path, entry.index_path, entry.about_path):
        with contextlib.suppress(FileNotFoundError):
            freed += os.stat(path).st_size
            os.unlink(path)
    os.close(descriptor)
    return freed


def _files(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []
