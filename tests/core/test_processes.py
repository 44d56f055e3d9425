"""Stop signals to the supervisor of a training: its ranks have the time that they need, and they end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from open_clip_zerovl.core.processes import children_of
from support import ROOT

SUPERVISE = """
import sys
from open_clip_zerovl.core.processes import supervise
sys.exit(supervise(sys.argv[2:], torchrun=sys.argv[1] == "torchrun"))
"""
TORCHRUN = f"{sys.executable} {ROOT / 'src/training/main.py'} --torchrun --standalone --nproc-per-node=2 --".split()
SLOW_TO_SAVE = """
import os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
pathlib.Path(f"started{os.environ['RANK']}").touch()
while not asked:
    time.sleep(0.05)
time.sleep(float(sys.argv[-1]))
pathlib.Path(f"saved{os.environ['RANK']}").touch()
while len(list(pathlib.Path().glob("saved*"))) < 2:  # as in a training: torchrun would end the later one
    time.sleep(0.05)
sys.exit(85)
"""


def supervised(folder: Path, program: str, *command: str) -> subprocess.Popen:
    """A program that `supervise` watches in a folder."""
    (folder / "program.py").write_text(program)
    kind = "torchrun" if command else "single"
    line = [sys.executable, "-c", SUPERVISE, kind, *(command or [sys.executable, "program.py"])]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    return subprocess.Popen(
        line, cwd=folder, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    )


def descendants(pid: int) -> list[int]:
    below = children_of(pid)
    return [*below, *(child for parent in below for child in descendants(parent))]


@pytest.mark.parametrize(
    ("number", "saving_seconds", "everyone"),
    [
        (signal.SIGUSR1, 0.5, True),  # torchrun gets it, too, as from some schedulers
        # torchrun kills its ranks 30 s after it was asked to stop
        pytest.param(
            signal.SIGTERM, 34, False, marks=pytest.mark.slow(reason="waits for 34 seconds")
        ),
    ],
)
def test_ranks_that_are_asked_to_stop_have_the_time_they_need(
    tmp_path, number, saving_seconds, everyone
):
    run = supervised(tmp_path, SLOW_TO_SAVE, *TORCHRUN, "program.py", str(saving_seconds))
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("started*"))) < 2:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        for pid in [run.pid, *(children_of(run.pid) if everyone else [])]:
            os.kill(pid, number)
        assert run.wait(timeout=saving_seconds + 30) == 85
    finally:
        for pid in [*descendants(run.pid), run.pid] if run.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_training_ends_with_a_supervisor_that_is_killed(tmp_path):
    """A scheduler starts the job again, and two runs would write into one folder."""
    program = (
        "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    )
    run = supervised(tmp_path, program)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{pid}/stat").exists()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    ):
        assert time.monotonic() < deadline or os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
