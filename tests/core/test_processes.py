"""A training as a command: our program among others named `training`, its processes, its signals, its exit status.

Ranks that are asked to stop have the time that they need, and they end with their supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from open_clip_zerovl.core import processes
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import (
    StopSignals,
    children_of,
    follow_training,
    gpu_memories,
    missing_ranks,
    ranks_here,
    start_training,
    take_gpus,
    training_command,
)
from support import ROOT, warm
from support.programs import COMMON, kill, wait_until
from support.tars import write_source
from support.tiny_clip import WORDS, write_bert

ZEROVL = [sys.executable, "-m", "open_clip_zerovl.cli", "train"]


def collide(folder: Path) -> Path:
    """A current folder with modules that have the names of the training program and of its imports."""
    for name in ("training", "elsewhere/training"):
        (folder / name).mkdir(parents=True)
        for module in ("__init__", "__main__", "main", "early", "params"):
            (folder / name / f"{module}.py").write_text(
                "raise SystemExit('another program called training')"
            )
    (folder / "training.py").write_text("raise SystemExit('a file called training')")
    for name in ("data", "config", "evaluate"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')")
    return folder


def test_another_module_called_training_is_never_started(tmp_path):
    """As far as the model's name, which is checked once everything is imported."""
    collide(tmp_path)
    path = os.pathsep.join([str(tmp_path / "elsewhere"), str(ROOT / "src")])
    done = subprocess.run(
        [warm.python(), *ZEROVL[1:], "--device", "cpu", "--dataset-type", "synthetic", "--model", "nothing"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "knows no model 'nothing'" in done.stderr, done.stderr
    assert list(tmp_path.glob("logs/*")) == []


def test_a_foreign_training_program_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_FOLDER", tmp_path)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "main.py").write_text("from open_clip import create_model")
    with pytest.raises(UserError, match="another package called training was installed over it"):
        training_command([])


def test_stop_signals_are_heard_within_their_block_alone():
    """Else Ctrl-C would be without effect after a training in a process that goes on, such as a notebook's."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(
    ("words", "gpus", "rest"),
    [
        ([], None, []),
        (["--", "--lr", "1"], None, ["--lr", "1"]),
        (["--lr", "1", "--gpus", "4", "--wd", "2"], 4, ["--lr", "1", "--wd", "2"]),
        (["--gpus=2"], 2, []),
    ],
)
def test_gpus_is_taken_out_of_the_flags(words, gpus, rest):
    assert take_gpus(words) == (gpus, rest)
    with pytest.raises(UserError, match="--gpus 0"):
        take_gpus([*words, "--gpus=0"])


@pytest.fixture
def four_gpus(tmp_path, monkeypatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 1 2 3; do echo $((i * 1024)); done; echo '[N/A]'")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("visible", "memories"),
    [
        (None, [1, 2, 3, 0]),
        ("", []),
        ("2,0", [3, 1]),
        (" 1 ", [2]),
        ("GPU-0,GPU-3", [0, 0]),
        ("-1", []),
        ("0,9,1", [1]),
        ("0,-1,1", [1]),
    ],
)
def test_memory_of_the_visible_gpus(four_gpus, visible, memories):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_memories(environment) == memories


def test_a_driver_that_hangs_is_named(four_gpus, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60")
    monkeypatch.setattr(processes, "_DRIVER_SECONDS", 0.2)
    ended: list[subprocess.Popen] = []
    with monkeypatch.context() as patch, pytest.raises(UserError, match="answered in 0.2 seconds"):
        patch.setattr(
            subprocess.Popen, "kill", lambda program: ended.append(program)
        )  # no signal ends it in the driver
        gpu_memories({})
    assert [program.poll() for program in ended] == [None]  # it is not waited for
    ended[0].kill()
    ended[0].wait()


@pytest.mark.parametrize(
    ("asked", "device", "environment", "ranks"),
    [
        (None, "cuda", {}, 4),
        (2, "cuda", {}, 2),
        (None, "cuda", {"CUDA_VISIBLE_DEVICES": "2"}, 1),
        (None, "cuda", {"CUDA_VISIBLE_DEVICES": ""}, 1),
        (None, "cuda:1", {}, 1),
        (None, "cpu", {}, 1),
        (3, "cpu", {}, 3),
        (None, "cuda", {"WORLD_SIZE": "8"}, 1),
        (None, "cuda", {"SLURM_NTASKS": "2"}, 1),
        (None, "cuda", {"SLURM_NTASKS": "1"}, 4),
        (5, "cuda", {}, "--gpus 5 does not work, visible GPUs here: 4; leave it out"),
        (
            2,
            "cuda",
            {"CUDA_VISIBLE_DEVICES": "1"},
            r"visible GPUs here: 1 \(CUDA_VISIBLE_DEVICES=1\)",
        ),
        (2, "cuda", {"CUDA_VISIBLE_DEVICES": ""}, "visible GPUs here: 0 "),
        (2, "cuda:1", {}, "--gpus 2 does not work, --device cuda:1 is one"),
        (2, "cuda", {"WORLD_SIZE": "8"}, "--gpus 2 does not work, torchrun"),
    ],
)
def test_how_many_processes(four_gpus, asked, device, environment, ranks):
    if isinstance(ranks, int):
        assert ranks_here(asked, device, environment) == ranks
    else:
        with pytest.raises(UserError, match=ranks):
            ranks_here(asked, device, environment)


# A rank that notes each signal, and ends after the number of them in its last word. Its parent stands for torchrun.
RANK = """
import os, pathlib, signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
pathlib.Path(f"started{os.getpid()}").touch()
while len(seen) < int(sys.argv[1]):
    time.sleep(0.02)
time.sleep(0.5)
pathlib.Path(f"seen{os.getpid()}").write_text(" ".join(signal.Signals(number).name for number in seen))
sys.exit(130)
"""
PARENT = """
import subprocess, sys
rank = [sys.executable, "program.py", sys.argv[1]]
ranks = [subprocess.Popen(rank, start_new_session=True) for _ in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""
SUPERVISE = """
import sys
from open_clip_zerovl.core.processes import supervise
sys.exit(supervise(sys.argv[2:], torchrun=sys.argv[1] == "torchrun"))
"""


def supervised(folder: Path, program: str, *command: str, kind: str = "single") -> subprocess.Popen:
    """A program that `supervise` watches in a folder."""
    (folder / "program.py").write_text(program)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, kind, *command], cwd=folder, start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "ranks"), [("torchrun", 2), ("single", 1)])
