"""Remote shards: a broken transfer continues at the byte where it broke, and one that stays broken ends in a sentence."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.remote import RemoteStream, RetryPolicy, Wait, check_openable, open_url
from open_clip_zerovl.shards.transfers import Unreachable
from support.shard_server import shard_server

CONTENT = bytes(range(256)) * 16_000  # 4 MB, more than aiohttp buffers


@pytest.fixture
def server(tmp_path):
    (tmp_path / "0.tar").write_bytes(CONTENT)
    with shard_server(tmp_path) as server:
        yield server


def patient(waits: list[Wait] | None = None, **options) -> RetryPolicy:
    quick = {
        "first_wait_seconds": 0.01,
        "longest_wait_seconds": 0.05,
        "stall_seconds": 1.0,
        **options,
    }
    return RetryPolicy(**quick, waits=(waits if waits is not None else []).append)


def read_all(url: str, policy: RetryPolicy, size: int = 70_001) -> bytes:
    parts = []
    with open_url(url, policy) as stream:
        while part := stream.read(size):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    "faults, reason",
    [
        (["503", "503"], "server answered 503"),
        (["429"], "server answered 429"),
        (["reset:3500000", "reset:30000"], "cut off"),
        (["cut:3500000", "cut:5", "503"], "server answered 503"),
        (["silent"], "server sent nothing"),
        (["crawl"], "came slower than 1024 bytes/s"),
        (["long"], "cut off"),
    ],
)
def test_a_broken_transfer_goes_on_at_its_byte(server, faults, reason, ranges):
    server.ranges, server.faults["0.tar"] = ranges, list(faults)
    waits: list[Wait] = []
    if (
        faults == ["long"] and ranges
    ):  # the range after the last byte is requested, and does not exist
        server.faults["0.tar"] += ["416"]
        with pytest.raises(Unreachable, match="server answered 416"):
            read_all(server.url("0.tar"), patient(waits))
        return
    assert read_all(server.url("0.tar"), patient(waits)) == CONTENT
    (wait,) = waits
    assert (
        sum(wait.reasons.values()) == len(faults)
        and reason in wait.reasons
        and 0 < wait.seconds < 20
    )
    asked = server.requests["0.tar"]
    assert len(asked) == len(faults) + 1 and asked == sorted(asked)
    if faults[0].startswith(("reset", "cut")):
        assert 0 < asked[1] <= 3_500_000  # what had come is not asked for again


def test_a_url_is_asked_for_as_it_is_written(server):
    """A signature may cover the escaped characters of a URL."""
    for query in ("?a=b%2Fc%27&d=%20", "?a=b/c&d=1+2", ""):
        assert len(read_all(server.url("0.tar") + query, patient())) == len(CONTENT)
        assert server.paths[-1] == f"/0.tar{query}"


def test_a_slow_drip_that_ends_is_not_an_interruption(server):
    server.faults["0.tar"] = ["drip:150"]
    waits: list[Wait] = []
    assert read_all(server.url("0.tar"), patient(waits, stall_seconds=5)) == CONTENT and waits == []


def test_a_server_that_dies_and_comes_back(server):
    waits: list[Wait] = []
    policy = patient(
        waits, first_wait_seconds=0.05, longest_wait_seconds=0.1, retries=200, stall_seconds=30
    )
    server.faults["0.tar"] = ["hold:100000"]
    with RemoteStream(server.url("0.tar"), policy) as stream:
        content = stream.read(90_000)
        server.kill()
        threading.Timer(2, server.start).start()
        content += stream.read(len(CONTENT))
    assert content == CONTENT and server.requests["0.tar"][-1] >= 90_000
    assert waits[0].reasons["no connection"] >= 3 and waits[0].seconds < 20


def test_a_shard_that_does_not_come_ends_after_its_retries(server):
    server.fault = "503"
    policy = patient(retries=3)
    with pytest.raises(
        Unreachable, match=r"^server answered 503 after 3 retries in 0 s$"
    ) as raised:
        read_all(server.url("0.tar"), policy)
    assert raised.value.passing and len(server.requests["0.tar"]) == 4
    # The outage has been waited out once: the next shard is asked once, and the first that comes ends it.
    with pytest.raises(Unreachable, match=r"^server answered 503$"):
        read_all(server.url("0.tar"), policy)
    assert len(server.requests["0.tar"]) == 5
    server.fault = ""
    assert read_all(server.url("0.tar"), policy) == CONTENT and not policy.failed
    server.kill()
    with pytest.raises(Unreachable, match=r"^no connection after 3 retries"):
        read_all(server.url("0.tar"), policy)


def test_what_a_server_says_for_good_is_not_asked_again(server):
    for name, fault, words in (
        ("gone.tar", "", "no such file"), ("0.tar", "403", "answered 403$"), ("1.tar", "401", "answered 401, .* HF_TOKEN"),
    ):  # fmt: skip
        server.fault = fault
        policy = patient()
        with pytest.raises(Unreachable, match=words) as raised:
            read_all(server.url(name), policy)
        assert not raised.value.passing and len(server.requests[name]) == 1 and not policy.failed


def test_a_shard_that_changes_while_it_is_read_is_not_mended_together(server):
    server.faults["0.tar"] = ["cut:3500000", "changed"]
    with pytest.raises(
        Unreachable, match="it has changed on the server while it was read at byte [1-9]"
    ):
        read_all(server.url("0.tar"), patient())


def test_patience_ends_before_the_loader_does(server):
    server.fault = "503"
    begin = time.monotonic()
    policy = RetryPolicy.within(2)
    with pytest.raises(Unreachable, match=r"server answered 503 after \d retries"):
        read_all(server.url("0.tar"), policy)
    assert time.monotonic() - begin < 2


def test_a_store_of_fsspec(monkeypatch):
    """s3:, gs: and the like by the same code, with fsspec's store in memory that loses its connection now and then."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/0.tar", CONTENT)
    stock, opened = type(store).open, []

    def failing(self, path, *arguments, **options):
        opened.append(path)
        if len(opened) <= 2:
            raise ConnectionResetError(104, "Connection reset by peer")
        file = stock(self, path, *arguments, **options)
        return DropsOff(file) if len(opened) == 3 else file

    monkeypatch.setattr(type(store), "open", failing)
    waits: list[Wait] = []
    try:
        assert read_all("memory://bucket/0.tar", patient(waits)) == CONTENT
        with pytest.raises(Unreachable, match="no such file"):
            read_all("memory://bucket/1.tar", patient())
    finally:
        store.rm("/bucket", recursive=True)
    assert waits[0].reasons == {"cut off": 2, "server sent nothing": 1}


