"""The one place that names what is replaced in open_clip_train, and that checks it is what we expect.

`open_clip_train.main` looks its collaborators up as module globals. `replaced` swaps some of them for the length of a
`with` block and puts them back after. A name or a signature that is not as expected stops the run before it starts, with the
open_clip version seen: extending a program by its internals is only safe when a change of them cannot pass unnoticed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import open_clip_train.main as host
import torch

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.files import save_atomically

SUPPORTED = "3.3."  # open_clip_torch releases whose main() was read; 4.x renames the seams

# The parameters of each seam that main() passes, as open_clip 3.3 defines them. () = any: a class or **kwargs function.
SEAMS: dict[str, tuple[str, ...]] = {
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


def check_host() -> None:
    """Make sure that the installed open_clip is one whose seams are known.

    Raises:
        UserError: another version, a missing seam, or a seam with other parameters.
    """
    seen = version("open_clip_torch")
    if not seen.startswith(SUPPORTED):
        raise UserError(
            f"open_clip_torch {seen} is installed and {SUPPORTED}x is supported; pip install 'open_clip_torch==3.3.*'"
        )
    for name, expected in SEAMS.items():
        function = getattr(host, name, None)
        if name == "optim":
            function = getattr(function, "AdamW", None)
        found = tuple(inspect.signature(function).parameters) if callable(function) else None
        if found is None or any(parameter not in found for parameter in expected):
            raise UserError(
                f"open_clip_torch {seen} has no {name}({', '.join(expected)}) in open_clip_train.main, found {found}; "
                f"reinstall an unmodified open_clip_torch {SUPPORTED}x"
            )


class CpuDistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """DDP as open_clip calls it, but on CPU: torch refuses `device_ids=[cpu]` there and wants None."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, **options: Any) -> None:
        on_cpu = device_ids is not None and all(torch.device(device).type == "cpu" for device in device_ids)
        super().__init__(module, device_ids=None if on_cpu else device_ids, **options)


@contextmanager
def replaced(replacements: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, `open_clip_train.main` finds `replacements` under their names, a DDP that also runs on CPU, and a
    `torch.save` that is atomic.

    Raises:
        UserError: see `check_host`.
        KeyError: a name that is no seam.
    """
    check_host()
    unknown = [name for name in replacements if name not in SEAMS]
    if unknown:
        raise KeyError(f"{unknown} are no seams; SEAMS lists them")
    kept = {name: getattr(host, name) for name in replacements}
    stock_ddp = torch.nn.parallel.DistributedDataParallel
    try:
        for name, replacement in replacements.items():
            setattr(host, name, replacement)
        torch.nn.parallel.DistributedDataParallel = CpuDistributedDataParallel
        torch.save = _save
        yield
    finally:
        torch.save = torch.serialization.save
        torch.nn.parallel.DistributedDataParallel = stock_ddp
        for name, original in kept.items():
            setattr(host, name, original)


def _save(content: Any, file: Any, **options: Any) -> None:
    """`torch.save`, atomic where it writes to a path."""
    if isinstance(file, str | os.PathLike):
        save_atomically(content, file, **options)
    else:
        torch.serialization.save(content, file, **options)
