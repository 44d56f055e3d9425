"""A web server on loopback that serves a folder of shards and misbehaves on request; it can be killed and come back."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

from support.loopback import Handler, Server


class _Handler(Handler):
    server: _Listener

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.owner.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.owner.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        owner, name = self.server.owner, self.path.partition("?")[0].strip("/")
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(asked[1]) if asked else 0
        with self.server.lock:
            owner.requests[name].append(begin)
            owner.paths.append(self.path)
            fault = owner.faults[name].pop(0) if owner.faults[name] else owner.fault
        with suppress(OSError):
            self._answer(name, begin if owner.ranges else 0, fault)

    def _answer(self, name: str, begin: int, fault: str) -> None:
        kind, _, number = fault.partition(":")
        path = self.server.owner.folder / name
        if kind == "open":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(path.read_bytes()[: int(number)])
            self.close_connection = True
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
        if kind == "checksum":
            headers["Content-MD5"] = hashlib.md5(content).hexdigest()
            content = content[:-1] + bytes([content[-1] ^ 1])
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
            slow, wait = {"drip": (int(number or 0), 0.01), "crawl": (len(part), 0.2)}.get(
                kind, (0, 0.0)
            )
            for at in range(slow):  # byte by byte
                self.wfile.write(part[at : at + 1])
                if self.server.stopping.wait(wait):
                    return
            self.wfile.write(part[slow:])
            self.close_connection = kind == "long"


class _Listener(Server):
    owner: ShardServer


class ShardServer:
    """Serves the files of a folder.

    Attributes:
        faults: name -> what befalls the next requests for it, one each: "503" or any status, "reset:N" and "cut:N" after N
            bytes, "open:N" no more than N bytes and no announced length,
            "hold:N" no more than N bytes until it is killed, "drip:N" byte by byte for N bytes, "crawl", "silent",
            "long" (more bytes announced than there are), "page" (a web page in its place), "checksum" (a bit flipped),
            "changed" (another ETag).
        fault: the fault of all other requests; "" for none.
        requests: name -> the first byte that each request asked for.
        paths: the requested paths, as the requests wrote them.
        ranges: whether range requests are understood.
    """

    def __init__(self, folder: Path, ranges: bool = True) -> None:
        self.folder, self.ranges = folder, ranges
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        self.fault = ""
        self.requests: defaultdict[str, list[int]] = defaultdict(list)
        self.paths: list[str] = []
        self.connections: set[socket.socket] = set()
        self.port = 0
        self._listener: _Listener | None = None
        self.start()

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._listener = _Listener(_Handler, self.port)
        self._listener.owner, self.port = self, self._listener.port
        self._listener.start()

    def kill(self) -> None:
        """Stop listening and break all connections."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        for connection in set(self.connections):
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
