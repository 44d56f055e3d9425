"""Resuming: the position at which a checkpoint was taken, and the `pt_load` seam, which loads a checkpoint or refuses it.

Both happen before open_clip's main loads the optimizer's state.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import fsspec
import torch

from open_clip_zerovl.checkpoints.weights import unpickling_reason
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import UNREADABLE
from open_clip_zerovl.core.randomness import STREAMS_VERSION
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.dga.retain import Decision
from open_clip_zerovl.recipe.optimizer import marked_temperature, parameter_groups

#: Of the entry `zerovl` in a checkpoint. 1 said no format, and was of runs whose seeds meant other streams.
FORMAT = STREAMS_VERSION
PREFIX = "module."  # what DDP puts before every name


@dataclass(frozen=True)
class Position:
    """The position at which a checkpoint was taken: `step` optimizer steps of epoch `epoch` are done.

    Attributes:
        workers: loader processes a rank, 1 if it reads by itself.
        sources: names with numbers of samples, "" for open_clip's own pipeline.
        micro_batch, dga_steps: the split of a rank's part of the effective batch; 0 in older checkpoints.
        order: flag -> value, of flags that decide the order of samples; empty in older checkpoints.
        retained: how many graphs `--dga-retain auto` keeps (`dga.retain.Decision`); empty if it has not decided.
        read_as: micro-batch, DGA steps and workers with which the epoch was begun and is read, if others than this run's.
    """

    epoch: int
    step: int
    effective_batch: int
    world_size: int
    workers: int
    sources: str = ""
    micro_batch: int = 0
    dga_steps: int = 0
    order: Mapping[str, Any] = field(default_factory=dict)
    retained: Mapping[str, float] = field(default_factory=dict)
    read_as: tuple[int, ...] = ()

    @property
    def dealt(self) -> Batching:
        """How the epoch's effective batches are divided among those who read them."""
        micro_batch, dga_steps, workers = self.read_as or (self.micro_batch, self.dga_steps, self.workers)
        return Batching(micro_batch, dga_steps, self.world_size, workers)

    def read_on(self, now: Position) -> Position:
        """`now`, in an epoch whose rest is to be read as this position's epoch was begun, so that each sample comes once."""
        if not self.micro_batch or self.dealt == now.dealt or self._batch != now._batch:
            return now
        return replace(now, read_as=(self.dealt.micro_batch, self.dealt.dga_steps, self.dealt.workers))

    @property
    def _batch(self) -> tuple[int, int]:
        return self.effective_batch, self.world_size

    def graphs_for(self, now: Position) -> Decision | None:
        """The decision of `--dga-retain auto`, if the split of the batch is that of `now`, else None."""
        same = (self.micro_batch, self.dga_steps, self.world_size) == (now.micro_batch, now.dga_steps, now.world_size)
        return Decision(**self.retained) if self.retained and same else None  # type: ignore[arg-type]

    def start_step(self, now: Position, steps: int = sys.maxsize) -> int:
        """The step at which a run with the batching of `now` goes on. The log says what is approximate.

        Args:
            steps: of the epoch, as `now` divides it. With a larger effective batch, or less data, it may end before this
                position: the run then goes on with the next epoch.

        Raises:
            UserError: the position is in the middle of an epoch whose samples `now` would show in another order.
        """
        if self.step == 0:
            if changed := self._changes(now):
                logging.warning(
                    f"Resuming at the start of epoch {self.epoch} with other settings than before: {'; '.join(changed)}. The "
                    "learning rate follows the schedule of this run's steps."
                )
            return 0
        if self.sources and self.sources != now.sources:
            logging.warning(
                f"Resuming step {self.step} of epoch {self.epoch}, taken on the sources {self.sources}, on others: "
                f"{now.sources or 'unnamed ones'}. The rest of this epoch shows what those have from that step on; from the "
                "next epoch on each sample is seen once. To begin their epoch whole, start a new run with --init-from."
            )
        else:
            # A flag that one of them does not know was not given there.
            for flag in (*self.order, *(now.order.keys() - self.order.keys())) if self.order and now.order else ():
                if now.order.get(flag) != (value := self.order.get(flag)):
                    raise UserError(
                        f"the checkpoint was taken in the middle of epoch {self.epoch} with {flag} {_shown(value)}, and this "
                        f"run has {_shown(now.order.get(flag))}: the rest of the epoch would show other samples than those "
                        f"that are left; give {flag} as it was, resume from an epoch's end, or start a new run with "
                        "--init-from"
                    )
        if self._batch == now._batch and (
            self.dealt == now.dealt or (not self.micro_batch and self.workers == now.workers)
        ):
            return min(self.step, steps)
        step = min(self.step * self.effective_batch // now.effective_batch, steps)
        words = (
            f"Resuming step {self.step} of epoch {self.epoch} ({self._batching()}) as step {step} ({now._batching()}). "
        )
        if self._batch == now._batch and self.micro_batch:
            logging.info(
                f"{words}The rest of this epoch is read as it was begun, by {self.dealt.workers} workers a rank, and then "
                "divided as this run asks: each step shows the samples that it would have shown."
            )
            return step
        logging.warning(
            f"{words}The count of samples goes on where it was. Which samples the rest of this epoch shows is approximate, "
            "since other readers divide the shards: some come twice and as many not at all. From the next epoch on each is "
            "seen once again. To be exact, give the effective batch and the ranks of the first bracket until the epoch ends."
        )
        return step

    def _changes(self, now: Position) -> list[str]:
        """What `now` has otherwise and a new epoch allows, in words; what this position does not know is left out."""
        changed = []
        if self.effective_batch != now.effective_batch:
            changed.append(f"an effective batch of {now.effective_batch} after {self.effective_batch}")
        if self.sources and self.sources != now.sources:
            changed.append(f"the sources {now.sources or 'without names'} after {self.sources}")
        for flag in sorted(self.order.keys() | now.order.keys()) if self.order and now.order else ():
            before, value = self.order.get(flag), now.order.get(flag)
            if before != value:
                changed.append(f"{flag} {_shown(value)} after {_shown(before)}")
        return changed

    def _batching(self) -> str:
        dealt = self.dealt
        split = f" = {dealt.micro_batch} x {dealt.dga_steps} x {self.world_size}" if dealt.micro_batch else ""
        return f"effective batch {self.effective_batch}{split}, {self.world_size} ranks x {dealt.workers} workers"


def _shown(value: Any) -> str:
    return "left out" if value is None or value is False else "given" if value is True else str(value)


def read_position(checkpoint: dict) -> Position | None:
    """The position of a checkpoint; None for one of open_clip's own, which is from an epoch's end.

    Raises:
        UserError: it was taken in the middle of an epoch with other random streams, or by a later release.
    """
    entry = checkpoint.get("zerovl")
    if not entry:
        return None
    entry = dict(entry) if isinstance(entry, dict) else {}
    written = entry.pop("format", 1)
    if not isinstance(written, int) or written > FORMAT:
        raise UserError(
            f"the checkpoint has format {_shown(written)}, and this release knows up to {FORMAT}; resume with the one that "
            "wrote it"
        )
    position = _position_of(entry)
    if written < FORMAT and position.step:
        raise UserError(
            f"the checkpoint was taken after step {position.step} of epoch {position.epoch} by an earlier release, whose seeds "
            "gave other batches, so that its epoch cannot go on; move the step checkpoints away, so that --resume latest goes "
            f"on from epoch_{position.epoch}.pt, or finish the epoch with that release"
        )
    return position


_COUNTS = {
    "epoch": 0, "step": 0, "effective_batch": 1, "world_size": 1, "workers": 1, "micro_batch": 0, "dga_steps": 0,
}  # fmt: skip
_LARGEST_COUNT = 1 << 50


def _position_of(entry: dict[str, Any]) -> Position:
    """The position that an entry tells, of the types and ranges that it must have: a file may say anything.

    Raises:
        UserError: it is none.
    """
    values = {"micro_batch": 0, "dga_steps": 0, "sources": "", "order": {}, "retained": {}, "read_as": (), **entry}
    known = {field.name for field in fields(Position)}
    wrong = sorted(map(str, known ^ values.keys()))
    wrong += [name for name, least in _COUNTS.items() if name in values and not _is_count(values[name], least)]
    if not isinstance(values["sources"], str):
        wrong.append("sources")
    if not isinstance(values["order"], dict):
        wrong.append("order")
    read_as, retained = values["read_as"], values["retained"]
    if not isinstance(read_as, tuple) or (
        read_as and not (len(read_as) == 3 and all(_is_count(value, 1) for value in read_as))
    ):
        wrong.append("read_as")
    if not isinstance(retained, dict) or (
        retained
        and not (
            retained.keys() == {field.name for field in fields(Decision)}
            and _is_count(retained["graphs"], 1)
            and all(isinstance(value, int | float) and 0 <= value < math.inf for value in retained.values())
        )
    ):
        wrong.append("retained")
    if wrong:
        raise UserError(
            f"the checkpoint does not say where in training it was taken: its entry 'zerovl' has no usable {wrong[0]!s:.40}; "
            "resume from another one, or start a new run from its weights with --init-from"
        )
    return Position(**values)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _LARGEST_COUNT


def entry_of(position: Position) -> dict[str, Any]:
    """The checkpoint's entry for a position; `read_position` reads it."""
    return {"format": FORMAT, **asdict(position)}


def load_checkpoint(model: torch.nn.Module, args: argparse.Namespace, file_path: str, map_location: Any = None) -> dict:
    """Load a training or bare checkpoint for `--resume` and check that it belongs to this model.

    Names are returned without `module.`, so that a single-process checkpoint resumes under DDP and the other way round
    (open_clip 3.3 fails on the prefix). Only tensors and plain containers are loaded; a file that would run code is refused.

    Raises:
        UserError: a missing or unreadable file, or tensors whose names or shapes are not this model's.
    """
    if os.path.isdir(file_path):
        raise UserError(f"--resume {file_path} is a folder; give a checkpoint in it, or --name with --resume latest")
    if "://" not in file_path and not os.path.isfile(file_path):
        raise UserError(f"--resume {file_path} does not exist; give the path of a checkpoint, or 'latest'")
    try:
        with fsspec.open(file_path, "rb") as file:
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"--resume {file_path} is no checkpoint of training ({unpickling_reason(error)}); give one that it wrote"
        ) from error
    except UNREADABLE as error:
        raise UserError(
            f"--resume {file_path} cannot be read as a checkpoint ({first_line(error)}); give a whole one"
        ) from error
    state = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"--resume {file_path} holds no state_dict; give a checkpoint that training wrote")
    state = {name.removeprefix(PREFIX): value for name, value in state.items()}
    _require_same_model(state, model.state_dict(), file_path, args.model)
    if "state_dict" in checkpoint:
        trains = getattr(args, "train_data", None) or getattr(args, "dataset_type", None) == "synthetic"
        # open_clip's main reads the optimizer's state of each checkpoint that counts epochs
        usable = "optimizer" not in checkpoint and not (trains and "epoch" in checkpoint)
        optimizer = checkpoint.get("optimizer")
        if isinstance(optimizer, dict):
            groups = optimizer.get("param_groups")
            usable = (
                isinstance(groups, list)
                and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
                and isinstance(optimizer.get("state"), dict)
            )
        if not usable or not _is_count(checkpoint.get("epoch", 0), 0):
            wrong = "'epoch' that counts epochs" if usable else "'optimizer' with a state"
            raise UserError(f"--resume {file_path} has no {wrong}; give a checkpoint that training wrote")
        if trains and isinstance(optimizer, dict):
            _require_same_temperature(optimizer, "temperature-parameter" in getattr(args, "ablate", ()), file_path)
        return {**checkpoint, "state_dict": state}
    return state


