"""`zerovl compare`: models on the same samples; the result is printed, and written as JSON and as a page."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.held_out import identity_of, seen_sentence, trained_on
from open_clip_zerovl.data.retrieval import parse_retrieval_data
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.embeddings.encoder import FrozenModel
from open_clip_zerovl.evaluate.accuracy import in_top
from open_clip_zerovl.evaluate.compare.charts import comparison_picture, map_picture
from open_clip_zerovl.evaluate.compare.comparison import (
    Comparison,
    RunMeasures,
    compare_runs,
    measure_run,
)
from open_clip_zerovl.evaluate.compare.pools import SourceFeatures
from open_clip_zerovl.evaluate.compare.samples import (
    ComparedPair,
    check_probe,
    encode,
    read_samples,
    rows_by_source,
)
from open_clip_zerovl.evaluate.retrieval.examples import (
    RetrievalExample,
    middle_of_each,
    retrieval_examples,
)
from open_clip_zerovl.evaluate.retrieval.metrics import recall_bounds
from open_clip_zerovl.evaluate.settings import CompareSettings
from open_clip_zerovl.evaluate.zero_shot.score import labelled_scores
from open_clip_zerovl.evaluate.zero_shot.sets import LabelledSet, open_labelled_set
from open_clip_zerovl.report.bounds import ceiling_remarks
from open_clip_zerovl.report.html import write_page


def run_compare(
    sides: Mapping[str, Sequence[Encoder]],
    data: str,
    settings: CompareSettings | None = None,
    *,
    unseen: str | None = None,
    zero_shot_data: str | None = None,
    out: str | os.PathLike[str],
) -> Comparison:
    """Measure one model, or compare several, on named sources; writes `compare.json` and `compare.html` into `out`.

    Args:
        sides: name -> its runs, in the order of their seeds.
        data: `name=shards::name=shards`, as `--train-data`, and retrieval sets in CLIP_benchmark's layout: two sources or more.
        unseen: sources that were in no training, in the same form.
        zero_shot_data: labelled sets whose zero-shot accuracy is compared, too: `name=set::name=set`.

    Raises:
        UserError: data or a model that cannot be read or do not fit, an `out` that cannot be written.
    """
    settings, out = settings or CompareSettings(), Path(out)
    check_sides({name: len(runs) for name, runs in sides.items()})
    check_writable(out, folder=True)
    for encoder in itertools.chain(*sides.values()):
        encoder.check()
    seen, rest, skipped = _samples(data, unseen, settings)
    places = parse_retrieval_data(zero_shot_data) if zero_shot_data is not None else {}
    sets = {name: open_labelled_set(str(place)) for name, place in places.items()}
    measured: dict[str, list[RunMeasures]] = {name: [] for name in sides}
    shown: dict[str, tuple[Tensor, Tensor]] = {}
    every = [
        (name, number, encoder)
        for name, runs in sides.items()
        for number, encoder in enumerate(runs, 1)
    ]
    for name, number, encoder in tqdm(every, desc="models", unit="model", leave=False):
        images, texts, scale = encode(
            encoder, [*seen, *rest], f"{name} {number}/{len(sides[name])}", out / "features"
        )
        seen_features = _by_source(seen, images[: len(seen)], texts[: len(seen)])
        rest_features = _by_source(rest, images[len(seen) :], texts[len(seen) :])
        labelled = _right_guesses(encoder, sets, out / "features")
        measured[name].append(
            measure_run(seen_features, scale, rest_features, labelled, seed=settings.seed)
        )
        shown.setdefault(name, (images[: len(seen)], texts[: len(seen)]))  # of the first run
    comparison = compare_runs(measured, draws=settings.draws, seed=settings.seed)
    notes = [
        *_trained_on(seen, every),
        *comparison.warnings(concepts=settings.concept_field is not None),
        *_few_captions(seen),
    ]
    report = {
        "sides": {name: [encoder.model for encoder in runs] for name, runs in sides.items()},
        "data": data,
        "unseen": unseen,
        "zero_shot_data": zero_shot_data,
        "settings": asdict(settings),
        "samples_passed_over": skipped,
        **comparison.to_json(),
        "notes": notes,
    }
    write_atomically(out / "compare.json", json.dumps(report, indent=1) + "\n")
    sides_named = ", ".join(comparison.names)
    page = write_page(
        out / "compare.html",
        "compare.html",
        title="Which model is better on these sources?"
        if len(sides) > 1
        else f"{sides_named} on its sources",
        lead=f"{sides_named} on {len(seen):,} pairs of {', '.join(rows_by_source(seen))}.",
        comparison=comparison,
        warnings=notes,
        picture=comparison_picture(comparison),
        map=map_picture(shown, [sample.source for sample in seen]),
        examples=_examples(seen, shown),
    )
    parts = [comparison.table(), "", comparison.how_intervals_are_made(), *notes, ""]
    verdicts = comparison.verdicts()
    if verdicts:
        parts += [*verdicts, ""]
    print(*parts, f"Written: {page}, {out / 'compare.json'}", sep="\n")
    return comparison


def _right_guesses(
    encoder: Encoder, sets: Mapping[str, LabelledSet], folder: Path
) -> dict[str, tuple[Tensor, int]]:
    """Labelled set -> (N,) whether the model guesses each picture's class (ties by expectation), and the number of classes."""
    if not sets:
        return {}
    model, guesses = FrozenModel.load(encoder), {}
    for name, dataset in sets.items():
        scores, targets = labelled_scores(
            model,
            dataset,
            folder,
            batch_size=encoder.batch_size,
            workers=encoder.workers,
            name=name,
        )
        guesses[name] = in_top(1, scores, targets), scores.shape[1]
    return guesses


