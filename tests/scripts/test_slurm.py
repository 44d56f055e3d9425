"""scripts/paper/train.sbatch: its own decisions with stubs for SLURM's commands, and a real two-node SLURM on this machine.

The real one is started by hand in a folder of its own: munged, slurmctld and two slurmd, ended with the test.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from support import ROOT
from support.tars import write_source
from support.tiny_clip import NUMBERED, write_bert

SBATCH = ROOT / "scripts" / "paper" / "train.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")


# ---------------------------------------------------------------------------------------------------------------------
# Without SLURM
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# A real SLURM
# ---------------------------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def slurm_conf(folder: Path) -> str:
    """Two nodes of two cores on this machine. Short intervals: by default a requeued job waits two minutes."""
    controller, *nodes = free_ports(3)
    user = getpass.getuser()
    lines = [
        "ClusterName=test", "SlurmctldHost=localhost(127.0.0.1)", f"SlurmctldPort={controller}",
        f"SlurmUser={user}", f"SlurmdUser={user}",
        "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.socket,cred_expire=5", "CredType=cred/munge",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/affinity", "TaskPluginParam=Cores",
        "MpiDefault=none", "ReturnToService=2",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "JobRequeue=1",
        "AccountingStorageType=accounting_storage/none", "JobAcctGatherType=jobacct_gather/none",
        "SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log", f"SlurmdLogFile={folder}/slurmd-%n.log",
        *(f"NodeName=n{i} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN" for i, port in enumerate(nodes, 1)),
        "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


Command = Callable[..., str]  # of SLURM; its output


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o700)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(slurm_conf(folder))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]

    def command(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def idle_nodes() -> int:
        words = ["sinfo", "--noheader", "--Node", "--format=%t"]
        return subprocess.run(words, capture_output=True, text=True).stdout.split().count("idle")

    with contextlib.ExitStack() as daemons:
        for words in (
            munged,
            ["slurmctld", "-D", "-c"],
            *(["slurmd", "-D", "-N", n] for n in ("n1", "n2")),
        ):
            daemon = daemons.enter_context(subprocess.Popen(words, stderr=subprocess.DEVNULL))
            daemons.callback(daemon.terminate)
            if words is munged:
                wait_for((folder / "munge.socket").exists, 20, "munged")
        wait_for(lambda: idle_nodes() == 2, 60, f"two idle nodes; {folder} holds logs", every=1)
        yield command


needs_slurm = pytest.mark.skipif(
    any(shutil.which(name) is None for name in DAEMONS),
    reason=f"needs a SLURM to start by hand: {', '.join(DAEMONS)} (Debian: slurm-wlm and munge)",
)


@needs_slurm
@pytest.mark.slow  # four starts of two ranks each with SLURM's pauses between them: about three minutes on two cores
@pytest.mark.timeout(900)
def test_a_run_requeued_by_slurm_ends_as_if_never_interrupted(slurm, tmp_path):
    """100 short steps on two nodes, one rank each. SIGUSR1 (short of time), `scontrol requeue` (preemption), to the end."""
    bert = write_bert(tmp_path / "bert", words=NUMBERED)
    data = "::".join(
        f"{name}={write_source(tmp_path / name, first, 120, 40)}"
        for name, first in (("a", 0), ("b", 1000))
    )
    values = [
        "model=zerovl-emoji", f"text-model={bert}", f"train-data={data}", f"logs={tmp_path / 'logs'}",
        "train-data-upsampling-factors=", "pretrained-image=", "token-drop=", "auto-augment=", "aug-cfg=",
        "retrieval-data=", "batch-size=4", "effective-batch=16", "train-num-samples=1600", "epochs=1",
        "save-every-steps=5", "log-every-n-steps=5",
    ]  # fmt: skip
    run = [sys.executable, "-m", "scripts.paper.recipes", "train-14m", "--gpus", "0"]
    run += [word for value in values for word in ("--set", value)]
    checkpoints = {name: tmp_path / "logs" / name / "checkpoints" for name in ("broken", "whole")}

    def steps_saved() -> int:
        names = checkpoints["broken"].glob("step_*.pt")
        return max((int(path.stem.rsplit("_", 1)[1]) for path in names), default=0)

    slurm("sbatch", "--test-only", "--cpus-per-task=2", "--nodes=2", str(SBATCH), "--name", "a")
    options = ["--sbatch=--cpus-per-task=2", f"--sbatch=--output={tmp_path}/%j.log"]
    job = slurm(*run, "--processes", "1", "--nodes", "2", *options, "--set", "name=broken").split()[
        -1
    ]
    log = tmp_path / f"{job}.log"
    wait_for(lambda: steps_saved() >= 10, 240, "step 10")
    slurm("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: "start 1:" in log.read_text(), 240, "the second start")
    assert "back into the queue" in log.read_text()
    first = steps_saved()
    wait_for(lambda: steps_saved() >= first + 10, 240, "ten more steps")
    slurm("scontrol", "requeue", job)
    wait_for(lambda: "start 2:" in log.read_text(), 240, "the third start")
    second = steps_saved()
    assert 10 <= first < second < 100
    shown = ("scontrol", "--oneliner", "show", "job", job)
    wait_for(lambda: "JobState=COMPLETED " in slurm(*shown), 300, "the end", every=1)
    words = log.read_text()
    assert "2 node(s), n[1-2]" in words and words.count("goes on after step") == 2
    assert all(f"step_0000_{step:08d}.pt" in words for step in (first, second))

    whole = [*run, "--no-slurm", "--processes", "2", "--set", "name=whole"]
    subprocess.run(whole, check=True, timeout=240)
    ours, theirs, before = (
        torch.load(file, weights_only=True)["state_dict"]
        for file in (*(folder / "epoch_1.pt" for folder in checkpoints.values()),
                     checkpoints["whole"] / "step_0000_00000095.pt")
    )  # fmt: skip
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    # The comparison sees 5 steps.
    assert not all(torch.equal(before[key], theirs[key]) for key in theirs)
