"""Training from a server that is killed, drips and comes back ends with the same weights as from the disk, bit for bit."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from support.programs import COMMON, ForkedTrainings, flat_tensors, state_of
from support.shard_server import ShardServer, shard_server
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION

DOWN_SECONDS = 2.0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two sources, the weights that training from it comes to by ranks, and a program that trains."""
    folder = tmp_path_factory.mktemp("remote")
    (folder / "tiny.json").write_text(
        json.dumps({"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT})
    )
    for name, first in (("a", 0), ("b", 1000)):
        write_source(folder / name, first, 60, 13)
    trainings = ForkedTrainings()

    def train(name: str, where: str, ranks: int, *extra: str, status: int = 0) -> str:
        words = f"""--train-data a={where}/a/{{00000..00004}}.tar::b={where}/b/{{00000..00004}}.tar --debiased-sampling
        --batch-size 4 --dga-steps 2 --workers 1 --epochs 2 --aug-cfg scale=(0.6,1.0) --name {name}"""
        request = {
            "model_config": str(folder / "tiny.json"),
            "cwd": str(folder),
            "limit": 120,
            "after": 60,
        }
        output = folder / f"{name}.txt"
        answer, printed = trainings(
            [*COMMON, *words.split(), *extra], output, ranks=ranks, **request
        )
        assert answer["statuses"] == [status] * ranks and answer["left"] == 0, printed[-3000:]
        return printed

    yield folder, train
    trainings.close()


@contextmanager
def sabotage(server: ShardServer, after: int):
    """Kill the server for a while after this number of requested shards."""
    done = threading.Event()

    def run() -> None:
        while (
            sum(len(asked) for name, asked in server.requests.items() if name.endswith(".tar"))
            < after
        ):
            if done.wait(0.005):
                return
        server.kill()
        time.sleep(DOWN_SECONDS)
        server.start()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def weights_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    weights = flat_tensors(state_of(folder, name, 2))
    weights.pop("/zerovl", None)
    return weights


@pytest.mark.slow(
    reason="half a minute; tests/shards reads through the same faults without training"
)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks, gib", [(1, "1"), (1, "0.0003"), (2, "0.0003")])
def test_the_same_weights_as_from_the_disk(place, tmp_path, ranks, gib):
    folder, train = place
    disk, remote = f"disk{ranks}", f"remote{ranks}-{gib}"
    if not (folder / "logs" / disk).exists():
        train(disk, str(folder), ranks)
    with shard_server(folder) as server, sabotage(server, after=4):
        server.faults.update({
            "a/00000.tar": ["503", "reset:30000"], "a/00001.tar": ["drip:60"], "a/00003.tar": ["cut:9000", "429"],
            "b/sizes.json": ["503"], "b/00002.tar": ["long", "drip:30"], "b/00001.tar": ["silent"],
        })  # fmt: skip
        extra = ["--shard-cache", str(tmp_path / "cache"), "--shard-cache-gib", gib]
        printed = train(remote, server.url().rstrip("/"), ranks, *extra)
    first, second = weights_of(folder, disk), weights_of(folder, remote)
    assert first.keys() == second.keys()
    assert not [key for key in first if not torch.equal(first[key], second[key])]
    assert "replaced" not in printed
    used = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert 100_000 < used <= float(gib) * 2**30