class DropsOff:
    """A store's file that gives two parts and then times out."""

    def __init__(self, file) -> None:
        self.file, self.left = file, 2

    def seek(self, at: int) -> int:
        return self.file.seek(at)

    def read(self, size: int) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise TimeoutError
        return self.file.read(min(size, 50_000))

    def close(self) -> None:
        pass


class Hub(BaseHTTPRequestHandler):
    """The hub's answer to a download: a redirect to another host, which has the file. Keeps (path, token) of each request."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        at_the_hub = "/resolve/" in self.path
        self.send_response(302 if at_the_hub else 200)
        if at_the_hub:
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/stored")
        self.send_header("Content-Length", "0" if at_the_hub else str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(b"" if at_the_hub else CONTENT)

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("hf://datasets/user/photos/train/0.tar", "/datasets/user/photos/resolve/main/train/0.tar"),
        (
            "hf://datasets/user/photos@refs%2Fpr%2F1/0.tar",
            "/datasets/user/photos/resolve/refs%2Fpr%2F1/0.tar",
        ),
        ("hf://user/model/0 1.tar", "/user/model/resolve/main/0%201.tar"),
    ],
)
def test_shards_on_the_hugging_face_hub(monkeypatch, url, path):
    """Asked for with the user's token, which goes to the hub alone and not to the host that it redirects to."""
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    try:
        check_openable(url)
        Hub.asked.clear()
        assert read_all(url, patient()) == CONTENT
    finally:
        hub.shutdown()
        hub.server_close()
    assert Hub.asked == [(path, "Bearer hf_secret"), ("/stored", None)]


def test_a_url_that_names_no_file_on_the_hub_is_refused():
    for url in ("hf://datasets/user/photos", "hf://0.tar"):
        with pytest.raises(UserError, match="write hf://datasets/USER/NAME/FILE.tar"):
            check_openable(url)
    with pytest.raises(ValueError, match="'us er/photos'"):  # huggingface_hub's sentence
        check_openable("hf://datasets/us er/photos/0.tar")


def test_a_command_is_run_again_and_what_is_known_dropped(tmp_path):
    shard, count = tmp_path / "0.tar", tmp_path / "count"
    shard.write_bytes(CONTENT)
    command = f"pipe:echo >> {count}; [ $(wc -l < {count}) -gt 2 ] && cat {shard} || (head -c 100000 {shard}; exit 7)"
    waits: list[Wait] = []
    assert read_all(command, patient(waits)) == CONTENT
    assert waits[0].reasons == {"command ended with status 7": 2}
    with pytest.raises(Unreachable, match=r"^command ended with status 3 after 3 retries"):
        read_all("pipe:exit 3", patient())


def test_a_reader_that_rests_does_not_use_up_the_patience(server):
    """Few samples are asked for of a small source: its stream rests for minutes, and may break meanwhile."""
    server.faults["0.tar"] = ["reset:300000"]
    with open_url(server.url("0.tar"), patient(most_seconds=0.3)) as stream:
        parts = [stream.read(70_001)]
        time.sleep(0.5)
        while part := stream.read(70_001):
            parts.append(part)
    assert b"".join(parts) == CONTENT and len(server.requests["0.tar"]) == 2
