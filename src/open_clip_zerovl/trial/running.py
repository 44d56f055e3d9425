"""`zerovl trial`: does a larger batch, debiased sampling or the whole recipe help on these data?

Files of the output folder, in the order in which they are made:

    trial.json                  the arguments; a later call with the same ones continues, with more --seeds adds runs
    data/                       test and validation pictures, and lists of the samples to train on
    before/ or aligned/         the model from which every run starts, unless an exported folder was given
    plan.json                   seconds a sample of each arm, measured once, and the samples of its runs
    runs/NAME/, runs/NAME.log   a training's own folder, while it runs, and its output
    records/NAME.json           settings and scores of a finished run; start.json those of the model before training
    result.json, trial.html     the table and the verdict

Every arm gets one pilot run a learning rate, scored on the validation pictures, up to two more where the best rate is the first
or the last one, and one run a seed at its best rate, scored
on the test sets. All start from the same weights. With `--equal time` an arm whose samples cost more sees fewer of them.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import scipy  # noqa: F401  # of the verdict, which comes after all trainings

from open_clip_zerovl.align.alignment import run_align
from open_clip_zerovl.align.request import AlignRequest
from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.claim import CONTENT, claim, difference
from open_clip_zerovl.core.durations import duration
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, locked, write_atomically
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.core.launch import ranks_here, start_training, visible_gpus
from open_clip_zerovl.evaluate.retrieval.score import score_set
from open_clip_zerovl.evaluate.settings import RetrievalSettings
from open_clip_zerovl.evaluate.zero_shot.score import score_loaded
from open_clip_zerovl.finetune.data import (
    contents,
    find_data,
    named_as,
    named_sets,
    open_sources,
    sets_of,
)
from open_clip_zerovl.finetune.finetuning import starting_folder
from open_clip_zerovl.finetune.outcome import labelled_sets
from open_clip_zerovl.finetune.request import digest_of_encoder, digest_of_model
from open_clip_zerovl.finetune.split import hold_out
from open_clip_zerovl.models.local_dir import LOCAL_DIR
from open_clip_zerovl.recipe.arguments import Settings, as_arguments
from open_clip_zerovl.report.html import write_page
from open_clip_zerovl.report.record import read_record
from open_clip_zerovl.report.verdicts import HIGHER
from open_clip_zerovl.trial.flags import ARMS, TrialFlags
from open_clip_zerovl.trial.result import MEAN_RECALL, Row, TrialResult

DEFAULT_BATCH = 256
PILOT_SEED = 100
MEASURED_STEPS = 4  # of the effective batch, from which the seconds a sample are taken
FEWEST_STEPS = 8  # of the effective batch in a run
SAVES = 10  # step checkpoints of a run, from which a stopped one continues
FURTHER_RATES = 2  # pilots of an arm beyond --rates, while its best rate is the first or last one
FULL_EPOCHS = 20  # of the printed command
REQUEST, PLAN = "trial.json", "plan.json"
MODEL = f"{CONTENT}--from"  # in REQUEST
# Flags of data and first model, which are made before anything is trained.
INPUTS = ("--from", "--image", "--text", "--data", "--retrieval-data")
LATER = ("seeds", "rates", "margin")  # a later call may give other ones

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request(TrialFlags):
    """The arguments of `zerovl trial`.

    Attributes:
        start: the model to start from; its device also trains. Its model is "" with encoders.
        encoders: an image and a text encoder, which `align` makes a model of; None with a model.
        data: pairs, see `finetune.data`.
        out: folder to write.
        given: training flags of all arms.
    """

    start: Encoder
    data: str
    out: Path
    encoders: tuple[str, str] | None = None
    given: Settings = field(default_factory=dict)

    def named(self, earlier: Mapping[str, Any] | None = None) -> Request:
        """Give each source and set its name, as in an earlier call if there was one."""
        earlier = earlier or {}
        pairs = find_data(self.data)
        sets = {
            "--retrieval-data": named_sets(self.retrieval_data or pairs.held_out),
            "--zero-shot-data": named_sets(self.zero_shot_data),
        }
        test, labelled = (named_as(data, earlier.get(flag)) or None for flag, data in sets.items())
        data = named_as(pairs.train_data, earlier.get("--data"))
        return replace(self, data=data, retrieval_data=test, zero_shot_data=labelled)

    def identity(self) -> dict[str, Any]:
        """Name the arguments that a later call has to repeat, and digest their content."""
        flags = {
            each.option: getattr(self, each.name)
            for each in flags_of(TrialFlags)
            if each.name not in LATER
        }
        inputs: dict[str, Any] = {"--data": self.data}
        if self.encoders is None:
            inputs |= {"--from": self.start.model, MODEL: digest_of_model(self.start)}
        for flag, encoder in zip(("--image", "--text"), self.encoders or (), strict=False):
            inputs |= {flag: encoder, f"{CONTENT}{flag}": digest_of_encoder(encoder)}
        data = contents(
            sources={"--data": self.data},
            retrieval={"--retrieval-data": self.retrieval_data},
            labelled={"--zero-shot-data": self.zero_shot_data},
        )
        return {**inputs, **flags, **data, "training flags": self.given}


@dataclass(frozen=True)
class Inputs:
    """Starting model and data of all runs.

    Attributes:
        model: `local-dir:FOLDER`.
        train_data: for `--train-data`, without the test and validation pictures.
        test, validation: retrieval sets, as `parse_retrieval_data` reads them.
        sizes: source -> samples.
        notes: sentences for the page.
    """

    model: str
    train_data: str
    test: str
    validation: str
    sizes: Mapping[str, int]
    notes: tuple[str, ...]


def best_rate(rates: Sequence[float], score: Callable[[float], float]) -> tuple[float, bool]:
    """The learning rate with the highest score, and whether it is the lowest or highest of several that were tried.

    While it is, one more beyond it is tried, `FURTHER_RATES` times at most.
    """
    scores = {rate: score(rate) for rate in sorted(rates)}
    while True:
        tried = sorted(scores)
        best = max(tried, key=scores.__getitem__)
        at_end = len(tried) > 1 and best in (tried[0], tried[-1])
        if not at_end or len(tried) == len(rates) + FURTHER_RATES:
            return best, at_end
        neighbour = tried[1] if best == tried[0] else tried[-2]
        beyond = float(f"{best * best / neighbour:.2g}")
        scores[beyond] = score(beyond)


def run_trial(request: Request, say: Say) -> TrialResult:
    """Train and score all arms, or those runs that an earlier call has left; write the page and print the table.

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
        request = _claim(request)
        trial = Trial(request, _inputs(request, say), say)
        return trial.run()


