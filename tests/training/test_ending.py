"""However a training process ends, it ends soon, says why, and leaves no process behind: at 1 and at 2 ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.tars import write_source
from support.tiny_clip import CLIP_TEXT, NATIVE_VISION, write_retrieval_set

# Seconds that a whole run may take, start of the model included, on a machine that is busy with other things.
LIMIT_SECONDS = 90
# Seconds that the other ranks may need after the first has ended.
AFTER_SECONDS = 20


class Trainings:
    """`forking_training.py` as a program that trains on request."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "support" / "forking_training.py"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, fault: str | None, *extra: str, name: str | None = None, **request) -> tuple[dict, str, Path]:
        """What the run came to, what it printed, and its folder."""
        self.count += 1
        name = name or f"run{self.count}"
        output = self.folder / f"output{self.count}"
        arguments = [
            "--model", "tiny", "--device", "cpu", "--precision", "fp32", "--warmup", "2",
            "--log-every-n-steps", "1", "--train-data", f"a={self.folder / 'a'}", "--batch-size", "4", "--dga-steps", "2",
            "--workers", "1", "--epochs", "2", "--save-every-steps", "2", "--name", name, *extra,
        ]  # fmt: skip
        request = {
            "arguments": arguments, "model_config": str(self.folder / "tiny.json"), "fault": fault, "cwd": str(self.folder),
            "output": str(output), "limit": LIMIT_SECONDS, "after": AFTER_SECONDS, **request,
        }  # fmt: skip
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline()), output.read_text(), self.folder / "logs" / name


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ending")
    config = {"embed_dim": 24, "vision_cfg": NATIVE_VISION, "text_cfg": CLIP_TEXT}
    (folder / "tiny.json").write_text(json.dumps(config))
    write_source(folder / "a", 0, 60, 13)
    trainings = Trainings(folder)
    yield trainings
    trainings.server.stdin.close()
    trainings.server.wait(timeout=60)


# fault -> exit status, and words that the process prints
CAUSES = {
    "defect in the step": (1, "ZeroDivisionError: a defect in the step"),
    "defect in the loss": (1, "ZeroDivisionError: a defect in the loss"),
    "defect in a loader worker": (1, "LookupError: a defect in the transform"),
    "out of memory": (1, "training.main: error: the device's memory is full (CUDA out of memory. Tried"),
    "exit in the step": (3, ""),
    "ctrl-c": (
        130,
        "training.main: stopped; step 2 of epoch 0 is saved. The same command goes on from there with --name",
    ),
    "ctrl-c twice": (130, "training.main: interrupted"),
    "sigterm": (85, "for the launcher"),
    "loader worker killed": (2, "loader worker 0 of rank 0 was lost"),
    "full disk": (2, "cannot be written"),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", CAUSES)
def test_one_rank_ends(train, fault):
    status, words = CAUSES[fault]
    done, printed, folder = train(fault)
    assert done == {"statuses": [status], "seconds": 0.0, "left": 0}, printed[-3000:]
    assert words in printed and printed.count("Traceback") == (
        1 if status == 1 and "error: the" not in words else 0
    ) + (1 if fault == "defect in a loader worker" else 0)
    assert (folder / "requeue").exists() == (fault == "sigterm")


@pytest.mark.timeout(200)
def test_a_broken_picture_in_the_retrieval_data_ends_the_run(train):
    pairs = write_retrieval_set(train.folder / "pairs", [1, 1, 1, 1])
    shard = next(Path(train.folder / "pairs").rglob("*.tar"))
    content = bytearray(shard.read_bytes())
    start = content.index(b"\x89PNG")
    content[start : start + 60] = bytes(60)
    shard.write_bytes(content)
    done, printed, _ = train(None, "--retrieval-data", f"r={train.folder / 'pairs'}", "--epochs", "1")
    assert done["statuses"][0] not in (0, None) and done["left"] == 0, (printed[-3000:], pairs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "fault_rank", "statuses", "words"),
    [
        ("defect in the step", 1, [1, 1], "[rank 0] training.main: error: another rank has ended"),
        ("killed", 1, [1, -9], "[rank 0] training.main: error: another rank has ended"),
        ("killed", 0, [-9, 1], "[rank 1] training.main: error: another rank has ended"),
        ("full disk", 0, [2, 1], "cannot be written"),
        ("ctrl-c", 1, [130, 130], "is saved. The same command goes on"),
    ],
)
def test_two_ranks_end(train, fault, fault_rank, statuses, words):
    """Without torchrun, which would end the other rank after a while: each sees by itself that it is alone."""
    done, printed, _ = train(fault, ranks=2, fault_rank=fault_rank)
    assert done["statuses"] == statuses and done["left"] == 0, printed[-3000:]
    assert done["seconds"] < AFTER_SECONDS and words in printed
