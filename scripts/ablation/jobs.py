"""The runs of an ablation: their flags, their records, and the order in which they are trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.files import write_atomically
from scripts.ablation.protocol import (
    ALL_UNSEEN,
    CONDITIONS,
    MINIATURES,
    Choices,
    Condition,
    unseen_source,
)
from scripts.ablation.sources import CONTEXT_SOURCE, CONTEXTS, MIXTURES
from scripts.drawn.training import TrainingRun, drawn_flags, flag_values

#: Flags of before `--ablate` had their names, with their values, in older records.
RENAMED = {
    ("--debiased-draw", "iid"): "iid-draw",
    ("--mixup-of", "both"): "mixup-both",
    ("--mixup-text", "embeddings"): "mixup-embeddings",
    ("--temperature-parameter", "temperature"): "temperature-parameter",
}


def settings_of(flags: Sequence[str]) -> dict[str, list[str]]:
    """The values of each flag by its present name."""
    values = flag_values(flags)
    for (name, value), now in RENAMED.items():
        if values.get(name) == [value]:
            del values[name]
            values["--ablate"] = [*values.get("--ablate", []), now]
    return values


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
    def needs(self) -> list[Job]:
        """The jobs of the same seed that have to come first."""
        return [Job(self.seed, name) for name in self.condition.needs]

    @property
    def trained(self) -> list[str]:
        """The sources that the run is trained on."""
        condition, sources = self.condition, [*MINIATURES[self.condition.miniature].sources]
        unseen = unseen_source(condition.miniature, self.seed)
        if condition.kind == "contexts":
            return [CONTEXT_SOURCE]
        if condition.trained == "one":
            return [sources[(sources.index(unseen) + 1) % len(sources)]]
        return [source for source in sources if condition.trained == "four" or source != unseen]

    @property
    def unseen(self) -> str | None:
        """The source that the run is scored on and not trained on; None if its score is of another kind."""
        return (
            unseen_source(self.condition.miniature, self.seed)
            if self.condition.score == "unseen"
            else None
        )


@dataclass(frozen=True)
class Ablation:
    """The folders of an ablation, and the settings of its jobs.

    Attributes:
        data: miniature -> its folder.
        out: records, runs, and data made from the miniatures.
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
        if condition.kind != "plain":
            more += [
                "--train-data",
                "::".join(f"{name}={folder}" for name, folder in self.sources(job).items()),
            ]
        if condition.teacher is not None:
            more += ["--teacher", str(self.teacher(job))]
        if condition.init_from is not None:
            more += [
                "--init-from",
                str(self.training_run(Job(job.seed, condition.init_from)).checkpoint),
            ]
        if condition.every_epoch:
            more += ["--save-frequency", "1"]
        flags = drawn_flags(
            self.data[condition.miniature], sampling=condition.sampling, epochs=condition.run_epochs(self.choices),
            seed=job.seed, sources=job.trained, more=more,
        )  # fmt: skip
        return TrainingRun(self.out / "runs" / str(job), tuple(flags), condition.ranks)

    def sources(self, job: Job) -> dict[str, Path]:
        """The sources of a job that is not trained on the miniature's own, by name."""
        if job.condition.kind == "clusters":
            count = int(self.choices["clusters"].split("-")[1])
            return {f"emoji-{k:03d}": self.clusters(job) / f"cluster-{k:03d}" for k in range(count)}
        kind = job.condition.kind
        if kind in MIXTURES:  # of the trained sources, which depend on the unseen one
            names = [f"part-{part}" for part in range(3)] if kind == "alike" else job.trained
            return {name: self.out / "data" / f"{kind}-{job.unseen}" / name for name in names}
        return {
            name: self.out / "data" / kind / name
            for name in (CONTEXTS if kind == "contexts" else job.trained)
        }

    def teacher(self, job: Job) -> Path:
        return self.out / "data" / f"{job}-teacher"

    def clusters(self, job: Job) -> Path:
        return self.out / "data" / str(job)

    def record_file(self, job: Job) -> Path:
        return self.out / f"{job}.json"

    def asked(self, job: Job) -> dict[str, Any]:
        """The settings that identify the job's record: its flags, and those of the runs that it is built on."""
        run = self.training_run(job)
        return {
            "condition": job.name, "seed": job.seed, "unseen": job.unseen, "split": self.split, "ranks": run.ranks,
            "choices": {name: self.choices[name] for name in sorted(job.condition.choices)},
            "flags": list(run.flags), "built_on": {one.name: self.asked(one)["flags"] for one in job.needs},
        }  # fmt: skip

    def is_recorded(self, job: Job) -> bool:
        """True if the job's JSON exists, has the job's settings and the present score."""
        record = self.record(job)
        scored_alike = (
            job.condition.score != "unseen"
            or self.split != "test"
            or ALL_UNSEEN in record.get("rsum", ())
        )
        return self._is_of(job, record) and scored_alike

    def record(self, job: Job) -> dict[str, Any]:
        """The job's JSON; empty if the file is missing."""
        file = self.record_file(job)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _is_of(self, job: Job, record: Mapping[str, Any]) -> bool:
        """True if a record is of this job with its present settings.

        A setting that became a choice after the run is not among the record's choices, and elsewhere among its flags.
        """
        if not job.condition.choices <= set(self.choices) or not isinstance(
            record.get("choices"), dict
        ):
            return False  # records of earlier protocols have no table of choices
        asked = self.asked(job)
        same = all(
            record.get(key) == asked[key]
            for key in ("condition", "seed", "unseen", "split", "ranks")
        )
        chosen = all(
            record["choices"].get(name, value) == value for name, value in asked["choices"].items()
        )
        then, now = ({"": one["flags"], **one.get("built_on", {})} for one in (record, asked))
        flags = then.keys() == now.keys() and all(
            settings_of(then[name]) == settings_of(now[name]) for name in now
        )
        return same and chosen and flags

    def take_over(self, runs: Path) -> int:
        """Write the JSONs of finished runs in a `runs.json` that are missing here; returns their number."""
        taken = 0
        for record in json.loads(runs.read_text(encoding="utf-8")) if runs.is_file() else ():
            job = Job(record["seed"], record["condition"])
            if (
                job.name in CONDITIONS
                and not self._is_of(job, self.record(job))
                and self._is_of(job, record)
            ):
                self.write_record(job, record)
                taken += 1
        return taken

    def write_record(self, job: Job, record: dict[str, Any]) -> None:
        write_atomically(self.record_file(job), json.dumps(record, indent=1) + "\n")

    def plan(self, seeds: Sequence[int], names: Sequence[str]) -> list[Job]:
        """The jobs without a record, seed by seed in the order of CONDITIONS, each after those that it needs."""
        jobs: dict[Job, None] = {}

        def add(job: Job) -> None:
            for base in job.needs:
                if base in wanted or not self.training_run(base).is_finished:
                    add(base)
            jobs[job] = None

        for seed in seeds:
            wanted = {job for name in names if not self.is_recorded(job := Job(seed, name))}
            for name in CONDITIONS:
                if (job := Job(seed, name)) in wanted:
                    add(job)
        return list(jobs)

    def tidy(self, job: Job) -> None:
        """Remove a recorded job's checkpoints, unless another condition of its seed still needs them."""
        waiting = [Job(job.seed, name) for name, one in CONDITIONS.items() if job.name in one.needs]
        if all(map(self.is_recorded, (job, *waiting))):
            shutil.rmtree(self.training_run(job).folder / "checkpoints", ignore_errors=True)
        for folder in (self.clusters(job), self.teacher(job)):
            shutil.rmtree(folder, ignore_errors=True)
