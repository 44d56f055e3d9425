"""The training program, started by the path of this file, whatever else is called `training` (`open_clip_zerovl.core.launch`).

    python .../training/__main__.py ARGS                     what `python -m training.main ARGS` does
    python .../training/__main__.py --processes N -- ARGS    the same in N processes; `gpus`: one for each visible GPU

Several processes are started by torchrun, after the command line was checked once. Signals to this process are passed on to
them. The exit status is that of the rank that failed first.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCHRUN = "--torchrun"
# Python puts the folder of a program first, and its modules (`data`, `train`, ...) would stand for packages of these names.
sys.path[:] = [str(HERE.parent), *(folder for folder in sys.path if Path(folder).resolve() != HERE)]


def main(words: list[str]) -> int:
    """Train, or start the processes that do; returns the exit status."""
    from open_clip_zerovl.core.launch import PROCESSES

    try:
        if words[:1] == [TORCHRUN]:
            return torchrun(words[1:])
        if words[:1] == [PROCESSES]:
            return start(words[1], words[words.index("--") + 1 :])
        return train(words)
    except KeyboardInterrupt:  # before training has begun
        print("training.main: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `zerovl train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def train(arguments: list[str]) -> int:
    """`python -m training.main ARGUMENTS` in this process."""
    from training.early import answer

    sys.argv[1:] = arguments
    if (status := answer(arguments)) is None:
        from training.main import run_as_program

        run_as_program()  # ends this process
    return status


def start(processes: str, arguments: list[str]) -> int:
    """Check the command line, then train in one process or in several."""
    from open_clip_zerovl.core.errors import UserError
    from open_clip_zerovl.core.launch import EACH_GPU, ranks_here
    from open_clip_zerovl.core.processes import SLURM_RANKS, supervise
    from training.early import answer
    from training.params import parse

    if (status := answer(arguments)) is not None:
        return status
    try:
        ranks = ranks_here(None if processes == EACH_GPU else int(processes), parse(arguments)[0].device)
    except UserError as error:
        print(f"training.main: error: {error}", file=sys.stderr)
        return 2
    if ranks == 1:
        return train(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {name: value for name, value in os.environ.items() if name not in SLURM_RANKS}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    place = [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", "--", __file__, *arguments]
    return supervise([sys.executable, __file__, *place], torchrun=True, environment=environment)


def torchrun(words: list[str]) -> int:
    """torchrun, which ends with the status of the rank that failed first, and with a sentence in place of its traceback."""
    import logging
    import signal

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun_main

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a rank says itself why it ends
    try:
        torchrun_main(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"training.main: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
