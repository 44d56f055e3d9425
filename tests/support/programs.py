"""Training programs started as a person starts them, in one process or under torchrun, and their files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from open_clip_zerovl.core.processes import children_of
from support import warm

SCRIPT = Path(__file__).parent / "training_script.py"
COMMON = [
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--precision",
    "fp32",
    "--log-every-n-steps",
    "1",
    "--warmup",
    "2",
]


def torchrun(ranks: int) -> list[str]:
    """Return the arguments after Python that start a program in this number of processes, none for one."""
    return (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )


def run_ranks(ranks: int, file: str, *arguments: str, timeout: float = 240) -> None:
    """Run a file of tests as a program under torchrun, with this process's `sys.path`, whose ranks all have to succeed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [warm.python(), *torchrun(ranks), file, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-12000:]


def launch(
    program: str,
    config: Path,
    arguments: list[str],
    *,
    ranks: int = 1,
    record: Path | None = None,
    cwd: Path,
    gradient: Path | None = None,
    status: int = 0,
):
    """Run the training script in `ranks` processes (torchrun), which must end with `status`."""
    command = [warm.python(), *torchrun(ranks), str(SCRIPT), program, str(config)]
    for flag, file in (("--record", record), ("--gradient", gradient)):
        command += [flag, str(file)] if file else []
    command += ["--", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == status, done.stderr[-12000:]
    return done


class ForkedTrainings:
    """`forking_training.py` as a program that trains on request, until `close`."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        command = [warm.python(), str(SCRIPT.with_name("forking_training.py"))]
        self._program = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(
        self, arguments: Sequence[str], output: Path, **request: object
    ) -> tuple[dict, str]:
        """Its answer to a request, and the output of the processes."""
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.write(
            json.dumps({"arguments": arguments, "output": str(output), **request}) + "\n"
        )
        self._program.stdin.flush()
        return json.loads(self._program.stdout.readline()), output.read_text()

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(timeout=60)


def state_of(folder: Path, name: str, epoch: int = 1) -> dict:
    return torch.load(
        folder / "logs" / name / "checkpoints" / f"epoch_{epoch}.pt", weights_only=True
    )


def flat_tensors(value, prefix="") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return {
        key: tensor
        for name, item in items
        for key, tensor in flat_tensors(item, f"{prefix}/{name}").items()
    }


def kill(program: subprocess.Popen) -> None:
    """SIGKILL to a program and all below it: ranks are in sessions of their own, and would train on without their launcher."""

    def below(pid: int) -> list[int]:
        return [pid, *(one for child in children_of(pid) for one in below(child))]

    if program.poll() is None:
        for pid in reversed(below(program.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.wait(timeout=60)


def wait_until(
    condition: Callable[[], object],
    program: subprocess.Popen | None = None,
    log: Path | None = None,
) -> None:
    """Wait for a condition, while a program runs if one is given, at most 200 seconds."""
    deadline = time.monotonic() + 200
    while not condition():
        runs = program is None or program.poll() is None
        assert runs and time.monotonic() < deadline, (
            log.read_text()[-3000:] if log else "it has ended"
        )
        time.sleep(0.01)


def kill_when(
    folder: Path, name: str, arguments: list[str], ranks: int, pattern: str, number: signal.Signals
) -> int:
    """Start a run, and signal all its training processes as soon as a checkpoint of this pattern is there."""
    command = [
        sys.executable,
        *torchrun(ranks),
        str(SCRIPT),
        "ours",
        str(folder / "tiny.json"),
        "--",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: list((folder / "logs" / name / "checkpoints").glob(pattern)), child)
        if number == signal.SIGKILL:
            kill(child)
        else:  # the launcher hands it on to its ranks
            os.killpg(child.pid, number)
        return child.wait(timeout=120)
    finally:
        kill(child)
