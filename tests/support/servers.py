"""Web servers on loopback that answer in threads within a `with`: shards, the hosts of old picture lists."""

from __future__ import annotations

import hashlib
import io
import re
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image


class Handler(BaseHTTPRequestHandler):
    """Answers with a length; without a log."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it holds a body back for 40 ms after its header

    def log_message(self, *args: object) -> None:
        pass

    def answer(
        self,
        status: int,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        announced: int | None = None,
    ) -> None:
        """Send an answer, whose header claims the length `announced` if it is given."""
        self.send_response(status)
        length = str(len(content) if announced is None else announced)
        for name, value in {"Content-Length": length, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def unannounced(self) -> None:
        """Begin an answer whose end is that of the connection."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def slowly(self, content: bytes, seconds: float) -> None:
        """Write byte by byte until the server stops."""
        for at in range(len(content)):
            self.wfile.write(content[at : at + 1])
            if self.server.stopping.wait(seconds):
                return


class Server(ThreadingHTTPServer):
    """A server on a free port; `stopping` is set when its handlers are to end."""

    daemon_threads, block_on_close, allow_reuse_address, request_queue_size = True, False, True, 128

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.port = self.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.lock, self.stopping = threading.Lock(), threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        pass

    def __enter__(self):
        begin = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        begin.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()


# ---------------------------------------------------------------------------------------------------------------------
# Shards, served with faults; the server can be killed
# ---------------------------------------------------------------------------------------------------------------------


class _Shards(Handler):
    server: ShardServer

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].strip("/")
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked else 0
        with self.server.lock:
            self.server.requests[name].append(begin)
            self.server.paths.append(self.path)
            faults = self.server.faults[name]
            fault = faults.pop(0) if faults else self.server.fault
        with suppress(OSError):
            self._answer(name, begin if self.server.ranges else 0, fault)

    def _answer(self, name: str, begin: int, fault: str) -> None:
        kind, _, number = fault.partition(":")
        path = self.server.folder / name
        if kind == "open":
            self.unannounced()
            self.wfile.write(path.read_bytes()[: int(number)])
            return
        if kind == "silent":
            self.server.stopping.wait(60)
            self.close_connection = True
            return
        if kind.isdigit() or not path.is_file():
            self.answer(int(kind) if kind.isdigit() else 404, b"no")
            return
        content = b"<html>sign in</html>" if kind == "page" else path.read_bytes()
        tag = hashlib.md5(content).hexdigest() + ("-new" if kind == "changed" else "")
        total = len(content) + (1000 if kind == "long" else 0)
        headers = {"ETag": f'"{tag}"'}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{total - 1}/{total}"
        part = content[begin:]
        self.answer(206 if begin else 200, b"", headers, announced=total - begin)
        if kind in ("reset", "cut"):
            self.wfile.write(part[: int(number)])
            self.close_connection = True
            if (
                kind == "reset"
            ):  # with data that nobody reads any more: the other side sees ECONNRESET
                time.sleep(0.05)
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.connection.close()
        elif kind == "hold":
            self.wfile.write(part[: int(number)])
            self.server.stopping.wait(60)
            self.close_connection = True
        else:
            slow = {"drip": int(number or 0), "crawl": len(part)}.get(kind, 0)
            self.slowly(part[:slow], 0.01 if kind == "drip" else 0.2)
            self.wfile.write(part[slow:])
            self.close_connection = kind == "long"


class ShardServer(Server):
    """Serves the files of a folder.

    Attributes:
        faults: name -> what befalls the next requests for it, one each: "503" or any status, "reset:N" and "cut:N" after N
            bytes, "open:N" no more than N bytes and no announced length,
            "hold:N" no more than N bytes until it is killed, "drip:N" byte by byte for N bytes, "crawl", "silent",
            "long" (more bytes announced than there are), "page" (a web page in its place), "changed" (another
            ETag).
        fault: the fault of all other requests; "" for none.
        requests: name -> the first byte that each request asked for.
        paths: the requested paths, as the requests wrote them.
        ranges: whether range requests are understood.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_Shards)
        self.folder, self.ranges, self.fault = folder, True, ""
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        self.requests: defaultdict[str, list[int]] = defaultdict(list)
        self.paths: list[str] = []
        self.connections: set[socket.socket] = set()

    def kill(self) -> None:
        """Stop listening and break all connections."""
        self.__exit__()
        for connection in set(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def url(self, name: str = "") -> str:
        return f"{self.address}/{name}"


# ---------------------------------------------------------------------------------------------------------------------
# The hosts of ten-year-old picture lists
# ---------------------------------------------------------------------------------------------------------------------


def photo(
    number: int, width: int = 120, height: int = 80, format: str = "JPEG", mode: str = "RGB"
) -> bytes:
    """Make a picture that no other number has, and that does not compress to nothing."""
    pixels = np.random.default_rng(number).integers(0, 256, size=(8, 12, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).convert(mode).save(
        content, format
    )
    return content.getvalue()


# Kinds of addresses that always answer alike: (status, content of a number, type).
PLAIN = {
    "good": (200, lambda number: photo(number), "image/jpeg"),
    "png": (200, lambda number: photo(number, format="PNG", mode="RGBA"), "image/png"),
    "pixel": (200, lambda number: photo(number, 1, 1), "image/jpeg"),
    "html": (200, lambda _: b"<html>This picture is no longer available</html>", "text/html"),
    "missing": (404, lambda _: b"gone", "text/plain"),
    "busy": (503, lambda _: b"busy", "text/plain"),
}


class _Hosts(Handler):
    server: HostileServer

    def do_GET(self) -> None:
        kind, text = self.path.strip("/").removesuffix(".jpg").split("/")
        number = int(text)
        with self.server.lock:
            self.server.requests[self.path] += 1
            nth = self.server.requests[self.path]
        if kind == "flaky":  # overloaded at first; the second request is served
            kind = "busy" if nth == 1 else "good"
        try:
            if kind in PLAIN:
                status, content, type_ = PLAIN[kind]
                self.answer(status, content(number), {"Content-Type": type_})
            elif kind == "moved":
                self.answer(302, b"", {"Location": f"/good/{number}.jpg"})
            else:
                getattr(self, f"_{kind}")(number)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _cut(self, number: int) -> None:
        """Break the transfer off."""
        content = photo(number)
        self.answer(200, content[: len(content) // 2], announced=len(content))
        self.close_connection = True

    def _half(self, number: int) -> None:
        """Break the transfer off without an announced length, so that it looks whole."""
        self.unannounced()
        content = photo(number)
        self.wfile.write(content[: len(content) // 2])

    def _huge(self, number: int) -> None:
        """Announce more bytes than allowed."""
        self.answer(200, announced=10**12)
        self.close_connection = True

    def _flood(self, number: int) -> None:
        """Send bytes without end and without a length."""
        self.unannounced()
        for _ in range(10_000):
            self.wfile.write(bytes(1 << 16))

    def _drip(self, number: int) -> None:
        """Send a byte now and then, so that every single wait is short."""
        content = photo(number)
        self.answer(200, announced=len(content))
        self.slowly(content, 0.1)

    def _silent(self, number: int) -> None:
        """Accept the connection and never answer."""
        self.server.stopping.wait(20)


class HostileServer(Server):
    """Counts requests by path."""

    def __init__(self) -> None:
        super().__init__(_Hosts)
        self.requests: Counter[str] = Counter()

    def url(self, kind: str, number: int) -> str:
        return f"{self.address}/{kind}/{number}.jpg"