def check_sides(runs: dict[str, int]) -> None:
    """UserError for sides of different numbers of runs. `runs`: side -> its runs."""
    if len(set(runs.values())) != 1:
        counts = ", ".join(f"{name} has {count}" for name, count in runs.items())
        raise UserError(
            f"runs are paired by their seeds, and {counts}; give each side the same number, in the same order of seeds"
        )


def _samples(
    data: str, unseen: str | None, settings: CompareSettings
) -> tuple[list[ComparedPair], list[ComparedPair], dict[str, int]]:
    """The samples of the sources and of the unseen ones, and how many of each were passed over."""
    sources = parse_sources(data, evaluation=True, split="test")
    others = parse_sources(unseen, evaluation=True, split="test") if unseen else ()
    if len(sources) < 2:
        raise UserError(
            f"--data {data!r} names one source; name those that the models were trained on: a=SHARDS::b=SHARDS"
        )
    both = {source.name for source in sources} & {source.name for source in others}
    if both:
        raise UserError(
            f"{min(both)!r} is a source of --data and of --unseen; an unseen source was in no training"
        )
    limit, concepts = settings.samples_per_source, settings.concept_field
    seen, skipped = read_samples(
        sources, limit, concept_field=concepts, held_out_field=settings.held_out_field
    )
    rest, more_skipped = read_samples(others, limit, concept_field=concepts)
    held_out = [sample for sample in seen if sample.held_out]
    lacking = {sample.source for sample in seen} - {sample.source for sample in held_out}
    if lacking:
        raise UserError(
            f"source {min(lacking)} has no held-out pair; give another --held-out, or leave it out"
        )
    check_probe(held_out)
    return seen, rest, {**skipped, **more_skipped}


def _trained_on(
    samples: Sequence[ComparedPair], runs: Sequence[tuple[str, int, Encoder]]
) -> list[str]:
    """A sentence on each model that names held-out pictures among those that it was trained on."""
    lists = {str(run.model): trained_on([run.model]) for _, _, run in runs}
    if all(trained is None for trained in lists.values()):
        return []
    held_out = [sample for sample in samples if sample.held_out]
    identities = np.array([identity_of(sample.picture()) for sample in held_out])
    sentences = (seen_sentence(identities, trained, model) for model, trained in lists.items())
    return [f"{sentence}." for sentence in sentences if sentence is not None]


def _few_captions(samples: Sequence[ComparedPair]) -> list[str]:
    """A sentence on the sources whose held-out pairs share few captions."""
    held_out = [sample for sample in samples if sample.held_out]
    best = {
        name: recall_bounds([held_out[row].caption for row in rows], range(len(rows)))["rsum_best"]
        for name, rows in rows_by_source(held_out).items()
    }
    return ceiling_remarks(best)


def _by_source(
    samples: Sequence[ComparedPair], images: Tensor, texts: Tensor
) -> dict[str, SourceFeatures]:
    """Source -> its pairs, from features (N, D) of samples."""
    return {
        name: SourceFeatures(
            images[rows],
            texts[rows],
            [samples[row].concept for row in rows],
            [samples[row].held_out for row in rows],
        )
        for name, rows in rows_by_source(samples).items()
    }


def _examples(
    samples: Sequence[ComparedPair], features: Mapping[str, tuple[Tensor, Tensor]]
) -> list[RetrievalExample]:
    """Retrieval examples among the held-out pairs, by the first run of each side."""
    rows = [row for row, sample in enumerate(samples) if sample.held_out]
    held_out = [samples[row] for row in rows]
    sources = [sample.source for sample in held_out]
    return retrieval_examples(
        lambda row: held_out[row].picture(),
        [sample.caption for sample in held_out],
        sources,
        {name: (images[rows], texts[rows]) for name, (images, texts) in features.items()},
        middle_of_each(sources),
    )
