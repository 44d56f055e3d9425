"""The training processes of an ablation, as many at the same time as there are cores."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field

from scripts.ablation.jobs import Job
from scripts.emoji.runs import TrainingRun


@dataclass(frozen=True)
class Ended:
    """A training process that has ended.

    Attributes:
        started: seconds since 1970.
        wall_seconds, cpu_seconds: of all its ranks, with start-up and loading.
    """

    job: Job
    status: int
    started: float
    wall_seconds: float
    cpu_seconds: float


@dataclass
class Processes:
    """Training processes that run at the same time, at most `slots` (a rank takes one)."""

    slots: int
    running: dict[Job, subprocess.Popen] = field(default_factory=dict)
    ended: queue.Queue[Ended] = field(default_factory=queue.Queue)
    _cost: dict[Job, int] = field(default_factory=dict)

    def has_room(self, ranks: int) -> bool:
        return sum(self._cost.values()) + min(ranks, self.slots) <= self.slots

    def start(self, job: Job, run: TrainingRun) -> None:
        child = run.start()
        self.running[job] = child
        self._cost[job] = min(run.ranks, self.slots)
        # One thread waits for each process: only wait4 gives a single child's CPU time, and the thread sees the end also
        # while another run is being measured.
        threading.Thread(target=self._wait, args=(job, child, time.time()), daemon=True).start()

    def _wait(self, job: Job, child: subprocess.Popen, started: float) -> None:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        self.ended.put(Ended(job, child.returncode, started, time.time() - started, cpu))

    def next_ended(self) -> Ended:
        """Waits for a process to end."""
        ended = self.ended.get()
        del self.running[ended.job], self._cost[ended.job]
        return ended

    def stop(self) -> None:
        """Ends all running processes, and waits for them."""
        for child in self.running.values():
            if child.returncode is None:
                os.kill(child.pid, signal.SIGTERM)
        while self.running:
            self.next_ended()
