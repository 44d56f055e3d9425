"""Step checkpoints: writing, deleting old ones, finding the newest; and one process at a time in a run's folder.

A checkpoint of step i of epoch e is an open_clip checkpoint (`epoch`, `state_dict`, `optimizer`, `scaler`) with one more
entry, `zerovl`: the `resume.Position` at which it was taken. It holds no generator's state: a step's random numbers follow from
(seed, step, rank), see `randomness`, the data's from (seed, epoch, source, position).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import time
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import UNREADABLE, free_space, lock_file, save_atomically
from training.resume import Position, entry_of

_NAME = re.compile(r"(?:epoch_(?P<done>\d+)|step_(?P<epoch>\d+)_(?P<step>\d+))\.pt")
# of `save_atomically`, and of open_clip's --save-most-recent
_LEFTOVER = re.compile(r"\..*\.pt\..*\.(?:part|tmp)|tmp\.pt")
LOCK = ".lock"
WAIT_SECONDS = 15.0  # for the earlier process to end when a launcher starts a run again
LATEST = "epoch_latest.pt"  # written by open_clip with --save-most-recent, which resumes from it


def newest_whole(folder: str, remote: bool = False) -> str | None:
    """Make the `get_latest_checkpoint` hook: the latest checkpoint in training that is not damaged.

    open_clip takes the last name in sorting order: a leftover tmp.pt comes after all epochs, and so does any step checkpoint.
    It does not notice a damaged file. On a remote store (`--remote-sync`) progress is read from names only.
    """
    names = _remote_names(folder) if remote else [path.name for path in Path(folder).glob("*.pt")]
    progress = {name: at for name in names if (at := _progress(name)) is not None}
    for name in sorted(progress, key=progress.__getitem__, reverse=True):
        path = os.path.join(folder, name)
        damage = None if remote else damage_of(Path(path))
        if damage is None:
            return path
        logging.warning(f"Skipping {path}: the file {damage}.")
    return None


def _progress(name: str) -> tuple[int, int] | None:
    """Read the (epochs done, steps of the next epoch done) from a checkpoint's name: `step_0003_00000120.pt` is (3, 120).

    Returns:
        None for another name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return (int(match["done"]), 0) if match["done"] else (int(match["epoch"]), int(match["step"]))


def _remote_names(folder: str) -> list[str]:
    """List the names in a folder of a remote store as open_clip lists them."""
    listing = subprocess.run(["aws", "s3", "ls", f"{folder}/"], capture_output=True, text=True)
    return (
        [line.split(" ")[-1] for line in listing.stdout.splitlines()]
        if listing.returncode == 0
        else []
    )


