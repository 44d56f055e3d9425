"""Stopping in time: a run that is asked to end saves a step checkpoint and tells its launcher to start it again."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch

REQUEUE_MARKER = "requeue"  # in the run's folder: the launcher is to start this run again with --resume latest
PREEMPTED_STATUS = 85


class Preempted(Exception):
    """The run was asked to stop, has saved a step checkpoint, and ends."""


class Preemption:
    """SIGTERM and SIGUSR1 ask the run to stop; the ranks agree on the step after which they all do.

    A scheduler signals each process at its own time. Were one rank to stop alone, the others would wait for it in their next
    collective until the job is killed without a checkpoint.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False
        self._group: Any = None
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        for number in self.SIGNALS:
            self._kept[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def agreed(self, distributed: bool) -> bool:
        """Whether any rank was asked to stop; every rank calls this after the same step and hears the same."""
        if not distributed:
            return self.asked
        if self._group is None:  # on the CPU, so that the GPU's queue is not waited for every step
            self._group = torch.distributed.new_group(backend="gloo")
        flag = torch.tensor([int(self.asked)])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def wait_for_all(self) -> None:
        """Wait until every rank that `agreed` is here: torchrun kills the others 30 s after the first of its ranks ends, and
        only the first rank has a checkpoint to write."""
        if self._group is not None:
            torch.distributed.barrier(group=self._group)


def mark_requeue(args: argparse.Namespace) -> Path:
    """Leave the marker that tells a launcher to start this run again."""
    marker = Path(args.logs) / args.name / REQUEUE_MARKER
    marker.write_text("start again with --resume latest\n", encoding="utf-8")
    return marker
