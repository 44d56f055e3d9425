"""Processes of a training: their command, their start, their stop signals, and their end with the process that started them.

    training_command(arguments, processes)         the command line; its signals and its exit status are the training's
    start_training(arguments, processes, log=...)  the same as a child of this process, with its words in a file
    follow_training(arguments, processes, say)     the same to its end, with its words handed on line by line

SIGTERM, SIGUSR1 and SIGHUP (a lost terminal) are passed on to the ranks of a training as SIGUSR1, which asks them to agree on a
step, save it and end. Ctrl-C is passed on as it is, once each time it is pressed. torchrun does not get them: it would kill the
ranks after 30 s, and an optimizer step with its checkpoint can take longer.

The library never imports `training`. The command names a file of that package which lies beside this one, in a checkout as in
an installed wheel. So neither a `training.py` in the current folder nor a fork of open_clip with a package of that name is ever
taken for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import Parser

PREEMPTED_STATUS = 85  # exit status of a training that was stopped with a step checkpoint; torchrun turns it into 1
REQUEUE_MARKER = "requeue"  # a file in the run's folder: the launcher is to start this run again with --resume latest

REMIND_SECONDS = 5.0  # a rank that is still starting ignores SIGUSR1, so it is sent again
# Removed for the ranks that torchrun starts: open_clip would take a launcher's SLURM task number for the rank.
SLURM_RANKS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 0.2
_BUFFER_BYTES = 64 << 20  # OpenBLAS's is 32 MiB on x86
# Ctrl-C: the first asks to save, the second to end; after more torchrun is asked to end the ranks.
_INTERRUPTS_PASSED_ON = 2
PROCESSES = (
    "--processes"  # begins a line of training/main.py: --processes N --, or --processes gpus --
)
EACH_GPU = "gpus"
_FOLDER = Path(__file__).resolve().parents[2]
# open_clip's older releases have a package `training` with a main.py, too: installed later, it overwrites files of ours.
_MARK = "open_clip_zerovl"
CPU_MICRO_BATCH = 16  # samples at once on a CPU, where nobody gives a number
MEMORY_FULL = "the device's memory is full"  # begins the last sentence of a training without memory
_STOP_SECONDS = 600.0  # for a step and its checkpoint
_DRIVER_SECONDS = 60.0  # in which nvidia-smi answers unless the driver hangs
_LAST_LINES = 40  # of a log, which are searched for an error
_FIRST_SHELL_STEP = 0xFFFFFFF0  # SLURM's numbers of steps that are a shell or a script begin here

# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def training_command(arguments: Sequence[str], processes: int | None = 1) -> list[str]:
    """Make the command line of a training, whose exit status is its own and whose stop signals reach all of its processes.

    Args:
        arguments: the flags of `python -m training.main`.
        processes: ranks on this machine; torchrun starts more than one. None: one for each visible GPU, counted when the
            command runs.

    Raises:
        UserError: the training program is not where it was installed.
    """
    program = _FOLDER / "training" / "main.py"
    try:
        ours = _MARK in program.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise UserError(
            f"the training program is not whole in {program.parent}: another package called training was installed over it, "
            "or the installation is cut short; install open_clip_zerovl again"
        )
    count = EACH_GPU if processes is None else str(processes)
    how = [] if processes == 1 else [PROCESSES, count, "--"]
    return [sys.executable, str(program), *how, *arguments]


def take_gpus(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Split a line into the number of `--gpus` (None if it is not given) and the other words.

    Raises:
        UserError: it is not a positive number.
    """
    parser = Parser(prog="zerovl train", add_help=False)
    parser.add_argument("--gpus", type=int)
    given, rest = parser.parse_known_args(words[1:] if words[:1] == ["--"] else words)
    if given.gpus is not None and given.gpus < 1:
        raise UserError(f"--gpus {given.gpus} is out of range; give at least 1")
    return given.gpus, rest


# ---------------------------------------------------------------------------------------------------------------------
# A child process that trains
# ---------------------------------------------------------------------------------------------------------------------


