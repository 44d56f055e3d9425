"""Replaces functions in open_clip_train.main, after a check that they are as expected.

`open_clip_train.main` looks up the functions that it calls as module globals. `replaced` swaps some of them within a `with`
block and restores them after it. Each supported line of releases has a `HostLine` that names them and calls the hooks, which
are the public methods of `run.TrainingRun`, as that main calls its own functions. If a name is missing, not used by main, or
has another signature, the run stops before it starts, and the message gives open_clip's version: a change of open_clip's
internals must not go unnoticed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import open_clip
import open_clip_train.main as host
import torch
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import save_atomically
from open_clip_zerovl.core.releases import OPENCLIP_V3, OPENCLIP_V4, ReleaseLine, line_of
from training.checkpointing import newest_whole, of_this_line


@dataclass(frozen=True)
class HostLine:
    """A line of open_clip's releases: the names that its main looks up, and the hooks of a run under them.

    Attributes:
        release: the line.
        names: the parameters of each function that main passes.
        filled: the names of main mapped to hooks, for a `TrainingRun` and the module of main.
    """

    release: ReleaseLine
    names: Mapping[str, tuple[str, ...]]
    filled: Callable[[Any, Any], dict[str, Any]]


def check_host(main: ModuleType | None = None, version: str = open_clip.__version__) -> HostLine:
    """Check that the installed open_clip is one with known names, and return its line.

    Raises:
        UserError: a release of no line, a name that is missing or not used, or a function without an expected parameter.
    """
    main = main or host
    line = LINES[line_of(version)]
    used = main.main.__code__.co_names
    for name, expected in line.names.items():
        function = getattr(main, name, None)
        if name == "optim":
            function = getattr(function, "AdamW", None)
        parameters = tuple(inspect.signature(function).parameters) if callable(function) else None
        if parameters is None or any(parameter not in parameters for parameter in expected):
            wrong = (
                f"has no {name}({', '.join(expected)}) in open_clip_train.main, found {parameters}"
            )
        elif name not in used:
            wrong = f"has {name} and does not use it in open_clip_train.main"
        else:
            continue
        raise UserError(
            f"open_clip_torch {version} {wrong}; install an unmodified open_clip_torch {line.release.read}"
        )
    return line


class CpuDistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """DDP as open_clip calls it, but on CPU: torch refuses `device_ids=[cpu]` there and wants None."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, **options: Any) -> None:
        on_cpu = device_ids is not None and all(
            torch.device(device).type == "cpu" for device in device_ids
        )
        super().__init__(module, device_ids=None if on_cpu else device_ids, **options)


@contextmanager
def replaced(
    replacements: Mapping[str, Any],
    entry: Callable[[], dict[str, Any]] = dict,
    compiled: Callable[[nn.Module], nn.Module | None] | None = None,
) -> Iterator[None]:
    """Replace names of `open_clip_train.main` within the block.

    It finds `replacements` under their names, a DDP that also runs on CPU, and a `torch.save` that is atomic.

    Args:
        entry: makes the entries to add to each checkpoint that main saves.
        compiled: is asked by `torch.compile` for the compiled form of a module; None from it: torch compiles the module.

    Raises:
        UserError: see `check_host`; or open_clip's function has a parameter that its replacement does not take.
        KeyError: a name that the line does not list.
    """
    line = check_host()
    for name, replacement in replacements.items():
        _check_parameters(name, replacement, line)
    originals = {name: getattr(host, name) for name in replacements}
    stock_ddp, stock_compile = torch.nn.parallel.DistributedDataParallel, torch.compile
    try:
        for name, replacement in replacements.items():
            setattr(host, name, replacement)
        vars(torch.nn.parallel)["DistributedDataParallel"] = CpuDistributedDataParallel
        torch.save = partial(_save, entry)
        if compiled is not None:
            vars(torch)["compile"] = partial(_compile, compiled, stock_compile)
        yield
    finally:
        torch.save = torch.serialization.save
        vars(torch)["compile"] = stock_compile
        vars(torch.nn.parallel)["DistributedDataParallel"] = stock_ddp
        for name, original in originals.items():
            setattr(host, name, original)


def _check_parameters(name: str, replacement: Any, line: HostLine) -> None:
    """Refuse a main that could pass a parameter which a replacement neither takes nor forwards."""
    stock = getattr(host, name)
    if not (callable(replacement) and callable(stock)):
        return
    taken = inspect.signature(replacement).parameters
    new = [
        each
        for each in inspect.signature(stock).parameters
        if each not in taken and each not in line.names[name]
    ]
    if new and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        raise UserError(
            f"open_clip_torch {open_clip.__version__} has a parameter {new[0]!r} of {name} in open_clip_train.main, which this "
            f"release of open_clip_zerovl does not know; install open_clip_torch {line.release.read}"
        )


