"""Training programs started as a person starts them, in one process or under torchrun, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).parent / "training_script.py"
COMMON = ["--model", "tiny", "--device", "cpu", "--precision", "fp32", "--log-every-n-steps", "1", "--warmup", "2"]


def launch(
    program: str,
    config: Path,
    arguments: list[str],
    *,
    ranks: int = 1,
    record: Path | None = None,
    cwd: Path,
    gradient: Path | None = None,
):
    """Run the training script in `ranks` processes (torchrun) and return the finished process."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(SCRIPT), program, str(config), *(["--record", str(record)] if record else [])]
    command += [*(["--gradient", str(gradient)] if gradient else []), "--", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def state_of(folder: Path, name: str, epoch: int = 1) -> dict:
    return torch.load(folder / "logs" / name / "checkpoints" / f"epoch_{epoch}.pt", weights_only=True)


def flat_tensors(value, prefix="") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: tensor for name, item in items for key, tensor in flat_tensors(item, f"{prefix}/{name}").items()}
