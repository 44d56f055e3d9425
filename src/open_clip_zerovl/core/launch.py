"""Training as a command: one way to start and watch it for `zerovl train`, fine-tuning, recipes and the demo.

    training_command(arguments, processes)         the command line; its signals and its exit status are the training's
    start_training(arguments, processes, log=...)  the same as a child of this process, with its words in a file
    follow_training(arguments, processes, say)     the same to its end, with its words handed on line by line

The library never imports `training`. The command names a file of that package which lies beside this one, in a checkout as in
an installed wheel. So neither a `training.py` in the current folder nor a fork of open_clip with a package of that name is ever
taken for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.processes import (
    PREEMPTED_STATUS,
    begin_child,
    end_with_parent,
    interrupts_held,
)

PROCESSES = (
    "--processes"  # the first words of training/main.py: --processes N --, or --processes gpus --
)
EACH_GPU = "gpus"
_FOLDER = Path(__file__).resolve().parents[2]
# open_clip's older releases have a package `training` with a main.py, too: installed later, it overwrites files of ours.
_MARK = "open_clip_zerovl"
CPU_MICRO_BATCH = 16  # samples at once on a CPU, where nobody gives a number
MEMORY_FULL = (
    "the device's memory is full"  # begins the sentence of a training that ends for want of memory
)
_STOP_SECONDS = 600.0  # for a step and its checkpoint
_LAST_LINES = 40  # of a log, which are searched for an error
_FIRST_SHELL_STEP = 0xFFFFFFF0  # SLURM's numbers of steps that are a shell or a script begin here

# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def training_command(
    arguments: Sequence[str], processes: int | None = 1, rendezvous: Sequence[str] = ()
) -> list[str]:
    """The command line of a training; its exit status is the training's, and stop signals to it reach all of its processes.

    Args:
        arguments: the flags of `python -m training.main`.
        processes: ranks on this machine; torchrun starts more than one. None: one for each visible GPU, counted when the
            command runs.
        rendezvous: torchrun's flags for a job of several machines (`--nnodes`, `--node-rank`, `--master-addr`,
            `--master-port`). With any, torchrun also starts a single rank.

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
    how = [] if processes == 1 and not rendezvous else [PROCESSES, count, *rendezvous, "--"]
    return [sys.executable, str(program), *how, *arguments]


