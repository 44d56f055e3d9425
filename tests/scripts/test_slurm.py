"""scripts/paper/train.sbatch: its decisions, with stubs for SLURM's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import ROOT

SBATCH = ROOT / "scripts" / "paper" / "train.sbatch"
RECIPES = ("-m", "scripts.paper.recipes")


def test_the_batch_file_parses_and_asks_slurm_for_what_it_relies_on():
    assert subprocess.run(["bash", "-n", SBATCH]).returncode == 0
    lines = SBATCH.read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert {"--ntasks-per-node=1", "--requeue", "--open-mode=append"} <= set(options)
    assert any(option.startswith("--signal=B:USR1@") for option in options)
    # sbatch stops reading options at the first command
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))


@dataclass
class Stub:
    """A folder that train.sbatch takes for a job's, with stubs for SLURM's commands, whose behaviour a test sets."""

    folder: Path

    def start(
        self, *arguments: str, srun: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen:
        commands = self.folder / "commands"
        commands.mkdir(exist_ok=True)
        scontrol = 'case "$*" in *hostnames*) echo n1; echo n2 ;; *node*) echo "NodeName=n1 NodeAddr=10.0.0.1 X=1" ;; '
        scontrol += f'*) echo "scontrol $*" >> {self.folder}/calls ;; esac'
        python = f'echo "python $*" >> {self.folder}/calls'
        for name, body in {"srun": srun, "scontrol": scontrol, "python": python}.items():
            (commands / name).write_text(
                f'#!/usr/bin/env bash\necho "{name} $*" >> {self.folder}/log\n{body}\n'
            )
            (commands / name).chmod(0o755)
        job = {
            "SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2", "PYTHON": str(commands / "python"), "PATH": f"{commands}:{os.environ['PATH']}",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", SBATCH, *arguments],
            env={**os.environ, **job, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, *arguments: str, srun: str = "exit 0", environment: dict[str, str] | None = None
    ) -> tuple[int, str]:
        process = self.start(*arguments, srun=srun, environment=environment)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    @property
    def calls(self) -> str:
        """The calls of SLURM and Python besides srun."""
        file = self.folder / "calls"
        return file.read_text() if file.exists() else ""

    @property
    def marker(self) -> Path:
        folder = self.folder / "logs" / "a-run"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "requeue"


@pytest.fixture
def stub(tmp_path) -> Stub:
    return Stub(tmp_path)


def task_of(stub: Stub, node: int) -> list[str]:
    """The program that a task of srun becomes on a node, by the words that srun got."""
    words = (stub.folder / "words").read_text().split("\0")[:-1]
    environment = {**os.environ, "SLURM_NODEID": str(node), "SLURM_NNODES": "2"}
    python = stub.folder / "commands" / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    done = subprocess.run(
        words[words.index("bash") :], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_program_a_node_meets_at_the_first_ones_address(stub):
    srun = f'printf "%s\\0" "$@" > {stub.folder}/words; echo "cores $SRUN_CPUS_PER_TASK"'
    environment = {"SLURM_CPUS_PER_TASK": "16"}
    given = ("--ranks", "4", "--", "--name", "a-run", "--lr", "1")
    status, output = stub.run(*given, srun=srun, environment=environment)
    # srun of 22.05 and later does not inherit --cpus-per-task.
    assert status == 0 and "cores 16" in output
    words = (stub.folder / "words").read_text().split("\0")
    assert {"--ntasks=2", "--ntasks-per-node=1"} <= set(words)
    place = ["--nnodes=2", "--master-addr=10.0.0.1", "--master-port=24711"]
    assert task_of(stub, 1) == [
        "-m", "training.main", "--processes", "4", "--node-rank=1", *place, "--", "--name", "a-run", "--lr", "1", "--resume",
        "latest",
    ]  # fmt: skip
    assert stub.calls == ""


@pytest.mark.parametrize(
    ("left", "status", "requeued"),
    [(True, 85, True), (False, 1, False), (True, 0, False), (False, 0, False)],
)
def test_only_a_run_that_left_its_marker_goes_back_into_the_queue(stub, left, status, requeued):
    """Left by this start: with an earlier one's, a run that cannot start would go round for ever."""
    stub.marker.touch()
    srun = f"touch {stub.marker}; exit {status}" if left else f"exit {status}"
    assert stub.run("--name", "a-run", srun=srun)[0] == status
    assert ("scontrol requeue 4711" in stub.calls) == requeued


def wait_for(
    condition: Callable[[], object], seconds: float, what: str, every: float = 0.1
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(every)


def signalled(stub: Stub, srun: str, number: int) -> tuple[int, str]:
    """Exit status and output of a job whose srun has touched `started` when this signal reaches the batch file."""
    process = stub.start("--name", "a-run", srun=srun)
    wait_for((stub.folder / "started").exists, 10, "srun")
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_short_of_time_the_ranks_are_asked_to_stop_and_the_job_goes_back(stub):
    """Also where the ranks leave no marker: the signal came before their first step."""
    # A launcher that is asked to stop: the ranks need a while to save.
    srun = f"trap 'sleep 1; exit 85' USR1; touch {stub.folder}/started; while :; do sleep 0.1; done"
    status, output = signalled(stub, srun, signal.SIGUSR1)
    assert status == 85 and "scontrol requeue 4711" in stub.calls, output


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_saves_each_epoch_only_goes_back_if_one_has_ended(stub, saved):
    """A rank that cannot save a step ends by SIGUSR1; without a new epoch it would go round for ever."""
    checkpoints = stub.marker.parent / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "epoch_1.pt").touch()  # of an earlier start
    wrote = f"sleep 0.1; touch {checkpoints}/epoch_2.pt; " if saved else ""
    started = f"touch {stub.folder}/started; while :; do sleep 0.1; done"
    status, output = signalled(stub, f"trap 'exit 138' USR1; {wrote}{started}", signal.SIGUSR1)
    assert ("scontrol requeue 4711" in stub.calls) is saved, output
    assert ("ask for more --time" in output) is not saved and status == (138 if saved else 2)


def test_ended_by_slurm_it_leaves_the_queue_to_slurm(stub):
    """SIGTERM: a preempted job is put back by SLURM, and a cancelled one must stay cancelled."""
    srun = f"touch {stub.folder}/started; sleep 1; touch {stub.marker}; exit 85"
    status, output = signalled(stub, srun, signal.SIGTERM)
    assert status == 85 and "requeue" not in stub.calls, output
