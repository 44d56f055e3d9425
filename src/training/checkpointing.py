"""Step checkpoints: writing, deleting old ones, finding the newest, resuming; and one process at a time in a run's folder.

A checkpoint of step i of epoch e is an open_clip checkpoint (`epoch`, `state_dict`, `optimizer`, `scaler`) with one more
entry, `zerovl`: the `Position` at which it was taken. It holds no generator's state: a step's random numbers follow from
(seed, step, rank), see `randomness`, the data's from (seed, epoch, source, position).

A resume loads a checkpoint, or refuses it, before open_clip's main loads the optimizer's state.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import fsspec
import torch

from open_clip_zerovl.checkpoints.loading import MODEL_ENTRY, tower_difference
from open_clip_zerovl.checkpoints.weights import load_pickled, require_finite_weights
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import (
    digest_of,
    free_space,
    lock_file,
    reading,
    save_atomically,
)
from open_clip_zerovl.core.randomness import STREAMS_VERSION
from open_clip_zerovl.data.sources import Source
from open_clip_zerovl.dga.retain import Decision
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.sampling.schedule import Batching

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
    except Exception as error:
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


def save_step(
    args: argparse.Namespace,
    model,
    optimizer,
    scaler,
    position: Position,
    entries: Mapping[str, Any],
    *,
    keep: int,
) -> None:
    """Write a step checkpoint on the first rank, where the run keeps files, and delete all older ones but `keep` whole ones.

    With `--save-most-recent` the checkpoint is open_clip's epoch_latest.pt, from which that flag resumes.

    Args:
        entries: further entries of the checkpoint.
    """
    if not args.save_logs:
        return
    folder = Path(args.checkpoint_path)
    content = {
        "epoch": position.epoch,
        "name": args.name,
        "state_dict": getattr(model, "_orig_mod", model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "zerovl": entry_of(position),
        **entries,
    }
    if scaler is not None:
        content["scaler"] = scaler.state_dict()
    step = f"step_{position.epoch:04d}_{position.step:08d}.pt"
    path = folder / (LATEST if args.save_most_recent else step)
    save_atomically(content, path)
    logging.info(f"Saved {path.name}.")
    _prune(folder, (position.epoch, position.step), keep)


def _prune(folder: Path, now: tuple[int, int], keep: int) -> None:
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
        elif whole == keep:
            path.unlink()
        elif damage_of(path, checksums=False) is None:
            whole += 1


def lock_folder(folder: Path, wait_seconds: float = WAIT_SECONDS) -> int:
    """Hold a lock on a run's folder until its descriptor is closed or this process ends: one process writes there.

    Where there are no locks, or one fails, the run continues after a warning.

    Raises:
        UserError: another process holds the lock for longer than `wait_seconds`.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A lock that is not shared with forks would be lost where this process reads the file: --remote-sync with fsspec.
    lock = partial(lock_file, folder / LOCK, wait=False, create=True)
    deadline = time.monotonic() + wait_seconds
    try:
        held = lock()
        if held is None:
            logging.warning(f"Waiting for the process that trains in {folder} to end.")
        while held is None and time.monotonic() < deadline:
            time.sleep(0.1)
            held = lock()
    except (UserError, OSError) as error:
        reason = "its file system has no locks" if isinstance(error, UserError) else error
        logging.warning(
            f"{folder} cannot be locked ({reason}); make sure that no other process trains this run."
        )
        return os.open(folder / LOCK, os.O_RDONLY)
    if held is None:
        raise UserError(
            f"another process is training the run in {folder}; wait for it, stop it, or choose another --name"
        )
    return held


# ---------------------------------------------------------------------------------------------------------------------
# Resuming
# ---------------------------------------------------------------------------------------------------------------------

FORMAT = STREAMS_VERSION  # of the entry `zerovl` in a checkpoint
PREFIX = "module."  # DDP's, of every name


