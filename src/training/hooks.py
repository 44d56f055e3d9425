"""Replaces functions in open_clip_train.main, after a check that they are as expected.

`open_clip_train.main` looks up the functions that it calls as module globals. `replaced` swaps some of them within a `with`
block and restores them after it. Each supported line of releases has a module (`openclip_v3`, `openclip_v4`) that names them
and calls the hooks, which are the public methods of `run.TrainingRun`, as that main calls its own functions. If a name is
missing, not used by main, or has another signature, the run stops before it starts, and the message gives open_clip's version:
a change of open_clip's internals must not go unnoticed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import open_clip
import open_clip_train.main as host
import torch
from torch import nn

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import save_atomically
from open_clip_zerovl.core.releases import ReleaseLine, line_of
from training import openclip_v3, openclip_v4

TABLES: dict[ReleaseLine, Any] = {table.LINE: table for table in (openclip_v3, openclip_v4)}


def check_host(main: ModuleType | None = None, version: str = open_clip.__version__) -> Any:
    """Check that the installed open_clip is one with known names, and return the module of its line.

    Raises:
        UserError: a release of no line, a name that is missing or not used, or a function without an expected parameter.
    """
    main = main or host
    table = TABLES[line_of(version)]
    used = main.main.__code__.co_names
    for name, expected in table.NAMES.items():
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
            f"open_clip_torch {version} {wrong}; install an unmodified open_clip_torch {table.LINE.read}"
        )
    return table


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
    table = check_host()
    for name, replacement in replacements.items():
        _check_parameters(name, replacement, table)
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


def _check_parameters(name: str, replacement: Any, table: Any) -> None:
    """Refuse a main that could pass a parameter which a replacement neither takes nor forwards."""
    stock = getattr(host, name)
    if not (callable(replacement) and callable(stock)):
        return
    taken = inspect.signature(replacement).parameters
    new = [
        each
        for each in inspect.signature(stock).parameters
        if each not in taken and each not in table.NAMES[name]
    ]
    if new and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        raise UserError(
            f"open_clip_torch {open_clip.__version__} has a parameter {new[0]!r} of {name} in open_clip_train.main, which this "
            f"release of open_clip_zerovl does not know; install open_clip_torch {table.LINE.read}"
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
