"""Step checkpoints: atomic, pruned, found again; and stopping in time when a job is preempted (invariant 4).

A checkpoint of step i of epoch e is an open_clip checkpoint (`epoch`, `state_dict`, `optimizer`, `scaler`) with one more
entry, `zerovl`, that says where in the epoch it was taken. No generator's state has to be in it: what is drawn in a step
derives from (seed, step, rank), see `seed_step`, and the data from (seed, epoch, source, position).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import signal
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from open_clip_train.main import get_latest_checkpoint as get_latest_stock

from open_clip_zerovl.errors import UserError

REQUEUE_MARKER = "requeue"  # in the run's folder: the launcher is to start this run again with --resume latest
PREEMPTED_STATUS = 85
_NAME = re.compile(r"(?:epoch_(?P<done>\d+)|step_(?P<epoch>\d+)_(?P<step>\d+))\.pt")

save_stock: Callable[..., None] = torch.save  # kept from before the seam replaces it


class Preempted(Exception):
    """The run was asked to stop, has saved a step checkpoint, and ends."""


@dataclass(frozen=True)
class Position:
    """Where a checkpoint was taken: `step` optimizer steps of epoch `epoch` are done, of which batches and which sources.

    `sources` are names with numbers of samples, "" where open_clip's own pipeline reads the data.
    """

    epoch: int
    step: int
    effective_batch: int
    world_size: int
    workers: int
    sources: str = ""

    def start_step(self, now: Position) -> int:
        """The step at which a run with the batching of `now` goes on, and a word in the log on what is approximate."""
        if self.step and self.sources and self.sources != now.sources:
            logging.warning(
                f"Resuming step {self.step} of epoch {self.epoch}, taken on the sources {self.sources}, on others: "
                f"{now.sources or 'unnamed ones'}. The rest of this epoch shows what those have from that step on; from the "
                "next epoch on each sample is seen once. To begin their epoch whole, start a new run with --init-from."
            )
        same = (self.effective_batch, self.world_size, self.workers)
        if same == (now.effective_batch, now.world_size, now.workers) or self.step == 0:
            return self.step
        step = self.step * self.effective_batch // now.effective_batch
        logging.warning(
            f"Resuming step {self.step} of epoch {self.epoch} (effective batch {self.effective_batch}, {self.world_size} "
            f"ranks x {self.workers} workers) as step {step} (effective batch {now.effective_batch}, {now.world_size} ranks "
            f"x {now.workers} workers). The count of samples goes on where it was; which samples the rest of this epoch "
            "shows is approximate, since other readers divide the shards: a few come twice and a few not. From the next "
            "epoch on each is seen once again."
        )
        return step


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the process's generators (torch on all devices, numpy, `random`) for one optimizer step.

    Dropout and token drop of a step are then the same whether or not the run was interrupted before it.
    """
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def save_atomically(content: Any, path: Any, *arguments: Any, **options: Any) -> None:
    """`torch.save` that leaves either the whole new file or what was there before, whenever it is killed."""
    if not isinstance(path, (str, os.PathLike)):
        save_stock(content, path, *arguments, **options)
        return
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "wb") as file:
            save_stock(content, file, *arguments, **options)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except OSError as error:
        raise UserError(
            f"the checkpoint {target} cannot be written ({error}); what was there before is kept"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def newest_whole(folder: str, remote: bool = False) -> str | None:
    """The `get_latest_checkpoint` seam: the checkpoint that is furthest in training and not cut off.

    open_clip sorts names, so that a leftover tmp.pt wins; and it takes a truncated file as it comes.
    """
    if remote:
        return get_latest_stock(folder, remote=True)
    found = []
    for path in Path(folder).glob("*.pt"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append(
                ((int(match["done"]), 0) if match["done"] else (int(match["epoch"]), int(match["step"])), path)
            )
    for _, path in sorted(found, reverse=True):
        if is_whole(path):
            return str(path)
        logging.warning(f"Skipping {path}: the file is cut off.")
    return None


def is_whole(path: Path) -> bool:
    """Whether a checkpoint file has its end (torch writes zip archives, whose directory is last)."""
    try:
        with zipfile.ZipFile(path):
            return True
    except (zipfile.BadZipFile, OSError):
        return False


class StepCheckpoints:
    """Writes a checkpoint every `every` optimizer steps and keeps the newest `keep` of them.

    Args:
        every: optimizer steps between two checkpoints, counted over the whole run; None = only when asked (preemption).
    """

    def __init__(self, args: argparse.Namespace, *, every: int | None, keep: int) -> None:
        self.args, self.every, self.keep = args, every, keep

    def due(self, steps_done: int) -> bool:
        """Whether a checkpoint is due after this many optimizer steps of the run."""
        return self.every is not None and steps_done % self.every == 0

    def write(self, model, optimizer, scaler, position: Position) -> None:
        """Write the checkpoint on the first rank; the others go on."""
        if not self.args.save_logs:
            return
        folder = Path(self.args.checkpoint_path)
        content = {
            "epoch": position.epoch,
            "name": self.args.name,
            "state_dict": getattr(model, "_orig_mod", model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "zerovl": asdict(position),
        }
        if scaler is not None:
            content["scaler"] = scaler.state_dict()
        path = folder / f"step_{position.epoch:04d}_{position.step:08d}.pt"
        save_atomically(content, path)
        logging.info(f"Saved {path.name}.")
        for old in sorted(folder.glob("step_*.pt"))[: -self.keep]:
            old.unlink()


def read_position(checkpoint: dict) -> Position | None:
    """Where a checkpoint was taken; None for one of open_clip's own, which is an epoch's end."""
    entry = checkpoint.get("zerovl")
    return Position(**entry) if entry else None


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
