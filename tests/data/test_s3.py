"""Shards in S3, through s3fs, from a stand-in of S3 on loopback that is killed and comes back."""

from __future__ import annotations

import threading

import pytest

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.shards.cache import ShardCache
from support import loading
from support.tars import write_source


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("s3fs", reason="needs the package s3fs")
    moto = pytest.importorskip("moto.server", reason="needs the package moto[server]")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    servers = [server]

    def restart(seconds: float) -> None:
        servers[-1].stop()

        def start() -> None:
            servers.append(moto.ThreadedMotoServer(port=port))  # what it holds is in this process
            servers[-1].start()

        threading.Timer(seconds, start).start()

    server.restart = restart
    yield server
    servers[-1].stop()


def loader_of(data: str, workers: int, cache: ShardCache | None = None):
    options = {"cache": cache, "shuffle_window_samples": 12, "stall_timeout_seconds": 60}
    return loading.loader_of(data, 5, workers=workers, **options)


@pytest.mark.slow  # moto and botocore take seconds to import, and are not among the test packages
@pytest.mark.timeout(300)
def test_shards_in_s3(server, tmp_path):
    import fsspec

    disk = f"cc={write_source(tmp_path / 'cc', 0, 40, 10)}"
    remote = "cc=s3://bucket/cc/{00000..00003}.tar"
    store = fsspec.filesystem("s3")
    store.mkdir("bucket")
    for file in sorted((tmp_path / "cc").iterdir()):
        store.pipe_file(f"bucket/cc/{file.name}", file.read_bytes())
    cache = ShardCache(str(tmp_path / "cache"), 1 << 30)
    for workers, kept in ((0, None), (2, None), (2, cache)):
        whole = [ids.tolist() for _, ids in loader_of(disk, workers)]
        seen = []
        loader = loader_of(remote, workers, kept)
        for number, (_, ids) in enumerate(loader):
            seen.append(ids.tolist())
            if number == 0 and workers == 0:
                server.restart(2)
        assert seen == whole and loader.lost == {}
        if workers == 0:
            assert loader.stats.epoch.waited["cc"].shards >= 1
    with pytest.raises(UserError, match=r"remote shards of source 'cc' have no size, first s3://bucket/gone"):
        parse_sources(remote.replace("bucket/cc", "bucket/gone"))
