"""Runs of the study of large and debiased batches on photographs (study.yaml). A stopped call continues.

    python -m scripts.photographs.styles --tars DIR --features DIR
    python -m scripts.photographs.study --features DIR [--only debiased] [--minutes 60]

A unit is an arm at one rate with all seeds; its records, one line a run, go to docs/results/photographs/PART.jsonl when it has
ended, and a call repeats no unit that is there. Scores are mean recalls (RSUM / 6) in percent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

from scripts.photographs.heads import Heads, Training, begin, train
from scripts.photographs.mixtures import WIDTH, Mixture, OneSource, Scored, Store
from scripts.photographs.stages import MapStore, Stages, divided
from scripts.photographs.styles import image_tower

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "docs" / "results" / "photographs"
Record = dict[str, Any]
Scores = dict[str, list[float]]  # measure -> of each seed


def read_protocol() -> dict[str, Any]:
    return yaml.safe_load((HERE / "study.yaml").read_text(encoding="utf-8"))


def seeds_of(protocol: dict[str, Any], part: str) -> list[int]:
    return (protocol["stages"] if part.startswith("stages") else protocol)["seeds"]


@dataclass(frozen=True)
class Unit:
    """An arm of a part at one rate.

    Attributes:
        part: the name of its file of records.
        data: the mixture; "" for the one source.
        start: the training from which it starts; None: random weights.
    """

    part: str
    data: str
    arm: str
    training: Training
    rate: float
    start: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[str, str, float]:
        return self.data, self.arm, self.rate


def read_records(part: str, folder: Path = RECORDS) -> list[Record]:
    """Read the runs of a part."""
    file = folder / f"{part}.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def append_records(part: str, records: Sequence[Record], folder: Path = RECORDS) -> None:
    """Add runs to a part in one write, so that a stopped call leaves all of them or none."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{part}.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(record)}\n" for record in records))


@cache
def commit() -> str:
    """Ask git for the commit of the programs."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=HERE, capture_output=True, text=True).stdout.strip()


def mean_scores(records: Sequence[Record], measure: str, **of: Any) -> dict[float, float]:
    """Average each rate's runs over seeds, of the records whose entries are `of`."""
    scores: dict[float, list[float]] = {}
    for run in records:
        if all(run[key] == value for key, value in of.items()):
            scores.setdefault(run["rate"], []).append(run["scores"][measure])
    return {rate: fmean(values) for rate, values in sorted(scores.items())}


def next_rate(by_rate: Mapping[float, float], ladder: Sequence[float]) -> float | None:
    """Find the rate beyond the edge of the grid at which the best one lies.

    Returns:
        None if the best rate lies inside, or at the ladder's end.
    """
    best = max(by_rate, key=by_rate.__getitem__)
    place = ladder.index(best)
    for edge, beyond in ((min(by_rate), place - 1), (max(by_rate), place + 1)):
        if best == edge and 0 <= beyond < len(ladder):
            return ladder[beyond]
    return None


def batch_units(settings: dict[str, Any], start: str, part: str) -> Iterator[Unit]:
    """Plan the units of the batch sizes from one start, where an arm's grid grows while its best rate lies at an edge."""
    begin, ladder = settings["starts"][start], read_protocol()["ladder"]
    for arm, given in settings["arms"].items():
        epochs = round(begin["epochs"] * given.get("longer", 1))
        training = Training(given["batch"], "random", settings["epoch_samples"], epochs)
        rates = list(given["rates"])
        while rates:
            yield from (Unit(part, "", arm, training, rate, begin.get("of")) for rate in rates)
            beyond = next_rate(mean_scores(read_records(part), "validation", arm=arm), ladder)
            rates = [] if beyond is None else [beyond]


def debiased_units(settings: dict[str, Any], part: str) -> Iterator[Unit]:
    """Plan the units of the mixtures: both arms at all rates."""
    for mixture in settings["mixtures"]:
        for rate in settings["rates"]:
            for sampling in ("random", "debiased"):
                training = Training(
                    settings["batch"], sampling, settings["epoch_samples"], settings["epochs"]
                )
                yield Unit(part, mixture, sampling, training, rate)


