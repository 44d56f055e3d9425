"""Stopping a run: it saves a step checkpoint and leaves a marker for its launcher to start it again."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

from open_clip_zerovl.core.processes import REQUEUE_MARKER

CONNECT_SECONDS = 60.0  # time for all ranks to arrive after their first step, in which they have met several times

PREEMPTED, INTERRUPTED = 1, 2  # who asked: a scheduler (SIGTERM, SIGUSR1), or a user (Ctrl-C)


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
    """Have SIGUSR1 end this process, as SIGTERM does: for a run that could not go on from a step checkpoint.

    `processes.supervise` has its ranks ignore SIGUSR1 until they are ready for it, and sends it in place of SIGTERM.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class Preemption:
    """SIGTERM, SIGUSR1 and Ctrl-C ask the run to stop; the ranks agree on the step after which they all stop.

    A scheduler does not signal all processes at the same time. If one rank stopped alone, the others would wait for it in their
    next collective until the job is killed without a checkpoint.

    Ctrl-C ends the run at once before training has begun (`training` is False), and when it is pressed a second time.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.asked = 0
        self.training = False
        self._group: Any = None
        self._kept: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Preemption:
        self._process = os.getpid()
        for number in self.SIGNALS:
            self._kept[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

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
            words = "training.main: stopping after this step, to save it; Ctrl-C again ends at once\n"
            number = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
            os.write(number, ("\n" * os.isatty(number) + words).encode())  # a terminal shows the progress line there

    def agreed(self, distributed: bool) -> int:
        """0, or who asked any rank to stop. All ranks call it after the same step and get the same answer."""
        if not distributed:
            return self.asked
        if self._group is None:  # on the CPU, so that the GPU's queue is not waited for every step
            on_cpu = torch.distributed.get_backend() == "gloo"
            self._group = torch.distributed.group.WORLD if on_cpu else new_cpu_group()
        flag = torch.tensor([self.asked])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return int(flag.item())

    def wait_for_all(self) -> None:
        """Wait for all ranks before ending: torchrun kills the others 30 s after one rank has ended, and the first rank may
        still be writing the checkpoint."""
        if self._group is not None:
            torch.distributed.barrier(group=self._group)


def new_cpu_group(seconds: float = CONNECT_SECONDS) -> Any:
    """A gloo group of all ranks. Every rank calls this at about the same time.

    To connect, a rank waits in a store for the other ranks' addresses; meanwhile it notices neither a signal nor the end of a
    rank. With torch's own time-out, that of a collective, it would wait half an hour for a lost rank.

    Raises:
        RuntimeError: a rank has not arrived within `seconds`.
    """
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    set_timeout = (
        getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
    )  # before torch 2.15
    set_timeout(distributed_c10d.default_pg_timeout, group)
    return group


def mark_requeue(args: argparse.Namespace) -> Path:
    """Leave the marker that tells a launcher to start this run again."""
    marker = Path(args.logs) / args.name / REQUEUE_MARKER
    marker.write_text("start again with --resume latest\n", encoding="utf-8")
    return marker
