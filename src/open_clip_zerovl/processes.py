"""Processes: ending with the one that started them, and what a stopped training leaves for its launcher."""

from __future__ import annotations

import ctypes
import os
import sys

PREEMPTED_STATUS = 85  # exit status of a training that was stopped with a step checkpoint; torchrun turns it into 1
REQUEUE_MARKER = "requeue"  # a file in the run's folder: the launcher is to start this run again with --resume latest

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
