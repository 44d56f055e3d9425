"""The inputs of a trial: its request, the test and validation pictures that it holds out, its first model, a model's scores.

Sets of classes are scored by zero-shot top-1, all others by mean recall (RSUM / 6), both in percent.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.align.alignment import run_align
from open_clip_zerovl.align.request import AlignRequest
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import Say
from open_clip_zerovl.core.files import CONTENT
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.data.names import PER_EPOCH
from open_clip_zerovl.data.sets import IndexedSet
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.data.splits import FEWEST_HELD_OUT, trained_on
from open_clip_zerovl.evaluate.metrics import is_above_chance
from open_clip_zerovl.evaluate.retrieval import score_set
from open_clip_zerovl.evaluate.settings import RetrievalSettings
from open_clip_zerovl.evaluate.zero_shot import LabelledSet, score_loaded
from open_clip_zerovl.finetune.data import (
    DATA_FLAG,
    DataArguments,
    all_classes,
    digest_of_encoder,
    digest_of_model,
    labelled_sets,
    sets_of,
)
from open_clip_zerovl.finetune.finetuning import starting_folder
from open_clip_zerovl.finetune.split import hold_out, set_identities
from open_clip_zerovl.recipe.flags import Settings
from open_clip_zerovl.report.verdicts import not_above_chance
from open_clip_zerovl.trial.flags import TrialFlags

TEST_SEED, VALIDATION_SEED = 0, 1  # of the choice of pictures
REQUEST, PLAN = "trial.json", "plan.json"
MEAN_RECALL, TOP1 = "mean recall", "top-1"
# Of a model on its sets: scores in percent, those of chance, whether they are above it, that of the commonest class.
ENTRIES = ("scores", "chance", "above_chance", "commonest")
MODEL = f"{CONTENT}--from"  # in REQUEST
# Flags of data and first model, which are made before anything is trained.
INPUTS = ("--from", "--image", "--text", "--data", "--retrieval-data", "--zero-shot-data")
LATER = ("seeds", "rates", "margin")  # a later call may give other ones

ScoredSet = IndexedSet | LabelledSet


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

    def identity(self, arguments: DataArguments) -> dict[str, Any]:
        """Name the arguments that a later call has to repeat, and digest their content."""
        flags = {
            each.option: getattr(self, each.name)
            for each in flags_of(TrialFlags)
            if each.name not in LATER
        }
        inputs: dict[str, Any] = {}
        if self.encoders is None:
            inputs |= {"--from": self.start.model, MODEL: digest_of_model(self.start)}
        for flag, encoder in zip(("--image", "--text"), self.encoders or (), strict=False):
            inputs |= {flag: encoder, f"{CONTENT}{flag}": digest_of_encoder(encoder)}
        return {
            **inputs,
            **flags,
            **arguments.entries(),
            "training flags": self.given,
        }


@dataclass(frozen=True)
class Inputs:
    """Starting model and data of all runs.

    Attributes:
        model: `local-dir:FOLDER`.
        train_data: for `--train-data`, without the test and validation pictures.
        test_data: the test sets, for `--retrieval-data`.
        test, validation: the sets whose mean score decides.
        more: sets of `--zero-shot-data`.
        sizes: source -> samples.
        notes: sentences for the page.
    """

    model: str
    train_data: str
    test_data: str
    test: Mapping[str, ScoredSet]
    validation: Mapping[str, ScoredSet]
    more: Mapping[str, LabelledSet]
    sizes: Mapping[str, int]
    notes: tuple[str, ...]

    def scores(
        self, start: Encoder, model: str | Path, *, pilot: bool
    ) -> dict[str, dict[str, Any]]:
        """Score a model on the validation sets, or on the test sets and those of --zero-shot-data.

        Args:
            start: how the model is loaded.

        Returns:
            ENTRIES, each by measure; the first measure is the mean over the sets that decide.
        """
        encoder = replace(start, model=str(model), model_name=None, text_model=None)
        loaded: Any = encoder.load()
        sets = self.validation if pilot else self.test
        of_sets = {name: _score(loaded, scored, encoder, name) for name, scored in sets.items()}
        by_class = all(isinstance(scored, LabelledSet) for scored in sets.values())
        word = TOP1 if by_class else MEAN_RECALL
        several = list(of_sets.values())
        mean = {
            entry: (any if entry == "above_chance" else statistics.fmean)(
                [score[entry] for score in several]
            )
            for entry in several[0]
        }
        measures = {word: mean}
        if len(of_sets) > 1:
            measures |= {f"{name}: {word}": score for name, score in of_sets.items()}
        for name, labelled in {} if pilot else self.more.items():
            measures[f"{name}: {TOP1}"] = _score(loaded, labelled, encoder, name)
        return {
            entry: {measure: score[entry] for measure, score in measures.items() if entry in score}
            for entry in ENTRIES
        }


def claim_folder(request: Request, say: Say) -> DataArguments:
    """Claim the folder.

    Returns:
        All data arguments, in which sources and sets have the names of the first call.

    Raises:
        UserError: the folder holds another trial with a plan, or other files.
    """
    arguments = DataArguments.of(request, say)
    identity = request.identity(arguments)
    inputs = [*INPUTS, *(f"{CONTENT}{flag}" for flag in INPUTS)]
    made = [request.out / name for name in ("data", "before", "aligned")]
    plan = request.out / PLAN
    return arguments.claim(request.out / REQUEST, identity, begun=plan, made=made, inputs=inputs)


def prepare(request: Request, arguments: DataArguments, say: Say) -> Inputs:
    """Hold out the test and validation pictures, and make the starting model."""
    folder, model = request.out / "data", request.start.model
    more = labelled_sets("", arguments.labelled) if arguments.labelled else {}
    test = hold_out(arguments, folder / "test", seed=TEST_SEED, model=model, role="test", say=say)
    tests, train_data, notes = _open_sets(test.new), test.train_data, list(test.notes)
    seen = None if request.encoders else trained_on([model])
    if _unseen(test.trained, seen) < FEWEST_HELD_OUT <= _unseen(test.held_out, seen) // 2:
        halves = {name: _halves(scored, folder) for name, scored in tests.items()}
        tests, validations = (
            {name: half[side] for name, half in halves.items()} for side in (0, 1)
        )
        held_out = test.new
        notes.append(
            f"Half of the test pictures validate: {model} was trained on nearly all others."
        )
    else:
        validation = hold_out(
            DataArguments({DATA_FLAG: train_data}),
            folder / "validation",
            seed=VALIDATION_SEED,
            model=model,
            role="validation",
            say=say,
        )
        train_data, held_out = validation.train_data, validation.new
        validations = _open_sets(held_out)
        notes += validation.notes
    start = request.start
    if request.encoders is not None:
        (image, text), aligned = request.encoders, request.out / "aligned"
        run_align(
            AlignRequest(
                images=(image,), texts=(text,), train_data=train_data, held_out=held_out, out=aligned,
                device=request.start.device,
            ),
            say,
        )  # fmt: skip
        start = replace(start, model=str(aligned / "model"))
    model = starting_folder(start, request.out / "before", say)
    sources = parse_sources(train_data, captions=request.given.get("captions", PER_EPOCH))
    sizes = {source.name: source.num_samples for source in sources}
    return Inputs(model, train_data, test.new, tests, validations, more, sizes, tuple(notes))


def _open_sets(data: str) -> dict[str, ScoredSet]:
    """Open held-out sets as labelled ones if all have classes, else as retrieval sets."""
    return {**(labelled_sets(data) if all_classes(data) else sets_of(data))}


def _unseen(pictures: np.ndarray | None, seen: np.ndarray | None) -> int:
    """Count the pictures that a model was not trained on."""
    known = np.empty(0, np.int64) if seen is None else seen
    return 0 if pictures is None else len(np.setdiff1d(pictures, known))


def _halves(scored: ScoredSet, folder: Path) -> tuple[ScoredSet, ScoredSet]:
    """Split a set at the median of its pictures' identities, which are hashes, so that both halves hold whole pictures."""
    images = scored.images if isinstance(scored, LabelledSet) else scored
    identities = set_identities(images, folder)
    upper = identities > np.median(identities)

    def half(rows: np.ndarray) -> ScoredSet:
        part = replace(images, samples=[images.samples[row] for row in np.flatnonzero(rows)])
        return replace(scored, images=part) if isinstance(scored, LabelledSet) else part

    return half(upper), half(~upper)


def _score(loaded: Any, scored_set: ScoredSet, encoder: Encoder, name: str) -> dict[str, Any]:
    """Score a model on a set, by top-1 of classes, else by mean recall.

    Returns:
        ENTRIES, the last one of classes alone.
    """
    if isinstance(scored_set, LabelledSet):
        accuracy = score_loaded(loaded, scored_set, encoder=encoder, name=name)
        top1, chance, commonest = (100 * accuracy[key] for key in ("top1", "chance", "commonest"))
        return dict(zip(ENTRIES, (top1, chance, is_above_chance(accuracy), commonest), strict=True))
    scored = score_set(loaded, name, scored_set, RetrievalSettings(), encoder=encoder)
    assert scored is not None
    metrics = scored.metrics
    above = not not_above_chance(metrics)
    values = (metrics["rsum"] / 6, metrics["rsum_chance"] / 6, above)
    return dict(zip(ENTRIES, values, strict=False))
