"""`zerovl compare`: models are encoded on the same pairs, compared, and the result is printed and written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.evaluate.bias.compare import Comparison, RunMeasures, check_sides, compare_runs, measure_run
from open_clip_zerovl.evaluate.bias.compare_page import compare_page
from open_clip_zerovl.evaluate.bias.compare_report import (
    comparison_table,
    how_intervals_are_made,
    verdicts,
    warnings_of,
)
from open_clip_zerovl.evaluate.bias.examples import RetrievalExample, middle_of_each, retrieval_examples
from open_clip_zerovl.evaluate.bias.measures import check_source_probe, probe_groups
from open_clip_zerovl.evaluate.bias.pools import SourceFeatures
from open_clip_zerovl.evaluate.bias.run import embed_samples, name_models
from open_clip_zerovl.evaluate.bias.samples import SourceSample, read_source_samples
from open_clip_zerovl.evaluate.settings import CompareSettings as CompareSettings
from open_clip_zerovl.report.plot import require_matplotlib

log = logging.getLogger(__name__)


def name_sides(models: Sequence[str]) -> dict[str, list[str]]:
    """Sides and their runs, from `A=run1,run2` or a single model that `bias.run.name_models` names.

    Raises:
        UserError: fewer than two sides, sides of different numbers of runs, a side without a name or with one that is taken.
    """
    sides: dict[str, list[str]] = {}
    for entry in models:
        ((name, paths),) = name_models([entry]).items()
        runs = [paths] if os.path.exists(paths) else paths.split(",")
        if name in sides or not all(runs) or (len(runs) > 1 and not entry.startswith(f"{name}=")):
            raise UserError(
                f"{entry!r} needs a name of its own and its runs; write NAME=MODEL, or NAME=RUN1,RUN2 for several seeds"
            )
        sides[name] = runs
    check_sides({name: len(runs) for name, runs in sides.items()})
    return sides


def run_compare(
    sides: Mapping[str, Sequence[Encoder]],
    data: str,
    settings: CompareSettings | None = None,
    *,
    unseen: str | None = None,
    out: str | os.PathLike[str],
) -> Comparison:
    """Compare models on named sources; prints tables and sentences, writes `compare.json` and `compare.html` into `out`.

    Args:
        sides: name -> its runs, in the order of their seeds.
        data: `name=shards::name=shards`, as `--train-data`, and retrieval sets in CLIP_benchmark's layout: two sources or more.
        unseen: sources that were in no training, likewise.

    Raises:
        UserError: data or a model that cannot be read or do not fit, an `out` that cannot be written, a missing package.
    """
    require_matplotlib()
    settings, out = settings or CompareSettings(), Path(out)
    check_sides({name: len(runs) for name, runs in sides.items()})
    check_writable(out, folder=True)
    for encoder in chain.from_iterable(sides.values()):
        encoder.check()
    samples, skipped = _samples(data, unseen, settings)
    seen, rest = samples
    _check_held_out(seen)
    measured: dict[str, list[RunMeasures]] = {}
    shown: dict[str, Sequence[Tensor]] = {}
    for name, runs in sides.items():
        measured[name] = []
        for number, encoder in enumerate(runs):
            features, logit_scale = _encode(encoder, [*seen, *rest], f"{name} {number + 1}/{len(runs)}")
            own = _by_source(seen, tuple(one[: len(seen)] for one in features))
            others = _by_source(rest, tuple(one[len(seen) :] for one in features))
            measured[name].append(measure_run(own, logit_scale, others, seed=settings.seed))
            if number == 0:
                shown[name] = tuple(one[: len(seen)] for one in features)
    found = compare_runs(measured, draws=settings.draws, seed=settings.seed)
    notes = warnings_of(found, concepts=settings.concept_field is not None)
    report = {
        "sides": {name: [encoder.model for encoder in runs] for name, runs in sides.items()},
        "data": data,
        "unseen": unseen,
        "settings": asdict(settings),
        "samples_passed_over": skipped,
        **found.to_json(),
        "notes": notes,
    }
    write_atomically(out / "compare.json", json.dumps(report, indent=1) + "\n")
    lead = f"{', '.join(found.names)} on {len(seen):,} pairs of {', '.join(dict.fromkeys(one.source for one in seen))}."
    page = compare_page(out / "compare.html", found, _examples(seen, shown), lead=lead, notes=notes)
    print(comparison_table(found))
    print(
        "\n".join(
            [
                "",
                how_intervals_are_made(found),
                *notes,
                "",
                *verdicts(found),
                "",
                f"Written: {page}, {out / 'compare.json'}",
            ]
        )
    )
    return found


def _samples(
    data: str, unseen: str | None, settings: CompareSettings
) -> tuple[tuple[list[SourceSample], list[SourceSample]], dict[str, int]]:
    """The samples of the sources and of the unseen ones, and how many of each were passed over."""
    sources = parse_sources(data, evaluation=True)
    others = parse_sources(unseen, evaluation=True) if unseen else ()
    if len(sources) < 2:
        raise UserError(
            f"--data {data!r} names one source; name those that the models were trained on: a=SHARDS::b=SHARDS"
        )
    if both := {source.name for source in sources} & {source.name for source in others}:
        raise UserError(
            f"{sorted(both)[0]!r} is a source of --data and of --unseen; an unseen source was in no training"
        )
    found, skipped = [], {}
    for group in (sources, others):
        own, passed = read_source_samples(
            group,
            settings.samples_per_source,
            concept_field=settings.concept_field,
            held_out_field=settings.held_out_field if group is sources else None,
        )
        found.append(own)
        skipped.update(passed)
    for name, count in skipped.items():
        if count:
            log.warning("Source %s: %d samples without a readable picture and a caption were passed over.", name, count)
    return (found[0], found[1]), skipped


def _check_held_out(samples: Sequence[SourceSample]) -> None:
    """UserError where the held-out pairs are too few to measure; nothing has been encoded yet."""
    held_out = [sample for sample in samples if sample.held_out]
    if lacking := sorted({sample.source for sample in samples} - {sample.source for sample in held_out}):
        raise UserError(f"source {lacking[0]} has no held-out pair; give another --held-out, or leave it out")
    check_source_probe([sample.source for sample in held_out], probe_groups([sample.concept for sample in held_out]))


def _encode(encoder: Encoder, samples: Sequence[SourceSample], name: str) -> tuple[tuple[Tensor, Tensor], float]:
    """(image_features, text_features) (N, D) of the samples and the factor `logit_scale.exp()`."""
    model, preprocess, tokenizer, device = encoder.load()
    features = embed_samples(
        model, preprocess, tokenizer, samples, batch_size=encoder.batch_size, device=device, name=name
    )
    scale = model.logit_scale
    assert isinstance(scale, Tensor)
    return features, scale.exp().item()


def _by_source(samples: Sequence[SourceSample], features: Sequence[Tensor]) -> dict[str, SourceFeatures]:
    """Source -> its pairs, from features (N, D) of samples that stand source by source."""
    rows: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault(sample.source, []).append(row)
    return {
        name: SourceFeatures(
            features[0][own],
            features[1][own],
            [samples[row].concept for row in own],
            [samples[row].held_out for row in own],
        )
        for name, own in rows.items()
    }


def _examples(samples: Sequence[SourceSample], features: Mapping[str, Sequence[Tensor]]) -> list[RetrievalExample]:
    """Retrieval examples among the held-out pairs, by the first run of each side."""
    rows = [row for row, sample in enumerate(samples) if sample.held_out]
    sources = [samples[row].source for row in rows]
    queries = middle_of_each(sources)
    chosen = torch.tensor(rows)
    found = {name: (images[chosen], texts[chosen]) for name, (images, texts) in features.items()}
    return retrieval_examples(
        _Pictures([samples[row] for row in rows]), [samples[row].caption for row in rows], sources, found, queries
    )


class _Pictures(Sequence[np.ndarray]):
    """The pictures of samples, decoded when they are shown."""

    def __init__(self, samples: Sequence[SourceSample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index):
        return np.asarray(self.samples[index].picture())