def _compile(
    compiled: Callable[[nn.Module], nn.Module | None],
    stock: Callable[..., Any],
    model: Any = None,
    **options: Any,
) -> Any:
    """Run `torch.compile`, but first ask `compiled` about a module.

    A module's own `compile` calls it with a method.
    """
    instead = compiled(model) if isinstance(model, nn.Module) else None
    return stock(model, **options) if instead is None else instead


def _save(entry: Callable[[], dict[str, Any]], content: Any, file: Any, **options: Any) -> None:
    """Save main's checkpoint and an entry as `torch.save` does, atomically where it writes to a path."""
    if isinstance(content, dict) and "optimizer" in content:
        content = {**content, **entry()}
    if isinstance(file, str | os.PathLike):
        save_atomically(content, file, **options)
    else:
        torch.serialization.save(content, file, **options)


# ---------------------------------------------------------------------------------------------------------------------
# open_clip 3.3
# ---------------------------------------------------------------------------------------------------------------------

_NAMES_V3 = {
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


def _filled_v3(run: Any, host: Any) -> dict[str, Any]:
    """Map the names of 3.3's main to hooks of `run`."""
    stock_data = host.get_data
    stock_tokenizer = host.get_tokenizer
    stock_epoch = host.train_one_epoch
    stock_evaluate = host.evaluate
    stock_adamw = host.optim.AdamW

    def get_data(args, preprocess_fns, epoch: int = 0, tokenizer=None, **more) -> dict:
        stock = partial(
            stock_data, preprocess_fns=preprocess_fns, epoch=epoch, tokenizer=tokenizer, **more
        )
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
        stock = partial(
            stock_evaluate, model, epoch=epoch, args=args, tb_writer=tb_writer, tokenizer=tokenizer, **more
        )  # fmt: skip
        return run.evaluate(
            stock, getattr(model, "module", model), data, epoch, tb_writer, tokenizer
        )

    return {
        "parse_args": lambda argv: run.args,
        "create_model_and_transforms": run.create_model,
        "get_tokenizer": lambda name, **options: stock_tokenizer(run.model_name, **options),
        "get_data": get_data,
        "pt_load": pt_load,
        "get_latest_checkpoint": newest_whole,
        "train_one_epoch": train_one_epoch,
        "evaluate": evaluate,
        **({"create_loss": run.create_loss} if run.own_step else {}),
        **({"cosine_lr": run.cosine_lr} if run.own_schedule else {}),
        "optim": SimpleNamespace(AdamW=create_adamw),
    }


def _prefixed(state: dict) -> dict:
    return {"module." + name: value for name, value in state.items()}


# ---------------------------------------------------------------------------------------------------------------------
# open_clip 4: its main wraps model and loss into a task (`create_task`), hands a `TrainState` to `train_one_epoch`, and its
# loaders yield dicts. Our loss is given to a `CLIPTask`; our step trains the task's module.
# ---------------------------------------------------------------------------------------------------------------------

_NAMES_V4 = {
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


def _filled_v4(run: Any, host: Any) -> dict[str, Any]:
    """Map the names of 4's main to hooks of `run`."""
    ours = _AdaptersV4(run, host)
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


class _AdaptersV4:
    """The run's hooks with the parameters that 4's main passes, beside main's own functions (`stock_...`)."""

    def __init__(self, run: Any, host: Any) -> None:
        self.run = run
        self.stock_data = host.get_data
        self.stock_task = host.create_task
        self.stock_optimizer = host.create_optimizer
        self.stock_epoch, self.stock_evaluate = host.train_one_epoch, host.evaluate
        self.stock_newest = host.get_latest_checkpoint

    def get_data(self, args, preprocess_fns, epoch: int = 0, tokenizer=None, **more) -> dict:
        stock = partial(
            self.stock_data, preprocess_fns=preprocess_fns, epoch=epoch, tokenizer=tokenizer, **more
        )
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
        stock = partial(self.stock_optimizer, model, cfg, **more)
        return self.run.create_optimizer(
            stock, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps
        )

    def train_one_epoch(self, state, data, args, tb_writer=None, **more) -> None:
        stock = partial(self.stock_epoch, state, data, args, tb_writer=tb_writer, **more)
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
        stock = partial(
            self.stock_evaluate, task, epoch=epoch, args=args, tb_writer=tb_writer, tokenizer=tokenizer, **more
        )  # fmt: skip
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
        return newest_whole(path, remote)


class _Loader:
    """A wrapped loader that yields dicts for open_clip's loop, or tuples for our step."""

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


LINES: dict[ReleaseLine, HostLine] = {
    OPENCLIP_V3: HostLine(OPENCLIP_V3, _NAMES_V3, _filled_v3),
    OPENCLIP_V4: HostLine(OPENCLIP_V4, _NAMES_V4, _filled_v4),
}
