"""One node's part of a training: a process for each GPU, stopped with a checkpoint when the scheduler or a user asks for it.

    python -m scripts.paper.launch --ranks 8 -- TRAINING ARGUMENTS            this machine alone
    srun ... python -m scripts.paper.launch --ranks 8 --slurm -- ARGUMENTS    one on each node of a job, see train.sbatch

SIGTERM, SIGUSR1 and Ctrl-C are passed on to the ranks (`open_clip_zerovl.core.processes.supervise`).

Exit status: training's own; 85 if it was stopped with a step checkpoint, from which the same command goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from open_clip_zerovl.core.processes import PREEMPTED_STATUS, REQUEUE_MARKER, SLURM_RANKS, supervise


@dataclass(frozen=True)
class Node:
    """This node's place in the job.

    Attributes:
        ranks: processes on this node.
        nodes: launchers in the job, one a node.
        index: of this node; node 0 holds rank 0.
        master_addr, master_port: where the nodes meet, if there are several.
    """

    ranks: int
    nodes: int = 1
    index: int = 0
    master_addr: str = ""
    master_port: str = ""

    @classmethod
    def of_slurm(cls, ranks: int, environment: Mapping[str, str]) -> Node:
        """The place that srun gave this task, with the meeting point that train.sbatch exports."""
        return cls(
            ranks,
            int(environment["SLURM_NNODES"]),
            int(environment["SLURM_NODEID"]),
            environment["MASTER_ADDR"],
            environment["MASTER_PORT"],
        )


def command_line(node: Node, arguments: Sequence[str]) -> list[str]:
    """torchrun for this node's ranks, or plain Python for a single rank."""
    if node.ranks * node.nodes == 1:
        return [sys.executable, "-m", "training.main", *arguments]
    place = ["--standalone"]
    if node.nodes > 1:
        # Ranks in the order of the nodes; a rendezvous backend would number them in the order of arrival.
        place = [f"--nnodes={node.nodes}", f"--node-rank={node.index}"]
        place += [f"--master-addr={node.master_addr}", f"--master-port={node.master_port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc-per-node={node.ranks}"]
    return [*torchrun, "-m", "training.main", "--", *arguments]


def run_folder(arguments: Sequence[str]) -> Path | None:
    """The folder of the run that training arguments name, None without `--name`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--logs", default="logs")
    parser.add_argument("--name")
    known, _ = parser.parse_known_args(list(arguments))
    return Path(known.logs) / known.name if known.name else None


def run_node(node: Node, arguments: Sequence[str], *, cwd: Path | None = None) -> int:
    """Train with this node's ranks and pass stop signals on to them.

    Returns:
        The exit status of training, or PREEMPTED_STATUS if it left the marker of a run that is to be started again.
    """
    environment = {name: value for name, value in os.environ.items() if name not in SLURM_RANKS}
    folder = run_folder(arguments)
    marker = (cwd or Path()) / folder / REQUEUE_MARKER if folder is not None else None
    if marker is not None and node.index == 0:
        # Left by an earlier stop: a run that fails to start must not look like a stopped one.
        marker.unlink(missing_ok=True)
    single = node.ranks * node.nodes == 1
    status = supervise(command_line(node, arguments), torchrun=not single, cwd=cwd, environment=environment)
    if status != 0 and marker is not None and marker.exists():
        return PREEMPTED_STATUS
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="processes on this node")
    parser.add_argument("--slurm", action="store_true", help="this is one of a SLURM job's nodes")
    parser.add_argument("arguments", nargs="+", metavar="-- ARGUMENTS", help="of training.main")
    options = parser.parse_args()
    node = Node.of_slurm(options.ranks, os.environ) if options.slurm else Node(options.ranks)
    return run_node(node, options.arguments)


if __name__ == "__main__":
    sys.exit(main())
