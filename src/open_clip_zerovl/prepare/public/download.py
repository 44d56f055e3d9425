"""Pictures and files from the web, from hosts that are slow, gone, or answer with something else.

The standard library is enough. Time, bytes and redirects of a transfer are bounded: each read of the socket, headers included,
waits no longer than the time that is left, since no socket timeout ends a transfer in which a byte comes every second. So a
transfer either ends as the host ended it, or raises `Failure`, which has a constant reason to count by and says whether a retry
may help.
"""

from __future__ import annotations

import errno
import functools
import http.client
import io
import math
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import locked
from open_clip_zerovl.core.flags import flag
from open_clip_zerovl.prepare.public.pictures import Failure

_PIECE_BYTES = 1 << 16
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Limits:
    """Limits of one transfer.

    Attributes:
        idle_seconds: longest wait for a connection, or for the next bytes.
        total_seconds: longest time of one attempt, redirects included.
        max_bytes: longest answer.
        verify_tls: refuse hosts whose certificate is wrong.
        user_agent: the name that hosts see; some refuse Python's.
    """

    idle_seconds: float = 10.0
    total_seconds: float = flag(30.0, "seconds a picture may take", option="--timeout")
    max_bytes: float = 50_000_000
    verify_tls: bool = flag(True, "accept hosts whose certificate is wrong", option="--no-tls-verify")
    user_agent: str = "Mozilla/5.0 (compatible; open_clip_zerovl; research dataset download)"


class Downloader:
    """`downloader(url)` returns the bytes, or raises `Failure`. Any thread may call it; proxies come from the environment."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    @functools.cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        context = ssl.create_default_context()
        if not self.limits.verify_tls:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Not urllib's default opener: it also opens file: and ftp: addresses, which a list must not reach.
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _HttpHandler(),
            _HttpsHandler(context=context),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPRedirectHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.UnknownHandler(),
        ):
            opener.add_handler(handler)
        return opener

    def __call__(self, url: str) -> bytes:
        """The bytes behind a URL.

        Raises:
            Failure: no address, no answer, an error of the host, a transfer that breaks off, or a limit that is exceeded.
        """
        with closing(self.receive(url)) as received:
            next(received)
            return b"".join(received)

    def receive(self, url: str, **headers: str) -> Generator[Any, None, None]:
        """The answer (its `status` and `headers`), then its bytes as they come; Failure as for a call."""
        if not url:
            raise Failure("no address")
        if not url.startswith(("http://", "https://")):
            raise Failure("not a web address")
        _transfer.deadline = time.monotonic() + self.limits.total_seconds
        headers = {"User-Agent": self.limits.user_agent, "Accept": "image/*,*/*;q=0.8", **headers}
        try:
            request = urllib.request.Request(_quoted(url), headers=headers)
            with self._opener.open(request, timeout=self.limits.idle_seconds) as answer:
                announced, received = content_length(answer), 0
                if announced is not None and announced > self.limits.max_bytes:
                    raise Failure("too many bytes")
                yield answer
                # read1 returns what one receive brings; read would wait for the whole piece.
                while piece := answer.read1(_PIECE_BYTES):
                    received += len(piece)
                    if received > self.limits.max_bytes:
                        raise Failure("too many bytes")
                    yield piece
        except Failure:
            raise
        except Exception as error:
            known = _explained(error)
            if known is None:
                raise
            raise known from error
        if announced is not None and received < announced:
            raise Failure("cut off", transient=True)


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

    Until it is whole it is called `NAME.part`. An existing file is not fetched again. Of several processes that share a dataset
    the first one fetches, the others wait and find the file.

    Args:
        attempts: how often to try.
        backoff_seconds: pause after the first failure; doubled after each further one.
        idle_seconds: longest wait for the next bytes.

    Raises:
        UserError: every attempt failed; the sentence names the URL and the last reason.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    downloader = Downloader(Limits(idle_seconds, total_seconds=math.inf, max_bytes=math.inf))
    reason = "no attempt was made"
    with locked(path.parent, name=f".{path.name}.lock"):
        for attempt in range(0 if path.is_file() else attempts):
            if attempt:
                time.sleep(backoff_seconds * 2 ** (attempt - 1))
            try:
                _go_on(downloader, url, part, progress)
                part.replace(path)
                break
            except Failure as failure:
                reason = failure.reason
                if reason == "http 416":  # the part is longer than the file
                    part.unlink(missing_ok=True)
                elif not failure.transient:
                    break
            except OSError as error:  # a full disk
                reason = str(error)
        if path.is_file():
            return path
    raise UserError(
        f"{url} could not be fetched ({reason}): fetch it by other means and give its path with --source, or try again "
        "later; the part that was fetched is kept."
    )


def _go_on(downloader: Downloader, url: str, part: Path, progress: bool) -> None:
    """Fetch the rest of a file, or all of it where the host gives no parts."""
    have = part.stat().st_size if part.is_file() else 0
    with closing(downloader.receive(url, **({"Range": f"bytes={have}-"} if have else {}))) as received:
        answer = next(received)
        have = have if answer.status == 206 else 0
        length = content_length(answer)
        total = None if length is None else length + have
        with (
            open(part, "ab" if have else "wb") as file,
            tqdm(desc=part.stem, total=total, initial=have, unit="B", unit_scale=True, disable=not progress) as bar,
        ):
            for piece in received:
                file.write(piece)
                bar.update(len(piece))


#: `deadline`: when the transfer of this thread must be over (time.monotonic).
_transfer = threading.local()


def _seconds_left(idle_seconds: float | None) -> float:
    left = _transfer.deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the transfer takes too long")
    return min(left, math.inf if idle_seconds is None else idle_seconds)


class _Reads(io.RawIOBase):
    """The receiving side of a socket, each read of which ends before the transfer's deadline."""

    def __init__(self, connection: socket.socket, raw: io.RawIOBase) -> None:
        self._connection, self._raw, self._idle_seconds = connection, raw, connection.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(_seconds_left(self._idle_seconds))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Reads(sock, self.fp.detach()))


