"""Resuming: the position at which a checkpoint was taken, and loading a checkpoint for `--resume`, or refusing it.

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
from itertools import zip_longest
from typing import Any

import fsspec
import torch

from open_clip_zerovl.checkpoints.adapters import is_adapter
from open_clip_zerovl.checkpoints.spec import (
    MODEL_ENTRY,
    NOT_OF_FUNCTION,
    first_difference,
    tower_config,
)
from open_clip_zerovl.checkpoints.weights import unpickling_reason
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import UNREADABLE
from open_clip_zerovl.core.randomness import STREAMS_VERSION
from open_clip_zerovl.dga.retain import Decision
from open_clip_zerovl.recipe.optimizer import marked_temperature, parameter_groups
from open_clip_zerovl.sampling.schedule import Batching

FORMAT = STREAMS_VERSION  # of the entry `zerovl` in a checkpoint
PREFIX = "module."  # DDP's, of every name

# ---------------------------------------------------------------------------------------------------------------------
# The position
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """The position at which a checkpoint was taken: `step` optimizer steps of epoch `epoch` are done.

    Attributes:
        batching: how the run divides its effective batches; a rank without loader processes counts as one worker.
        sources: names with numbers of samples, "" for open_clip's own pipeline.
        order: flag -> value, of flags that decide the order of samples.
        retained: how many graphs `--dga-retain auto` keeps (`dga.retain.Decision`); empty if it has not decided.
    """

    epoch: int
    step: int
    batching: Batching
    sources: str = ""
    order: Mapping[str, Any] = field(default_factory=dict)
    retained: Mapping[str, float] = field(default_factory=dict)

    def graphs_for(self, now: Position) -> Decision | None:
        """The decision of `--dga-retain auto`, if the split of the batch is that of `now`, else None."""
        same = replace(self.batching, workers=1) == replace(now.batching, workers=1)
        return Decision(**self.retained) if self.retained and same else None  # type: ignore[arg-type]

    def start_step(self, now: Position, steps: int = sys.maxsize) -> int:
        """The step at which a run with the batching of `now` continues. The log names approximations.

        Args:
            steps: number of steps of the epoch, as `now` divides it. With a larger effective batch, or less data, it
                may end before this
                position: the run then continues with the next epoch.

        Raises:
            UserError: the position is in the middle of an epoch whose samples `now` would show in another order.
        """
        changed = self._changed_order(now)
        if self.step == 0:
            self._warn_of_changes(now, changed)
            return 0
        if self.sources and self.sources != now.sources:
            logging.warning(
                f"Step {self.step} of epoch {self.epoch} was taken on the sources {self.sources}, and this run has "
                f"{now.sources or 'sources without names'}. The rest of this epoch continues at that step of the new sources; "
                "from the next epoch on each sample is seen once. For a whole first epoch, start a new run with --init-from."
            )
        elif changed:
            flag, before, value = changed[0]
            raise UserError(
                f"the checkpoint was taken in the middle of epoch {self.epoch} with {flag} {before}, and this run has {value}: "
                f"the remaining batches would contain different samples; give {flag} as before, resume from an epoch's end, or "
                "start a new run with --init-from"
            )
        step = min(self.step * self.batching.effective_batch // now.batching.effective_batch, steps)
        if self.batching != now.batching:
            logging.warning(
                f"Resuming step {self.step} of epoch {self.epoch} ({_shown(self.batching)}) as step {step} "
                f"({_shown(now.batching)}). The sample count continues. The samples of the rest of this epoch are approximate, "
                "since other readers divide the shards: some samples come twice, and as many are skipped. From the next epoch "
                "on each sample comes once again. For an exact rest of the epoch give the batch, the ranks and the workers of "
                "the first bracket."
            )
        return step

    def _changed_order(self, now: Position) -> list[tuple[str, str, str]]:
        """The changed flags among those that decide the order of samples, with both values in words."""
        pairs = [
            (flag, self.order.get(flag), value)
            for flag, value in sorted(now.order.items())
            if self.order
        ]
        return [
            (flag, _value(before), _value(value))
            for flag, before, value in pairs
            if before != value
        ]

    def _warn_of_changes(self, now: Position, order: list[tuple[str, str, str]]) -> None:
        """Warn of settings that differ in `now`, which a new epoch allows."""
        before, after = self.batching.effective_batch, now.batching.effective_batch
        changed = [f"an effective batch of {after} after {before}"] * (before != after)
        if self.sources and self.sources != now.sources:
            changed.append(f"the sources {now.sources or 'without names'} after {self.sources}")
        changed += [f"{flag} {value} after {before}" for flag, before, value in order]
        if changed:
            logging.warning(
                f"Resuming at the start of epoch {self.epoch} with other settings than before: {'; '.join(changed)}. The "
                "learning rate follows the schedule of this run's steps."
            )


def _value(value: Any) -> str:
    return (
        "left out" if value is None or value is False else "given" if value is True else str(value)
    )


def _shown(batching: Batching) -> str:
    split = f"{batching.micro_batch} x {batching.dga_steps} x {batching.world_size}"
    return f"effective batch {batching.effective_batch} = {split}, {batching.world_size} ranks x {batching.workers} workers"


# ---------------------------------------------------------------------------------------------------------------------
# Its entry in a checkpoint
# ---------------------------------------------------------------------------------------------------------------------

_COUNTS = {
    "epoch": 0,
    "step": 0,
    "world_size": 1,
    "workers": 1,
    "micro_batch": 1,
    "dga_steps": 1,
}  # name -> least
_LARGEST_COUNT = 1 << 50


def entry_of(position: Position) -> dict[str, Any]:
    """The checkpoint's entry `zerovl` for a position, of plain containers; `read_position` reads it."""
    values = {
        each.name: getattr(position, each.name)
        for each in fields(Position)
        if each.name != "batching"
    }
    return {"format": FORMAT, **values, **asdict(position.batching)}


