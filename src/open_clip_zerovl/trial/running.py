"""`zerovl trial`: does a larger batch, debiased sampling or the whole recipe help on these data?

Files of the output folder, in the order in which they are made:

    trial.json                  the arguments; a later call with the same ones continues, with more --seeds adds runs
    data/                       test and validation pictures, and lists of the samples to train on
    before/ or aligned/         the model from which every run starts, unless an exported folder was given
    plan.json                   seconds a sample of each arm, measured in turns, and the samples of its runs
    runs/NAME/, runs/NAME.log   a training's own folder, while it runs, and its output
    records/NAME.json           settings and scores of a finished run; start.json those of the model before training
    result.json, trial.html     the table and the verdict, and the --seeds, --rates and --margin of all tables so far

Every arm gets one pilot run a learning rate, scored on the validation pictures, up to two more where the best rate is the first
or the last one, and one run a seed at its best rate, scored on the test sets. All start from the same weights. With
`--equal time` an arm whose samples cost more sees fewer of them. Each source gives whole effective batches, as many as its size
asks for, so that debiased batches waste no sample and all arms see the same mixture.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # noqa: F401  # of the verdict, which comes after all trainings

from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.files import check_writable, locked, write_atomically
from open_clip_zerovl.core.processes import (
    TrainingStopped,
    gpu_memories,
    ranks_here,
    start_training,
)
from open_clip_zerovl.data.names import PER_EPOCH
from open_clip_zerovl.evaluate.zero_shot import LabelledSet
from open_clip_zerovl.finetune.finetuning import has_logit_bias
from open_clip_zerovl.recipe.flags import Settings, as_arguments
from open_clip_zerovl.report.pages import write_page
from open_clip_zerovl.report.run import read_record
from open_clip_zerovl.report.tables import duration
from open_clip_zerovl.report.verdicts import HIGHER
from open_clip_zerovl.sampling import WHEN_DEBIASED
from open_clip_zerovl.sampling.schedule import Batching, apportion
from open_clip_zerovl.trial.flags import ARMS
from open_clip_zerovl.trial.inputs import PLAN, Inputs, Request, claim_folder, prepare
from open_clip_zerovl.trial.result import Row, TrialResult

DEFAULT_BATCH = 256
PILOT_SEED = 100
ROUNDS = 2  # in which each arm is measured once
MEASURED_STEPS = 3  # of the effective batch, each time
FEWEST_STEPS = 8  # of the effective batch in a run
LOGGED, SAVES = 20, 10  # lines and step checkpoints of a run, from which a stopped one continues
FURTHER_RATES = 2  # pilots of an arm beyond --rates, while its best rate is the first or last one
FULL_EPOCHS = 20  # of the printed command
RESULT = "result.json"
# Training flags that the trial sets itself -> the flag of `zerovl trial` in their place.
SETS_ITSELF = {
    "model": "--from",
    "train-data": "--data",
    "train-data-upsampling-factors": "--minutes",
    "epochs": "--minutes",
    "batch-size": "--micro-batch",
    "lr": "--rates",
    "seed": "--seeds",
    "device": "--device",
    **dict.fromkeys(("logs", "name", "resume", "save-frequency", "save-every-steps"), "--out"),
}


def best_rate(rates: Sequence[float], score: Callable[[float], float]) -> tuple[float, bool]:
    """Find the learning rate with the highest score, and whether it is the lowest or highest of several that were tried.

    While it is, one more beyond it is tried, `FURTHER_RATES` times at most.
    """
    scores = {rate: score(rate) for rate in sorted(rates)}
    for left in range(FURTHER_RATES, -1, -1):
        tried = sorted(scores)
        best = max(tried, key=scores.__getitem__)
        at_end = len(tried) > 1 and best in (tried[0], tried[-1])
        if not (at_end and left):
            break
        neighbour = tried[1] if best == tried[0] else tried[-2]
        beyond = float(f"{best * best / neighbour:.2g}")  # of close rates one of them, perhaps
        scores[beyond] = score(beyond)
    return best, at_end


def run_trial(request: Request, say: Say) -> TrialResult:
    """Train and score all arms, or those runs that an earlier call has left, write the page and print the table.

    Args:
        say: is called with a line about each stage.

    Raises:
        UserError: bad input, a folder of another trial, a training that failed.
    """
    check_writable(request.out, folder=True)
    with locked(
        request.out,
        busy=f"another process runs the trial in {request.out}; wait for it, or give another --out",
    ):
        trial = Trial(request, prepare(request, claim_folder(request, say), say), say)
        return trial.run()


class Trial:
    """A trial whose inputs are ready (see `run_trial`).

    Attributes:
        flags_of: arm -> its training flags.
        batch: samples of the largest optimizer step.
    """

    def __init__(self, request: Request, inputs: Inputs, say: Say) -> None:
        self.request, self.inputs, self.say = request, inputs, say
        self.ranks = ranks_here(request.gpus, "cpu" if request.start.device == "cpu" else "cuda")
        self.sigmoid = has_logit_bias(inputs.model)
        asked = request.arms
        self.flags_of: dict[str, Settings] = (
            {name: {**flags} for name, flags in asked.items()}
            if isinstance(asked, Mapping)
            else self._methods(asked)
        )
        self.arms = [*self.flags_of]
        of_arms = {flag: "--arms" for flags in self.flags_of.values() for flag in flags}
        taken = {
            **{flag: of_arms[flag] for flag in request.given if flag in of_arms},
            **SETS_ITSELF,
        }
        for flag in (*request.given, *of_arms):
            if flag in taken:
                raise UserError(
                    f"--{flag} does not work with a trial, which sets it; give {taken[flag]}"
                )
        self.batch = max(map(self._batch, self.arms))
        self.notes: list[str] = []  # on the pilots
        self.further = 0  # pilots beyond --rates
        self.done, self.begin = 0, time.monotonic()  # runs of this call

    def _methods(self, names: Sequence[str]) -> dict[str, Settings]:
        """Choose the training flags of the arms of ARMS."""
        micro, sizes = self.request.micro_batch * self.ranks, self.inputs.sizes
        smallest, several = min(sizes.values()), len(sizes) > 1
        batch = self.request.effective_batch or min(DEFAULT_BATCH, smallest // 4 // micro * micro)
        if batch % micro or batch < 2 * micro or batch > smallest:
            raise UserError(
                f"an effective batch of {batch} does not fit: it must be a multiple of {micro} (--micro-batch on "
                f"{self.ranks} ranks), at least twice as large, and at most the {smallest:,} samples of the smallest source; "
                "give another --effective-batch or --micro-batch"
            )
        if "debiased" in names and not several:
            raise UserError(
                "--arms debiased needs two sources or more; give --data NAME=SHARDS::NAME=SHARDS, or leave it out"
            )
        if "recipe" in names and self.sigmoid:
            raise UserError(
                "--arms recipe mixes up pairs, which the sigmoid loss of this model does not take; leave it out"
            )
        large: Settings = {"dga-steps": str(batch // micro), "dga-retain": "auto"}
        sampling: Settings = {"sampling": "debiased" if several else "random"}
        methods: dict[str, Settings] = {
            "plain": {"sampling": "random"},
            "dga": {"sampling": "random", **large},
            "debiased": {**sampling, **large},
            "recipe": {**sampling, **large, "coin-flip-mixup": ""},
        }
        left_out = {"debiased": not several, "recipe": self.sigmoid}
        return {arm: methods[arm] for arm in names or ARMS if not left_out.get(arm)}

    def _batch(self, arm: str) -> int:
        """Count the samples of an optimizer step."""
        steps = int(self.flags_of[arm].get("dga-steps") or 1)
        return Batching(self.request.micro_batch, steps, self.ranks).effective_batch

    def run(self) -> TrialResult:
        """Run pilots and runs, write table and page."""
        out, seeds = self.request.out, range(self.request.seeds)
        for arm, samples in self.samples.items():
            self.say(f"{arm}: {samples:,} samples a run")
        rates = {arm: self._best_rate(arm) for arm in self.arms}
        records = [self.record(arm, rates[arm], seed) for seed in seeds for arm in self.arms]
        looks, notes = self._looks()
        result = TrialResult(
            records, self.arms, self.request.margin, self.start_record(), self.request.equal, looks
        )
        notes = [*self.inputs.notes, *self.notes, *notes]
        if self.by_source and len(self.inputs.sizes) > 1:
            notes.append(f"Take debiased batches {WHEN_DEBIASED} (docs/results.md).")
        command, advice = self._winners_command(result.winner, rates[result.winner]), ""
        if not result.learned:
            command = ""
        elif result.gain.verdict.sign == HIGHER:
            advice = f"Train {result.winner} in full:"
        else:
            advice = (
                f"{self.samples[result.winner]:,} samples did not surely improve the model before training: try more "
                f"--minutes before you train {result.winner} in full:"
            )
        content = {
            "rates": rates, "winner": result.winner if result.learned else None, "command": command, "notes": notes,
            "means": [dict(zip(result.header, row, strict=True)) for row in result.means()],
            "differences": [dict(zip(Row.HEADER, row, strict=True)) for row in result.differences()],
            "verdicts": result.sentences, "looks": self.looks,
        }  # fmt: skip
        write_atomically(out / RESULT, json.dumps(content, indent=1) + "\n")
        page = write_page(
            out / "trial.html", "trial.html", title="Does it help on these data?", result=result, notes=notes, advice=advice,
            command=command, facts=self._facts(), arms=self._arms_table(),
        )  # fmt: skip
        print(
            *filter(
                None, [result.table(), *notes, f"{advice}\n{command}".strip(), f"Written: {page}"]
            ),
            sep="\n\n",
        )
        return result

    def _facts(self) -> list[list[str]]:
        """List what all arms share."""
        asked = self.request
        start = asked.start.model if asked.encoders is None else " and ".join(asked.encoders)
        sources = ", ".join(f"{name} ({size:,})" for name, size in self.inputs.sizes.items())
        shared = {
            "start": start, "samples to train on": sources, "micro-batch": f"{asked.micro_batch} x {self.ranks} ranks",
            "effective batch": f"{self.batch}", "minutes of all runs": f"{asked.minutes:g}", "equal": asked.equal,
            "margin": f"{asked.margin:g} point{'s' * (asked.margin != 1)}",
            "flags of all arms": shlex.join(as_arguments(asked.given)),
        }  # fmt: skip
        return [[name, value] for name, value in shared.items() if value]

    def _arms_table(self) -> list[list[str]]:
        """List the arms: what each is, and its training flags."""
        words = {} if isinstance(self.request.arms, Mapping) else ARMS
        return [
            [arm, words.get(arm, ""), shlex.join(as_arguments(flags))]
            for arm, flags in self.flags_of.items()
        ]

    @cached_property
    def looks(self) -> list[dict[str, Any]]:
        """List what this call and the earlier ones whose table was seen were asked for."""
        file, asked = self.request.out / RESULT, self.request
        earlier = json.loads(file.read_text(encoding="utf-8"))["looks"] if file.is_file() else []
        now = {"--seeds": asked.seeds, "--rates": [*asked.rates], "--margin": asked.margin}
        return earlier if now in earlier[-1:] else [*earlier, now]

    def _looks(self) -> tuple[int, list[str]]:
        """Count the tables with other runs, and name what was changed after one was seen."""
        runs = {json.dumps([look["--seeds"], look["--rates"]]) for look in self.looks}
        notes = []
        if len(runs) > 1:
            error = 5 * (2 - 0.5 ** (len(runs) - 1))
            notes.append(
                f"Runs were added after a table was seen: this is look {len(runs)}. Each look halves the error that its "
                f"intervals are allowed, so that at most {error:.3g} % of such trials have a false word, in place of 5 %."
            )
        for flag in ("--rates", "--margin"):
            values = dict.fromkeys(json.dumps(look[flag]) for look in self.looks)
            if len(values) > 1:
                notes.append(
                    f"{flag} was changed after scores were known: {', then '.join(values)}."
                )
        return len(runs), notes

    # ---------------------------------------------------------------------------------------------
    # Length
    # ---------------------------------------------------------------------------------------------

    @cached_property
    def samples(self) -> dict[str, int]:
        """Count the samples of a run of each arm, once, so that later runs have the same length.

        Raises:
            UserError: --minutes are too few.
        """
        file, asked, sizes = self.request.out / PLAN, self.request, self.inputs.sizes.values()
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))["samples"]
        # Enough for a batch of the smallest source alone.
        fewest = max(FEWEST_STEPS, math.ceil(sum(sizes) / min(sizes)) if self.by_source else 0)
        costs: dict[str, list[float]] = {arm: [] for arm in self.arms}
        for number in range(ROUNDS):
            self.say(f"measuring the time of each arm, {number + 1} of {ROUNDS}")
            for arm in self.arms:
                costs[arm].append(self._seconds_a_sample(arm))
        cost = {arm: statistics.median(times) for arm, times in costs.items()}
        if asked.equal == "samples":
            cost = dict.fromkeys(cost, max(cost.values()))
        seconds = 60 * asked.minutes / self._runs
        batches = {arm: int(seconds / each / self.batch) for arm, each in cost.items()}
        if min(batches.values()) < fewest:
            needed = asked.minutes * fewest * self.batch * max(cost.values()) / seconds
            raise UserError(
                f"--minutes {asked.minutes:g} leaves {min(batches.values())} batches of {self.batch} a run, and {fewest} are "
                f"needed{' for one of each source' if fewest > FEWEST_STEPS else ''}; give --minutes {math.ceil(needed)} or "
                "more, a smaller --effective-batch, fewer --rates or fewer --arms"
            )
        samples = {arm: count * self.batch for arm, count in batches.items()}
        plan = {"seconds_a_sample": costs, "samples": samples}
        write_atomically(file, json.dumps(plan, indent=1) + "\n")
        return samples

    @cached_property
    def by_source(self) -> bool:
        """Return whether a batch of some arm comes from one source."""
        return any(
            flags.get("sampling") in ("debiased", "sequential")
            for flags in (self._flags(arm, 0.0) for arm in self.arms)
        )

    @property
    def _runs(self) -> int:
        """Count the runs of the whole trial, as far as they are known before the pilots."""
        rates = self.request.rates
        return len(self.arms) * (len(rates) * (len(rates) > 1) + self.request.seeds)

    def _seconds_a_sample(self, arm: str) -> float:
        name, sources = f"measuring-{arm}", len(self.inputs.sizes)
        batches = [math.ceil(MEASURED_STEPS / sources)] * sources
        shutil.rmtree(self._folder(name), ignore_errors=True)
        self._train(name, arm, min(self.request.rates), PILOT_SEED, batches, saves=0)
        seconds = seconds_of(self._folder(name))
        shutil.rmtree(self._folder(name))
        return seconds / (sum(batches) * self.batch)

    # ---------------------------------------------------------------------------------------------
    # Runs
    # ---------------------------------------------------------------------------------------------

    def _best_rate(self, arm: str) -> float:
        """Find the learning rate with the best pilot, which one rate alone does not need.

        Raises:
            UserError: no pilot could be trained.
        """
        rates = self.request.rates
        if len(rates) == 1:
            return rates[0]
        failed: dict[float, str] = {}

        def score(rate: float) -> float:
            self.further += rate not in rates
            record = self.record(arm, rate, PILOT_SEED, pilot=True)
            if "failed" in record:
                failed[rate] = record["failed"]
                return -math.inf
            return next(iter(record["scores"].values()))

        best, at_end = best_rate(rates, score)
        if best in failed:
            raise UserError(f"no pilot of {arm} could be trained: {failed[best]}")
        self.notes += [
            f"{arm}: the pilot at {rate:g} failed: {why}." for rate, why in failed.items()
        ]
        if at_end:
            self.notes.append(
                f"{arm}: the best learning rate, {best:g}, is at an end of those tried; call again with --rates beyond it."
            )
        return best

    def start_record(self) -> dict[str, Any]:
        """Score the model before training on the test sets."""
        file = self.request.out / "records" / "start.json"
        if not file.is_file():
            record = self.inputs.scores(self.request.start, self.inputs.model, pilot=False)
            write_atomically(file, json.dumps(record, indent=1) + "\n")
        return json.loads(file.read_text(encoding="utf-8"))

    def record(self, arm: str, rate: float, seed: int, *, pilot: bool = False) -> dict[str, Any]:
        """Return the record of a run, which is trained and scored first if there is none.

        A pilot that cannot be trained or scored, as one that diverges, gets the sentence of its error in place of scores.
        """
        name = f"{'pilot' if pilot else 'run'}-{arm}-{rate:g}-{seed}"
        file, samples = self.request.out / "records" / f"{name}.json", self.samples[arm]
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        self._say_run(name)
        record: dict[str, Any] = {
            "arm": arm, "rate": rate, "seed": seed, "pilot": pilot, "samples": samples,
            "flags": as_arguments(self.flags_of[arm]),
        }  # fmt: skip
        sizes, batches = np.array([*self.inputs.sizes.values()]), samples // self.batch
        shares = apportion(sizes, batches) if self.by_source else sizes * (batches / sizes.sum())
        try:
            checkpoint = self._train(name, arm, rate, seed, shares.tolist())
            record["seconds"] = round(seconds_of(self._folder(name)), 1)
            record |= self.inputs.scores(self.request.start, checkpoint, pilot=pilot)
        except TrainingStopped:
            raise
        except UserError as error:
            if not pilot:
                raise UserError(f"{name}: {error}") from error
            record["failed"] = str(error)
        write_atomically(file, json.dumps(record, indent=1) + "\n")
        shutil.rmtree(self._folder(name), ignore_errors=True)
        self.done += 1
        return record

    def _say_run(self, name: str) -> None:
        """Say the number of a run among all, and the time that is left by the runs of this call."""
        made = len([*(self.request.out / "records").glob("*-*.json")])
        runs = self._runs + self.further
        each = (
            (time.monotonic() - self.begin) / self.done
            if self.done
            else 60 * self.request.minutes / runs
        )
        self.say(f"run {made + 1} of {runs}, about {duration(each * (runs - made))} left: {name}")

    def _folder(self, name: str) -> Path:
        return self.request.out / "runs" / name

    def _flags(self, arm: str, rate: float) -> Settings:
        """Choose the training flags of an arm, but for the length of its run."""
        on_gpu = self.request.start.device != "cpu" and bool(gpu_memories())
        return {
            "model": self.inputs.model,
            "train-data": self.inputs.train_data,
            "captions": PER_EPOCH,
            "batch-size": str(self.request.micro_batch),
            "lr": f"{rate:g}",
            "lr-min": f"{rate / 100:g}",
            "warmup-share": "0.1",
            "wd": "0.1",
            "beta2": "0.98",
            "eps": "1e-6",
            "grad-clip-norm": "1.0",
            "freeze-norm-statistics": "",
            "siglip": "" if self.sigmoid else None,  # as finetune
            "precision": "amp_bf16" if on_gpu else "fp32",
            "device": None if on_gpu else "cpu",
            "workers": str(self.request.start.workers),
            **self.request.given,
            **self.flags_of[arm],
        }

    def _train(
        self,
        name: str,
        arm: str,
        rate: float,
        seed: int,
        batches: Sequence[float],
        saves: int = SAVES,
    ) -> Path:
        """Train a run, or the rest of one that was stopped, and return its last checkpoint.

        Args:
            batches: effective batches of each source.
            saves: step checkpoints.

        Raises:
            UserError: the training failed, or was stopped.
        """
        folder = self._folder(name)
        checkpoint = folder / "checkpoints" / "epoch_1.pt"
        if checkpoint.is_file():
            return checkpoint
        sizes = self.inputs.sizes.values()
        # All digits, so that a batch lacks no sample.
        passes = [count * self.batch / size for count, size in zip(batches, sizes, strict=True)]
        steps = round(sum(batches)) * self.batch // self._batch(arm)
        place: Settings = {
            "train-data-upsampling-factors": "::".join(str(each) for each in passes),
            "epochs": "1",
            "save-frequency": "1",
            "save-every-steps": str(max(1, steps // saves)) if saves else None,
            "log-every-n-steps": str(max(1, steps // LOGGED)),
            "seed": str(seed),
            "logs": str(folder.parent),
            "name": name,
            "resume": "latest",
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = as_arguments({**self._flags(arm, rate), **place})
        child = start_training(arguments, self.ranks, log=folder.with_name(f"{name}.log"))
        try:
            child.check()
        except BaseException:
            child.stop()
            raise
        return checkpoint

    def _winners_command(self, arm: str, rate: float) -> str:
        """Write the command that trains an arm in full, with paths below the current folder relative."""
        test = self.inputs.test_data
        classes = isinstance(next(iter(self.inputs.test.values())), LabelledSet)
        flags = {
            **self._flags(arm, rate), "epochs": str(FULL_EPOCHS), "name": f"trial-{arm}", "retrieval-data": test,
            "zero-shot-data": self.request.zero_shot_data or (test if classes else None),
        }  # fmt: skip
        return shlex.join(["zerovl", "train", *as_arguments(flags)]).replace(f"{Path.cwd()}/", "")


def seconds_of(folder: Path) -> float:
    """Return the seconds of a run from the times of its logged steps, without the starts of its processes."""
    record = read_record(folder)
    lines = sorted([*record["start"], *record["step"]], key=lambda line: (line["at"], line["time"]))
    seconds = share = 0.0
    for line, following in itertools.pairwise(lines):
        if line["kind"] == following["kind"] == "step":
            seconds += following["time"] - line["time"]
            share += following["at"] - line["at"]
    return seconds / share if share else lines[-1]["time"] - lines[0]["time"]
