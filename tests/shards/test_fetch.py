"""Remote shards become local files: whole, once a machine, from where a transfer broke; the cache keeps to its bound."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.shards.fetch import (
    RetryPolicy,
    ShardCache,
    Unreachable,
    ahead_of_reading,
    fetch_file,
    is_shard,
)
from open_clip_zerovl.shards.files import open_index
from open_clip_zerovl.shards.urls import asked_wait
from support.servers import Handler, Server, ShardServer
from support.tars import write_source

GIB = 2**30
CONTENT = bytes(range(256)) * 16_000  # 4 MB
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def server(tmp_path):
    """A server of two tars of 10 samples each, and of a large file."""
    write_source(tmp_path / "cc", 0, 40, 10)
    (tmp_path / "cc/large").write_bytes(CONTENT)
    with ShardServer(tmp_path / "cc") as server:
        yield server


@pytest.fixture
def cache(tmp_path) -> ShardCache:
    return ShardCache(str(tmp_path / "cache"), GIB)


def patient(reasons: list[str] | None = None, **options) -> RetryPolicy:
    quick = {
        "first_wait_seconds": 0.01,
        "longest_wait_seconds": 0.05,
        "stall_seconds": 1.0,
        **options,
    }
    return RetryPolicy(**quick, retried=(reasons if reasons is not None else []).append)


def read(cache: ShardCache, url: str, policy: RetryPolicy | None = None, **options) -> bytes:
    with cache.borrowed(url, policy or patient(), **options) as path:
        return Path(path).read_bytes()


def original(server: ShardServer, number: int) -> bytes:
    return (server.folder / f"{number:05d}.tar").read_bytes()


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


#: The faults of the requests for a file, one after the other -> the reasons of the retries; after them the file comes.
FAULTS = {
    "none": ([], []),
    "overloaded": (["503", "500"], ["server answered 503", "server answered 500"]),
    "too many requests": (["429"], ["server answered 429"]),
    "reset in the middle": (["reset:3500000", "reset:30000"], ["cut off"] * 2),
    "reset at the start": (["reset:0"], ["cut off"]),
    "cut, cut, overloaded": (
        ["cut:3500000", "cut:5", "503"],
        ["cut off"] * 2 + ["server answered 503"],
    ),
    "silent": (["silent"], ["server sent nothing"]),
    "slow": (["crawl"], ["came slower than 1024 bytes/s"]),
    "slow at first": (["drip:100"], []),
    "a wrong length": (["long"], ["cut off"]),
    "another version": (["cut:3500000", "changed"], ["cut off", "changed on its server"]),
    "no length, cut": (
        ["open:2048"],
        ["cut off"],
    ),  # before the second sample: what came has no torn member
}
#: The same where it matters whether the server understands ranges.
BY_RANGES = {
    # nothing follows, and so it begins again
    ("a wrong length", True): (["long", "416"], ["cut off", "server answered 416"]),
    # it begins again in any case
    ("another version", False): (["cut:3500000", "changed"], ["cut off"]),
}


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("case", FAULTS)
def test_a_file_comes_whole_whatever_breaks(server, cache, case, ranges):
    faults, expected = BY_RANGES.get((case, ranges), FAULTS[case])
    tar = original(server, 0)
    if case != "no length, cut":
        tar += CONTENT
    (server.folder / "0.tar").write_bytes(tar)
    server.ranges, server.faults["0.tar"] = ranges, list(faults)
    reasons: list[str] = []
    policy = patient(reasons, stall_seconds=2.0 if case == "slow at first" else 0.5)
    assert read(cache, server.url("0.tar"), policy) == tar and reasons == expected
    asked = server.requests["0.tar"]
    assert len(asked) == len(expected) + 1
    if faults[:1] in (["reset:3500000"], ["cut:3500000"]):
        assert 0 < asked[1] <= 3_500_000  # what had come is not asked for again
    assert not list(Path(cache.folder).rglob("part")) + list(Path(cache.folder).rglob("room"))


@pytest.mark.parametrize(
    ("name", "fault", "words", "requests"),
    [
        ("00000.tar", "503", r"^server answered 503 after 3 retries$", 4),
        ("00000.tar", "cut:3000", r"^cut off at byte 3000 after 3 retries$", 4),
        ("00000.tar", "page", r"^no tar or parquet after 1 retry$", 2),
        ("00000.tar", "403", r"^server answered 403$", 1),
        ("gone.tar", "", r"^no such file$", 1),
    ],
)
def test_what_does_not_come_ends_in_a_sentence(server, cache, name, fault, words, requests):
    server.fault, server.ranges = fault, False
    policy = patient(retries=3)
    with pytest.raises(Unreachable, match=words) as raised:
        read(cache, server.url(name), policy, check=is_shard)
    assert len(server.requests[name]) == requests
    assert raised.value.passing == bool(policy.failed) == (fault in ("503", "cut:3000"))
    assert not [path for path in Path(cache.folder).rglob("*.tar") if path.is_file()]


def test_an_outage_is_waited_out_once(server, cache):
    server.fault = "503"
    policy = patient(retries=3)
    for requests in (4, 5):  # the second time it is asked once
        with pytest.raises(Unreachable, match="server answered 503"):
            read(cache, server.url("00000.tar"), policy)
        assert len(server.requests["00000.tar"]) == requests
    server.fault = ""
    assert read(cache, server.url("00000.tar"), policy) == original(server, 0)
    assert not policy.failed


def test_a_url_is_asked_for_as_it_is_written_and_its_token_is_not_kept(server, cache):
    """A signature may cover the escaped characters of a URL."""
    for query in ("?a=b%2Fc%27&secret=%20", "?a=b/c&secret=1+2"):
        assert read(cache, server.url("large") + query) == CONTENT
        assert server.paths[-1] == f"/large{query}"
    assert not [path for path in Path(cache.folder).rglob("*") if "secret" in path.name]


def _read_in_turn(cache: ShardCache, url: str, barrier, answers) -> None:
    barrier.wait()
    answers.put(read(cache, url, patient(stall_seconds=100.0)))


def test_several_processes_fetch_a_shard_once(server, cache):
    server.faults["00000.tar"] = ["drip:50"]
    barrier, answers = FORK.Barrier(4), FORK.Queue()
    arguments = (cache, server.url("00000.tar"), barrier, answers)
    children = [FORK.Process(target=_read_in_turn, args=arguments) for _ in range(4)]
    for child in children:
        child.start()
    assert {answers.get(timeout=60) for _ in children} == {original(server, 0)}
    for child in children:
        child.join()
    assert len(server.requests["00000.tar"]) == 1


def test_a_killed_fetch_goes_on_and_its_room_is_free_for_others(server, cache):
    server.faults["large"] = ["hold:1000000"]
    arguments = (cache, server.url("large"), FORK.Barrier(1), FORK.Queue())
    child = FORK.Process(target=_read_in_turn, args=arguments)
    child.start()
    parts = Path(cache.folder).glob
    wait_until(lambda: any(path.stat().st_size == 1_000_000 for path in parts("*/part")))
    child.kill()
    child.join()
    assert read(cache, server.url("large")) == CONTENT
    assert server.requests["large"] == [0, 1_000_000]
    server.faults["large"] = ["cut:500000"] * 9
    changed = ShardCache(cache.folder, GIB)
    (server.folder / "large").write_bytes(CONTENT[::-1])
    with pytest.raises(Unreachable):
        read(changed, server.url("large"), patient(retries=0))
    small = ShardCache(cache.folder, len(original(server, 0)) + 1000)  # holds no other file
    assert read(small, server.url("00000.tar")) == original(server, 0)
    assert used(Path(cache.folder)) <= small.limit_bytes


def test_a_kill_between_two_versions_mixes_no_bytes(server, cache, monkeypatch):
    server.faults["large"] = ["cut:1000000"]
    with pytest.raises(Unreachable):
        read(cache, server.url("large"), patient(retries=0))
    (server.folder / "large").write_bytes(CONTENT[::-1])
    write = Path.write_text

    def written_last(*arguments, **options):
        write(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", written_last)
        read(cache, server.url("large"))
    assert read(cache, server.url("large")) == CONTENT[::-1]


def test_the_bound_holds_and_the_least_recently_used_makes_room(server, tmp_path):
    size = max(len(original(server, number)) for number in range(4))
    cache = ShardCache(str(tmp_path / "cache"), 3 * (size + 100))
    for number in (0, 1, 2, 0, 3, 0):  # 3 takes the place of 1
        assert read(cache, server.url(f"{number:05d}.tar")) == original(server, number)
        assert used(tmp_path / "cache") <= cache.limit_bytes
        time.sleep(0.01)
    left = sorted(path.name[-9:] for path in (tmp_path / "cache").glob("*/*.tar"))
    assert left == ["00000.tar", "00002.tar", "00003.tar"]
    assert [len(server.requests[f"{number:05d}.tar"]) for number in range(4)] == [1, 1, 1, 1]


def test_what_is_being_read_stays(server, tmp_path):
    size = max(len(original(server, number)) for number in range(4))
    cache = ShardCache(str(tmp_path / "cache"), 2 * (size + 9000))
    quick = patient(stall_seconds=0.2)
    with ExitStack() as stack:
        paths = [
            stack.enter_context(cache.borrowed(server.url(f"{n:05d}.tar"), quick)) for n in (0, 1)
        ]
        with pytest.raises(UserError, match=r"has no room for a shard of .* --shard-cache-gib"):
            read(cache, server.url("00002.tar"), quick)
        assert [len(open_index(path)) for path in paths] == [10, 10]
        assert used(tmp_path / "cache") <= cache.limit_bytes
        released = threading.Timer(0.3, stack.pop_all().close)
        released.start()  # a shard that another reader gives back is waited for
        assert read(cache, server.url("00002.tar"), patient(stall_seconds=20)) == original(
            server, 2
        )
        released.join()


def test_each_run_asks_once_whether_a_shard_has_changed(server, cache):
    url, requests = server.url("00000.tar"), server.requests["00000.tar"]
    old, new = original(server, 0), original(server, 1)
    assert read(cache, url) == old
    (server.folder / "00000.tar").write_bytes(new)
    assert read(cache, url) == old and len(requests) == 1
    with cache.borrowed(url, patient()) as held:  # by an earlier run
        second = ShardCache(cache.folder, GIB)
        assert read(second, url) == new and Path(held).read_bytes() == old
    before = len(requests)
    assert read(second, url) == new and len(requests) == before
    server.kill()
    notes: list[str] = []
    assert read(ShardCache(cache.folder, GIB), url, notes=notes.append) == new
    assert notes == [
        "shards are taken from the cache without asking whether they have changed (no connection)"
    ]


def test_a_gzip_that_ends_in_its_first_header_is_no_shard(tmp_path):
    """tarfile neither accepts nor refuses it: it raises EOFError."""
    (tmp_path / "00000.tar").write_bytes(gzip.compress(CONTENT, mtime=0)[:15])
    assert not is_shard(tmp_path / "00000.tar")


def test_shards_are_fetched_ahead(server, cache):
    ahead = ahead_of_reading(cache, patient())
    server.faults["00000.tar"] = ["503"]  # the thread does not retry
    for number in (0, 1, 2):
        ahead(server.url(f"{number:05d}.tar"))
    wait_until(lambda: len(list(Path(cache.folder).glob("*/*.tar"))) == 2)
    ahead(None)
    for number in (0, 1, 2):
        assert read(cache, server.url(f"{number:05d}.tar")) == original(server, number)
    assert [len(server.requests[f"{number:05d}.tar"]) for number in range(3)] == [2, 1, 1]


def test_a_command_runs_once_and_again_from_its_beginning(server, cache, tmp_path):
    shard, count = server.folder / "large", tmp_path / "count"
    broken = f"(head -c 100000 {shard}; exit 7)"
    url = f"pipe:echo >> {count}; [ $(wc -l < {count}) -gt 2 ] && cat {shard} || {broken}"
    reasons: list[str] = []
    assert read(cache, url, patient(reasons)) == read(cache, url) == CONTENT
    assert reasons == ["command ended with status 7"] * 2 and count.read_text() == "\n" * 3
    read(
        ShardCache(cache.folder, GIB), url
    )  # another run: no server says whether it gives the same
    assert count.read_text() == "\n" * 4
    with pytest.raises(Unreachable, match=r"^command ended with status 3 after 3 retries"):
        read(cache, "pipe:exit 3")
    tiny = ShardCache(str(tmp_path / "tiny"), 1 << 14)  # a command announces no length
    with pytest.raises(UserError, match="has no room"):
        read(tiny, f"pipe:cat {shard}", patient(stall_seconds=0.1))
    assert used(tmp_path / "tiny") <= tiny.limit_bytes


def test_a_disk_that_cannot_be_written_ends_in_a_sentence(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be used \(.*\): give another folder with --shard"):
        read(ShardCache(str(tmp_path / "file"), GIB), server.url("large"))
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(UserError, match=r"part cannot be written \(No space left on device\)"):
        read(ShardCache(str(tmp_path / "cache"), GIB), server.url("large"))


def test_a_store_of_fsspec(cache, monkeypatch):
    """s3:, gs: and the like by the same code, with fsspec's store in memory that loses its connection now and then."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/0.tar", CONTENT)
    stock, opened = type(store).open, []

    def dropping(self, path, *arguments, **options):
        opened.append(path)
        return DropsOff(CONTENT) if len(opened) == 1 else stock(self, path, *arguments, **options)

    monkeypatch.setattr(type(store), "open", dropping)
    reasons: list[str] = []
    try:
        assert read(cache, "memory://bucket/0.tar", patient(reasons)) == CONTENT
        with pytest.raises(Unreachable, match="no such file"):
            read(cache, "memory://bucket/1.tar")
        with monkeypatch.context() as patch:  # a store that tells no version
            patch.setattr(type(store), "info", lambda *_, **__: {})
            store.pipe_file("/bucket/2.tar", CONTENT)
            assert [read(cache, "memory://bucket/2.tar") for _ in range(2)] == [CONTENT] * 2
    finally:
        store.rm("/bucket", recursive=True)
    assert reasons == ["server sent nothing"]


