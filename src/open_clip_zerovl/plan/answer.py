"""A plan: hardware, batching, time, memory and disk of a run, and what is missing for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.data.schedule import Batching
from open_clip_zerovl.plan.data import Missing, SourceCheck
from open_clip_zerovl.plan.estimate import UTILISATION
from open_clip_zerovl.plan.settings import PlanSettings
from open_clip_zerovl.plan.teachers import TeacherPlan
from open_clip_zerovl.recipe.flags import AllFlags


@dataclass(frozen=True)
class Hardware:
    """The hardware that the run is planned for.

    Attributes:
        name: of one device.
        kind: "cuda", "cpu", or "assumed".
        ranks: W, one rank a GPU, or one on the CPU.
        memory_gib: of one GPU, or of the machine for a CPU.
        free_gib: of that, free now (all of it for assumed hardware).
        cores: CPU cores that this process may use; None for assumed hardware.
    """

    name: str
    kind: str
    ranks: int
    memory_gib: float
    free_gib: float
    cores: int | None


@dataclass
class Plan:
    """The result of `zerovl plan`.

    Attributes:
        estimate: nothing was measured on the hardware that the plan is for.
        retained: R, graphs kept in a step.
        step_seconds: of one optimizer step, with data where that was measured.
        compute_seconds, data_seconds: its parts on one rank; data for one loader process, None without samples.
        loss_seconds: part of compute_seconds.
        loader_rate: samples a second of one loader process.
        peak_bytes: of one device.
        checkpoint_bytes, checkpoints: size of one checkpoint, and how many are kept at the same time.
        free_disk_bytes: of the disk of --logs, None for assumed hardware.
        timed: (K, R, seconds) of the steps that were taken.
        teachers: the run's stored teachers.
        teacher_hours: of `zerovl teacher` on all of the run's devices; None where the embeddings exist, or nothing is known.
        missing: what the run needs and lacks.
        elsewhere: what this machine lacks, if the plan is for other hardware.
    """

    settings: PlanSettings
    hardware: Hardware
    estimate: bool
    sources: list[SourceCheck]
    retrieval: dict[str, str]
    batching: Batching
    epoch_steps: int
    parameters: int
    trained_parameters: int
    retained: int = 0
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    loss_seconds: float | None = None
    data_seconds: float | None = None
    loader_rate: float | None = None
    peak_bytes: float | None = None
    sample_flops: float | None = None
    checkpoint_bytes: int = 0
    checkpoints: int = 0
    free_disk_bytes: int | None = None
    timed: tuple[tuple[int, int, float], ...] = ()
    teachers: TeacherPlan | None = None
    teacher_hours: float | None = None
    missing: list[Missing] = field(default_factory=list)
    elsewhere: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.epoch_steps * self.settings.epochs

    @property
    def samples_per_second(self) -> float:
        return self.batching.effective_batch / self.step_seconds if self.step_seconds else 0.0

    @property
    def hours(self) -> float:
        """Of training steps, without evaluation and checkpoints."""
        return self.steps * self.step_seconds / 3600

    @property
    def hours_with_teachers(self) -> float:
        """Of `zerovl teacher`, where it has still to run, and of training steps."""
        return self.hours + (self.teacher_hours or 0.0)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        plain = dataclasses.asdict(self)
        batching = plain.pop("batching")
        plain["batching"] = {
            "micro_batch": batching["micro_batch"],
            "dga_steps": batching["dga_steps"],
            "ranks": batching["world_size"],
            "effective_batch": self.batching.effective_batch,
        }
        unplanned = {each.name for each in flags_of(AllFlags) if each.planned is not True}
        given = [(name, value) for name, value in plain["settings"].items() if name not in unplanned]
        plain["settings"] = {k: v for k, v in given if v is not None and v is not False and v not in ((), {})}
        plain["steps"], plain["samples_per_second"], plain["hours"] = self.steps, self.samples_per_second, self.hours
        plain["hours_with_teachers"] = self.hours_with_teachers
        plain["gpu_hours"] = self.hours * self.hardware.ranks if self.hardware.kind != "cpu" else None
        plain["utilisation_assumed"] = UTILISATION if self.estimate else None
        return plain
