"""open_clip 4: the names that its main looks up, and the hooks of a run under them.

Its main wraps model and loss into a task (`create_task`), hands a `TrainState` to `train_one_epoch`, and its loaders yield
dicts. Our loss is given to a `CLIPTask`; our step trains the task's module.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from open_clip_zerovl.core.releases import OPENCLIP_V4
from training.resume import of_this_line

LINE = OPENCLIP_V4
# The parameters of each function that main passes.
NAMES: dict[str, tuple[str, ...]] = {
    "parse_args": ("args",),
    "create_model_and_transforms": (
        "model_name",
        "pretrained",
        "precision",
        "device",
        "output_dict",
    ),
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


def filled(run: Any, host: Any) -> dict[str, Any]:
    """Map the names of this line's main (`host`) to hooks of `run`, called as that main calls them."""
    ours = _Adapters(run, host)
    stock_tokenizer = host.get_tokenizer
    return {
        "parse_args": lambda argv: run.args,
        "create_model_and_transforms": run.create_model,
        "get_tokenizer": lambda name, **options: stock_tokenizer(run.model_name, **options),
        "create_task": ours.create_task,
        "create_optimizer": ours.create_optimizer,
        "get_data": ours.get_data,
        "get_latest_checkpoint": ours.newest_checkpoint,
        "train_one_epoch": ours.train_one_epoch,
        "evaluate": ours.evaluate,
        "load_checkpoint": host.load_checkpoint
        if getattr(run.args, "fsdp", False)
        else ours.load_checkpoint,
        **({"cosine_lr": run.cosine_lr} if run.own_schedule else {}),
    }


class _Adapters:
    """The run's hooks with the parameters that this line's main passes. `stock_...` are main's own functions."""

    def __init__(self, run: Any, host: Any) -> None:
        self.run = run
        self.stock_data = host.get_data
        self.stock_task = host.create_task
        self.stock_optimizer = host.create_optimizer
        self.stock_epoch, self.stock_evaluate = host.train_one_epoch, host.evaluate
        self.stock_newest = host.get_latest_checkpoint

    def get_data(self, args, preprocess_fns, epoch: int = 0, tokenizer=None, **more) -> dict:
        def stock(args: argparse.Namespace) -> dict:
            return self.stock_data(args, preprocess_fns, epoch=epoch, tokenizer=tokenizer, **more)

        data = self.run.get_data(stock, args, preprocess_fns, tokenizer)
        if "train" in data:
            data["train"].dataloader = _Loader(
                data["train"].dataloader, as_dicts=not self.run.own_step
            )
        return data

    def create_task(self, args, model, dist_model=None, **more) -> Any:
        if not self.run.own_step:
            return self.stock_task(args, model=model, dist_model=dist_model, **more)
        from open_clip.task import CLIPTask

        return CLIPTask(model, loss=self.run.create_loss(args))

    def create_optimizer(self, model, cfg, **more) -> Any:
        def stock() -> Any:
            return self.stock_optimizer(model, cfg, **more)

        return self.run.create_optimizer(
            stock, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps
        )

    def train_one_epoch(self, state, data, args, tb_writer=None, **more) -> None:
        def stock() -> None:
            self.stock_epoch(state, data, args, tb_writer=tb_writer, **more)

        self.run.train_epoch(
            stock, state.task.trainable_module, data, getattr(state.task, "loss", None), state.epoch, state.optimizer,
            state.scaler, state.scheduler, tb_writer,
        )  # fmt: skip
        if self.run.own_step:  # open_clip's own loop counts these
            loader = data["train"].dataloader
            state.global_step = loader.num_batches * (state.epoch + 1)
            state.samples_seen = loader.num_samples * (state.epoch + 1)

    def evaluate(
        self, task, data, epoch, args, tb_writer=None, tokenizer=None, **more
    ) -> dict[str, Any]:
        def stock(data: dict) -> dict[str, Any]:
            return self.stock_evaluate(
                task, data, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer, **more
            )

        return self.run.evaluate(
            stock, task.get_trainable_module(), data, epoch, tb_writer, tokenizer
        )

    def load_checkpoint(
        self, task, path, optimizer=None, scaler=None, metadata=None, **_: Any
    ) -> int:
        """Load as open_clip does, after our checks.

        The checkpoint has bare names; 3.3 or this line wrote it.
        """
        checkpoint = self.run.load_checkpoint(path, "cpu")
        if "epoch" not in checkpoint:  # bare weights
            task.load_state_dict({"state_dict": checkpoint})
            return 0
        task.load_state_dict(
            {key: checkpoint[key] for key in ("state_dict", "state_dict_ema") if key in checkpoint}
        )
        if optimizer is not None and "optimizer" in checkpoint:
            optimizer.load_state_dict(
                of_this_line(checkpoint["optimizer"], task.get_trainable_module(), optimizer)
            )
        if scaler is not None and "scaler" in checkpoint:
            scaler.load_state_dict(checkpoint["scaler"])
        if metadata is not None:
            metadata.update(
                {
                    key: int(checkpoint[key])
                    for key in ("global_step", "samples_seen")
                    if key in checkpoint
                }
            )
        return checkpoint["epoch"]

    def newest_checkpoint(self, path: str, remote: bool = False) -> str | None:
        """Return open_clip's answer if it is a folder (a sharded checkpoint), else ours, which is a file."""
        sharded = None if remote else self.stock_newest(path, remote=False)
        if sharded is not None and os.path.isdir(sharded):
            return sharded
        return self.run.newest_checkpoint(path, remote)


class _Loader:
    """A loader that yields dicts for open_clip's loop, or tuples for our step. All else is the wrapped loader's."""

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
        """Return the loader itself."""
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