class DropsOff(io.BytesIO):
    """A store's file that gives two parts and then times out."""

    left = 2

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise TimeoutError
        return super().read(50_000)


class Hub(Handler):
    """The hub's answer to a download: a redirect to another host, which has the file. Keeps (path, token) of each request."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if "/resolve/" in self.path:
            self.answer(302, b"", {"Location": f"http://localhost:{self.server.port}/stored"})
        else:
            self.answer(200, CONTENT)


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
def test_shards_on_the_hugging_face_hub(cache, monkeypatch, url, path):
    """Asked for with the user's token, which goes to the hub alone and not to the host that it redirects to."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with Server(Hub) as hub:
        hub.asked = []
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        assert read(cache, url) == CONTENT
    assert hub.asked == [(path, "Bearer hf_secret"), ("/stored", None)]


def test_parquet_that_breaks_off_without_a_length_is_fetched_again(server, cache):
    content = b"PAR1" + CONTENT + b"PAR1"
    (server.folder / "0.parquet").write_bytes(content)
    server.faults["0.parquet"] = ["open:1000000"]
    assert read(cache, server.url("0.parquet")) == content


def test_a_large_file_is_resumed_by_the_next_call(server, tmp_path):
    server.faults["large"] = ["cut:1000000"]
    path = tmp_path / "annotations.zip"
    with pytest.raises(
        UserError, match=r"large cannot be fetched \(cut off at byte .*\); ask later"
    ):
        fetch_file(server.url("large"), path, advice="ask later", policy=patient(retries=0))
    for _ in range(2):
        fetch_file(server.url("large"), path, advice="")
    assert path.read_bytes() == CONTENT and server.requests["large"] == [0, 1_000_000]


@pytest.mark.parametrize(("asked", "seconds"), [("7", 7.0), ("Fri, 27 Nov 2026 10:00:00 GMT", 0.0)])
def test_a_busy_server_is_given_the_time_that_it_asks_for(asked, seconds):
    headers = Message()
    headers["Retry-After"] = asked
    assert asked_wait(HTTPError("http://a/b", 429, "busy", headers, None)) == seconds
    assert asked_wait(URLError("refused")) == 0