def read_position(checkpoint: dict) -> Position | None:
    """The position of a checkpoint; None for one of open_clip's own, which is from an epoch's end.

    Raises:
        UserError: another format, or an entry that is not a position.
    """
    if not (found := checkpoint.get("zerovl")):
        return None
    entry = dict(found) if isinstance(found, dict) else {}
    if (written := entry.pop("format", FORMAT)) != FORMAT:
        raise UserError(
            f"the checkpoint has format {_value(written)}, and this release reads {FORMAT}; resume with the one that wrote it, "
            "or start a new run from its weights with --init-from"
        )
    entry.pop("effective_batch", None)
    retained = entry.get("retained", {})
    good = {
        **{name: _is_count(entry.get(name), least) for name, least in _COUNTS.items()},
        "sources": isinstance(entry.get("sources"), str),
        "order": isinstance(entry.get("order"), dict),
        "retained": retained == {} or _is_decision(retained),
    }
    wrong = [name for name, right in good.items() if not right] + sorted(
        map(str, entry.keys() - good.keys())
    )
    if wrong:
        raise UserError(
            f"the checkpoint does not say where in training it was taken: its entry 'zerovl' has no usable {wrong[0]!s:.40}; "
            "resume from another one, or start a new run from its weights with --init-from"
        )
    batching = Batching(
        *(entry[name] for name in ("micro_batch", "dga_steps", "world_size", "workers"))
    )
    return Position(
        entry["epoch"], entry["step"], batching, entry["sources"], entry["order"], retained
    )


def _is_count(value: Any, least: int) -> bool:
    return (
        isinstance(value, int) and not isinstance(value, bool) and least <= value < _LARGEST_COUNT
    )


def _is_decision(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {each.name for each in fields(Decision)}
        and _is_count(value["graphs"], 1)
        and all(
            isinstance(number, int | float) and 0 <= number < math.inf for number in value.values()
        )
    )


# ---------------------------------------------------------------------------------------------------------------------
# The checkpoint
# ---------------------------------------------------------------------------------------------------------------------


def load_checkpoint(
    model: torch.nn.Module, args: argparse.Namespace, file_path: str, map_location: Any = None
) -> dict:
    """Load a training or bare checkpoint for `--resume` and check that it belongs to this model.

    Names are returned without `module.`, so that a single-process checkpoint resumes under DDP and the other way round
    (open_clip 3.3 fails on the prefix). Only tensors and plain containers are loaded; a file that would run code is refused.

    Raises:
        UserError: a missing or unreadable file, or tensors whose names or shapes are not this model's.
    """
    if os.path.isdir(file_path):
        raise UserError(
            f"--resume {file_path} is a folder; give a checkpoint in it, or --name with --resume latest"
        )
    try:
        with fsspec.open(file_path, "rb") as file:
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"--resume {file_path} is not a checkpoint of training ({unpickling_reason(error)}); give a file that it wrote"
        ) from error
    except UNREADABLE as error:
        raise UserError(
            f"--resume {file_path} cannot be read as a checkpoint ({first_line(error)}); give a whole one"
        ) from error
    state = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise UserError(
            f"--resume {file_path} holds no state_dict; give a checkpoint that training wrote"
        )
    state = {name.removeprefix(PREFIX): value for name, value in state.items()}
    _require_same_model(state, model.state_dict(), file_path, args.model)
    if "state_dict" in checkpoint:
        trains = _trains(args)
        # open_clip's main reads the optimizer's state of each checkpoint that counts epochs
        usable = "optimizer" not in checkpoint and not (trains and "epoch" in checkpoint)
        optimizer = checkpoint.get("optimizer")
        if isinstance(optimizer, dict):
            groups = optimizer.get("param_groups")
            usable = (
                isinstance(groups, list)
                and all(
                    isinstance(group, dict) and isinstance(group.get("params"), list)
                    for group in groups
                )
                and isinstance(optimizer.get("state"), dict)
            )
        if not usable or not _is_count(checkpoint.get("epoch", 0), 0):
            wrong = "'epoch' that counts epochs" if usable else "'optimizer' with a state"
            raise UserError(
                f"--resume {file_path} has no {wrong}; give a checkpoint that training wrote"
            )
        if trains and isinstance(optimizer, dict):
            _require_same_temperature(
                optimizer, "temperature-parameter" in getattr(args, "ablate", ()), file_path
            )
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
    theirs, own = (
        [p for group in groups for p in group["params"]]
        for groups in (groups_3, optimizer.param_groups)
    )
    if saved == here or saved != of_3 or {id(p) for p in theirs} != {id(p) for p in own}:
        return state
    logging.info(
        "The optimizer's state comes from open_clip 3.3, whose parameter groups differ: each parameter keeps its moments "
        "and gets this release's weight decay."
    )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    kept = {
        id(p): state["state"][n]
        for p, n in zip(theirs, numbers, strict=True)
        if n in state["state"]
    }
    return {
        "state": {number: kept[id(p)] for number, p in enumerate(own) if id(p) in kept},
        "param_groups": optimizer.state_dict()["param_groups"],
    }


