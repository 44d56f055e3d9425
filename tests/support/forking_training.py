"""Started by tests: many trainings one after the other that share one start of Python, torch and this package.

Reads a request a line and runs `training.main` as a program of its own, in a forked process a rank; `programs.ForkedTrainings`
asks it. A request is a JSON dict

    arguments   of training.main
    ranks       processes (1); they meet as under torchrun, and nothing but their own sockets tells them of each other's end
    fault       name in `faults.FAULTS`, in `fault_rank` (0) and that process's `fault_step` (2)
    model_config  JSON file of a model to register
    cwd         folder to run in
    output      file for the output of the processes (default: standard error)
    limit       seconds after which what still runs is killed (600)
    after       likewise, counted from the end of the first rank (600)

Answers with a JSON dict: `statuses` of the ranks, None for one that had to be killed; `seconds` from the end of the first rank
to that of the last; `left`, how many processes they left behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

import open_clip

from scripts.soak import processes_of
from support import faults
from training.main import run_as_program


def start(request: dict, rank: int, port: int) -> int:
    """Fork a rank and return its process number."""
    child = os.fork()
    if child != 0:
        return child
    os.setsid()
    if "output" in request:
        os.dup2(os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(2, 1)
    os.chdir(request.get("cwd", "."))
    if request.get("ranks", 1) > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["ranks"]), MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )  # fmt: skip
    if "model_config" in request:
        open_clip.add_model_config(request["model_config"])
    sys.argv = ["training.main", *request["arguments"]]
    if rank == request.get("fault_rank", 0):
        faults.install(request.get("fault"), request.get("fault_step", 2))
    run_as_program()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(request: dict) -> dict:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [start(request, rank, port) for rank in range(request.get("ranks", 1))]
    statuses: dict[int, int] = {}
    ended: list[float] = []
    deadline = time.monotonic() + request.get("limit", 600)
    while len(statuses) < len(ranks) and time.monotonic() < deadline:
        for pid in ranks:
            found, status = (0, 0) if pid in statuses else os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                ended.append(time.monotonic())
                # the other ranks wait at most the limit for a rank that was ended from outside
                deadline = min(deadline, ended[0] + request.get("after", 600))
        time.sleep(0.02)
    left = [pid for rank in ranks for pid in processes_of(rank)]
    if left:  # loader workers may need a moment to see that their training process is gone
        time.sleep(1)
        left = [pid for rank in ranks for pid in processes_of(rank)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        if pid not in statuses:
            os.waitpid(pid, 0)
    return {
        "statuses": [statuses.get(pid) for pid in ranks],
        "seconds": (time.monotonic() if len(ended) < len(ranks) else ended[-1])
        - (ended[0] if ended else time.monotonic()),
        "left": len(left),
    }


def main() -> int:
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
