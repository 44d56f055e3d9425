"""Pictures and files from the web, from hosts that are slow, gone, or answer with something else.

The standard library is enough. Time, bytes and redirects of one picture are bounded. A watchdog bounds the time as a whole: no
socket timeout ends a transfer in which a byte comes every second. A failure has a constant reason to count by, and says whether
a retry may help.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import http.client
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import flag
from open_clip_zerovl.prepare.public.pictures import Failure

_PIECE_BYTES = 1 << 16
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Limits:
    """Limits of the download of one picture.

    Attributes:
        idle_seconds: longest wait for a connection, or for the next bytes.
        total_seconds: longest time of one attempt, redirects included.
        max_bytes: longest answer.
        verify_tls: refuse hosts whose certificate is wrong.
        user_agent: the name that hosts see; some refuse Python's.
    """

    idle_seconds: float = 10.0
    total_seconds: float = flag(30.0, "seconds a picture may take", option="--timeout")
    max_bytes: int = 50_000_000
    verify_tls: bool = flag(True, "accept hosts whose certificate is wrong", option="--no-tls-verify")
    user_agent: str = "Mozilla/5.0 (compatible; open_clip_zerovl; research dataset download)"


class Downloader:
    """`downloader(url)` returns the bytes, or raises `Failure`. Any thread may call it; proxies come from the environment."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._watchdog = _Watchdog(self.limits.total_seconds)
        context = ssl.create_default_context()
        if not self.limits.verify_tls:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Not urllib's default opener: it also opens file: and ftp: addresses, which a list must not reach.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _HttpHandler(self._watchdog),
            _HttpsHandler(self._watchdog, context),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPRedirectHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.UnknownHandler(),
        ):
            self._opener.add_handler(handler)

    def __call__(self, url: str) -> bytes:
        """The bytes behind a URL.

        Raises:
            Failure: no address, no answer, an error of the host, or a limit that is exceeded.
        """
        if not url:
            raise Failure("no address")
        if not url.startswith(("http://", "https://")):
            raise Failure("not a web address")
        with self._watchdog.watching() as watched:
            try:
                return self._get(url)
            except Exception as error:
                known = self._timed_out(watched) or (error if isinstance(error, Failure) else _explained(error))
                if known is None or known is error:
                    raise
                raise known from error

    def close(self) -> None:
        """End the watchdog's thread."""
        self._watchdog.stop()

    def _get(self, url: str) -> bytes:
        headers = {"User-Agent": self.limits.user_agent, "Accept": "image/*,*/*;q=0.8"}
        request = urllib.request.Request(_quoted(url), headers=headers)
        with self._opener.open(request, timeout=self.limits.idle_seconds) as answer:
            announced = _content_length(answer)
            if announced is not None and announced > self.limits.max_bytes:
                raise Failure("too many bytes")
            pieces, received = [], 0
            # read1 returns what one receive brings; read would wait for the whole piece.
            while piece := answer.read1(_PIECE_BYTES):
                pieces.append(piece)
                received += len(piece)
                if received > self.limits.max_bytes:
                    raise Failure("too many bytes")
        if announced is not None and received < announced:
            raise Failure("cut off", transient=True)
        return b"".join(pieces)

    def _timed_out(self, watched: _Watched) -> Failure | None:
        return Failure("timed out", transient=True) if watched.expired else None


def fetch_file(
    url: str,
    path: str | Path,
    *,
    attempts: int = 5,
    backoff_seconds: float = 2.0,
    idle_seconds: float = 30.0,
    progress: bool = True,
) -> Path:
    """Fetch one large file (an annotation file, a zip of pictures), from where an earlier call stopped; returns its path.

    Until it is whole it is called `NAME.part`. An existing file is not fetched again.

    Args:
        attempts: how often to try.
        backoff_seconds: pause after the first failure; doubled after each further one.
        idle_seconds: longest wait for the next bytes.

    Raises:
        UserError: every attempt failed; the sentence names the URL and the last reason.
    """
    path = Path(path)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        # Several processes may share a dataset: the first fetches, the others wait and find the file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _fetch(url, path, attempts, backoff_seconds, idle_seconds, progress)
    return path


def _fetch(url: str, path: Path, attempts: int, backoff_seconds: float, idle_seconds: float, progress: bool) -> None:
    part = path.with_name(path.name + ".part")
    reason = "no attempt was made"
    for attempt in range(attempts):
        if attempt:
            time.sleep(backoff_seconds * 2 ** (attempt - 1))
        have = part.stat().st_size if part.is_file() else 0
        headers = {"User-Agent": Limits.user_agent} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=idle_seconds) as answer:
                resumed = answer.status == 206
                length = _content_length(answer)
                total = None if length is None else length + (have if resumed else 0)
                with (
                    open(part, "ab" if resumed else "wb") as file,
                    tqdm(
                        desc=path.name,
                        total=total,
                        initial=have if resumed else 0,
                        unit="B",
                        unit_scale=True,
                        disable=not progress,
                    ) as bar,
                ):
                    while piece := answer.read1(1 << 20):
                        file.write(piece)
                        bar.update(len(piece))
            if total is not None and part.stat().st_size != total:
                reason = f"it was cut off at {part.stat().st_size} of {total} bytes"
                continue
            part.replace(path)
            return
        except urllib.error.HTTPError as error:
            reason = f"the server answered {error.code} {error.reason}"
            if error.code == 416:  # the part is longer than the file
                part.unlink(missing_ok=True)
            elif error.code not in _TRANSIENT_STATUS:
                break
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
    raise UserError(
        f"{url} could not be fetched ({reason}): fetch it by other means and give its path with --source, or try again "
        "later; the part that was fetched is kept."
    )


