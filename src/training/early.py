"""Help and errors of the command line, which `python -m training.main` prints before torch is loaded (which takes seconds)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, no_checkpoint
from open_clip_zerovl.data.names import check_paths, check_separators
from training.config import RecipeConfig
from training.params import parse

_RANK_VARIABLES = ("RANK", "PMI_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")  # open_clip's, in its order


def answer(argv: Sequence[str]) -> int | None:
    """Print the help or the first error, and return the exit status; None if training may start."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "")
    try:
        check_run(*parse(argv), rank=int(rank or 0))
    except UserError as error:
        print(f"{f'[rank {rank}] ' if rank else ''}training.main: error: {error}", file=sys.stderr)
        return 2
    return None


def check_run(args: argparse.Namespace, config: RecipeConfig, *, rank: int) -> None:
    """Check the run's folder and name, and that there is data.

    Raises:
        UserError: the first error.
    """
    if rank == 0:  # rank 0 makes the run's folder, which another rank could take for an older run's
        require_new_name(args, resumes_latest=args.resume == "latest")
    if os.path.exists(args.logs) and not os.path.isdir(args.logs):
        raise UserError(f"--logs {args.logs} is a file; give the folder in which runs are kept")
    if rank == 0 and args.logs.lower() != "none":
        check_writable(args.logs, folder=True)
    if (
        not args.train_data
        and not args.dataset_type.startswith("synthetic")
        and not (args.val_data or args.imagenet_val or args.imagenet_v2 or config.retrieval_data)
    ):
        raise UserError("there is nothing to do: give --train-data, or data to evaluate on (--retrieval-data ...)")
    if config.sampling is not None:
        check_separators(args.train_data)
        check_paths(args.train_data)
    _check_checkpoint("--resume", None if args.resume == "latest" else args.resume)
    _check_checkpoint("--init-from", config.init_from)


def _check_checkpoint(flag: str, path: str | None) -> None:
    """
    Raises:
        UserError: a file of this machine that does not exist, or that no release of torch has written.
    """
    if path is None or "://" in path or os.path.isdir(path):  # a folder is told of where it is read
        return
    if not os.path.isfile(path):
        raise UserError(
            f"{flag} {path} does not exist; give the path of a checkpoint" + ", or 'latest'" * (flag == "--resume")
        )
    if (wrong := no_checkpoint(path)) is not None:
        raise UserError(f"{flag} {path} is no checkpoint: it {wrong}; give a file that training wrote, as epoch_N.pt")


def require_new_name(args: argparse.Namespace, *, resumes_latest: bool) -> None:
    """
    Raises:
        UserError: a run of this name has a log, and is not to be resumed.
    """
    if args.name is None or resumes_latest:
        return
    log = os.path.join(args.logs, args.name, "out-0" if args.log_local else "out.log")
    if os.path.exists(log):
        raise UserError(
            f"a run called {args.name!r} exists in {args.logs}; choose another --name, or continue it with --resume latest"
        )