@dataclass(frozen=True)
class Position:
    """The position at which a checkpoint was taken: `step` optimizer steps of epoch `epoch` are done.

    Attributes:
        batching: how the run divides its effective batches; a rank without loader processes counts as one worker.
        retained: how many graphs `--dga-retain auto` keeps (`dga.retain.Decision`); empty if it has not decided.
    """

    epoch: int
    step: int
    batching: Batching
    retained: Mapping[str, float] = field(default_factory=dict)

    def graphs_for(self, now: Batching) -> Decision | None:
        """Return the decision of `--dga-retain auto`.

        Returns:
            None if the split of the batch is not that of `now`.
        """
        same = replace(self.batching, workers=1) == replace(now, workers=1)
        return Decision(**self.retained) if self.retained and same else None  # type: ignore[arg-type]

    def start_step(self, now: Batching, steps: int = sys.maxsize) -> int:
        """Find the step at which a run with another batching continues.

        The log names approximations.

        Args:
            steps: number of steps of the epoch, as `now` divides it. With a larger effective batch, or less data, it may end
                before this position: the run then continues with the next epoch.
        """
        step = min(self.step * self.batching.effective_batch // now.effective_batch, steps)
        if self.step and self.batching != now:
            logging.warning(
                f"Resuming step {self.step} of epoch {self.epoch} ({_shown(self.batching)}) as step {step} "
                f"({_shown(now)}). The sample count continues. The samples of the rest of this epoch are approximate, "
                "since other readers divide the shards: some samples come twice, and as many are skipped. From the next epoch "
                "on each sample comes once again. For an exact rest of the epoch give the batch, the ranks and the workers of "
                "the first bracket."
            )
        return step


def _shown(batching: Batching) -> str:
    split = f"{batching.micro_batch} x {batching.dga_steps} x {batching.world_size}"
    return f"effective batch {batching.effective_batch} = {split}, {batching.world_size} ranks x {batching.workers} workers"


def entry_of(position: Position) -> dict[str, Any]:
    """Make the checkpoint's entry `zerovl` for a position, of plain containers.

    `read_position` reads it.
    """
    values = {
        each.name: getattr(position, each.name)
        for each in fields(Position)
        if each.name != "batching"
    }
    return {"format": FORMAT, **values, **asdict(position.batching)}


def read_position(checkpoint: dict) -> Position | None:
    """Read the position of a checkpoint.

    Returns:
        None for one of open_clip's own, which is from an epoch's end.

    Raises:
        UserError: another format.
        LookupError, TypeError: an entry that is not a position.
    """
    entry = dict(checkpoint.get("zerovl") or {})
    if not entry:
        return None
    written = entry.pop("format", FORMAT)
    if written != FORMAT:
        raise UserError(
            f"the checkpoint has format {written}, and this release reads {FORMAT}; resume with the one that wrote it, "
            "or start a new run from its weights with --init-from"
        )
    batching = Batching(**{each.name: index(entry.pop(each.name)) for each in fields(Batching)})
    return Position(
        index(entry["epoch"]), index(entry["step"]), batching, dict(entry.get("retained", {}))
    )


# ---------------------------------------------------------------------------------------------------------------------
# The settings of a run, of which a resume names each that is not the checkpoint's with what happens
# ---------------------------------------------------------------------------------------------------------------------

SETTINGS_ENTRY = "zerovl_settings"
# taken: the learning rate follows them
_SCHEDULE = (
    "lr", "epochs", "warmup", "warmup_share", "lr_min", "lr_scheduler", "epochs_cooldown", "lr_cooldown_end",
    "lr_cooldown_power", "skip_scheduler",
)  # fmt: skip
# without effect: the weights are the checkpoint's
_START = ("pretrained", "pretrained_image", "init_from", "init_image", "init_text")
# taken from the next epoch on; in the middle of an epoch, whose samples would come in another order, refused
_ORDER = (
    "captions", "dataset_resampled", "sampling", "seed", "source_order", "train_data_upsampling_factors", "train_num_samples",
)  # fmt: skip
# taken: `Position.start_step` says what happens in the middle of an epoch
_BATCH, _SOURCES = "an effective batch of", "the sources"


def settings_of(
    args: argparse.Namespace, batching: Batching, sources: Sequence[Source] = ()
) -> dict[str, str]:
    """Collect the settings of schedule, start and order, with the batch and the sources, in words."""
    weights = "::".join(f"{source.weight:g}" for source in sources)
    values = {**vars(args), "train_data_upsampling_factors": weights or None}
    return {
        _BATCH: str(batching.effective_batch),
        _SOURCES: described(sources) or "(unnamed)",
        **{name: _value(values.get(name)) for name in (*_SCHEDULE, *_START, *_ORDER)},
    }


def _value(value: Any) -> str:
    return (
        "left out" if value is None or value is False else "given" if value is True else str(value)
    )


def described(sources: Sequence[Source]) -> str:
    """Name sources with their numbers of samples, and those that were packed with a digest of what they were packed from."""
    parts = []
    for source in sources:
        packed = source.pack_file
        of = "" if packed is None else f", packed {digest_of(packed.read_bytes())[:12]}"
        parts.append(f"{source.name} ({source.num_samples}{of})")
    return ", ".join(parts)


def compared_settings(
    checkpoint: Mapping[str, Any], now: Mapping[str, str], position: Position | None
) -> list[str]:
    """Word what happens to each setting that is not the checkpoint's.

    Args:
        now: this run's; empty for a run without flags of ours, whose settings are not compared.
        position: the checkpoint's; None: the end of an epoch.

    Raises:
        UserError: the position is in the middle of an epoch whose samples would come in another order.
    """
    before = {**now, **checkpoint.get(SETTINGS_ENTRY, {})}
    changed = {
        name: f"{_named(name)} {value} after {before[name]}"
        for name, value in now.items()
        if value != before[name]
    }
    schedule, start, order, data = (
        [name for name in names if name in changed]
        for names in (_SCHEDULE, _START, _ORDER, (_BATCH, _SOURCES))
    )
    words = []
    if schedule:
        changes = ", ".join(changed[name] for name in schedule)
        words.append(f"The learning rate follows this command line from here on: {changes}.")
    if start:
        flags = ", ".join(map(_named, start))
        words.append(f"{flags}: no effect, since the weights are the checkpoint's.")
    if position is None or position.step == 0:
        if changes := "; ".join(changed[name] for name in (*data, *order)):
            words.append(
                f"Resuming at the start of epoch {checkpoint.get('epoch')} with other settings than before: {changes}. The "
                "learning rate follows the schedule of this run's steps."
            )
    elif _SOURCES in changed:
        words.append(
            f"Step {position.step} of epoch {position.epoch} was taken on the sources {before[_SOURCES]}, and this run has "
            f"{now[_SOURCES]}. The rest of this epoch continues at that step of the new sources; from the next epoch on each "
            "sample is seen once. For a whole first epoch, start a new run with --init-from."
        )
    elif order:
        name = order[0]
        raise UserError(
            f"the checkpoint was taken in the middle of epoch {position.epoch} with {_named(name)} {before[name]}, and this "
            f"run has {now[name]}: the remaining batches would contain different samples; give {_named(name)} as before, "
            "resume from an epoch's end, or start a new run with --init-from"
        )
    return words


def _named(name: str) -> str:
    return name if " " in name else f"--{name.replace('_', '-')}"


# ---------------------------------------------------------------------------------------------------------------------
# The checkpoint
# ---------------------------------------------------------------------------------------------------------------------


def keep_settings(optimizer: torch.optim.Optimizer, *, taken: bool) -> torch.optim.Optimizer:
    """Keep an optimizer's own settings when it loads a checkpoint's state, whose settings torch takes without a word.

    Args:
        taken: False: the checkpoint's settings hold, as in open_clip's own program. Either way changes are logged.

    Returns:
        The optimizer.
    """
    compared = ("weight_decay", "betas", "eps", "rate_scale")
    here: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "part", *compared) if name in group}
        for group in optimizer.param_groups
    ]

    def restore(optimizer: torch.optim.Optimizer) -> None:
        changed: dict[str, str] = {}
        for group, settings in zip(optimizer.param_groups, here, strict=True):
            for name in settings.keys() & {*compared}:
                now, before = settings[name], group.get(name)
                if now != before:
                    changed[name] = (
                        f"{name} {now} after {before}"
                        if taken
                        else f"{name} {before}, and not {now}"
                    )
            if taken:
                group.update(settings)
        if changed:
            how = "takes" if taken else "keeps the checkpoint's"
            logging.warning(f"The resumed optimizer {how} {', '.join(sorted(changed.values()))}.")

    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer


