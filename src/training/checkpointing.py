"""Step checkpoints: written whole, pruned, and found again.

A checkpoint of step i of epoch e is an open_clip checkpoint (`epoch`, `state_dict`, `optimizer`, `scaler`) with one more
entry, `zerovl`: the `resume.Position` at which it was taken. No generator's state has to be in it: what a step draws
derives from (seed, step, rank), see `randomness`, and the data from (seed, epoch, source, position).
"""

from __future__ import annotations

import argparse
import logging
import re
import zipfile
from pathlib import Path

from open_clip_train.main import get_latest_checkpoint as get_latest_stock

from open_clip_zerovl.files import save_atomically
from training.resume import Position, entry_of

_NAME = re.compile(r"(?:epoch_(?P<done>\d+)|step_(?P<epoch>\d+)_(?P<step>\d+))\.pt")


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

    @property
    def kept(self) -> bool:
        """Whether this run keeps checkpoints at all: not with `--logs none`. The same on every rank."""
        return self.args.logs.lower() != "none"

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
            "zerovl": entry_of(position),
        }
        if scaler is not None:
            content["scaler"] = scaler.state_dict()
        path = folder / f"step_{position.epoch:04d}_{position.step:08d}.pt"
        save_atomically(content, path)
        logging.info(f"Saved {path.name}.")
        for old in sorted(folder.glob("step_*.pt"))[: -self.keep]:
            old.unlink()
