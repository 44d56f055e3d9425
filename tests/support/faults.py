"""Faults of a training process in one of its optimizer steps, by name; `forking_training.py` installs them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from open_clip_zerovl.data import mixture
from open_clip_zerovl.dga.retain import Retention
from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from training import hooks
from training.stopping import Preemption

_step = 2


def _in_call(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Act at the beginning of the `_step`-th call of a method."""
    stock, calls = getattr(owner, name), []

    def method(self, *arguments, **options):
        calls.append(1)
        if len(calls) == _step:
            act()
        return stock(self, *arguments, **options)

    setattr(owner, name, method)


def _in_step(act: Callable[[], None]) -> None:
    _in_call(DecoupledGradientAccumulation, "backward", act)


def _raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def _signals(*numbers: int) -> Callable[[], None]:
    def act() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # Python calls a handler between two of its instructions

    return act


def _defect_in_a_worker() -> None:
    """Fail at its seventh micro-batch, after steps that were trained."""
    stock, calls = mixture.collate_images, []

    def collate(*arguments):
        calls.append(1)
        if len(calls) == 7:
            raise LookupError("a defect in the transform")
        return stock(*arguments)

    mixture.collate_images = collate


def _full_disk() -> None:
    """Files of this process cannot grow beyond 200 KB: a checkpoint fails in the midst of its writing, and the log does not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))


def _spoils_the_weights() -> None:
    stock, calls = torch.optim.AdamW.step, []

    def step(self, *arguments, **options):
        result = stock(self, *arguments, **options)
        calls.append(1)
        if len(calls) == _step:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("nan"))
        return result

    torch.optim.AdamW.step = step


def _killed_while_a_file_is_written() -> None:
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    time.sleep(1)  # torch's handler of the signal raises here


def _killed_after_the_first_step() -> None:
    """Before it hears whether the other ranks have been asked to stop."""
    Preemption.agreed = lambda self, distributed: os.kill(os.getpid(), signal.SIGKILL)


def _auto_keeps(graphs: int) -> Callable[[], None]:
    """Memory for which `--dga-retain auto` decides to keep this number of graphs."""

    def install() -> None:
        Retention._fitting = lambda self, size: graphs

    return install


FAULTS: dict[str, Callable[[], None]] = {
    "defect in the step": lambda: _in_step(_raises(ZeroDivisionError("a defect in the step"))),
    "out of memory": lambda: _in_step(
        _raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    ),
    "exit in the step": lambda: _in_step(_raises(SystemExit(3))),
    "ctrl-c": lambda: _in_step(_signals(signal.SIGINT)),
    "ctrl-c twice": lambda: _in_step(_signals(signal.SIGINT, signal.SIGINT)),
    "sigterm": lambda: _in_step(_signals(signal.SIGTERM)),
    "sighup": lambda: _in_step(_signals(signal.SIGHUP)),
    "weights not finite": _spoils_the_weights,
    "killed": lambda: _in_step(_signals(signal.SIGKILL)),
    "killed after the first step": _killed_after_the_first_step,
    "loader worker killed at a save": lambda: _in_call(
        hooks, "save_atomically", _killed_while_a_file_is_written
    ),
    "full disk": lambda: _in_step(_full_disk),
    "defect in a loader worker": _defect_in_a_worker,
    "auto keeps 1 graph": _auto_keeps(1),
    "auto keeps 3 graphs": _auto_keeps(3),
}


def install(name: str | None, step: int = 2) -> None:
    """Install a fault in this process, which comes in its `step`-th optimizer step, or none."""
    global _step
    _step = step
    if name is not None:
        FAULTS[name]()
