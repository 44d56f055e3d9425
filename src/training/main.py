"""`python -m training.main`: open_clip's training program with the flags of the ZeroVL recipe.

    python -m training.main ARGS                               train in this process
    python .../training/main.py --processes N ... -- ARGS      in N processes, or with `gpus` in one for each visible GPU; words
                                                               in place of `...` are torchrun's (`core.processes`)

The command line is parsed once, before torch is loaded (which takes seconds), so that help and errors are printed at once.
torchrun starts several processes. Signals to this process are passed on to them; the exit status is that of the rank that
failed first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and not __package__:  # started by the path of this file
    # Python puts the folder of a program first, and its modules (`data`, `train`, ...) would stand for packages of these names.
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [
        str(_HERE.parent),
        *(folder for folder in sys.path if Path(folder).resolve() != _HERE),
    ]

from open_clip_zerovl.core.errors import ended, say
from open_clip_zerovl.core.processes import (
    EACH_GPU,
    PROCESSES,
    SLURM_RANKS,
    missing_ranks,
    name_of_rank,
    ranks_here,
    supervise,
    usable_cores,
)
from open_clip_zerovl.core.releases import uncollected

TORCHRUN = "--torchrun"


def main(argv: Sequence[str] | None = None) -> int:
    """Run training (or evaluation) and return the exit status.

    0          done
    2          an error, with one sentence on standard error
    1          a defect, likewise; its traceback is printed with `--debug`, and kept in the folder of a run that has trained
    85         stopped by SIGTERM or SIGUSR1 with a step checkpoint and a marker for the launcher (torchrun turns it into 1)
    130        stopped by Ctrl-C with a step checkpoint
    143, 130   the same with `--logs none`, without a checkpoint
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        from training.params import read_command

        command = read_command(words)
        from training.run import train

        return train(*command)

    return ended(run, name_of_rank(), words)


def run_as_program() -> NoReturn:
    """Run `program` as a process with an exit status that says how it ended."""
    words = sys.argv[1:]
    sys.exit(
        ended(lambda: program(words), name_of_rank(), words, interrupted="no training has begun")
    )


def _train_here(words: Sequence[str]) -> NoReturn:
    """Train in this process, which ends with all that it has started (`stopping.run`)."""
    # not at the top: open_clip may be missing, which the boundary reports
    from training.params import read_command, say_loading

    command = read_command(words)
    if (missing := missing_ranks()) is not None:
        say(missing)
    if command[1].active:
        say_loading()
    with uncollected():
        from training import run, stopping

    stopping.run(lambda: run.train(*command), words)


def program(words: Sequence[str]) -> int:
    """Train, or start the processes that do, and return the exit status."""
    if words[:1] == [TORCHRUN]:
        return torchrun(list(words[1:]))
    if words[:1] == [PROCESSES]:
        end = words.index("--")
        return start(words[1], words[2:end], words[end + 1 :])
    _train_here(words)


def start(processes: str, rendezvous: Sequence[str], arguments: Sequence[str]) -> int:
    """Check the command line, then train in this process or in several that torchrun starts."""
    from training.params import read_command

    args, _ = read_command(arguments)
    asked = None if processes == EACH_GPU else int(processes)
    ranks = int(processes) if rendezvous else ranks_here(asked, args.device)
    if ranks == 1 and not rendezvous:
        _train_here(arguments)
    environment = {name: value for name, value in os.environ.items() if name not in SLURM_RANKS}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    place = [
        *(rendezvous or ["--standalone"]),
        f"--nproc-per-node={ranks}",
        "--",
        __file__,
        *arguments,
    ]
    return supervise(
        [sys.executable, __file__, TORCHRUN, *place], torchrun=True, environment=environment
    )


def torchrun(words: list[str]) -> int:
    """Run torchrun, which ends with the status of the rank that failed first, and with a sentence in place of its traceback."""
    import logging
    import signal

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun_main

    # a rank itself prints why it ends
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun_main(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        say(f"training.main: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}")
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    run_as_program()
