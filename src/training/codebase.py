"""`--copy-codebase`: a copy of the code with which a run is trained.

open_clip copies the folder three levels above its own main. For a checkout that is the checkout; for an installed package it is
the whole environment (gigabytes), without this package.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("open_clip_zerovl", "training", "open_clip", "open_clip_train")


def copy_codebase(run_folder: str | os.PathLike[str]) -> Path:
    """Copy the code of `PACKAGES` to `run_folder/code`; a resumed run keeps what its first process copied.

    Returns:
        The folder `code`.
    """
    code = Path(run_folder) / "code"
    if code.exists():
        logging.info(f"{code} has the code of the run's first start; it is kept.")
        return code
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None  # this program imports them all
        shutil.copytree(Path(spec.origin).parent, code / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    logging.info(f"Copied the code of {', '.join(PACKAGES)} to {code}.")
    return code


def copy_of_run(args: argparse.Namespace) -> None:
    """What `--copy-codebase` does in a run: its first process copies."""
    if args.rank == 0:
        copy_codebase(os.path.join(args.logs, args.name))
