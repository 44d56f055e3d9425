"""Web servers on loopback that answer in threads within a `with`: shards, the hosts of old picture lists, a model hub."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

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

    def __init__(self, handler: type[Handler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
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
# Shards, served with faults; the server can be killed and come back
# ---------------------------------------------------------------------------------------------------------------------


class _Shards(Handler):
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


class _Listener(Server):
    owner: ShardServer


class ShardServer:
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
        """Listen on the same port as before."""
        self._listener = _Listener(_Shards, self.port)
        self._listener.owner, self.port = self, self._listener.port
        self._listener.__enter__()

    def kill(self) -> None:
        """Stop listening and break all connections."""
        if self._listener is not None:
            self._listener.__exit__()
            self._listener = None
        for connection in set(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def url(self, name: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


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


# ---------------------------------------------------------------------------------------------------------------------
# A model hub: tokens, repositories, commits and large files as huggingface_hub asks for them
# ---------------------------------------------------------------------------------------------------------------------


class ModelHub(Server):
    """The repositories {repository: {file: content}} and the number of commits. `fault` names what goes wrong next."""

    def __init__(self) -> None:
        super().__init__(_Hub)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.fault = ""


class _Hub(Handler):
    server: ModelHub

    def _send(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.answer(status, body, {"Content-Type": "application/json", **(headers or {})})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _refused(self) -> bool:
        role = {"Bearer writer": "write", "Bearer reader": "read"}.get(
            self.headers.get("Authorization", "")
        )
        if role is None:
            self._send({"error": "Invalid user token."}, 401)
        return role is None

    def do_PUT(self) -> None:
        content = self._body()
        if self.server.fault == "upload":  # the line goes dead in the middle of a large file
            self.close_connection = True
            self.connection.close()
            return
        self.server.objects[self.path.rsplit("/", 1)[1]] = content
        self._send(b"")

    def do_POST(self) -> None:
        content = self._body()
        if self._refused():
            return
        if self.path == "/api/repos/create":
            self._create(json.loads(content))
        elif self.path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(content)["files"]
            modes = [
                ("lfs" if file["path"].endswith(".safetensors") else "regular") for file in files
            ]
            answer = [
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
                for file, mode in zip(files, modes, strict=True)
            ]
            self._send({"files": answer})
        elif self.path.endswith("/info/lfs/objects/batch"):
            large = [
                {
                    **item,
                    "actions": {"upload": {"href": f"{self.server.address}/objects/{item['oid']}"}},
                }
                for item in json.loads(content)["objects"]
            ]
            self._send(
                {"objects": large, "transfer": "basic"},
                headers={"Content-Type": "application/vnd.git-lfs+json"},
            )
        else:
            self._commit(self.path.split("/api/models/")[1].split("/commit/")[0], content)

    def _create(self, asked: dict) -> None:
        name = (
            f"{asked['organization']}/{asked['name']}"
            if asked.get("organization")
            else f"me/{asked['name']}"
        )
        if not name.startswith("me/"):
            self._send(
                {"error": "You don't have the rights to create a model under this namespace"}, 403
            )
            return
        there = name in self.server.repositories
        self.server.repositories.setdefault(name, {})
        if (
            asked.get("private") or asked.get("visibility") == "private"
        ):  # before and since huggingface_hub 1.0
            self.server.private.add(name)
        self._send({"url": f"{self.server.address}/{name}", "name": name}, 409 if there else 200)

    def _commit(self, name: str, content: bytes) -> None:
        if self.server.fault == "commit":
            self._send({"error": "Internal Error"}, 500)
            return
        for line in content.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.server.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.server.repositories[name][value["path"]] = self.server.objects[value["oid"]]
        self.server.commits.append(name)
        commit = hashlib.sha1(str(len(self.server.commits)).encode()).hexdigest()
        address = f"{self.server.address}/{name}/commit/{commit}"
        self._send({"success": True, "commitOid": commit, "commitUrl": address, "hookOutput": ""})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/api/whoami-v2":
            if not self._refused():
                role = "read" if self.headers["Authorization"].endswith("reader") else "write"
                self._send(
                    {
                        "name": "me",
                        "type": "user",
                        "orgs": [],
                        "auth": {"accessToken": {"role": role}},
                    }
                )
        elif "/revision/" in path:  # before huggingface_hub 1.0: where large files go
            self._send(
                {"id": path.split("/api/models/")[1].split("/revision/")[0], "xetEnabled": False}
            )
        elif "/resolve/" in path:
            name, file = path.strip("/").split("/resolve/")
            content = self.server.repositories.get(name, {}).get(file.split("/", 1)[1])
            if content is None:
                self._send({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            else:
                tag = hashlib.sha1(content).hexdigest()
                self._send(content, headers={"ETag": f'"{tag}"', "X-Repo-Commit": "0" * 40})
        else:
            self._send({"error": "not found"}, 404)