def _claim(request: Request) -> Request:
    """Claim the folder.

    Returns:
        The request, in which sources and sets have the names of the first call.

    Raises:
        UserError: the folder holds another trial with a plan, or other files.
    """
    request = request.named()
    identity = request.identity()
    inputs = [*INPUTS, *(f"{CONTENT}{flag}" for flag in INPUTS)]

    def untrained(stored: dict[str, Any]) -> bool:
        if (request.out / PLAN).is_file():
            return False
        if difference(*({name: of.get(name) for name in inputs} for of in (stored, identity))):
            for made in ("data", "before", "aligned"):
                shutil.rmtree(request.out / made, ignore_errors=True)
        return True

    return request.named(claim(request.out / REQUEST, identity, restart=untrained))


def _inputs(request: Request, say: Say) -> Inputs:
    """Hold out the test and validation pictures, and make the starting model."""
    given = request.retrieval_data or ""
    tests = sets_of(given) if given else {}
    test = hold_out(
        request.data, given, request.out / "data" / "test", seed=0, model=request.start.model, sets=tests, say=say
    )  # fmt: skip
    validation = hold_out(
        test.train_data, "", request.out / "data" / "validation", seed=0, model=request.start.model, say=say
    )  # fmt: skip
    if request.encoders is None:
        model = starting_folder(request.start, request.out / "before", say)
    else:
        folder, (image, text) = request.out / "aligned", request.encoders
        aligned = AlignRequest(
            images=(image,), texts=(text,), train_data=validation.train_data, held_out=validation.new, out=folder,
            device=request.start.device,
        )  # fmt: skip
        run_align(aligned, say)
        model = LOCAL_DIR + str(folder / "model")
    sizes = {source.name: source.num_samples for source in open_sources(validation.train_data)}
    notes = (*test.notes, *validation.notes)
    return Inputs(model, validation.train_data, test.new, validation.new, sizes, notes)