class TrainingStopped(UserError):
    """A training that ended by a signal: the same call goes on with it."""


class MemoryFull(UserError):
    """A training ended since its device has too little memory for its micro-batch."""


def _check(status: int, printed: Iterable[str], log: Path | None = None) -> None:
    """Look at the exit status of a training.

    Raises:
        TrainingStopped: it was stopped or killed.
        MemoryFull: its device has too little memory.
        UserError: it failed (its last error is in the sentence).
    """
    if status in (PREEMPTED_STATUS, 130, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT):
        raise TrainingStopped("the training was stopped; make the same call again to go on")
    if status != 0:
        lines = [line.strip() for line in printed if line.strip()] or ["it printed nothing"]
        errors = [line for line in lines[-_LAST_LINES:] if "error" in line.lower()]
        error = (errors or lines)[-1].removeprefix("training.main: error: ")
        kind = TrainingStopped if status < 0 or status > 128 else UserError
        if MEMORY_FULL in error:
            kind = MemoryFull
        place = f" (the whole output: {log})" if log else ""
        raise kind(f"the training ended with status {status}: {error}{place}")


@dataclass(frozen=True)
class TrainingProcess:
    """A training that runs as a child of this process.

    Attributes:
        process: the child.
        log: the file with its words (standard output and standard error).
    """

    process: subprocess.Popen
    log: Path

    def stop(self) -> None:
        """Ask the training to save a checkpoint and end, wait for it, and kill it after ten minutes."""
        self.process.terminate()
        try:
            self.process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def check(self) -> None:
        """Wait for the training's end.

        Raises:
            TrainingStopped: it was stopped or killed.
            MemoryFull: its device has too little memory.
            UserError: it failed (its last error is in the sentence).
        """
        status = self.process.wait()
        printed = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        _check(status, printed, self.log)


