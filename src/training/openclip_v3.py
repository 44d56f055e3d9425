"""open_clip 3.3: the names that its main looks up, and the hooks of a run under them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from open_clip_zerovl.core.releases import OPENCLIP_V3

LINE = OPENCLIP_V3

# The parameters of each function that main passes.
NAMES: dict[str, tuple[str, ...]] = {
    "parse_args": ("args",),
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


def filled(run: Any, host: Any) -> dict[str, Any]:
    """Map the names of this line's main (`host`) to hooks of `run`, called as that main calls them."""
    stock_data = host.get_data
    stock_tokenizer = host.get_tokenizer
    stock_epoch = host.train_one_epoch
    stock_evaluate = host.evaluate
    stock_adamw = host.optim.AdamW

    def get_data(args, preprocess_fns, epoch: int = 0, tokenizer=None, **more) -> dict:
        def stock(args) -> dict:
            return stock_data(args, preprocess_fns, epoch=epoch, tokenizer=tokenizer, **more)

        return run.get_data(stock, args, preprocess_fns, tokenizer)

    def pt_load(file_path: str, map_location: Any = None) -> dict:
        checkpoint = run.load_checkpoint(file_path, map_location)
        if not run.args.distributed:
            return checkpoint
        if "state_dict" in checkpoint:
            return {**checkpoint, "state_dict": _prefixed(checkpoint["state_dict"])}
        return _prefixed(checkpoint)

    def create_adamw(groups, **options) -> Any:
        return run.create_optimizer(partial(stock_adamw, groups, **options), **options)

    def train_one_epoch(*inputs: Any, tb_writer=None, **more) -> None:
        # model, data, loss, epoch, optimizer, scaler, scheduler; then dist_model, args
        stock = partial(stock_epoch, *inputs, tb_writer=tb_writer, **more)
        run.train_epoch(stock, *inputs[:7], tb_writer)

    def evaluate(
        model, data, epoch, args, tb_writer=None, tokenizer=None, **more
    ) -> dict[str, Any]:
        def stock(data: dict) -> dict[str, Any]:
            return stock_evaluate(
                model, data, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer, **more
            )

        return run.evaluate(
            stock, getattr(model, "module", model), data, epoch, tb_writer, tokenizer
        )

    return {
        "parse_args": lambda argv: run.args,
        "create_model_and_transforms": run.create_model,
        "get_tokenizer": lambda name, **options: stock_tokenizer(run.model_name, **options),
        "get_data": get_data,
        "pt_load": pt_load,
        "get_latest_checkpoint": run.newest_checkpoint,
        "train_one_epoch": train_one_epoch,
        "evaluate": evaluate,
        **({"create_loss": run.create_loss} if run.own_step else {}),
        **({"cosine_lr": run.cosine_lr} if run.own_schedule else {}),
        "optim": SimpleNamespace(AdamW=create_adamw),
    }


def _prefixed(state: dict) -> dict:
    return {"module." + name: value for name, value in state.items()}
