"""A web server on loopback that behaves like the hosts of ten-year-old picture lists."""

from __future__ import annotations

import io
import time
from collections import Counter

import numpy as np
from PIL import Image

from support.loopback import Handler, Server, serving


def photo(
    number: int, width: int = 120, height: int = 80, format: str = "JPEG", mode: str = "RGB"
) -> bytes:
    """A picture that no other number has, and that does not compress to nothing."""
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
    "truncated": (
        200,
        lambda number: _half(number)[0],
        "image/jpeg",
    ),  # half a picture, served whole
    "html": (200, lambda _: b"<html>This picture is no longer available</html>", "text/html"),
    "missing": (404, lambda _: b"gone", "text/plain"),
    "busy": (503, lambda _: b"busy", "text/plain"),
}
MOVED = {"moved": "/good/{}.jpg", "loop": "/loop/{}.jpg", "tofile": "file:///etc/hostname"}


def _half(number: int) -> tuple[bytes, bytes]:
    content = photo(number)
    return content[: len(content) // 2], content[len(content) // 2 :]


class _Handler(Handler):
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
            elif kind in MOVED:
                self.answer(302, b"", {"Location": MOVED[kind].format(number)})
            else:
                getattr(self, f"_{kind}")(number, nth)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _unannounced(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def _slowly(self, content: bytes) -> None:
        for i in range(len(content)):
            self.wfile.write(content[i : i + 1])
            time.sleep(0.1)

    def _chunked(self, number: int, nth: int) -> None:
        content = photo(number)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for begin in range(0, len(content), 500):
            piece = content[begin : begin + 500]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _cut(self, number: int, nth: int) -> None:
        """The transfer breaks off."""
        first, second = _half(number)
        self.answer(200, first, announced=len(first + second))
        self.close_connection = True

    def _huge(self, number: int, nth: int) -> None:
        """More bytes than allowed, announced."""
        self.answer(200, announced=10**12)
        self.close_connection = True

    def _flood(self, number: int, nth: int) -> None:
        """Bytes without end, not announced."""
        self._unannounced()
        for _ in range(10_000):
            self.wfile.write(bytes(1 << 16))

    def _drip(self, number: int, nth: int) -> None:
        """A byte now and then: every single wait is short."""
        content = photo(number)
        self.answer(200, announced=len(content))
        self._slowly(content)

    def _open(self, number: int, nth: int) -> None:
        """Half a picture at once, then a byte now and then; no length is announced: only the end shows that it is whole."""
        first, second = _half(number)
        self._unannounced()
        self.wfile.write(first)
        if nth == 1:
            self._slowly(b"x" * 100_000)
        self.wfile.write(second)

    def _half(self, number: int, nth: int) -> None:
        """Half a picture without an announced length, then the end of the connection; whole at the second request."""
        content = photo(number)
        self._unannounced()
        self.wfile.write(content if nth > 1 else content[: len(content) // 2])

    def _silent(self, number: int, nth: int) -> None:
        """The connection is accepted and never answered."""
        self.server.stopping.wait(20)


class HostileServer(Server):
    """Counts requests by path."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.requests: Counter[str] = Counter()

    def url(self, kind: str, number: int) -> str:
        return f"{self.address}/{kind}/{number}.jpg"


def hostile_server():
    return serving(HostileServer())