def start_training(
    arguments: Sequence[str], processes: int | None = 1, *, log: Path, threads: int | None = None
) -> TrainingProcess:
    """Start a training as a child of this process. It saves a checkpoint and ends when this process is killed.

    Args:
        arguments, processes: see `training_command`.
        log: a file to which the training's words are appended.
        threads: CPU threads of a rank; None: torch's choice for one rank, an equal share of the cores for several.

    Raises:
        UserError: see `training_command`.
    """
    environment = None if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with open(log, "ab") as file:
        child = _start(
            training_command(arguments, processes),
            stdout=file,
            stderr=file,
            env=environment,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
    return TrainingProcess(child, log)


def _start(command: Sequence[str], **how: Any) -> subprocess.Popen:
    """Start a child, and end it again after a Ctrl-C in that moment, which Python loses within its hooks of a fork.

    Raises:
        KeyboardInterrupt: after the child has ended.
    """
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        return subprocess.Popen(command, **how)
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        child = subprocess.Popen(command, **how)
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        child.terminate()
        child.wait()
        raise KeyboardInterrupt
    return child


def follow_training(
    arguments: Sequence[str], processes: int | None, say: Callable[[str], None]
) -> None:
    """Run a training as a child of this process to its end.

    Args:
        arguments, processes: see `training_command`.
        say: is called with each line that the training prints.

    Raises:
        UserError: see `training_command`; the training failed (its last error is in the sentence), or was stopped.
        KeyboardInterrupt: Ctrl-C, after the training has saved a checkpoint and ended; a second one ends it at once.
    """
    child = _start(
        training_command(arguments, processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        preexec_fn=begin_child,  # out of the group that a notebook interrupts as a whole
    )
    assert child.stdout is not None
    printed: deque[str] = deque(maxlen=_LAST_LINES)
    interrupt: KeyboardInterrupt | None = None
    try:
        while True:
            try:
                for line in child.stdout:
                    printed.append(line)
                    say(line.rstrip("\n"))
                status = child.wait()
                break
            except KeyboardInterrupt as error:  # a notebook's, which does not reach the child
                interrupt = error
                child.send_signal(signal.SIGINT)
    except BaseException:  # of `say`
        child.send_signal(signal.SIGINT)
        child.stdout.read()  # a child whose words nobody reads waits for ever
        child.wait()
        raise
    if interrupt is not None:
        raise interrupt
    _check(status, printed)


# ---------------------------------------------------------------------------------------------------------------------
# Stop signals
# ---------------------------------------------------------------------------------------------------------------------


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends, on Linux alone.

    To Linux the parent is the *thread* that started this process: call it only if that thread lives as long as the parent,
    such as its main thread.

    Args:
        number: the signal.
        parent: the parent's process number, as the parent itself gave it; with it a parent that has already ended is noticed.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def begin_child() -> None:
    """Prepare torchrun or the single rank: a group of its own, SIGUSR1 ignored, an end with its supervisor.

    A terminal's Ctrl-C goes to a whole group; so it reaches the supervisor alone, and each rank gets it once. A scheduler may
    send SIGUSR1 to all processes of a job, and it would end torchrun. The ranks inherit this until they set their own handler.
    Without the third, ranks of a killed launcher would train on while the job is started again.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent(signal.SIGTERM)


def supervise(
    command: Sequence[str],
    *,
    torchrun: bool,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a training and pass stop signals on to its ranks.

    Args:
        torchrun: the command is torchrun, whose children are the ranks; else it is the single rank.

    Returns:
        Its exit status; 128 + N where signal N ended it.
    """
    with StopSignals() as stop:
        child = subprocess.Popen(command, env=environment, preexec_fn=begin_child)
        passed_on, remind_at = 0, 0.0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout=_POLL_SECONDS)
                return status if status >= 0 else 128 - status
            ranks = children_of(child.pid) if torchrun else [child.pid]
            if stop.asked and time.monotonic() >= remind_at:
                _send(signal.SIGUSR1, ranks)
                remind_at = time.monotonic() + REMIND_SECONDS
            if stop.interrupts > passed_on:
                passed_on = stop.interrupts
                if ranks and passed_on <= _INTERRUPTS_PASSED_ON:
                    _send(signal.SIGINT, ranks)
                else:
                    child.terminate()


def children_of(parent: int) -> list[int]:
    """List the running child processes of a process, from /proc."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid ...", where a name may hold blanks and brackets
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended since it was listed
            continue
        if int(ppid) == parent and state != "Z":
            children.append(int(stat.parent.name))
    return children


def _send(number: int, processes: Sequence[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


class StopSignals:
    """Memory of signals within a block: SIGTERM, SIGUSR1 and SIGHUP in `asked`, the number of Ctrl-C in `interrupts`."""

    def __init__(self) -> None:
        self.asked = 0
        self.interrupts = 0
        self._earlier_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            # nohup has SIGHUP ignored
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._earlier_handlers[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.asked = 1


# ---------------------------------------------------------------------------------------------------------------------
# GPUs, ranks and cores
# ---------------------------------------------------------------------------------------------------------------------


def gpu_memories(environment: Mapping[str, str] = os.environ) -> list[float]:
    """Ask nvidia-smi for the GiB of each NVIDIA GPU that CUDA_VISIBLE_DEVICES lets a process see, without torch.

    A GPU or a part of one that is named (GPU-..., MIG-...) counts with the memory of the smallest.

    Raises:
        UserError: the driver does not answer.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if (named is not None and not named.strip()) or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    program = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        printed, _ = program.communicate(timeout=_DRIVER_SECONDS)
    except subprocess.TimeoutExpired as error:
        program.kill()  # not waited for: it ends with its call of the driver, perhaps never
        raise UserError(
            f"nvidia-smi has not answered in {_DRIVER_SECONDS:g} seconds: NVIDIA's driver hangs, and a run would, too; restart "
            'the machine, or set CUDA_VISIBLE_DEVICES="" to run on the CPU'
        ) from error
    lines = printed.splitlines() if program.returncode == 0 else []
    # "[N/A]" if it is shared with the CPU
    memories = [int(line) / 1024 if line.strip().isdecimal() else 0.0 for line in lines]
    if named is None or not memories:
        return memories
    visible: list[float] = []
    for name in map(str.strip, named.split(",")):
        # As the driver reads it: up to the first that does not exist.
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= len(memories)):
            break
        visible.append(memories[int(name)] if name.isdecimal() else min(memories))
    return visible


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, srun or mpirun has started this process as one of several ranks."""
    sizes = ("WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
    return any(
        environment.get(name, "").isdecimal() and int(environment[name]) > 1 for name in sizes
    )


def missing_ranks(environment: Mapping[str, str] = os.environ) -> str | None:
    """Word that a process waits for ranks which nobody has started.

    The shell of `salloc -n 2`, and a batch script, say the number of tasks; srun alone starts them, each in a step.
    """
    tasks, step = environment.get("SLURM_NTASKS", ""), environment.get("SLURM_STEP_ID", "")
    by_srun = step.isdecimal() and int(step) < _FIRST_SHELL_STEP
    if "WORLD_SIZE" in environment or by_srun or not tasks.isdecimal() or int(tasks) < 2:
        return None
    return (
        f"waiting for {int(tasks) - 1} of {tasks} ranks (SLURM_NTASKS={tasks}), which this process alone does not start: start "
        "the training with srun, or unset SLURM_NTASKS"
    )


def rank_here() -> str:
    """Return the rank that a launcher has given this process as text, "" without a launcher."""
    # open_clip's, in its order
    variables = ("RANK", "PMI_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return next((os.environ[name] for name in variables if name in os.environ), "")


def name_of_rank() -> str:
    """Name the training program in its messages, with its rank where there are several."""
    return f"[rank {rank_here()}] training.main" if is_rank() else "training.main"


def ranks_here(asked: int | None, device: str, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of training processes on this machine.

    Args:
        asked: their number; None: one for each visible GPU.
        device: the flag `--device`.

    Raises:
        UserError: a number that this machine cannot have.
    """
    most, why = 1, f"--device {device} is one"
    if is_rank(environment):
        why = "torchrun, srun or mpirun starts the processes"
    elif device == "cpu":
        return asked or 1
    elif device == "cuda":
        visible = len(gpu_memories(environment))
        only = environment.get("CUDA_VISIBLE_DEVICES")
        most, why = max(1, visible), f"visible GPUs here: {visible}"
        why += "" if only is None else f" (CUDA_VISIBLE_DEVICES={only})"
    if asked is not None and asked > most:
        raise UserError(
            f"--gpus {asked} does not work, {why}; leave it out, or give --device cpu for processes on the CPU"
        )
    return asked or most


