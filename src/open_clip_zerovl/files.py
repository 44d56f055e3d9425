"""Files written whole or not at all: under another name first, then renamed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def write_atomically(path: str | Path, content: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part. Text is UTF-8."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def save_atomically(content: Any, file: Path) -> None:
    """`torch.save` under another name, renamed when whole."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        torch.save(content, scratch)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)
