"""The cache of remote shards: fetched once, whole, by one process; bounded; never taken from under a reader."""

from __future__ import annotations

import contextlib
import gzip
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from open_clip_zerovl.shards import cache as cache_module
from open_clip_zerovl.shards.cache import FetchAhead, ShardCache
from open_clip_zerovl.shards.index import FOLDER, TarIndex, open_index
from open_clip_zerovl.shards.members import locate_samples
from open_clip_zerovl.shards.remote import RetryPolicy
from open_clip_zerovl.shards.transfers import StalledShard, Unreachable
from support.shard_server import shard_server
from support.tars import write_source

GIB = 2**30
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def server(tmp_path):
    write_source(tmp_path / "cc", 0, 60, 10)
    with shard_server(tmp_path / "cc") as server:
        yield server


def patient(**options) -> RetryPolicy:
    return RetryPolicy(
        **{
            "first_wait_seconds": 0.01,
            "longest_wait_seconds": 0.05,
            "stall_seconds": 1.0,
            **options,
        }
    )


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read(cache: ShardCache, server, number: int, notes: list[str] | None = None) -> bytes | None:
    with cache.borrowed(
        server.url(f"{number:05d}.tar"), patient(), (notes if notes is not None else []).append
    ) as path:
        return Path(path).read_bytes() if path is not None else None


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def original(server, number: int) -> bytes:
    return (server.folder / f"{number:05d}.tar").read_bytes()


def test_a_shard_is_fetched_once_and_indexed(server, tmp_path):
    cache = ShardCache(str(tmp_path / "cache"), GIB)
    url = server.url("00000.tar?token=secret")
    with cache.borrowed(url, patient()) as path:
        assert len(list(locate_samples(path))) == 10
        assert Path(path).parent.joinpath(FOLDER, f"{Path(path).name}.npz").is_file()
        index = open_index(path)
        assert isinstance(index, TarIndex) and len(index) == 10
        with cache.borrowed(url, patient()) as again:
            assert again == path and Path(path).read_bytes() == original(server, 0)
    assert len(server.requests["00000.tar"]) == 1
    assert not any("secret" in file.read_text() for file in (tmp_path / "cache/.about").iterdir())


