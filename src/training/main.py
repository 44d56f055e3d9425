"""`python -m training.main`: open_clip's training program with the flags of the ZeroVL recipe.

    python -m training.main ARGS                               train in this process
    python .../training/main.py --processes N ... -- ARGS      in N processes, or with `gpus` in one for each visible GPU; words
                                                               in place of `...` are torchrun's (`core.launch`)

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

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.launch import EACH_GPU, PROCESSES, ranks_here
from open_clip_zerovl.core.lazy import uncollected
from open_clip_zerovl.core.processes import SLURM_RANKS, supervise
from training.console import say
from training.params import Command, rank_here, read_command, say_loading
from training.scratch import use_scratch_folder

TORCHRUN = "--torchrun"


def main(argv: Sequence[str] | None = None) -> int:
    """Run training (or evaluation) and return the exit status.

    0          done
    2          an error, with one sentence on standard error
    85         stopped by SIGTERM or SIGUSR1 with a step checkpoint and a marker for the launcher (torchrun turns it into 1)
    130        stopped by Ctrl-C with a step checkpoint
    143, 130   the same with `--logs none`, without a checkpoint
    """
    command = checked(sys.argv[1:] if argv is None else argv)
    if command is None:
        return 2
    from training.run import train

    return train(*command)


def run_as_program(command: Command | None = None) -> NoReturn:
    """`main` as a process, which ends with all that it has started (`stopping.run`)."""
    command = command or checked(sys.argv[1:])
    if command is None:
        sys.exit(2)
    use_scratch_folder()
    if command[1].active:
        say_loading()
    with uncollected():
        from training import run, stopping

    stopping.run(lambda: run.train(*command))


def checked(argv: Sequence[str]) -> Command | None:
    """The parsed command line; None after one sentence about its first error."""
    try:
        return read_command(argv)
    except UserError as error:
        rank = rank_here()
        say(f"{f'[rank {rank}] ' if rank else ''}training.main: error: {error}")
        return None


def program(words: Sequence[str]) -> int:
    """Train, or start the processes that do; returns the exit status."""
    try:
        if words[:1] == [TORCHRUN]:
            return torchrun(list(words[1:]))
        if words[:1] == [PROCESSES]:
            end = words.index("--")
            return start(words[1], words[2:end], words[end + 1 :])
        return 2 if (command := checked(words)) is None else run_as_program(command)
    except KeyboardInterrupt:  # before training has begun
        say("training.main: interrupted")
        return 130
    except BrokenPipeError:  # `zerovl train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def start(processes: str, rendezvous: Sequence[str], arguments: Sequence[str]) -> int:
    """Check the command line, then train in this process or in several that torchrun starts."""
    command = checked(arguments)
    if command is None:
        return 2
    try:
        asked = None if processes == EACH_GPU else int(processes)
        ranks = int(processes) if rendezvous else ranks_here(asked, command[0].device)
    except UserError as error:
        say(f"training.main: error: {error}")
        return 2
    if ranks == 1 and not rendezvous:
        run_as_program(command)
    use_scratch_folder()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    environment = {name: value for name, value in os.environ.items() if name not in SLURM_RANKS}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
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
    """torchrun, which ends with the status of the rank that failed first, and with a sentence in place of its traceback."""
    import logging
    import signal

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun_main

    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # a rank itself prints why it ends
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
    sys.exit(program(sys.argv[1:]))
