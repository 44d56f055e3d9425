"""The interface between a run and the supported lines of open_clip releases: what the run replaces in open_clip's main.

`main.Run` makes the pieces and uses no name of open_clip's main. `line_3` and `line_4` know how their main calls each
piece, but not what it does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pieces:
    """The parts of a run that differ from open_clip's own; None keeps open_clip's.

    Attributes:
        args: the parsed command line.
        copy_codebase: (args) copies the code of the run into its folder, for `--copy-codebase`.
        create_model: (name, pretrained, **options) -> model, training transform, evaluation transform.
        model_name: the name under which open_clip knows the model and its tokenizer.
        get_data: (stock, args, transforms, epoch, tokenizer) -> data by name; `stock(args)` is what open_clip itself opens.
            Training data yields (images, texts, ...) where `train_epoch` trains, and what open_clip's loop takes otherwise.
        load_checkpoint: (path, map_location) -> checkpoint with bare names, checked against the model.
        newest_checkpoint: (folder, remote) -> path or None.
        train_epoch: (stock, model, data, loss, epoch, optimizer, scaler, scheduler, tb_writer) trains an epoch by `stock()`,
            open_clip's own loop, or by our step.
        own_step: whether `train_epoch` takes our step.
        create_loss: (args) -> loss of our step.
        cosine_lr: as open_clip's.
        create_adamw: (lr, betas, eps) -> optimizer.
        evaluate: (stock, model, data, epoch, tb_writer, tokenizer) -> metrics; `stock(data)` gives open_clip's.
    """

    args: argparse.Namespace
    copy_codebase: Callable[[argparse.Namespace], None]
    create_model: Callable[..., tuple[torch.nn.Module, Any, Any]]
    model_name: str
    get_data: Callable[..., dict]
    load_checkpoint: Callable[..., dict]
    newest_checkpoint: Callable[..., str | None]
    train_epoch: Callable[..., None]
    own_step: bool
    create_loss: Callable[[argparse.Namespace], torch.nn.Module]
    cosine_lr: Callable[..., Callable[[int], float]] | None = None
    create_adamw: Callable[..., torch.optim.Optimizer] | None = None
    evaluate: Callable[..., dict[str, Any]] | None = None
