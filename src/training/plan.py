"""`--plan` (`zerovl plan`): a training that takes two steps and prints what the whole run takes.

The first step starts the loaders, makes the optimizer's state and chooses kernels; the second is timed. On a CPU a step has at
most two micro-batches, and the time of the run's step follows from it: each micro-batch costs the same, and a third more where
it is forwarded twice. Nothing is saved.

    K  micro-batches of a step    R  graphs retained
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from open_clip_zerovl.core.files import free_space
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.report.tables import duration
from open_clip_zerovl.sampling.schedule import Batching
from training.checkpointing import checkpoint_bytes
from training.log import memory_bytes
from training.stopping import Stopped

STEPS = 2
CPU_MICRO_BATCHES = 2
_GIB = 2**30


class Planned(Stopped):
    """The steps of a plan are taken.

    Attributes:
        lines: what the whole run takes.
    """

    def __init__(self, epoch: int, step: int, lines: Sequence[str]) -> None:
        super().__init__(0, epoch, step, saved=False)
        self.lines = lines


class StepTimer:
    """Timer of a plan's steps, of which the last one counts.

    Attributes:
        wait_seconds: time in which the step waited for its K micro-batches.
        step_seconds: time of the step itself.
        micro_batches: number of the micro-batches that it took.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device = device
        self.left = min(STEPS, steps)
        self.wait_seconds = self.step_seconds = 0.0
        self.micro_batches = 0
        self._at = time.perf_counter()

    def shortened(self, micro_batches: list[Any]) -> list[Any]:
        """Cut a step to CPU_MICRO_BATCHES on a CPU.

        Call when they have come.
        """
        now = time.perf_counter()
        self.wait_seconds, self._at = now - self._at, now
        taken = micro_batches if self.device.type == "cuda" else micro_batches[:CPU_MICRO_BATCHES]
        self.micro_batches = len(taken)
        return taken

    def is_last(self) -> bool:
        """Return whether the plan is done.

        Call after each step.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.step_seconds, self._at = now - self._at, now
        self.left -= 1
        return self.left == 0

    def seconds(self, dga_steps: int, retain: int | str) -> float:
        """Return the seconds of a step of K micro-batches, with the wait for its data."""
        return self.wait_seconds + self.step_seconds * (
            relative_cost(dga_steps, retain) / relative_cost(self.micro_batches, retain)
        )


def relative_cost(dga_steps: int, retain: int | str) -> float:
    """Return the cost of a step in micro-batches of plain training, whose forward pass is a third: K + (K-R)/3."""
    retained = dga_steps if retain == "auto" else min(int(retain), dga_steps)
    return dga_steps + (0 if dga_steps == 1 else (dga_steps - retained) / 3)


def plan_lines(
    timer: StepTimer,
    args: argparse.Namespace,
    batching: Batching,
    config: AllFlags,
    model: torch.nn.Module,
    steps: int,
) -> list[str]:
    """Return the lines of a plan.

    Args:
        args: of the plan; its `whole_run` holds the run's own values, see `params.without_a_trace`.
        steps: of an epoch.
    """
    seconds, pairs = timer.seconds(batching.dga_steps, config.dga_retain), batching.effective_batch
    step = (
        f"{seconds:.3g} s for {pairs:,} pairs ({pairs / seconds:,.1f} pairs/s), {timer.wait_seconds / seconds:.0%} of it "
        "waiting for data"
    )
    if timer.micro_batches < batching.dga_steps:
        step += f"; timed with {timer.micro_batches} of its {batching.dga_steps} micro-batches"
    if timer.device.type == "cuda":
        total = torch.cuda.get_device_properties(timer.device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    every = steps * args.epochs
    hours = f"{every:,} steps, {duration(every * seconds)}"
    if timer.device.type == "cuda":
        hours += f", {every * seconds * batching.world_size / 3600:,.1f} GPU hours"
    size, count = checkpoint_bytes(model), checkpoints_kept(args.whole_run, config)
    logs = args.whole_run.logs
    place, free = free_space("." if logs.lower() == "none" else logs)
    disk = f"{count} checkpoints of {_size(size)}, with one being written: {_size(count * size)}"
    rows = {
        "step": step,
        "memory": f"{memory_bytes(timer.device) / _GIB:.1f} of {total / _GIB:.1f} GiB at the peak of a rank",
        "run": f"{hours}; evaluation and checkpoints come on top",
        "disk": f"{disk}; {_size(free)} are free in {Path(place)}",
    }
    return [f"{label:<10}{words}" for label, words in rows.items()]


def _size(count: float) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.1f} MiB"


def checkpoints_kept(args: argparse.Namespace, config: AllFlags) -> int:
    """Return the number of checkpoints on the disk at the end of a run, with one that is being written."""
    every = args.save_frequency
    epochs = 1 if every <= 0 else len({*range(every, args.epochs + 1, every), args.epochs})
    if args.delete_previous_checkpoint:
        epochs = 1
    steps = config.keep_checkpoints if config.save_every_steps is not None else 0
    return epochs + steps + args.save_most_recent + 1
