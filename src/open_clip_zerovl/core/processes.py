"""Processes: ending with the parent process, stopping a training from outside, the usable CPU cores, numpy's buffer.

SIGTERM, SIGUSR1 and SIGHUP (a lost terminal) are passed on to the ranks of a training as SIGUSR1, which asks them to agree on a
step, save it and end. Ctrl-C is passed on as it is, once each time it is pressed. torchrun does not get them: it would kill the
ranks after 30 s, and an optimizer step with its checkpoint can take longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

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


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends, in whatever way. Linux only; elsewhere a no-op.

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
    """The running child processes of a process, from /proc."""
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


def begin_child() -> None:
    """Runs first in torchrun or the single rank: a group of its own, SIGUSR1 ignored, an end with its supervisor.

    A terminal's Ctrl-C goes to a whole group; so it reaches the supervisor alone, and each rank gets it once. A scheduler may
    send SIGUSR1 to all processes of a job, and it would end torchrun. The ranks inherit this until they set their own handler.
    Without the third, ranks of a killed launcher would train on while the job is started again.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent(signal.SIGTERM)


class StopSignals:
    """Within its block, remembers SIGTERM, SIGUSR1 and SIGHUP in `asked`, and counts Ctrl-C in `interrupts`."""

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


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block: Python loses an exception that is raised within its hooks of a fork."""
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield
        return
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        signal.raise_signal(signal.SIGINT)


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, and the container's quota (cgroup v2)."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        allowed, _, period = quota.read_text(encoding="ascii").partition(" ")
        if allowed.isdigit():
            return max(1, min(affinity, round(int(allowed) / int(period))))
    return affinity


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
