"""State dicts read from files. No code in a file is run; a file that cannot be read is refused with a sentence."""

from __future__ import annotations

import logging
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.checkpoints.adapters import ENTRY, merged
from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.files import UNREADABLE, no_checkpoint

WEIGHTS_FILE = "open_clip_model.safetensors"


def read_state_dict(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights of a checkpoint under open_clip's own names, adapters of --lora merged.

    Only tensors and plain containers are loaded (`weights_only=True`); a pickle that wants to run code is refused.

    Raises:
        UserError: no such file, a file that does not load so, or one without weights.
    """
    return merged(*read_unmerged(Path(checkpoint)), Path(checkpoint))


def read_unmerged(checkpoint: Path) -> tuple[dict[str, Tensor], Any]:
    """The weights with adapters as training keeps them, without `module.` (DDP) and `_orig_mod.` (compile); entry of adapters.

    Errors as `read_state_dict`.
    """
    content = _read_content(checkpoint)
    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if (
        not isinstance(weights, Mapping)
        or not weights
        or not all(isinstance(v, Tensor) for v in weights.values())
    ):
        raise UserError(
            f"{checkpoint} holds no 'state_dict' of tensors: give an open_clip training checkpoint"
        )
    plain: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key.replace("_orig_mod.", "").removeprefix("module.")
        if name in plain:
            raise UserError(
                f"{checkpoint} holds '{name}' twice, with and without a wrapper's prefix"
            )
        plain[name] = tensor
    return plain, content.get(ENTRY)


def read_epoch(checkpoint: str | os.PathLike[str]) -> int | None:
    """The epoch after which open_clip saved a checkpoint, None if it is not recorded. Errors as `read_state_dict`."""
    epoch = read_entry(checkpoint, "epoch")
    return epoch if isinstance(epoch, int) else None


def read_entry(checkpoint: str | os.PathLike[str], name: str) -> Any:
    """An entry of a checkpoint besides its weights, None if there is none. Errors as `read_state_dict`."""
    content = _read_content(Path(checkpoint))
    return content.get(name) if isinstance(content, dict) else None


def _read_content(checkpoint: Path) -> Any:
    if checkpoint.is_dir():
        raise UserError(
            f"{checkpoint} is a folder; give a checkpoint file, such as RUN/checkpoints/epoch_N.pt"
        )
    if not checkpoint.is_file():
        raise UserError(f"checkpoint {checkpoint} does not exist; correct the path")
    _check_kind(checkpoint)
    try:
        # Memory-mapped, so that the optimizer's state (two thirds of the file) is not read; only the zip format can be.
        return torch.load(
            checkpoint, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(checkpoint)
        )
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{checkpoint} is not a plain checkpoint of tensors and was refused, since loading it could run code: "
            f"{unpickling_reason(error)}"
        ) from error
    except UNREADABLE as error:
        raise UserError(
            f"{checkpoint} cannot be loaded, it may be cut short: {first_line(error)}"
        ) from error


def _check_kind(checkpoint: Path) -> None:
    """UserError for a file that is not a checkpoint: a text, a picture, a safetensors file without its folder."""
    if checkpoint.suffix == ".safetensors":
        raise UserError(
            f"{checkpoint} holds only weights; give the exported folder that contains it"
        )
    try:
        said = no_checkpoint(checkpoint)
    except OSError as error:
        raise UserError(
            f"checkpoint {checkpoint} cannot be opened ({error.strerror}); correct the path"
        ) from error
    if said is not None:
        raise UserError(
            f"{checkpoint} is not a checkpoint: it {said}; give a file that training wrote, such as epoch_N.pt"
        )


def unpickling_reason(error: pickle.UnpicklingError) -> str:
    """torch's finding in a file, without the advice to load it unchecked with which the message begins."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = [
        line
        for line in lines[1:]
        if not line.startswith(("Please file", "Check the documentation"))
    ]
    return (found or lines or [type(error).__name__])[0]


@contextmanager
def no_alarm() -> Iterator[None]:
    """Suppresses open_clip's warning of random weights while a model is built whose weights are loaded right after."""
    root = logging.getLogger()  # open_clip logs there

    def keep(record: logging.LogRecord) -> bool:
        return not any(
            words in record.getMessage()
            for words in ("initialized randomly", "no CLIP weights found")
        )

    root.addFilter(keep)
    try:
        yield
    finally:
        root.removeFilter(keep)