def test_the_bound_holds_and_the_least_recently_used_makes_room(server, tmp_path):
    size = len(original(server, 0))
    folder = tmp_path / "cache"
    cache = ShardCache(str(folder), 3 * size + 3 * (size // 8 + 9000))
    for number in (0, 1, 2, 0, 3, 0):  # 3 takes the place of 1
        assert read(cache, server, number) == original(server, number)
        assert used(folder) <= cache.limit_bytes
        os.utime(
            *[path for path in folder.glob(".about/*") if f"-{number:05d}" in path.name],
            ns=(time.time_ns(),) * 2,
        )
        time.sleep(0.01)
    left = sorted(path.name.partition("-")[2] for path in folder.glob("*.tar"))
    assert left == ["00000.tar", "00002.tar", "00003.tar"]
    assert [len(server.requests[f"{number:05d}.tar"]) for number in range(4)] == [1, 1, 1, 1]


def test_a_shard_that_gets_its_name_while_room_is_counted_is_counted(server, tmp_path, monkeypatch):
    """Another process renames it between the listing of the folder and the look at the file."""
    cache = ShardCache(str(tmp_path / "cache"), GIB)
    read(cache, server, 0)
    before = used(tmp_path / "cache")
    part = tmp_path / "cache" / "x.tar.part"
    part.write_bytes(bytes(1000))
    stock = cache_module._files

    def listed(folder: str) -> list:
        found = stock(folder)
        if part.exists() and Path(folder) == tmp_path / "cache":
            part.rename(part.with_suffix(""))
        return found

    monkeypatch.setattr(cache_module, "_files", listed)
    assert cache._used() == before + 1000


def test_what_is_being_read_stays(server, tmp_path):
    size = len(original(server, 0))
    cache = ShardCache(str(tmp_path / "cache"), 2 * size + 2 * (size // 8 + 9000))
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        for number in (0, 1):
            stack.enter_context(cache.borrowed(server.url(f"{number:05d}.tar"), patient()))
        assert read(cache, server, 2, notes) is None
        assert used(tmp_path / "cache") <= cache.limit_bytes
    assert (
        len(notes) == 1
        and "is full of shards that are being read" in notes[0]
        and "--shard-cache-gib" in notes[0]
    )
    assert read(cache, server, 2) == original(server, 2)


def _borrow(cache: ShardCache, url: str, barrier, answers) -> None:
    barrier.wait()
    with cache.borrowed(url, patient(stall_seconds=100.0)) as path:
        answers.put(Path(path).read_bytes())


def test_several_processes_fetch_a_shard_once(server, tmp_path):
    cache = ShardCache(str(tmp_path / "cache"), GIB)
    server.faults["00000.tar"] = ["drip:50"]
    barrier, answers = FORK.Barrier(4), FORK.Queue()
    children = [
        FORK.Process(target=_borrow, args=(cache, server.url("00000.tar"), barrier, answers))
        for _ in range(4)
    ]
    for child in children:
        child.start()
    assert {answers.get(timeout=60) for _ in children} == {original(server, 0)}
    for child in children:
        child.join()
    assert len(server.requests["00000.tar"]) == 1


def test_a_process_that_dies_while_it_fetches_leaves_nothing_in_the_way(server, tmp_path):
    folder = tmp_path / "cache"
    cache = ShardCache(str(folder), GIB)
    server.faults["00000.tar"] = ["drip:100000"]
    child = FORK.Process(
        target=_borrow, args=(cache, server.url("00000.tar"), FORK.Barrier(1), FORK.Queue())
    )
    child.start()
    wait_until(lambda: any(path.stat().st_size for path in folder.glob("*.part")))
    waiting = cache.borrowed(server.url("00000.tar"), patient(most_seconds=0.3))
    with pytest.raises(StalledShard, match="another process has been fetching it for 0.3 s"):
        waiting.__enter__()
    child.kill()
    child.join()
    # Its reserved space is free for other shards, and the next reader that asks fetches the shard.
    small = ShardCache(str(folder), 2 * len(original(server, 1)))
    assert read(small, server, 1) == original(server, 1) and not list(folder.glob("*.part"))
    assert read(cache, server, 0) == original(server, 0)


@pytest.mark.parametrize("fault", ["page", "checksum", "cut:3000", "503"])
def test_what_is_not_the_shard_is_not_kept(server, tmp_path, fault):
    cache = ShardCache(str(tmp_path / "cache"), GIB)
    server.faults["00000.tar"] = [fault]
    assert read(cache, server, 0) == original(server, 0) and len(server.requests["00000.tar"]) == 2
    server.fault = fault
    if fault.startswith("cut"):
        server.fault = "503"
    with pytest.raises(Unreachable):
        read(cache, server, 1)
    assert [path.name.partition("-")[2] for path in (tmp_path / "cache").glob("[!.]*")] == [
        "00000.tar"
    ]


def test_each_run_asks_once_whether_a_shard_has_changed(server, tmp_path):
    folder = str(tmp_path / "cache")
    assert read(ShardCache(folder, GIB), server, 0) == original(server, 0)
    new = original(server, 1)
    old = original(server, 0)
    (server.folder / "00000.tar").write_bytes(new)
    assert read(ShardCache(folder, GIB, since=0.0), server, 0) == old
    second = ShardCache(folder, GIB)
    assert read(second, server, 0) == new
    before = len(server.requests["00000.tar"])
    assert read(second, server, 0) == new and len(server.requests["00000.tar"]) == before
    server.kill()
    notes: list[str] = []
    third = ShardCache(folder, GIB)
    assert read(third, server, 0, notes) == new
    assert notes == [
        "shards are taken from the cache without asking whether they have changed (no connection)"
    ]


def test_a_cache_that_cannot_be_written_is_read_past(server, tmp_path):
    (tmp_path / "cache").write_text("a file")
    notes: list[str] = []
    assert read(ShardCache(str(tmp_path / "cache"), GIB), server, 0, notes) is None
    assert (
        "cannot be used (File exists)" in notes[0] or "cannot be used (Not a directory)" in notes[0]
    )


def test_shards_are_fetched_ahead(server, tmp_path):
    cache = ShardCache(str(tmp_path / "cache"), GIB)
    ahead = FetchAhead(cache, patient())
    server.faults["00000.tar"] = ["503"]  # the thread does not retry
    for number in (0, 1, 2):
        ahead.want(server.url(f"{number:05d}.tar"))
    wait_until(lambda: len(list((tmp_path / "cache").glob("*.tar"))) >= 2)
    ahead.close()
    for number in (0, 1, 2):
        assert read(cache, server, number) == original(server, number)
    assert [len(server.requests[f"{number:05d}.tar"]) for number in range(3)] == [2, 1, 1]


def test_a_command_is_cached_too(server, tmp_path):
    cache = ShardCache(str(tmp_path / "cache"), GIB)
    url = f"pipe:echo >> {tmp_path}/ran; cat {server.folder}/00000.tar"
    for _ in range(2):
        with cache.borrowed(url, patient()) as path:
            assert Path(path).read_bytes() == original(server, 0)
    assert (tmp_path / "ran").read_text() == "\n"
    tiny = ShardCache(str(tmp_path / "tiny"), 1 << 14)
    with tiny.borrowed(url, patient()) as path:
        assert path is None
    assert used(tmp_path / "tiny") <= tiny.limit_bytes


def test_a_compressed_shard_without_its_end_is_not_kept(tmp_path):
    """tarfile raises EOFError on a gzip file that ends within its first header, and so neither accepts nor refuses it."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "00000.tar").write_bytes(gzip.compress(os.urandom(4000))[:15])
    with (
        shard_server(served) as server,
        pytest.raises(Unreachable, match="no tar or parquet, 3 times"),
    ):
        read(ShardCache(str(tmp_path / "cache"), GIB), server, 0)


@pytest.mark.parametrize("bytes_", [700, 512 * 20])  # within the first member, within another one
def test_a_shard_that_breaks_off_where_no_length_was_announced_is_fetched_again(
    server, tmp_path, bytes_
):
    server.faults["00001.tar"] = [f"open:{bytes_}", "open:9999999"]
    cache = ShardCache(str(tmp_path / "cache"), GIB)
    assert read(cache, server, 1) == original(server, 1)
    server.faults["00002.tar"] = [f"open:{bytes_}"] * 3
    with pytest.raises(Unreachable, match="cut off, 3 times"):
        read(cache, server, 2)