class Trial:
    """A trial whose inputs are ready; see `run_trial`."""

    def __init__(self, request: Request, inputs: Inputs, say: Say) -> None:
        self.request, self.inputs, self.say = request, inputs, say
        self.ranks = ranks_here(request.gpus, "cpu" if request.start.device == "cpu" else "cuda")
        asked = request.arms
        self.flags_of: dict[str, Settings] = (
            {name: {**flags} for name, flags in asked.items()}
            if isinstance(asked, Mapping)
            else self._methods(asked)
        )
        self.arms = [*self.flags_of]
        self.notes: list[str] = []  # on the pilots

    def _methods(self, names: Sequence[str]) -> dict[str, Settings]:
        """Training flags of the arms of ARMS."""
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
        large: Settings = {"dga-steps": str(batch // micro), "dga-retain": "auto"}
        sampling: Settings = {"sampling": "debiased" if several else "random"}
        methods: dict[str, Settings] = {
            "plain": {"sampling": "random"},
            "dga": {"sampling": "random", **large},
            "debiased": {**sampling, **large},
            "recipe": {**sampling, **large, "coin-flip-mixup": ""},
        }
        return {arm: methods[arm] for arm in names or ARMS if several or arm != "debiased"}

    def _batch(self, arm: str) -> int:
        """Samples of an optimizer step."""
        return self.request.micro_batch * self.ranks * int(self.flags_of[arm].get("dga-steps") or 1)

    @property
    def effective(self) -> int:
        """The largest batch of an arm."""
        return max(map(self._batch, self.arms))

    def run(self) -> TrialResult:
        """Pilots, runs, table, page."""
        out = self.request.out
        for arm, samples in self.samples.items():
            self.say(f"{arm}: {samples:,} samples a run")
        rates = {arm: self._best_rate(arm) for arm in self.arms}
        records = [
            self.record(arm, rates[arm], seed)
            for seed in range(self.request.seeds)
            for arm in self.arms
        ]
        scores = list(records[0]["scores"])
        measures = [MEAN_RECALL, *(key for key in scores if key.endswith(("_rsum", "_top1")))]
        result = TrialResult(records, self.arms, measures, self.request.margin, self.start_record())
        notes = [*self.inputs.notes, *self.notes]
        command = shlex.join(self._winners_command(result.winner, rates[result.winner]))
        content = {
            "rates": rates, "winner": result.winner, "command": command, "notes": notes,
            "means": [dict(zip(result.header, row, strict=True)) for row in result.means()],
            "differences": [dict(zip(Row.HEADER, row, strict=True)) for row in result.differences],
            "verdicts": [row.sentence for row in (*result.deciding, result.gain)],
        }  # fmt: skip
        write_atomically(out / "result.json", json.dumps(content, indent=1) + "\n")
        advice = f"Train {result.winner} in full:"
        if result.gain.verdict != HIGHER:
            advice = (
                f"{self.samples[result.winner]:,} samples did not surely improve the model before training: try more "
                f"--minutes before you train {result.winner} in full:"
            )
        page = write_page(
            out / "trial.html", "trial.html", title="Does it help on these data?", result=result, notes=notes, advice=advice,
            command=command,
        )  # fmt: skip
        print(result.table(), *notes, f"{advice}\n{command}", f"Written: {page}", sep="\n\n")
        return result

    # ---------------------------------------------------------------------------------------------
    # Length
    # ---------------------------------------------------------------------------------------------

    @cached_property
    def samples(self) -> dict[str, int]:
        """Arm -> samples of a run; decided by the first call, so that later runs have the same length.

        Raises:
            UserError: --minutes are too few.
        """
        file, asked = self.request.out / PLAN, self.request
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))["samples"]
        costs = {arm: self._seconds_a_sample(arm) for arm in self.arms}
        runs = len(self.arms) * (len(asked.rates) + asked.seeds)
        seconds = 60 * asked.minutes / runs
        self.say(f"{runs} runs of {duration(seconds)} each")
        dearest = max(costs.values())
        samples = {
            arm: int(seconds / (dearest if asked.equal == "samples" else cost))
            for arm, cost in costs.items()
        }
        fewest, needed = min(samples.values()), FEWEST_STEPS * self.effective
        if fewest < needed:
            raise UserError(
                f"--minutes {asked.minutes:g} leaves {fewest:,} samples a run, fewer than {FEWEST_STEPS} batches of "
                f"{self.effective}; give --minutes {math.ceil(asked.minutes * needed / fewest)} or more, a smaller "
                "--effective-batch, or fewer arms"
            )
        plan = {"seconds_a_sample": costs, "samples": samples}
        write_atomically(file, json.dumps(plan, indent=1) + "\n")
        return samples

    def _seconds_a_sample(self, arm: str) -> float:
        name, samples = f"measuring-{arm}", MEASURED_STEPS * self.effective
        self.say(f"measuring {arm} on {samples:,} samples")
        shutil.rmtree(self._folder(name), ignore_errors=True)
        every_step: Settings = {"log-every-n-steps": "1"}
        self._train(name, arm, min(self.request.rates), PILOT_SEED, samples, every_step)
        steps = read_record(self._folder(name))["step"]
        shutil.rmtree(self._folder(name))
        # The first step is slower: it checks its gradient and fills caches.
        return 1 / statistics.median(step["samples_per_second"] for step in steps[1:])

    # ---------------------------------------------------------------------------------------------
    # Runs
    # ---------------------------------------------------------------------------------------------

    def _best_rate(self, arm: str) -> float:
        """The learning rate with the best pilot."""

        def score(rate: float) -> float:
            return self.record(arm, rate, PILOT_SEED, pilot=True)["scores"][MEAN_RECALL]

        best, at_end = best_rate(self.request.rates, score)
        if at_end:
            self.notes.append(
                f"{arm}: the best learning rate, {best:g}, is at an end of those tried; call again with --rates beyond it."
            )
        return best

    def start_record(self) -> dict[str, Any]:
        """The scores of the model before training on the test sets."""
        file = self.request.out / "records" / "start.json"
        if not file.is_file():
            record = self._scores(self.inputs.model, pilot=False)
            write_atomically(file, json.dumps(record, indent=1) + "\n")
        return json.loads(file.read_text(encoding="utf-8"))

    def record(self, arm: str, rate: float, seed: int, *, pilot: bool = False) -> dict[str, Any]:
        """The record of a run, which is trained and scored first if there is none."""
        name = f"{'pilot' if pilot else 'run'}-{arm}-{rate:g}-{seed}"
        file = self.request.out / "records" / f"{name}.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        begin = time.monotonic()
        checkpoint = self._train(name, arm, rate, seed, self.samples[arm])
        record: dict[str, Any] = {
            "arm": arm, "rate": rate, "seed": seed, "pilot": pilot, "samples": self.samples[arm],
            "seconds": round(time.monotonic() - begin, 1), "flags": as_arguments(self.flags_of[arm]),
            **self._scores(checkpoint, pilot),
        }  # fmt: skip
        write_atomically(file, json.dumps(record, indent=1) + "\n")
        shutil.rmtree(self._folder(name), ignore_errors=True)
        self.say(f"{name}: mean recall {record['scores'][MEAN_RECALL]:.2f}")
        return record

    def _folder(self, name: str) -> Path:
        return self.request.out / "runs" / name

    def _flags(self, arm: str, rate: float) -> Settings:
        """Training flags of an arm, but for the length of its run."""
        on_gpu = self.request.start.device != "cpu" and visible_gpus() > 0
        return {
            "model": self.inputs.model,
            "train-data": self.inputs.train_data,
            "batch-size": str(self.request.micro_batch),
            "lr": f"{rate:g}",
            "lr-min": f"{rate / 100:g}",
            "warmup-share": "0.1",
            "wd": "0.1",
            "beta2": "0.98",
            "eps": "1e-6",
            "grad-clip-norm": "1.0",
            "freeze-norm-statistics": "",
            "precision": "amp_bf16" if on_gpu else "fp32",
            "device": None if on_gpu else "cpu",
            "workers": str(self.request.start.workers),
            **self.flags_of[arm],
            **self.request.given,
        }

    def _train(
        self,
        name: str,
        arm: str,
        rate: float,
        seed: int,
        samples: int,
        more: Settings | None = None,
    ) -> Path:
        """The last checkpoint of a run; a run that was stopped goes on.

        Raises:
            UserError: the training failed, or was stopped.
        """
        folder = self._folder(name)
        checkpoint = folder / "checkpoints" / "epoch_1.pt"
        if checkpoint.is_file():
            return checkpoint
        passes = samples / sum(self.inputs.sizes.values())
        place: Settings = {
            "train-data-upsampling-factors": "::".join(
                f"{source}={passes:.6g}" for source in self.inputs.sizes
            ),
            "epochs": "1",
            "save-frequency": "1",
            "save-every-steps": str(max(1, samples // self._batch(arm) // SAVES)),
            "seed": str(seed),
            "logs": str(folder.parent),
            "name": name,
            "resume": "latest",
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = as_arguments({**self._flags(arm, rate), **place, **(more or {})})
        child = start_training(arguments, self.ranks, log=folder.with_name(f"{name}.log"))
        try:
            child.check()
        except BaseException:
            child.stop()
            raise
        return checkpoint

    def _scores(self, model: str | Path, pilot: bool) -> dict[str, dict[str, float]]:
        """Recalls in percent and RSUM of each set, their mean, zero-shot top-1 of labelled sets; chance beside them.

        "chance_upper" holds the mean recall that random orders reach.
        """
        encoder = replace(self.request.start, model=str(model), model_name=None, text_model=None)
        loaded: Any = encoder.load()
        scores: dict[str, float] = {}
        sums, chance = [], []
        for name, dataset in sets_of(self.inputs.validation if pilot else self.inputs.test).items():
            scored = score_set(loaded, name, dataset, RetrievalSettings(), encoder=encoder)
            assert scored is not None
            metrics = scored.metrics
            sums.append(metrics["rsum"] / 6)
            chance.append(metrics["rsum_chance_upper"] / 6)
            scores |= {
                f"{name}_I2T_R@1": 100 * metrics["image_to_text_R@1"],
                f"{name}_T2I_R@1": 100 * metrics["text_to_image_R@1"],
                f"{name}_rsum": metrics["rsum"],
                f"{name}_chance": metrics["rsum_chance"],
            }
        labelled = (
            {}
            if pilot or not self.request.zero_shot_data
            else labelled_sets("", self.request.zero_shot_data)
        )
        for name, labelled_set in labelled.items():
            accuracy = score_loaded(loaded, labelled_set, encoder=encoder, name=name)
            scores[f"{name}_top1"] = 100 * accuracy["top1"]
            scores[f"{name}_top1_chance"] = 100 * accuracy["chance"]
        return {
            "scores": {MEAN_RECALL: statistics.fmean(sums), **scores},
            "chance_upper": {MEAN_RECALL: statistics.fmean(chance)},
        }

    def _winners_command(self, arm: str, rate: float) -> list[str]:
        flags = {**self._flags(arm, rate), "epochs": str(FULL_EPOCHS), "name": f"trial-{arm}"}
        return ["zerovl", "train", *as_arguments(flags)]