def is_archive(path: Path) -> bool:
    """Return whether a file begins as torch's checkpoints do since 1.6.

    `damage_of` checks the rest.
    """
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def damage_of(path: Path, *, checksums: bool = True) -> str | None:
    """Describe the damage of a checkpoint file as a verb phrase.

    torch writes zip archives. Their directory comes last and holds a checksum of each tensor, which torch does not compare when
    it loads.

    Args:
        checksums: read all of the file and compare them (about a second a gigabyte).

    Returns:
        None for a whole file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip() if checksums else None
    except zipfile.BadZipFile:
        return "is cut off"
    except UNREADABLE as error:
        return f"cannot be read ({first_line(error)})"
    return None if wrong is None else f"is damaged: the checksum of {wrong} in it does not match"


def remove_leftovers(folder: Path) -> None:
    """Delete half-written files of killed processes.

    No other process may be writing there.
    """
    for path in folder.glob("*") if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            logging.warning(f"Removing {path}, which a killed process left half-written.")
            path.unlink(missing_ok=True)


def require_room(folder: str | os.PathLike[str], model: torch.nn.Module) -> None:
    """Refuse a disk without room for a checkpoint.

    Args:
        folder: the folder of the run; it exists.

    Raises:
        UserError: its disk has no room for a checkpoint: weights, and two moments of each that is trained.
    """
    needed = checkpoint_bytes(model)
    _, free = free_space(folder)
    if free < needed:
        raise UserError(
            f"the disk of {folder} has {free / 2**20:,.0f} MiB free, and a checkpoint of this run takes about "
            f"{needed / 2**20:,.0f} MiB; make room there, or choose another folder with --logs"
        )


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """Return the size of a checkpoint: weights, and two moments of each that is trained."""
    weights = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    return weights + 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)


class StepCheckpoints:
    """Writes a checkpoint every `every` optimizer steps and keeps the newest `keep` whole ones.

    With `--save-most-recent` the checkpoint is open_clip's epoch_latest.pt, from which that flag resumes.

    Args:
        every: optimizer steps between two checkpoints, counted over the whole run; None: only when the run is stopped.
    """

    def __init__(self, args: argparse.Namespace, *, every: int | None, keep: int) -> None:
        self.args = args
        self.every = every
        self.keep = keep

    @property
    def kept(self) -> bool:
        """Return whether this run keeps checkpoints at all, which it does not with `--logs none`.

        The same on every rank.
        """
        return self.args.logs.lower() != "none"

    def due(self, steps_done: int) -> bool:
        """Return whether a checkpoint is due after this many optimizer steps of the run."""
        return self.every is not None and steps_done % self.every == 0

    def write(
        self, model, optimizer, scaler, position: Position, entries: Mapping[str, Any] | None = None
    ) -> None:
        """Write the checkpoint, with further entries, on the first rank.

        Other ranks do nothing.
        """
        if not self.args.save_logs:
            return
        folder = Path(self.args.checkpoint_path)
        content = {
            "epoch": position.epoch,
            "name": self.args.name,
            "state_dict": getattr(model, "_orig_mod", model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "zerovl": entry_of(position),
            **(entries or {}),
        }
        if scaler is not None:
            content["scaler"] = scaler.state_dict()
        if self.args.save_most_recent:
            path = folder / LATEST
        else:
            path = folder / f"step_{position.epoch:04d}_{position.step:08d}.pt"
        save_atomically(content, path)
        logging.info(f"Saved {path.name}.")
        self._prune(folder, (position.epoch, position.step))

    def _prune(self, folder: Path, now: tuple[int, int]) -> None:
        """Delete older step checkpoints, and those with a higher step than the one just written.

        A higher step comes from before the resume: the file was damaged, or it counts smaller steps because the run has
        resumed with a larger effective batch. It would be taken for the newest on the next resume.
        """
        whole = 0
        for path in sorted(folder.glob("step_*.pt"), reverse=True):
            progress = _progress(path.name)
            if progress is None:
                continue
            if progress > now:
                logging.info(f"Deleting {path.name}, whose step is higher than the one just saved.")
                path.unlink()
            elif whole == self.keep:
                path.unlink()
            elif damage_of(path, checksums=False) is None:
                whole += 1


def lock_folder(folder: Path, wait_seconds: float = WAIT_SECONDS) -> int:
    """Hold a lock on a run's folder until its descriptor is closed or this process ends: one process writes there.

    A file system without locks is logged, and the run continues without.

    Raises:
        UserError: another process holds the lock for longer than `wait_seconds`, or the folder cannot be written.
    """
    file, deadline = folder / LOCK, time.monotonic() + wait_seconds
    folder.mkdir(parents=True, exist_ok=True)
    file.touch()
    try:
        # A lock that is not shared with forks would be lost where this process reads the file: --remote-sync with fsspec.
        lock = partial(lock_file, file, wait=False, create=True)
        held = lock()
        if held is None:
            logging.warning(f"Waiting for the process that trains in {folder} to end.")
        while held is None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process is training the run in {folder}; wait for it, stop it, or choose another --name"
                )
            time.sleep(0.1)
            held = lock()
    except OSError as error:
        logging.warning(
            f"{file} cannot be locked ({error}); make sure that no other process trains this run."
        )
        return os.open(file, os.O_RDONLY)
    return held