def take_gpus(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Split a line into the number of `--gpus` (None if it is not given) and the other words.

    Raises:
        UserError: it is not a positive number.
    """
    gpus = None
    rest = []
    left = list(words[1:] if words[:1] == ["--"] else words)
    while left:
        word = left.pop(0)
        flag, has_value, value = word.partition("=")
        if flag != "--gpus":
            rest.append(word)
            continue
        value = value if has_value else left.pop(0) if left else ""
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"--gpus {value}".strip() + ": give the number of processes, 1 or more")
        gpus = int(value)
    return gpus, rest


# ---------------------------------------------------------------------------------------------------------------------
# A child process that trains
# ---------------------------------------------------------------------------------------------------------------------


class TrainingStopped(UserError):
    """A training that ended by a signal: the same call goes on with it."""


class MemoryFull(UserError):
    """A training ended since its device has too little memory for its micro-batch."""


@dataclass(frozen=True)
class TrainingProcess:
    """A training that runs as a child of this process.

    Attributes:
        process: the child.
        log: the file with its words (standard output and standard error).
    """

    process: subprocess.Popen
    log: Path

    def is_running(self) -> bool:
        """True if the training has not ended yet."""
        return self.process.poll() is None

    def ask_to_stop(self) -> None:
        """Ask the training to save a checkpoint and end; returns at once."""
        if self.is_running():
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ask the training to save a checkpoint and end, and wait for it; after ten minutes it is killed."""
        self.ask_to_stop()
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
        if status in (PREEMPTED_STATUS, 130, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT):
            raise TrainingStopped("the training was stopped; call the same command again to go on")
        if status != 0:
            error = last_error(self.log)
            kind = TrainingStopped if status < 0 or status > 128 else UserError
            if MEMORY_FULL in error:
                kind = MemoryFull
            raise kind(
                f"the training ended with status {status}: {error} (the whole output: {self.log})"
            )


def _start(command: Sequence[str], **how: Any) -> subprocess.Popen:
    """Start a child; Ctrl-C in that moment ends it again.

    Raises:
        KeyboardInterrupt: after the child has ended.
    """
    try:
        with interrupts_held():
            child = subprocess.Popen(command, **how)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
    return child


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
        KeyboardInterrupt: Ctrl-C in the moment of the start; the training has ended.
    """
    environment = None if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with open(log, "ab") as file:
        command = training_command(arguments, processes)
        child = _start(
            command,
            stdout=file,
            stderr=file,
            env=environment,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
    return TrainingProcess(child, log)


def follow_training(
    arguments: Sequence[str], processes: int | None, say: Callable[[str], None]
) -> None:
    """Run a training as a child of this process to its end.

    Args:
        arguments, processes: see `training_command`.
        say: is called with each line that the training prints.

    Raises:
        UserError: see `training_command`; the training failed (its last error is in the sentence), or was stopped.
        KeyboardInterrupt: Ctrl-C, after the training has saved a checkpoint and ended.
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
    last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    def hand_on() -> None:
        for line in child.stdout or ():
            last_lines.append(line)
            say(line.rstrip("\n"))

    try:
        hand_on()
        status = child.wait()
    except BaseException:  # a notebook's interrupt, or an error of `say`
        child.send_signal(signal.SIGINT)
        try:
            hand_on()
        finally:
            child.stdout.read()  # a child whose words nobody reads waits for ever
            child.wait()
        raise
    if status in (130, PREEMPTED_STATUS, 128 + signal.SIGTERM, -signal.SIGTERM):
        raise UserError("the training was stopped; make the same call again to go on")
    if status != 0:
        raise UserError(f"the training ended with status {status}: {error_among(last_lines)}")


def last_error(log: Path) -> str:
    """`error_among` the lines of a file."""
    return error_among(log.read_text(encoding="utf-8", errors="replace").splitlines())


def error_among(printed: Iterable[str]) -> str:
    """The last error among lines that a training printed, without the program's name; the last line if none is an error."""
    lines = [line.strip() for line in printed if line.strip()]
    errors = [line for line in lines[-_LAST_LINES:] if "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("training.main: error: ")


# ---------------------------------------------------------------------------------------------------------------------
# GPUs and ranks
# ---------------------------------------------------------------------------------------------------------------------


def gpu_memories(environment: Mapping[str, str] = os.environ) -> list[float]:
    """GiB of each NVIDIA GPU that a process sees: those of nvidia-smi, as far as CUDA_VISIBLE_DEVICES lets it. Needs no torch.

    A GPU or a part of one that is named (GPU-..., MIG-...) counts with the memory of the smallest.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if (named is not None and not named.strip()) or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
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


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """The number of NVIDIA GPUs that a process sees; see `gpu_memories`."""
    return len(gpu_memories(environment))


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """True if torchrun, srun or mpirun has started this process as one of several ranks."""
    sizes = ("WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
    return any(
        environment.get(name, "").isdecimal() and int(environment[name]) > 1 for name in sizes
    )


def missing_ranks(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a sentence for a process that waits for ranks which nobody has started; None for one that does not.

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
    """The rank that a launcher has given this process, as text; "" without a launcher."""
    # open_clip's, in its order
    variables = ("RANK", "PMI_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return next((os.environ[name] for name in variables if name in os.environ), "")


def name_of_rank() -> str:
    """The training program's name in its messages: with its rank where there are several."""
    return f"[rank {rank_here()}] training.main" if is_rank() else "training.main"


def ranks_here(asked: int | None, device: str, environment: Mapping[str, str] = os.environ) -> int:
    """The number of training processes on this machine.

    Args:
        asked: their number; None: one for each visible GPU.
        device: the flag `--device`.

    Raises:
        UserError: a number that this machine cannot have.
    """
    if is_rank(environment):
        if asked not in (None, 1):
            raise UserError(
                f"--gpus {asked} does not work within torchrun, srun or mpirun, which start the processes; leave it out"
            )
        return 1
    if device not in ("cuda", "cpu") and asked not in (None, 1):
        raise UserError(
            f"--gpus {asked} does not work with --device {device}; leave --device out, or give --device cpu"
        )
    if device != "cuda":
        return asked or 1
    visible = visible_gpus(environment)
    if asked is None:
        return max(1, visible)
    if asked > max(1, visible):
        only = environment.get("CUDA_VISIBLE_DEVICES")
        seen = (
            f"{visible} GPU{'s are' if visible > 1 else ' is'} visible here"
            if visible
            else "no GPU is visible here"
        )
        fewer = f"give at most {visible}" if visible else "leave --gpus out"
        raise UserError(
            f"--gpus {asked}: {seen}{'' if only is None else f' (CUDA_VISIBLE_DEVICES={only})'}; "
            f"{fewer}, or give --device cpu for {asked} processes on the CPU"
        )
    return asked
