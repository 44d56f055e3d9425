"""The base of the tests' web servers, which answer on loopback, in threads, until their block ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar


class Handler(BaseHTTPRequestHandler):
    """Answers with a length; without a log."""

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
        """Send an answer; `announced` is the length that its header claims, if not the true one."""
        self.send_response(status)
        length = str(len(content) if announced is None else announced)
        for name, value in {"Content-Length": length, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """A server on a free port; `stopping` is set when its handlers are to end."""

    daemon_threads, block_on_close, allow_reuse_address, request_queue_size = True, False, True, 128

    def __init__(self, handler: type[Handler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.port = self.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.lock, self.stopping = threading.Lock(), threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        pass

    def start(self) -> None:
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def stop(self) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()


AnyServer = TypeVar("AnyServer", bound=Server)


@contextmanager
def serving(server: AnyServer) -> Iterator[AnyServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()