def load_checkpoint(file_path: str, map_location: Any = None, *, checksums: bool = True) -> dict:
    """Load a training or bare checkpoint for `--resume`.

    Torch compares its tensors with the model's when main loads them.

    Names are returned without `module.`, so that a single-process checkpoint resumes under DDP and the other way round
    (open_clip 3.3 fails on the prefix). Only tensors and plain containers are loaded; a file that would run code is refused.

    Args:
        checksums: compare those of a file of this machine, see `damage_of`.

    Raises:
        UserError: an unreadable file.
    """
    damage = damage_of(Path(file_path)) if checksums and zipfile.is_zipfile(file_path) else None
    if damage is not None:
        raise UserError(
            f"--resume {file_path} cannot be read as a checkpoint: the file {damage}; give a whole one"
        )
    with reading(file_path, "give a checkpoint that training wrote"):
        with fsspec.open(file_path, "rb") as file:
            checkpoint = load_pickled(file, map_location=map_location)
        state = checkpoint.get("state_dict", checkpoint)
        state = {name.removeprefix(PREFIX): value for name, value in state.items()}
        if "state_dict" not in checkpoint:
            return state
        return {**checkpoint, "state_dict": state}


def of_this_line(state: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Convert the state of an optimizer of open_clip 3.3 to the groups of this one.

    Any other state stays as it is.

    open_clip 4 spares more parameters from weight decay, so that its groups have other sizes. Each parameter keeps its moments
    and gets the weight decay that this release has for it.
    """
    groups_3 = parameter_groups(model, 0.0)
    saved, here, of_3 = (
        [len(group["params"]) for group in groups]
        for groups in (state["param_groups"], optimizer.param_groups, groups_3)
    )
    saved_parameters, parameters_here = (
        [p for group in groups for p in group["params"]]
        for groups in (groups_3, optimizer.param_groups)
    )
    if (
        saved == here
        or saved != of_3
        or {id(p) for p in saved_parameters} != {id(p) for p in parameters_here}
    ):
        return state
    logging.info(
        "The optimizer's state comes from open_clip 3.3, whose parameter groups differ: each parameter keeps its moments "
        "and gets this release's weight decay."
    )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    moments = {
        id(p): state["state"][n]
        for p, n in zip(saved_parameters, numbers, strict=True)
        if n in state["state"]
    }
    return {
        "state": {
            number: moments[id(p)] for number, p in enumerate(parameters_here) if id(p) in moments
        },
        "param_groups": optimizer.state_dict()["param_groups"],
    }


def require_same_function(checkpoint: dict, model_cfg: Mapping[str, Any] | None, path: str) -> None:
    """Refuse a checkpoint's config that computes another function than this run's with tensors of the same shapes.

    Args:
        model_cfg: this run's; None if it is not known.
    """
    saved = checkpoint.get(MODEL_ENTRY)
    if model_cfg is None or not isinstance(saved, dict):
        return
    for tower in ("image", "text"):
        if (difference := tower_difference(saved, model_cfg, tower)) is not None:
            key, there, here = difference
            raise UserError(
                f"--resume {path} was trained with {key} {there}, and this run's model has {here}, which changes no "
                "shape, but what the weights compute; give the model as it was, or start a new run with --init-from"
            )


def require_finite(checkpoint: dict, model: torch.nn.Module, path: str) -> None:
    """Refuse weights of a checkpoint, or moments of its optimizer, that are not finite numbers.

    Args:
        checkpoint: with bare names; of a training, or weights alone.
    """
    weights = checkpoint.get("state_dict", checkpoint)
    require_finite_weights(weights, dict(model.named_parameters()), path)
    moments = {
        f"{name} of the optimizer's parameter {number}": value
        for number, state in checkpoint.get("optimizer", {}).get("state", {}).items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    require_finite_weights(moments, moments, path)
