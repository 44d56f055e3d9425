"""open_clip 4: the names that its main looks up, and our pieces under them.

Its main wraps model and loss into a task (`create_task`), hands a `TrainState` to `train_one_epoch`, and its loaders yield
dicts. Our step enters as the loss of a `CLIPTask`, and trains the task's module.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.releases import LINE_4
from training.pieces import Pieces
from training.resume import of_this_line

LINE = LINE_4
SHARDED = ".metadata"  # the file by which a folder is a sharded checkpoint (torch.distributed.checkpoint)

# The parameters of each seam that main passes.
SEAMS: dict[str, tuple[str, ...]] = {
    "parse_args": ("args",),
    "copy_codebase": ("args",),
    "create_model_and_transforms": ("model_name", "pretrained", "precision", "device", "output_dict"),
    "get_tokenizer": ("model_name", "context_length", "cache_dir"),
    "get_data": ("args", "preprocess_fns", "epoch", "tokenizer", "naflex_data_config"),
    "create_task": ("args", "model", "dist_model", "naflex_data_config"),
    "create_optimizer": ("model", "cfg", "device", "tensorize"),
    "cosine_lr": ("optimizer", "base_lr", "warmup_length", "steps"),
    "train_one_epoch": ("state", "data", "args", "tb_writer"),
    "evaluate": ("task", "data", "epoch", "args", "tb_writer", "tokenizer"),
    "load_checkpoint": ("task", "path", "optimizer", "scaler", "is_distributed", "metadata"),
    "load_sharded_checkpoint": ("task", "checkpoint_dir", "optimizer", "scaler", "metadata"),
    "get_latest_checkpoint": ("path", "remote"),
}


def filled(pieces: Pieces, host: Any) -> dict[str, Any]:
    """What to put under the names of this line's main (`host`): seam -> our piece, called as that main calls it."""
    stock_data, stock_tokenizer, stock_task = host.get_data, host.get_tokenizer, host.create_task
    stock_epoch, stock_evaluate, stock_load = host.train_one_epoch, host.evaluate, host.load_checkpoint
    stock_optimizer = host.create_optimizer
    stock_load_sharded, stock_newest = host.load_sharded_checkpoint, host.get_latest_checkpoint

    def get_data(args, preprocess_fns, epoch: int = 0, tokenizer=None, naflex_data_config=None) -> dict:
        def stock(args: argparse.Namespace) -> dict:
            return stock_data(
                args, preprocess_fns, epoch=epoch, tokenizer=tokenizer, naflex_data_config=naflex_data_config
            )

        data = pieces.get_data(stock, args, preprocess_fns, epoch, tokenizer)
        if "train" in data:
            data["train"].dataloader = _Loader(data["train"].dataloader, as_dicts=not pieces.own_step)
        return data

    def create_task(args, model, dist_model=None, naflex_data_config=None) -> Any:
        if not pieces.own_step:
            return stock_task(args, model=model, dist_model=dist_model, naflex_data_config=naflex_data_config)
        from open_clip.task import CLIPTask

        return CLIPTask(model, loss=pieces.create_loss(args))

    def create_optimizer(model, cfg, device=None, tensorize: bool = False) -> Any:
        if pieces.create_adamw is not None:
            return pieces.create_adamw(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps)
        try:
            return stock_optimizer(model, cfg, device=device, tensorize=tensorize)
        except ValueError as error:  # of flags: --opt-fallback-list, --text-layer-decay ...
            raise UserError(str(error).rstrip(".")) from error

    def train_one_epoch(state, data, args, tb_writer=None) -> None:
        def stock() -> None:
            stock_epoch(state, data, args, tb_writer=tb_writer)

        pieces.train_epoch(
            stock, state.task.trainable_module, data, getattr(state.task, "loss", None), state.epoch, state.optimizer,
            state.scaler, state.scheduler, tb_writer,
        )  # fmt: skip
        if pieces.own_step:  # what open_clip's own loop counts
            loader = data["train"].dataloader
            state.global_step = loader.num_batches * (state.epoch + 1)
            state.samples_seen = loader.num_samples * (state.epoch + 1)

    def evaluate(task, data, epoch, args, tb_writer=None, tokenizer=None) -> dict[str, Any]:
        def stock(data: dict) -> dict[str, Any]:
            return stock_evaluate(task, data, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer)

        assert pieces.evaluate is not None
        return pieces.evaluate(stock, task.get_trainable_module(), data, epoch, tb_writer, tokenizer)

    def load_checkpoint(task, path, optimizer=None, scaler=None, is_distributed=False, metadata=None) -> int:
        """As open_clip's, of a checkpoint that is checked and has bare names, as 3.3 wrote it or this line."""
        checkpoint = pieces.load_checkpoint(path, "cpu")
        if "epoch" not in checkpoint:  # bare weights
            task.load_state_dict({"state_dict": checkpoint})
            return 0
        task.load_state_dict({key: checkpoint[key] for key in ("state_dict", "state_dict_ema") if key in checkpoint})
        if optimizer is not None and "optimizer" in checkpoint:
            optimizer.load_state_dict(of_this_line(checkpoint["optimizer"], task.get_trainable_module(), optimizer))
        if scaler is not None and "scaler" in checkpoint:
            scaler.load_state_dict(checkpoint["scaler"])
        if metadata is not None:
            metadata.update({key: int(checkpoint[key]) for key in ("global_step", "samples_seen") if key in checkpoint})
        return checkpoint["epoch"]

    def load_sharded_checkpoint(task, checkpoint_dir, optimizer=None, scaler=None, metadata=None) -> int:
        """Of `--fsdp-checkpoint sharded`, a folder: open_clip's to load, where it is one."""
        if not os.path.isfile(os.path.join(checkpoint_dir, SHARDED)):
            raise UserError(
                f"--resume {checkpoint_dir} is a folder, and no sharded checkpoint ({SHARDED} is missing); give a checkpoint "
                "file, such as RUN/checkpoints/epoch_N.pt"
            )
        return stock_load_sharded(task, checkpoint_dir, optimizer=optimizer, scaler=scaler, metadata=metadata)

    def newest_checkpoint(path: str, remote: bool = False) -> str | None:
        """Ours of files; open_clip's where it finds a sharded one, which is a folder."""
        sharded = None if remote else stock_newest(path, remote=False)
        return sharded if sharded is not None and os.path.isdir(sharded) else pieces.newest_checkpoint(path, remote)

    seams: dict[str, Any] = {
        "parse_args": lambda argv: pieces.args,
        "copy_codebase": pieces.copy_codebase,
        "create_model_and_transforms": pieces.create_model,
        "create_task": create_task,
        "create_optimizer": create_optimizer,
        "get_data": get_data,
        "get_latest_checkpoint": newest_checkpoint,
        "load_sharded_checkpoint": load_sharded_checkpoint,
        "train_one_epoch": train_one_epoch,
        "load_checkpoint": stock_load if getattr(pieces.args, "fsdp", False) else load_checkpoint,
    }
    if pieces.model_name != pieces.args.model:
        seams["get_tokenizer"] = lambda name, **options: stock_tokenizer(pieces.model_name, **options)
    if pieces.cosine_lr is not None:
        seams["cosine_lr"] = pieces.cosine_lr
    if pieces.evaluate is not None:
        seams["evaluate"] = evaluate
    return seams


class _Loader:
    """A loader whose micro-batches come in the form that their taker reads: dicts in open_clip's loop, tuples in our step."""

    def __init__(self, loader: Any, *, as_dicts: bool) -> None:
        self._loader, self._as_dicts = loader, as_dicts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_loader", "_as_dicts"):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    @property
    def unwrapped(self) -> Any:
        """The loader itself."""
        return self._loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self._as_dicts == isinstance(batch, dict):
                yield batch
            elif self._as_dicts:
                yield {"image": batch[0], "text": batch[1]}
            else:
                yield batch["image"], batch["text"]
