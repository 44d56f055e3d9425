"""A source on a server is the source on the disk: the same batches whatever faults the network has; retries are logged."""

from __future__ import annotations

import logging
import time

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.shards.fetch import ShardCache
from support import loading
from support.servers import ShardServer
from support.tars import write_source

SHARDS, PER_SHARD = 4, 10


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_source(tmp_path / "cc", 0, SHARDS * PER_SHARD, PER_SHARD)
    with ShardServer(tmp_path) as server:
        yield server


def loader_of(data: str, **options) -> MixtureLoader:
    return loading.loader_of(
        data, 5, shuffle_window_samples=12, **{"stall_timeout_seconds": 20, **options}
    )


def epoch_of(loader: MixtureLoader, epoch: int = 0) -> list[list[int]]:
    loader.set_epoch(epoch)
    return [ids.tolist() for _, ids in loader]


def on_disk(server) -> str:
    return f"cc={server.folder}/cc/{{00000..0000{SHARDS - 1}}}.tar"


def on_server(server) -> str:
    return f"cc={server.url('cc/')}{{00000..0000{SHARDS - 1}}}.tar"


@pytest.mark.parametrize(("strategy", "workers"), [("random", 0), ("debiased", 2)])
def test_through_the_cache(server, tmp_path, strategy, workers, caplog):
    """Two epochs and an entry in the middle of one, over a cache that holds half of the shards, whatever faults there are."""
    write_source(tmp_path / "dd", 1000, SHARDS * PER_SHARD, PER_SHARD)
    data = f"{on_disk(server)}::{on_disk(server).replace('cc', 'dd')}"
    remote = data.replace(str(tmp_path), server.url().rstrip("/"))
    options = {"workers": workers, "strategy": strategy}
    size = (tmp_path / "cc/00000.tar").stat().st_size
    # each process reads a shard of each source, and the next one is fetched ahead
    cache = ShardCache(
        str(tmp_path / "cache"), (4 if workers == 0 else 7) * (size + size // 8 + 9000)
    )
    if workers == 0:  # what is fetched ahead is not retried, but asked for again by its reader
        server.faults.update({
            "cc/sizes.json": ["503"], "cc/00000.tar": ["503", "reset:9000"], "cc/00001.tar": ["cut:5000", "drip:40"],
            "cc/00003.tar": ["silent"],
        })  # fmt: skip
    caplog.set_level(logging.WARNING)
    entered = []
    for loader in (loader_of(data, **options), loader_of(remote, cache=cache, **options)):
        entered.append([epoch_of(loader, 0), epoch_of(loader, 1)])
        loader.set_epoch(1, 7)
        entered[-1].append([ids.tolist() for _, ids in loader])
    assert entered[0] == entered[1] and entered[0][1][7:] == entered[0][2]
    assert (
        sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
        <= cache.limit_bytes
    )
    said = [record.message for record in caplog.records]
    retried = "Shards of source 'cc' are fetched with retries (server answered 503)."
    assert (retried in said) == (workers == 0)
    assert len(said) == len(set(said)) <= 3  # each reason once


def test_a_server_that_is_gone_ends_in_one_sentence(server):
    loader = loader_of(on_server(server), stall_timeout_seconds=5)
    server.kill()
    with pytest.raises(
        UserError,
        match=r"could not be fetched \(no connection after \d retries\), nor could 3",
    ):
        epoch_of(loader)


def test_one_shard_that_never_comes_is_replaced(server):
    server.faults["cc/00002.tar"] = ["500"] * 1000
    loader = loader_of(on_server(server), stall_timeout_seconds=3)
    assert len(epoch_of(loader)) == 8
    assert loader.lost == {"cc": {"unreadable shard": PER_SHARD}}


@pytest.mark.parametrize("name", ["sizes.json", "manifest.json"])
def test_a_file_that_does_not_come_is_not_taken_for_none(server, monkeypatch, name):
    """Without the manifest all captions of a packed picture would be one text."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server.faults["cc/sizes.json"] = ["404"]
    with pytest.raises(UserError, match="4 remote shards of source 'cc' have no size"):
        parse_sources(on_server(server))
    server.faults[f"cc/{name}"] = ["503"] * 9
    with pytest.raises(
        UserError, match=rf"{name} could not be fetched .*server answered 503 after 8 retries"
    ):
        parse_sources(on_server(server))


def test_the_sizes_of_a_url_lie_beside_it_behind_its_token(server):
    (source,) = parse_sources(f"a={server.url('cc/00000.tar')}?token=a/b")
    assert source.sizes == (PER_SHARD,) and "/cc/sizes.json?token=a/b" in server.paths


@pytest.mark.parametrize("sizes", ["", "@{}/cc/sizes.json"])
def test_packed_shards_of_a_server_show_one_caption_as_those_on_disk(server, sizes):
    data = on_server(server) + sizes.format(server.folder)
    assert [parse_sources(each)[0].captions for each in (data, on_disk(server))] == [None, None]
    (server.folder / "cc/manifest.json").write_text('{"made_from": {}}')
    packed = [parse_sources(each)[0].captions for each in (data, on_disk(server))]
    assert packed == ["one-per-epoch"] * 2
    assert parse_sources(data, captions="joined")[0].captions == "joined"
