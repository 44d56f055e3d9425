"""Processes that end with the one that started them. Needs Linux; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent ends, however the parent ends.

    Linux counts as the parent the *thread* that started this process: call it only where that is a thread that lives as
    long as the parent, such as its main thread.

    Args:
        number: the signal.
        parent: process number of the parent, as the parent itself gave it. A parent that has ended already is noticed by it.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
