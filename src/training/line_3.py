"""open_clip 3.3: the names that its main looks up, and our pieces for them."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from open_clip_zerovl.core.releases import LINE_3
from training.pieces import Pieces
from training.resume import PREFIX

LINE = LINE_3

# The parameters of each seam that main passes.
SEAMS: dict[str, tuple[str, ...]] = {
    "parse_args": ("args",),
    "copy_codebase": ("args",),
    "create_model_and_transforms": ("model_name", "pretrained", "precision", "device", "output_dict"),
    "get_tokenizer": ("model_name", "context_length", "cache_dir"),
    "get_data": ("args", "preprocess_fns", "epoch", "tokenizer"),
    "create_loss": ("args",),
    "optim": ("params", "lr", "betas", "eps"),  # of optim.AdamW
    "cosine_lr": ("optimizer", "base_lr", "warmup_length", "steps"),
    "train_one_epoch": (
        "model", "data", "loss", "epoch", "optimizer", "scaler", "scheduler", "dist_model", "args", "tb_writer",
    ),
    "evaluate": ("model", "data", "epoch", "args", "tb_writer", "tokenizer"),
    "pt_load": ("file_path", "map_location"),
    "get_latest_checkpoint": ("path", "remote"),
}  # fmt: skip


def filled(pieces: Pieces, host: Any) -> dict[str, Any]:
    """What to put under the names of this line's main (`host`): seam -> our piece, called as that main calls it."""
    stock_data, stock_tokenizer, stock_epoch, stock_evaluate = (
        host.get_data, host.get_tokenizer, host.train_one_epoch, host.evaluate,
    )  # fmt: skip

    def get_data(args: argparse.Namespace, preprocess_fns, epoch: int = 0, tokenizer=None) -> dict:
        def stock(args: argparse.Namespace) -> dict:
            return stock_data(args, preprocess_fns, epoch=epoch, tokenizer=tokenizer)

        return pieces.get_data(stock, args, preprocess_fns, epoch, tokenizer)

    def pt_load(file_path: str, map_location: Any = None) -> dict:
        checkpoint = pieces.load_checkpoint(file_path, map_location)
        if not pieces.args.distributed:
            return checkpoint
        if "state_dict" in checkpoint:
            return {**checkpoint, "state_dict": _prefixed(checkpoint["state_dict"])}
        return _prefixed(checkpoint)

    def train_one_epoch(
        model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=None
    ) -> None:
        def stock() -> None:
            stock_epoch(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=tb_writer)

        pieces.train_epoch(stock, model, data, loss, epoch, optimizer, scaler, scheduler, tb_writer)

    def evaluate(model, data, epoch, args, tb_writer=None, tokenizer=None) -> dict[str, Any]:
        def stock(data: dict) -> dict[str, Any]:
            return stock_evaluate(model, data, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer)

        assert pieces.evaluate is not None
        return pieces.evaluate(stock, unwrapped(model), data, epoch, tb_writer, tokenizer)

    seams: dict[str, Any] = {
        "parse_args": lambda argv: pieces.args,
        "copy_codebase": pieces.copy_codebase,
        "create_model_and_transforms": pieces.create_model,
        "get_data": get_data,
        "pt_load": pt_load,
        "get_latest_checkpoint": pieces.newest_checkpoint,
        "train_one_epoch": train_one_epoch,
    }
    if pieces.model_name != pieces.args.model:
        seams["get_tokenizer"] = lambda name, **options: stock_tokenizer(pieces.model_name, **options)
    if pieces.own_step:
        seams["create_loss"] = pieces.create_loss
    if pieces.cosine_lr is not None:
        seams["cosine_lr"] = pieces.cosine_lr
    if pieces.create_adamw is not None:
        create = pieces.create_adamw
        seams["optim"] = SimpleNamespace(AdamW=lambda groups, **options: create(**options))
    if pieces.evaluate is not None:
        seams["evaluate"] = evaluate
    return seams


def unwrapped(model: Any) -> Any:
    """The model inside DistributedDataParallel."""
    return getattr(model, "module", model)


def _prefixed(state: dict) -> dict:
    return {PREFIX + name: value for name, value in state.items()}
