"""The runs of an ablation: their flags, what each is recognised by, what has to be trained first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.files import write_atomically
from scripts.ablation.conditions import CONDITIONS, Condition
from scripts.ablation.protocol import ALL_UNSEEN, Choices, unseen_source
from scripts.ablation.sources import CONTEXT_SOURCE, ClusterSettings, cluster_data, context_data
from scripts.drawn.data import DrawnData
from scripts.drawn.emoji import EMOJI
from scripts.drawn.icons import ICONS
from scripts.emoji.runs import TrainingRun, drawn_flags, flag_values

MINIATURES: dict[str, DrawnData] = {"emoji": EMOJI, "icons": ICONS}


@dataclass(frozen=True, order=True)
class Job:
    """A condition with a seed."""

    seed: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}-seed{self.seed}"

    @property
    def condition(self) -> Condition:
        return CONDITIONS[self.name]

    @property
    def trained(self) -> list[str]:
        """The sources that the run is trained on."""
        sources = [*MINIATURES[self.condition.miniature].sources]
        if self.condition.kind == "contexts":
            return [CONTEXT_SOURCE]
        if self.condition.trained == "four":
            return sources
        unseen = unseen_source(sources, self.seed)
        if self.condition.trained == "one":
            return [sources[(sources.index(unseen) + 1) % len(sources)]]
        return [source for source in sources if source != unseen]

    @property
    def unseen(self) -> str | None:
        """The source that the run is scored on and not trained on; None where its score is of another kind."""
        if self.condition.score != "unseen":
            return None
        return unseen_source([*MINIATURES[self.condition.miniature].sources], self.seed)


@dataclass(frozen=True)
class Ablation:
    """The folders of an ablation, and the settings of its jobs.

    Attributes:
        data: miniature -> its folder.
        out: records, runs, and data that is made of the miniatures.
        choices: the fixed settings, and those that the protocol's pilots chose.
        split: "test", or "val" for pilots.
    """

    data: dict[str, Path]
    out: Path
    choices: Choices
    split: str = "test"

    def training_run(self, job: Job) -> TrainingRun:
        condition = job.condition
        more = condition.run_flags(self.choices)
        if condition.kind == "contexts":
            more += ["--train-data", context_data(self.contexts)]
        elif condition.kind == "clusters":
            more += ["--train-data", cluster_data(self.clusters(job), self.cluster_settings.count)]
        elif condition.kind == "groups":
            more += ["--train-data", "::".join(f"{source}={self.groups / source}" for source in job.trained)]
        if condition.teacher is not None:
            more += ["--teacher", str(self.teacher(job))]
        if condition.init_from is not None:
            more += ["--init-from", str(self.training_run(Job(job.seed, condition.init_from)).checkpoint)]
        if condition.every_epoch:
            more += ["--save-frequency", "1"]
        flags = drawn_flags(
            self.data[condition.miniature],
            sampling=condition.sampling,
            epochs=condition.run_epochs(self.choices),
            seed=job.seed,
            sources=job.trained,
            more=more,
        )
        return TrainingRun(self.out / "runs" / str(job), tuple(flags), condition.ranks)

    @property
    def contexts(self) -> Path:
        return self.out / "data" / "contexts"

    @property
    def groups(self) -> Path:
        return self.out / "data" / "groups"

    def teacher(self, job: Job) -> Path:
        return self.out / "data" / f"{job}-teacher"

    @property
    def cluster_settings(self) -> ClusterSettings:
        return ClusterSettings.of(self.choices["clusters"])

    def clusters(self, job: Job) -> Path:
        return self.out / "data" / str(job)

    def record_file(self, job: Job) -> Path:
        return self.out / f"{job}.json"

    def asked(self, job: Job) -> dict[str, Any]:
        """What the job's record is recognised by: its flags, and those of the runs that it is built on."""
        run = self.training_run(job)
        built_on = {name: self.asked(Job(job.seed, name))["flags"] for name in job.condition.needs}
        return {
            "condition": job.name, "seed": job.seed, "unseen": job.unseen, "split": self.split, "ranks": run.ranks,
            "choices": {name: self.choices[name] for name in sorted(job.condition.choices)},
            "flags": list(run.flags), "built_on": built_on,
        }  # fmt: skip

    def is_recorded(self, job: Job) -> bool:
        """Whether the job's JSON exists, has the job's settings and the present score."""
        record = self._record(job)
        scored_alike = job.condition.score != "unseen" or self.split != "test" or ALL_UNSEEN in record.get("rsum", ())
        return self._is_of(job, record) and scored_alike

    def _record(self, job: Job) -> dict[str, Any]:
        """The job's JSON; empty where there is none."""
        file = self.record_file(job)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _is_of(self, job: Job, record: dict[str, Any]) -> bool:
        """Whether a record is of this job with its present settings.

        A setting that became a choice after the run is not among the record's choices, and elsewhere among its flags.
        """
        if not job.condition.choices <= set(self.choices) or not isinstance(record.get("choices"), dict):
            return False  # records of earlier protocols have no table of choices
        asked = self.asked(job)
        flags, choices = asked.pop("flags"), asked.pop("choices")
        return (
            all(record.get(key) == value for key, value in asked.items())
            and flag_values(record["flags"]) == flag_values(flags)
            and all(record["choices"].get(name, value) == value for name, value in choices.items())
        )

    def take_over(self, runs: Path) -> int:
        """Write the JSONs of finished runs in a `runs.json` that are missing here; returns their number."""
        taken = 0
        for record in json.loads(runs.read_text(encoding="utf-8")) if runs.is_file() else ():
            job = Job(record["seed"], record["condition"])
            if job.name in CONDITIONS and not self._is_of(job, self._record(job)) and self._is_of(job, record):
                self.write_record(job, record)
                taken += 1
        return taken

    def write_record(self, job: Job, record: dict[str, Any]) -> None:
        write_atomically(self.record_file(job), json.dumps(record, indent=1) + "\n")

    def plan(self, seeds: Sequence[int], names: Sequence[str]) -> list[Job]:
        """The jobs to train, seed by seed: those without a record, each after those that it needs."""
        jobs: list[Job] = []
        for seed in seeds:
            wanted = {name for name in names if not self.is_recorded(Job(seed, name))}
            open_ends = [*wanted]
            while open_ends:
                for needs in CONDITIONS[open_ends.pop()].needs:
                    if needs not in wanted and not self.training_run(Job(seed, needs)).is_finished():
                        wanted.add(needs)
                        open_ends.append(needs)
            jobs += [Job(seed, name) for name in _in_order(wanted)]
        return jobs

    def tidy(self, job: Job) -> None:
        """Remove a recorded job's checkpoints, unless another condition of its seed still needs them."""
        waiting = [name for name, one in CONDITIONS.items() if job.name in one.needs]
        if self.is_recorded(job) and all(self.is_recorded(Job(job.seed, name)) for name in waiting):
            shutil.rmtree(self.training_run(job).folder / "checkpoints", ignore_errors=True)
        for folder in (self.clusters(job), self.teacher(job)):
            shutil.rmtree(folder, ignore_errors=True)


def _in_order(names: set[str]) -> list[str]:
    """Names in the order of CONDITIONS, those that others need first."""
    ordered: list[str] = []

    def add(name: str) -> None:
        for needs in CONDITIONS[name].needs:
            if needs in names:
                add(needs)
        if name not in ordered:
            ordered.append(name)

    for name in CONDITIONS:
        if name in names:
            add(name)
    return ordered