def units(protocol: dict[str, Any]) -> dict[str, Callable[[], Iterator[Unit]]]:
    """Name each part's units, in the order of their value."""
    stages = protocol["stages"]
    return {
        "batch-random": lambda: batch_units(protocol["batch"], "random", "batch-random"),
        "debiased": lambda: debiased_units(protocol["debiased"], "debiased"),
        "batch-aligned": lambda: batch_units(protocol["batch"], "aligned", "batch-aligned"),
        "stages-debiased": lambda: debiased_units(stages["debiased"], "stages-debiased"),
        "stages-batch": lambda: batch_units(stages["batch"], "random", "stages-batch"),
    }


class Laboratory:
    """A maker of units and of their records.

    Args:
        folder: gets the records.
    """

    def __init__(self, protocol: dict[str, Any], features: Path, folder: Path = RECORDS) -> None:
        self.protocol, self.features, self.folder = protocol, features, folder
        self.store = cache(lambda maps: (MapStore if maps else Store)(features))
        self.data = cache(self._data)
        self.start = cache(self._start)

    def _data(self, name: str, maps: bool = False) -> Scored:
        if not name:
            return OneSource(self.store(maps))
        return Mixture(self.store(maps), self.protocol["debiased"]["mixtures"][name])

    def _start(self, batch: int, rate: float, seed: int, epochs: int) -> Heads:
        samples = self.protocol["batch"]["epoch_samples"]
        training = Training(batch, "random", samples, epochs)
        heads = begin(WIDTH, [seed])
        train(heads, self.data("").pairs, training, rate, [seed])
        return heads

    def train_heads(self, unit: Unit) -> tuple[int, Scores]:
        """Train the heads of all seeds at once, and count the steps of each."""
        scored, seeds = self.data(unit.data), seeds_of(self.protocol, unit.part)
        heads = begin(
            scored.pairs.images.shape[1], seeds, self.start(**unit.start) if unit.start else None
        )
        steps = train(heads, scored.pairs, unit.training, unit.rate, seeds)
        return steps, scored.scores(heads)

    def train_stages(self, unit: Unit) -> tuple[int, Scores]:
        """Train the image tower's last stages below the heads, seed by seed."""
        scored, of_images = self.data(unit.data, True), self.data(unit.data).of_images
        steps = 0
        scores: Scores = {}
        for seed in seeds_of(self.protocol, unit.part):
            stages = divided(image_tower(self.features / "encoders"))[1]
            towers: Any = Stages(stages, begin(WIDTH, [seed]), of_images)
            steps = train(towers, scored.pairs, unit.training, unit.rate, [seed])
            for name, values in scored.scores(towers).items():
                scores.setdefault(name, []).extend(values)
        return steps, scores

    def make(self, unit: Unit) -> None:
        """Train and score all seeds of a unit, unless its records are there."""
        if unit.key in {
            (run["data"], run["arm"], run["rate"]) for run in read_records(unit.part, self.folder)
        }:
            return
        seeds, clock = seeds_of(self.protocol, unit.part), time.process_time()
        steps, scores = (self.train_stages if unit.part.startswith("stages") else self.train_heads)(
            unit
        )
        seconds = (time.process_time() - clock) / len(seeds)
        facts = {"data": unit.data, "arm": unit.arm, "rate": unit.rate}
        facts |= {"steps": steps, "samples": steps * unit.training.batch}
        facts |= {"cpu_seconds": round(seconds, 2), "commit": commit()}
        records = [
            facts
            | {"seed": seed, "scores": {name: round(of[number], 3) for name, of in scores.items()}}
            for number, seed in enumerate(seeds)
        ]
        append_records(unit.part, records, self.folder)
        means = {name: round(fmean(of), 2) for name, of in scores.items()}
        print(*unit.key, f"{seconds:.1f} s a run", means, flush=True)

    def signs(self) -> None:
        """Write what is known of each mixture before its trainings, once."""
        there = {record["data"] for record in read_records("signs", self.folder)}
        for name in self.protocol["debiased"]["mixtures"]:
            if name not in there:
                mixture = self.data(name)
                assert isinstance(mixture, Mixture)
                signs = {key: round(value, 3) for key, value in mixture.signs().items()}
                append_records("signs", [{"data": name, **signs}], self.folder)
                print(name, signs, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="PART", help="instead of all parts")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no unit later")
    given = parser.parse_args()
    torch.set_num_threads(1)
    protocol = read_protocol()
    laboratory = Laboratory(protocol, given.features)
    end = time.monotonic() + 60 * given.minutes
    laboratory.signs()
    parts = units(protocol)
    for part in given.only or parts:
        for unit in parts[part]():
            if time.monotonic() > end:
                return
            laboratory.make(unit)


if __name__ == "__main__":
    main()