def _trains(args: argparse.Namespace) -> bool:
    return (
        bool(getattr(args, "train_data", None))
        or getattr(args, "dataset_type", None) == "synthetic"
    )


def require_same_function(checkpoint: dict, model_cfg: Mapping[str, Any] | None, path: str) -> None:
    """UserError if a checkpoint's config computes another function than this run's with tensors of the same shapes.

    Args:
        model_cfg: this run's; None if it is not known.
    """
    saved = checkpoint.get(MODEL_ENTRY)
    if model_cfg is None or not isinstance(saved, dict):
        return
    if not all(isinstance(saved.get(part), dict) for part in ("vision_cfg", "text_cfg")):
        raise UserError(
            f"--resume {path} has an entry {MODEL_ENTRY!r} that is no model's; resume from another checkpoint"
        )
    for tower in ("image", "text"):
        found = first_difference(
            tower_config(saved, tower), tower_config(model_cfg, tower), NOT_OF_FUNCTION
        )
        if found is None:
            continue
        key, there, here = found
        raise UserError(
            f"--resume {path} was trained with {key} {there}, and this run's model has {here}, which changes no "
            "shape, but what the weights compute; give the model as it was, or start a new run with --init-from"
        )


def require_same_rates(
    checkpoint: dict, optimizer: torch.optim.Optimizer | None, args: argparse.Namespace, path: str
) -> None:
    """UserError if the groups of a checkpoint's optimizer have other rates than this run's, if this run trains.

    An optimizer that loads a state takes its rates without a word.

    Args:
        optimizer: this run's; None if it has open_clip's groups.
    """
    state = checkpoint.get("optimizer")
    if not isinstance(state, dict) or not _trains(args):
        return
    own = [] if optimizer is None else optimizer.state_dict()["param_groups"]
    saved, here = (
        [(group.get("part"), group["rate_scale"]) for group in groups if "rate_scale" in group]
        for groups in (state["param_groups"], own)
    )
    for before, now in zip_longest(saved, here):
        if (
            before is None
            or now is None
            or before[0] != now[0]
            or not math.isclose(before[1], now[1])
        ):
            words = [
                "no such group" if each is None else f"{each[0]} at {each[1]:.3g} x --lr"
                for each in (before, now)
            ]
            raise UserError(
                f"--resume {path} has {words[0]} where this run has {words[1]}: --lr-image, --lr-text, --lr-head or "
                "--layer-decay have changed; give them as before, or start a new run with --init-from"
            )


def _require_same_temperature(optimizer: dict, wanted: bool, path: str) -> None:
    """UserError if the temperature's moments belong to another parameter than this run's."""
    if marked_temperature(optimizer) != wanted:
        saved, here = ("without", "with") if wanted else ("with", "without")
        raise UserError(
            f"--resume {path} was trained {saved} --ablate temperature-parameter, and this run is {here} it, for which the "
            "optimizer's moments do not fit; give the flag as before, or start a new run with --init-from"
        )


def _require_same_model(state: dict, own: dict, path: str, model_name: str) -> None:
    problems = [f"it lacks {name}" for name in own if name not in state]
    problems += [f"it has {name}, which the model lacks" for name in state if name not in own]
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
            + (
                ", and --lora and --lora-on as they were"
                if any(map(is_adapter, (*state, *own)))
                else ""
            )
        )