class _Watched:
    """One request that the watchdog watches: its deadline, its connection, and whether it expired."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.expired = False
        self.connection: socket.socket | None = None


class _Watchdog:
    """Closes the connections of requests that have passed their deadline."""

    def __init__(self, total_seconds: float) -> None:
        self._total_seconds = total_seconds
        self._watched: set[_Watched] = set()
        self._lock = threading.Lock()
        self._current = threading.local()
        self._stopped = threading.Event()
        self._tick_seconds = min(0.5, total_seconds / 10)
        threading.Thread(target=self._run, daemon=True, name="download-watchdog").start()

    @contextmanager
    def watching(self) -> Iterator[_Watched]:
        """Watch the request that this thread makes in the block."""
        watched = _Watched(time.monotonic() + self._total_seconds)
        self._current.watched = watched
        with self._lock:
            self._watched.add(watched)
        try:
            yield watched
        finally:
            with self._lock:
                self._watched.discard(watched)

    def connected(self, connection: socket.socket) -> None:
        """The request of this thread has this connection."""
        self._current.watched.connection = connection

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._tick_seconds):
            now = time.monotonic()
            with self._lock:
                late = [watched for watched in self._watched if now > watched.deadline]
            for watched in late:
                watched.expired = True
                if watched.connection is not None:
                    try:
                        watched.connection.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue  # closed already


class _WatchedHttp(http.client.HTTPConnection):
    def __init__(self, *args: Any, watchdog: _Watchdog, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watchdog = watchdog

    def connect(self) -> None:
        super().connect()
        self._watchdog.connected(self.sock)


class _WatchedHttps(http.client.HTTPSConnection):
    def __init__(self, *args: Any, watchdog: _Watchdog, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watchdog = watchdog

    def connect(self) -> None:
        super().connect()
        self._watchdog.connected(self.sock)


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, watchdog: _Watchdog) -> None:
        super().__init__()
        self._connection = functools.partial(_WatchedHttp, watchdog=watchdog)

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, watchdog: _Watchdog, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._connection = functools.partial(_WatchedHttps, watchdog=watchdog, context=context)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req)


def _content_length(answer: Any) -> int | None:
    value = answer.headers.get("Content-Length")
    return int(value) if value is not None and value.strip().isdecimal() else None


def _quoted(url: str) -> str:
    """The URL with characters that a request line may not hold (spaces, other alphabets) percent-encoded."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    try:
        host = host if host.isascii() else host.encode("idna").decode()
    except UnicodeError as error:
        raise Failure("not a web address") from error
    return f"{scheme}://{host}{slash}{urllib.parse.quote(path.partition('#')[0], safe=_SAFE)}"


_SAFE = "%/:=&?~#+!$,;'@()*[]"


def _explained(error: BaseException) -> Failure | None:
    """The Failure for an exception of the network; None for a bug in this program, or too many open files."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if 300 <= error.code < 400:
            return Failure("bad redirect")
        return Failure(f"http {error.code}", transient=error.code in _TRANSIENT_STATUS)
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _explained(error.reason)
    if isinstance(error, TimeoutError):
        return Failure("timed out", transient=True)
    if isinstance(error, ssl.SSLError):
        return Failure("bad certificate" if isinstance(error, ssl.SSLCertVerificationError) else "tls error")
    if isinstance(error, socket.gaierror):
        again = error.errno == socket.EAI_AGAIN
        return Failure("no answer on the host's name", transient=True) if again else Failure("unknown host")
    if isinstance(error, http.client.IncompleteRead):
        return Failure("cut off", transient=True)
    if isinstance(error, urllib.error.URLError):
        return Failure("not a web address")  # urllib's own words for a missing host or an unknown scheme
    if isinstance(error, ConnectionError):
        return Failure("connection refused or lost", transient=True)
    if isinstance(error, (http.client.InvalidURL, UnicodeError)):
        return Failure("not a web address")
    if isinstance(error, http.client.HTTPException):
        return Failure("not http", transient=True)
    if isinstance(error, OSError):
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return None
        return Failure("network error", transient=True)
    if isinstance(error, ValueError):
        return Failure("not a web address")  # a port that is no number, brackets that do not match
    return None
