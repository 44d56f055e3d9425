"""A web server on loopback that serves a folder of shards and misbehaves as told; it can be killed and come back."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def log_message(self, *args: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        with self.server.owner.lock:
            self.server.owner.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.owner.lock:
            self.server.owner.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        owner, name = self.server.owner, self.path.partition("?")[0].strip("/")
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked else 0
        with owner.lock:
            owner.requests[name].append(begin)
            owner.paths.append(self.path)
            fault = owner.faults[name].pop(0) if owner.faults[name] else owner.fault
        with suppress(OSError):
            self._answer(name, begin if owner.ranges else 0, fault)

    def _answer(self, name: str, begin: int, fault: str) -> None:
        kind, _, number = fault.partition(":")
        path = self.server.owner.folder / name
        if kind == "silent":
            self.server.owner.stopping.wait(60)
            self.close_connection = True
            return
        if kind.isdigit() or not path.is_file():
            self._send(int(kind) if kind.isdigit() else 404, b"no", 2)
            return
        content = b"<html>sign in</html>" if kind == "page" else path.read_bytes()
        tag = hashlib.md5(content).hexdigest() + ("-new" if kind == "changed" else "")
        total = len(content) + (1000 if kind == "long" else 0)
        headers = {"ETag": f'"{tag}"'}
        if kind == "checksum":
            headers["Content-MD5"] = hashlib.md5(content).hexdigest()
            content = content[:-1] + bytes([content[-1] ^ 1])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{total - 1}/{total}"
        part = content[begin:]
        self._send(206 if begin else 200, b"", total - begin, headers)
        if kind in ("reset", "cut"):
            self.wfile.write(part[: int(number)])
            self.close_connection = True
            if kind == "reset":  # with data that nobody reads any more: the other side sees ECONNRESET
                self.wfile.flush()
                time.sleep(0.05)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
        elif kind == "hold":
            self.wfile.write(part[: int(number)])
            self.wfile.flush()
            self.server.owner.stopping.wait(60)
            self.close_connection = True
        elif kind == "drip":  # the first bytes one by one
            for at in range(int(number)):
                self.wfile.write(part[at : at + 1])
                self.wfile.flush()
                if self.server.owner.stopping.wait(0.01):
                    return
            self.wfile.write(part[int(number) :])
        elif kind == "crawl":  # all of them, five bytes a second
            for at in range(len(part)):
                self.wfile.write(part[at : at + 1])
                self.wfile.flush()
                if self.server.owner.stopping.wait(0.2):
                    return
        else:
            self.wfile.write(part)
            self.close_connection = kind == "long"

    def _send(self, status: int, body: bytes, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128
    owner: ShardServer

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class ShardServer:
    """Serves the files of a folder.

    Attributes:
        faults: name -> what befalls the next requests for it, one each: "503" or any status, "reset:N" and "cut:N" after N
            bytes, "hold:N" no more than N bytes until it is killed, "drip:N" byte by byte for N bytes, "crawl", "silent",
            "long" (more bytes announced than there are), "page" (a web page in its place), "checksum" (a bit flipped),
            "changed" (another ETag).
        fault: what befalls all other requests; "" is none.
        requests: name -> the first byte that each request asked for.
        paths: what the requests asked for, as they wrote it.
        ranges: whether range requests are understood.
    """

    def __init__(self, folder: Path, ranges: bool = True) -> None:
        self.folder, self.ranges = folder, ranges
        self.lock = threading.Lock()
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        self.fault = ""
        self.requests: defaultdict[str, list[int]] = defaultdict(list)
        self.paths: list[str] = []
        self.connections: set[socket.socket] = set()
        self.stopping = threading.Event()
        self.port = 0
        self._listener: _Listener | None = None
        self.start()

    def start(self) -> None:
        """Listen, on the same port as before."""
        self.stopping.clear()
        self._listener = _Listener(("127.0.0.1", self.port), _Handler)
        self._listener.owner = self
        self.port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def kill(self) -> None:
        """Stop listening and break all connections."""
        self.stopping.set()
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
            self._listener = None
        with self.lock:
            for connection in self.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def url(self, name: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


@contextmanager
def shard_server(folder: Path, **options):
    server = ShardServer(folder, **options)
    try:
        yield server
    finally:
        server.kill()
