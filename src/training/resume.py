"""The `pt_load` seam: a checkpoint is fitted to this run, or refused in a sentence, before main touches the optimizer."""

from __future__ import annotations

import argparse
import os
import pickle
from typing import Any

import torch
from open_clip_train.file_utils import pt_load as load_stock

from open_clip_zerovl.checkpoints.weights import UNREADABLE, first_line, unpickling_reason
from open_clip_zerovl.errors import UserError

PREFIX = "module."  # what DDP puts before every name


def load_checkpoint(model: torch.nn.Module, args: argparse.Namespace, file_path: str, map_location: Any = None) -> dict:
    """Load a training or bare checkpoint for `--resume` and check that it belongs to this model.

    A single-process checkpoint resumes under DDP and the other way round (open_clip 3.3 fails on the `module.` prefix).

    Raises:
        UserError: a missing or unreadable file, or tensors whose names or shapes are not this model's.
    """
    if os.path.isdir(file_path):
        raise UserError(f"--resume {file_path} is a folder; give a checkpoint in it, or --name with --resume latest")
    if "://" not in file_path and not os.path.isfile(file_path):
        raise UserError(f"--resume {file_path} does not exist; give the path of a checkpoint, or 'latest'")
    try:
        checkpoint = load_stock(file_path, map_location=map_location)
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
    if args.distributed:
        state = {PREFIX + name: value for name, value in state.items()}
    if "state_dict" in checkpoint:
        return {**checkpoint, "state_dict": state}
    return state


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
