"""Training as a command: what `zerovl train` and others start as a process of its own. The library never imports `training`.

The command names a file of the package `training` that lies beside this package, in a checkout as in an installed wheel. So
neither a `training.py` in the current folder nor a fork of open_clip with a package of that name is ever taken for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from open_clip_zerovl.core.errors import UserError

PROCESSES = "--processes"  # the first words of training/__main__.py: --processes N --, or --processes gpus --
EACH_GPU = "gpus"
_FOLDER = Path(__file__).resolve().parents[2]
# open_clip's older releases have a package `training` with a main.py, too: installed later, it overwrites files of ours.
_MARK = "open_clip_zerovl"


def training_command(arguments: Sequence[str], processes: int | None = 1) -> list[str]:
    """The command line of a training; its exit status is the training's, and stop signals to it reach all of its processes.

    Args:
        arguments: the flags of `python -m training.main`.
        processes: ranks; torchrun starts more than one. None: one for each visible GPU, counted when the command runs.

    Raises:
        UserError: the training program is not where it was installed.
    """
    program = _FOLDER / "training" / "__main__.py"
    try:
        ours = program.is_file() and _MARK in (program.parent / "main.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise UserError(
            f"the training program is not whole in {program.parent}: another package called training was installed over it, "
            "or the installation is cut short; install open_clip_zerovl again"
        )
    how = [] if processes == 1 else [PROCESSES, EACH_GPU if processes is None else str(processes), "--"]
    return [sys.executable, str(program), *how, *arguments]


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """How many NVIDIA GPUs a process sees: those of nvidia-smi, as far as CUDA_VISIBLE_DEVICES lets it. Needs no torch."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not named.strip():
        return 0
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    found = sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
    if named is None or found == 0:
        return found
    count = 0
    for name in map(str.strip, named.split(",")):
        # As the driver reads it: up to the first that does not exist. Names (GPU-..., MIG-...) are taken as they are.
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= found):
            break
        count += 1
    return count


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, srun or mpirun has started this process as one of several ranks."""
    sizes = ("WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
    return any(environment.get(name, "").isdecimal() and int(environment[name]) > 1 for name in sizes)


def ranks_here(asked: int | None, device: str, environment: Mapping[str, str] = os.environ) -> int:
    """How many processes train on this machine.

    Args:
        asked: their number; None: one for each visible GPU.
        device: the flag `--device`.

    Raises:
        UserError: a number that this machine cannot have.
    """
    if asked is not None and asked < 1:
        raise UserError(f"--gpus {asked} is out of range; give 1 or more (--device cpu trains without a GPU)")
    if is_rank(environment):
        if asked not in (None, 1):
            raise UserError(
                f"--gpus {asked} does not work within torchrun, srun or mpirun, which start the processes; leave it out"
            )
        return 1
    if device != "cuda":
        several = device != "cpu" and asked not in (None, 1)
        if several:
            raise UserError(
                f"--gpus {asked} does not work with --device {device}; leave --device out, or give --device cpu"
            )
        return asked or 1
    visible = visible_gpus(environment)
    if asked is None:
        return max(1, visible)
    if asked > max(1, visible):
        seen = (
            f"{visible} GPU{'s are' if visible != 1 else ' is'} visible here" if visible else "no GPU is visible here"
        )
        only = environment.get("CUDA_VISIBLE_DEVICES")
        raise UserError(
            f"--gpus {asked}: {seen}{'' if only is None else f' (CUDA_VISIBLE_DEVICES={only})'}; give at most that many, or "
            "--device cpu for that many processes on the CPU"
        )
    return asked