def usable_cores() -> int:
    """Count the CPU cores that this process may use by its affinity and the container's quota (cgroup v2)."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        allowed, _, period = quota.read_text(encoding="ascii").partition(" ")
        if allowed.isdigit():
            return max(1, min(affinity, round(int(allowed) / int(period))))
    return affinity


def require_threads(number: int = 8) -> None:
    """Start and end some threads at once, as many as gloo starts or more.

    A gloo process group that cannot start its second thread waits for its first one for ever, whatever its timeout.

    Raises:
        RuntimeError: a limit of memory or of processes allows fewer.
    """
    leave = threading.Event()
    threads = [threading.Thread(target=leave.wait) for _ in range(number)]
    try:
        for thread in threads:
            thread.start()
    finally:
        leave.set()


@cache
def take_product_buffer(inverse: Callable[[Any], Any] | None = None) -> None:
    """Have OpenBLAS allocate its buffer, which it does once a process, at the first inverse or large product.

    Where that fails, as under a limit of memory (`ulimit -v`), OpenBLAS tries again for ever: a chart, whose transforms are
    inverted, never ended.

    Args:
        inverse: of the library whose copy of OpenBLAS is meant; None: numpy's.

    Raises:
        MemoryError: there is no room for the buffer.
    """
    import numpy as np  # loads slowly

    try:
        mmap.mmap(-1, _BUFFER_BYTES).close()
    except OSError as error:
        raise MemoryError("no room for the buffer of matrix products") from error
    (inverse or np.linalg.inv)(np.eye(1))
