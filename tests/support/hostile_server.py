"""A web server on loopback that behaves like the hosts of ten-year-old picture lists; and lists that point at it."""

from __future__ import annotations

import io
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


def photo(number: int, width: int = 120, height: int = 80, format: str = "JPEG", mode: str = "RGB") -> bytes:
    """A picture that no other number has, and that does not compress to nothing."""
    pixels = np.random.default_rng(number).integers(0, 256, size=(8, 12, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).convert(mode).save(content, format)
    return content.getvalue()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HostileServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        kind, number = self.path.strip("/").removesuffix(".jpg").split("/")
        with self.server.lock:
            self.server.requests[self.path] += 1
            nth = self.server.requests[self.path]
        self.server.served.release()
        time.sleep(self.server.delay_seconds)
        try:
            getattr(self, f"_{kind}")(int(number), nth)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _send(self, status: int, content: bytes, kind: str = "image/jpeg", *, announced: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) if announced is None else announced))
        self.end_headers()
        self.wfile.write(content)

    def _good(self, number: int, nth: int) -> None:
        self._send(200, photo(number))

    def _png(self, number: int, nth: int) -> None:
        self._send(200, photo(number, format="PNG", mode="RGBA"), "image/png")

    def _chunked(self, number: int, nth: int) -> None:
        content = photo(number)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for begin in range(0, len(content), 500):
            piece = content[begin : begin + 500]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _missing(self, number: int, nth: int) -> None:
        self._send(404, b"gone", "text/plain")

    def _moved(self, number: int, nth: int) -> None:
        self._to(f"/good/{number}.jpg")

    def _loop(self, number: int, nth: int) -> None:
        self._to(f"/loop/{number}.jpg")

    def _tofile(self, number: int, nth: int) -> None:
        self._to("file:///etc/hostname")

    def _to(self, place: str) -> None:
        self.send_response(302)
        self.send_header("Location", place)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _html(self, number: int, nth: int) -> None:
        self._send(200, b"<html>This picture is no longer available</html>", "text/html")

    def _flaky(self, number: int, nth: int) -> None:
        """Overloaded at first; the second request is served."""
        if nth == 1:
            self._send(503, b"busy", "text/plain")
        else:
            self._good(number, nth)

    def _busy(self, number: int, nth: int) -> None:
        self._send(503, b"busy", "text/plain")

    def _cut(self, number: int, nth: int) -> None:
        """The transfer breaks off."""
        content = photo(number)
        self._send(200, content[: len(content) // 2], announced=len(content))
        self.close_connection = True

    def _truncated(self, number: int, nth: int) -> None:
        """The file itself is half a picture, served whole."""
        content = photo(number)
        self._send(200, content[: len(content) // 2])

    def _pixel(self, number: int, nth: int) -> None:
        self._send(200, photo(number, 1, 1))

    def _huge(self, number: int, nth: int) -> None:
        """More bytes than allowed, announced."""
        self._send(200, b"", announced=10**12)
        self.close_connection = True

    def _flood(self, number: int, nth: int) -> None:
        """Bytes without end, not announced."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for _ in range(10_000):
            self.wfile.write(bytes(1 << 16))

    def _drip(self, number: int, nth: int) -> None:
        """A byte now and then: every single wait is short."""
        content = photo(number)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for i in range(len(content)):
            self.wfile.write(content[i : i + 1])
            self.wfile.flush()
            time.sleep(0.1)

    def _open(self, number: int, nth: int) -> None:
        """Half a picture at once, then a byte now and then; no length is announced: only the end shows that it is whole."""
        content = photo(number)
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(content[: len(content) // 2])
        while nth == 1:
            self.wfile.write(b"x")
            time.sleep(0.1)
        self.wfile.write(content[len(content) // 2 :])

    def _silent(self, number: int, nth: int) -> None:
        """The connection is taken and nothing said."""
        self.server.stopping.wait(20)


class HostileServer(ThreadingHTTPServer):
    """Counts requests by path; `served` is released once a request."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.served = threading.Semaphore(0)
        self.stopping = threading.Event()
        self.delay_seconds = 0.0

    def handle_error(self, request: object, client_address: object) -> None:
        pass

    def url(self, kind: str, number: int) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{kind}/{number}.jpg"


@contextmanager
def hostile_server():
    server = HostileServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        server.server_close()