@pytest.mark.parametrize("presses", [1, 2])
def test_each_rank_gets_ctrl_c_once_each_time(tmp_path, kind, ranks, presses):
    """A terminal signals its whole foreground group; a rank that got it twice would take it for the second Ctrl-C."""
    (tmp_path / "parent.py").write_text(PARENT)
    program = "program.py" if kind == "single" else "parent.py"
    run = supervised(tmp_path, RANK, sys.executable, program, str(presses), kind=kind)
    wait_until(lambda: len(list(tmp_path.glob("started*"))) == ranks, run)
    for _ in range(presses):
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.4)
    assert run.wait(timeout=30) == 130
    assert [path.read_text() for path in tmp_path.glob("seen*")] == [
        " ".join(["SIGINT"] * presses)
    ] * ranks


@pytest.mark.slow(reason="torchrun and two ranks that import torch, four times")
@pytest.mark.timeout(400)
def test_two_processes_train_and_stop_with_a_checkpoint(tmp_path):
    """Over gloo in a folder with other programs called training: to the end; by Ctrl-C and SIGTERM.

    A run on unnamed data, which no step checkpoint could resume, ends by SIGTERM too.
    """
    collide(tmp_path)
    write_bert(tmp_path / "bert", words=[*WORDS, "sample", *"0123456789"])
    data = f"a={write_source(tmp_path / 'a', 0, 40, 10)}"
    line = [
        *ZEROVL,
        "--gpus",
        "2",
        *COMMON,
        "--model",
        "zerovl-emoji",
        "--text-model",
        "bert",
        "--train-data",
        data,
    ]
    line += ["--batch-size", "2", "--dga-steps", "2", "--workers", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def start(name: str, epochs: int) -> subprocess.Popen:
        with open(tmp_path / f"{name}.err", "a") as err:
            return subprocess.Popen(
                [*line, "--epochs", str(epochs), "--name", name, "--resume", "latest"],
                cwd=tmp_path, env=environment, stderr=err, start_new_session=True,
            )  # fmt: skip

    def said(name: str) -> str:
        return (tmp_path / f"{name}.err").read_text()

    whole = start("whole", 1)
    assert whole.wait(timeout=120) == 0, said("whole")
    assert (tmp_path / "logs" / "whole" / "checkpoints" / "epoch_1.pt").exists()
    for name, number, status in (("ctrl-c", signal.SIGINT, 130), ("sigterm", signal.SIGTERM, 85)):
        run = start(name, 10_000)
        wait_until(lambda name=name: "Train Epoch: 1 " in said(name), run)
        os.killpg(run.pid, number)
        assert run.wait(timeout=60) == status, said(name)
        assert "is saved. The same command goes on from there" in said(
            name
        ) and "Traceback" not in said(name)
        assert list((tmp_path / "logs" / name / "checkpoints").glob("step_*.pt"))
    line[line.index(data)] = f"{tmp_path / 'a'}/{{00000..00003}}.tar"
    run = start("unnamed", 10_000)
    wait_until(lambda: "Train Epoch: 1 " in said("unnamed"), run)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(timeout=60) == 128 + signal.SIGUSR1 and "Traceback" not in said("unnamed"), (
        said("unnamed")
    )
    assert not list((tmp_path / "logs" / "unnamed").glob("checkpoints/step_*.pt"))


# Stands for the training program: prints something, then ends with a status, or on SIGTERM with that of a stop.
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
print("training.main: error: too much", "and more", file=sys.stderr, flush=True)
time.sleep(60 * (sys.argv[1] == "wait"))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A function that starts the stub with a word, and its log."""
    monkeypatch.setattr(
        processes,
        "training_command",
        lambda words, processes: [sys.executable, "-c", PROGRAM, *words],
    )
    return lambda word: start_training([word], log=tmp_path / "log", threads=1)


def test_a_training_that_is_started_tells_how_it_ended(program):
    training = program("0")
    training.check()
    assert training.process.returncode == 0
    with pytest.raises(
        UserError, match=r"ended with status 3: too much and more \(the whole output: .*log\)"
    ):
        program("3").check()


def test_a_training_that_is_started_is_stopped_with_a_checkpoint(program):
    training = program("wait")
    wait_until(lambda: training.log.read_text(), training.process)
    assert training.process.poll() is None
    training.stop()
    assert training.process.returncode == 85
    with pytest.raises(UserError, match="was stopped; make the same call again"):
        training.check()


# Ends when it was asked twice.
ASKED_TWICE = """
import signal, time
asked = []
def ask(*_):
    asked.append(1)
    print("asked", flush=True)
signal.signal(signal.SIGINT, ask)
print("starts", flush=True)
while len(asked) < 2:
    time.sleep(0.01)
"""


def test_each_interrupt_of_a_notebook_reaches_the_training(monkeypatch):
    """The second one ends it at once: it is in a group of its own."""
    command = [sys.executable, "-c", ASKED_TWICE]
    monkeypatch.setattr(processes, "training_command", lambda words, ranks: command)
    lines = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) < 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow_training([], 1, interrupt)
    assert lines == ["starts", "asked", "asked"]


def test_ctrl_c_in_the_moment_of_a_fork_is_not_lost(tmp_path):
    """Python loses an exception that a signal's handler raises within its hooks of a fork."""
    armed = [True]

    def press() -> None:
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)

    before = children_of(os.getpid())
    os.register_at_fork(before=press)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests left
    try:
        with pytest.raises(KeyboardInterrupt):
            start_training(["--help"], log=tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert children_of(os.getpid()) == before and not armed


GLOO_WITHOUT_MEMORY = """
import os, resource, sys, time
import torch
from open_clip_zerovl.core.processes import require_threads

def ending(megabytes, guarded):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (megabytes << 20),) * 2)
        try:
            if guarded:
                require_threads()
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            os._exit(0)
        except (RuntimeError, MemoryError):
            os._exit(2)
    for _ in range(100):
        ended, word = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(word)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

guarded = sys.argv[1] == "guarded"
print({ending(megabytes, guarded) for megabytes in range(8, 44, 3)})
"""


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_process_group_without_memory_for_its_threads_is_an_error_and_no_hang(guarded):
    """Without the guard, gloo hangs or aborts (slow: it waits for those that hang)."""
    words = [sys.executable, "-c", GLOO_WITHOUT_MEMORY, "guarded" if guarded else "bare"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert (eval(said) <= {0, 2}) == guarded, said


@pytest.mark.parametrize(
    ("environment", "waits"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "2"}, True),  # a batch script
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "4294967290"}, True),  # the shell of salloc
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, False),  # srun
        ({"SLURM_NTASKS": "2", "WORLD_SIZE": "2"}, False),  # torchrun
    ],
)
def test_a_process_without_its_ranks_says_that_it_waits(environment, waits):
    sentence = missing_ranks(environment)
    assert (sentence is not None) == waits
    assert not waits or sentence.startswith("waiting for 1 of 2 ranks (SLURM_NTASKS=2)")


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
    command = [*TORCHRUN, "program.py", str(saving_seconds)]
    run = supervised(tmp_path, SLOW_TO_SAVE, *command, kind="torchrun")
    try:
        wait_until(lambda: len(list(tmp_path.glob("started*"))) == 2, run)
        for pid in [run.pid, *(children_of(run.pid) if everyone else [])]:
            os.kill(pid, number)
        assert run.wait(timeout=saving_seconds + 30) == 85
    finally:
        kill(run)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_training_ends_with_a_supervisor_that_is_killed(tmp_path):
    """A scheduler starts the job again, and two runs would write into one folder."""
    program = (
        "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    )
    run = supervised(tmp_path, program, sys.executable, "program.py")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), run)
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    run.kill()
    run.wait()
    wait_until(lambda: not stat.exists() or "Z" in stat.read_text().rpartition(")")[2])
