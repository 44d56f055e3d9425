"""The end of a training process: stop requests, and the last steps of every process.

A run that is asked to stop saves a step checkpoint and leaves a marker for its launcher to start it again (`Preemption`).

An ordinary exit of Python waits for loader workers, threads, and collectives that another rank may never enter. Meanwhile the
other ranks and the launcher wait, and the GPUs are held. Here the process ends its children first, then runs exit handlers
(logs, wandb, tensorboard), then ends, all within `LIMIT_SECONDS` (`run`).
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch

from open_clip_zerovl.core.errors import explain, say
from open_clip_zerovl.core.processes import MEMORY_FULL, StopSignals, end_with_parent, name_of_rank

CONNECT_SECONDS = 60.0  # time for all ranks to arrive after their first step, in which they have met several times

# who asked: a scheduler or a lost terminal (SIGTERM, SIGUSR1, SIGHUP), or a user (Ctrl-C)
PREEMPTED = 1
INTERRUPTED = 2

LIMIT_SECONDS = 10.0

_LOST_RANK = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Timed out waiting \d+ms for (recv|send) operation|remote process exited|"
    r"wait timeout after \d+ms",
    re.I,
)

# ---------------------------------------------------------------------------------------------------------------------
# Stop requests
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Stopped(Exception):
    """The run was asked to stop and ends after `step` optimizer steps of epoch `epoch`.

    Attributes:
        asked: PREEMPTED or INTERRUPTED.
        saved: whether these steps are in a checkpoint.
    """

    asked: int
    epoch: int
    step: int
    saved: bool


def end_by_signals() -> None:
    """Make SIGUSR1 end this process as SIGTERM does, for a run that could not go on from a step checkpoint.

    `processes.supervise` has its ranks ignore SIGUSR1 until they are ready for it, and sends it in place of SIGTERM.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class Preemption(StopSignals):
    """Stop requests by SIGTERM, SIGUSR1, SIGHUP (a lost terminal) and Ctrl-C, after which all ranks stop at the same step.

    A scheduler does not signal all processes at the same time. If one rank stopped alone, the other ranks would wait for it in
    their next collective until the job is killed without a checkpoint.

    Ctrl-C ends the run at once before training has begun (`training` is False), and when it is pressed a second time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.training = False
        self._group: Any = None
        self._process = os.getpid()

    def __enter__(self) -> Preemption:
        self._process = os.getpid()
        super().__enter__()
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # A scheduler may also signal loader workers, which are forks of this process. They must go on until the checkpoint is
        # written; this process ends them.
        if os.getpid() != self._process:
            return
        if number != signal.SIGINT:
            self.asked = max(self.asked, PREEMPTED)
            return
        if not self.training or self.asked == INTERRUPTED:
            raise KeyboardInterrupt
        self.asked = INTERRUPTED
        if os.environ.get("RANK", "0") == "0":
            words = (
                "training.main: stopping after this step, to save it; Ctrl-C again ends at once\n"
            )
            number = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
            os.write(number, words.encode())

    def agreed(self, distributed: bool) -> int:
        """Return 0, or who asked any rank to stop.

        All ranks call it after the same step and get the same answer.
        """
        if not distributed:
            return self.asked
        if self._group is None:  # on the CPU, so that the GPU's queue is not waited for every step
            on_cpu = torch.distributed.get_backend() == "gloo"
            self._group = torch.distributed.group.WORLD if on_cpu else new_cpu_group()
        flag = torch.tensor([self.asked])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return int(flag.item())

    def wait_for_all(self) -> None:
        """Wait for all ranks: torchrun kills the rest 30 s after one has ended, and the first may still write a checkpoint."""
        if self._group is not None:
            torch.distributed.barrier(group=self._group)


def new_cpu_group(seconds: float = CONNECT_SECONDS) -> Any:
    """Create a gloo group of all ranks.

    Every rank calls this at about the same time.

    To connect, a rank waits in a store for the other ranks' addresses; meanwhile it notices neither a signal nor the end of a
    rank. With torch's own time-out, that of a collective, it would wait half an hour for a lost rank. It does so before torch
    2.9, whose groups keep the time-out with which they are made: a vote would fail if a rank came a minute later.

    Raises:
        RuntimeError: a rank has not arrived within `seconds`.
    """
    if not hasattr(torch.distributed.ProcessGroup, "set_timeout"):
        return torch.distributed.new_group(backend="gloo")
    group: Any = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    group.set_timeout(torch.distributed.distributed_c10d.default_pg_timeout)
    return group


# ---------------------------------------------------------------------------------------------------------------------
# The end of the process
# ---------------------------------------------------------------------------------------------------------------------


def run(program: Callable[[], int], words: Sequence[str] = ()) -> NoReturn:
    """Call a program and end this process with the status that it returns, or that of its error, see `errors.explain`.

    Under torchrun the process ends when torchrun does.

    Args:
        words: the command line, which may hold `--debug`.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Ranks of a killed torchrun would go on training while a restart writes into the same folder.
        end_with_parent(signal.SIGKILL)
    try:
        status = program()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            say(stop.code)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        status = explain(
            error,
            name_of_rank(),
            words,
            interrupted="saved checkpoints are kept",
            sentence=sentence_of(error),
        )
    end(status)


def sentence_of(error: BaseException) -> str | None:
    """Describe an error that only training has: a full GPU, a lost rank.

    Returns:
        None for any other error.
    """
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{MEMORY_FULL} ({first_line}); lower --batch-size and raise --dga-steps by the same factor: the "
            "effective batch stays (--dga-retain 1 keeps one graph, --loss-chunk 1024 fewer logits at once)"
        )
    if isinstance(error, RuntimeError) and _LOST_RANK.search(str(error)):
        return f"another rank has ended; its own message gives the reason ({first_line})"
    return None


def end(status: int) -> NoReturn:
    """End this process and its children within `LIMIT_SECONDS`."""
    # they ask for an end, which has begun
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(
        RuntimeError
    ):  # no memory for its stack; the status is known, and the end has begun
        threading.Thread(target=_end_late, args=(status,), daemon=True).start()
    end_children()
    atexit._run_exitfuncs()
    logging.shutdown()
    _exit(status)


def end_children() -> None:
    """Kill the processes that multiprocessing has started here: loader workers, open_clip's remote sync."""
    # torch's handler raises an error for each loader worker that dies
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(timeout=2)


def _end_late(status: int) -> None:
    time.sleep(LIMIT_SECONDS)
    _exit(status)


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            continue
    os._exit(status)