def of_this_line(state: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """The state of an optimizer of open_clip 3.3 in the groups of this one; any other state as it is.

    open_clip 4 spares more parameters from weight decay, so that its groups have other sizes. Each parameter keeps its moments
    and gets the weight decay that this release has for it.
    """
    groups_3 = parameter_groups(model, 0.0)
    saved, here, of_3 = (
        [len(group["params"]) for group in groups]
        for groups in (state["param_groups"], optimizer.param_groups, groups_3)
    )
    theirs, own = ([p for group in groups for p in group["params"]] for groups in (groups_3, optimizer.param_groups))
    if saved == here or saved != of_3 or {id(p) for p in theirs} != {id(p) for p in own}:
        return state
    logging.info(
        "The optimizer's state is of open_clip 3.3, which divides parameters otherwise: each keeps its own, and gets the "
        "weight decay of this release."
    )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    kept = {id(p): state["state"][n] for p, n in zip(theirs, numbers, strict=True) if n in state["state"]}
    return {
        "state": {number: kept[id(p)] for number, p in enumerate(own) if id(p) in kept},
        "param_groups": optimizer.state_dict()["param_groups"],
    }


def _require_same_temperature(optimizer: dict, wanted: bool, path: str) -> None:
    """UserError where the temperature's moments are in another parameter's units than this run's."""
    if marked_temperature(optimizer) != wanted:
        saved, here = ("without", "with") if wanted else ("with", "without")
        raise UserError(
            f"--resume {path} was trained {saved} --ablate temperature-parameter, this run is {here} it, and the optimizer's "
            "moments of one do not fit the other; give it as it was, or start a new run with --init-from"
        )


def _require_same_model(state: dict, own: dict, path: str, model_name: str) -> None:
    problems = [f"it lacks {name}" for name in own if name not in state]
    problems += [f"it has {name}, which the model has not" for name in state if name not in own]
    problems += [
        f"{name} is {tuple(state[name].shape)} there and {tuple(own[name].shape)} here"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if problems:
        raise UserError(
            f"--resume {path} is a checkpoint of another model than --model {model_name}: {problems[0]}"
            + (f" (and {len(problems) - 1} more differences)" if len(problems) > 1 else "")
            + "; give the model it was trained with"
        )