class _Http(http.client.HTTPConnection):
    response_class = _Answer

    def connect(self) -> None:
        self.timeout = _seconds_left(self.timeout)
        super().connect()


class _Https(http.client.HTTPSConnection, _Http):
    response_class = _Answer


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._connection = functools.partial(_Https, context=context)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req)


def content_length(answer: Any) -> int | None:
    """The number of bytes that an answer announces; None where it announces none."""
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

#: Exceptions of the network -> (reason, whether a retry may help); the first that fits counts.
_REASONS: tuple[tuple[type[Exception], str, bool], ...] = (
    (TimeoutError, "timed out", True),
    (ssl.SSLCertVerificationError, "bad certificate", False),
    (ssl.SSLError, "tls error", False),
    (socket.gaierror, "unknown host", False),
    (http.client.IncompleteRead, "cut off", True),
    (urllib.error.URLError, "not a web address", False),  # urllib's own words for a missing host or an unknown scheme
    (ConnectionError, "connection refused or lost", True),
    (http.client.InvalidURL, "not a web address", False),
    (http.client.HTTPException, "not http", True),
    (OSError, "network error", True),
    (ValueError, "not a web address", False),  # a port that is no number, brackets that do not match
)


def _explained(error: BaseException) -> Failure | None:
    """The Failure for an exception of the network; None for a bug in this program, or too many open files."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if 300 <= error.code < 400:
            return Failure("bad redirect")
        return Failure(f"http {error.code}", transient=error.code in _TRANSIENT_STATUS)
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _explained(error.reason)
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return Failure("no answer on the host's name", transient=True)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return None
    return next((Failure(why, transient=again) for kind, why, again in _REASONS if isinstance(error, kind)), None)
