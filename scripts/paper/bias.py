"""Source bias (section 3.1): models on the same held-out pairs of two sources or more.

    python -m scripts.paper.bias random=A.pt debiased=B.pt --data "a=SHARDS::b=SHARDS" [--unseen "c=SHARDS"] [--out DIR]

    RSUM within      retrieval within one source; mean over sources
    RSUM across      between pictures of one source and captions of another, matched by concept (--concept)
    RSUM mixed       in one pool of all sources, where recognising the source helps
    RSUM unseen      in sources of no training
    probe            accuracy of a cross-validated linear classifier of the source on one embedding (figure 3)
    log p            mean log-probability of negatives (figure 4); lower values contribute less to training

Differences are to the first model. `--out` also writes bias.json.

`N` held-out pairs of all sources, `D` embedding width.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Annotated as A
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from open_clip_zerovl.api import name_models
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.evaluate.metrics import Measure, interval, mean_over, resampled
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.report.tables import text_table
from open_clip_zerovl.shards.pictures import BadPicture
from open_clip_zerovl.shards.tar import Sample
from scripts.paper.bias_measures import (
    Pool,
    check_source_probe,
    hits_of,
    log_p_by_query,
    pools_of,
    probe_groups,
    source_probe_guesses,
    units_of,
)
from scripts.program import program

DRAWS = 1000
BATCH_SAMPLES = 64
SHARDS_READ = 8  # shards from which a source's pairs are taken, evenly spaced; more only if these hold too few
TITLES = {
    "within": "RSUM within",
    "across": "RSUM across",
    "mixed": "RSUM mixed",
    "unseen": "RSUM unseen",
    "probe_images": "probe, images %",
    "probe_texts": "probe, texts %",
    "log_p_same": "log p, same source",
    "log_p_other": "log p, other source",
}
# Truth values, and the splits that pairs may be named by: the emoji's say "test" or "val", or nothing.
_NO = ("", "0", "0.0", "f", "false", "n", "no", "off", "none", "null", "nan", "train", "training")
_YES = ("1", "1.0", "t", "true", "y", "yes", "on", "test", "val", "valid", "validation", "dev")


# ---------------------------------------------------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One pair of a source.

    Attributes:
        concept: its concept; None if no field names it, or the field is empty.
        held_out: True if it was kept out of training.
    """

    source: str
    image: bytes
    caption: str
    concept: str | None = None
    held_out: bool = True

    def picture(self) -> Image.Image:
        """Decode the picture as RGB. BadPicture if it cannot be decoded."""
        return decode_image(self.image)


def read_pairs(
    sources: Sequence[Source],
    limit: int,
    *,
    concept_field: str | None = None,
    held_out_field: str | None = None,
) -> list[Pair]:
    """Read up to `limit` pairs of each source, from 8 evenly spaced shards first, in the order of the shards.

    A sample without a caption or a picture that can be decoded is passed over. The first of several captions is taken.

    Args:
        concept_field: a field of each sample's json, or a column of a table, that names its concept.
        held_out_field: likewise, a field that is true for pairs kept out of training; None takes all as held out.

    Raises:
        UserError: a source without a usable pair, a sample without the field, or one whose held-out field is no truth value.
    """
    pairs: list[Pair] = []
    for source in tqdm(sources, desc="reading samples", unit="source", leave=False):
        numbers = range(len(source.shards))
        spaced = numbers[:: -(-len(numbers) // SHARDS_READ)]
        share = -(-limit // len(spaced))
        of_source: list[Pair] = []
        for shard in [*spaced, *(number for number in numbers if number not in spaced)]:
            most = min(limit, len(of_source) + share)
            for sample in samples_of(source, shard):
                if len(of_source) == most:
                    break
                pair = _pair(source.name, sample, concept_field, held_out_field)
                of_source += [] if pair is None else [pair]
        if not of_source:
            raise UserError(
                f"source {source.name!r} has no pair of a readable picture and a caption in its shards"
            )
        pairs += of_source
    return pairs


def _pair(
    source: str, sample: Sample, concept_field: str | None, held_out_field: str | None
) -> Pair | None:
    if sample.image is None or not sample.captions:
        return None
    concept, held_out = None, True
    if concept_field is not None:
        value = _field(source, sample, concept_field)
        concept = None if value is None or value == "" else str(value)
    if held_out_field is not None:
        value = _field(source, sample, held_out_field)
        word = str(value).strip().lower()
        held_out = word in _YES
        if not held_out and word not in _NO:
            raise UserError(
                f"sample {sample.key} of {source} has {value!r} in its field {held_out_field!r}, neither true nor false; write "
                "true for pairs kept out of training and false for the rest"
            )
    pair = Pair(source, sample.image, sample.captions[0], concept, held_out)
    try:
        pair.picture()
    except BadPicture:
        return None
    return pair


def _field(source: str, sample: Sample, field: str) -> Any:
    if field not in sample.about:
        raise UserError(
            f"sample {sample.key} of {source} has no field {field!r} in its json (in a table: no such column); name another"
        )
    return sample.about[field]


def encode(model: FrozenModel, pairs: Sequence[Pair], name: str) -> tuple[Tensor, Tensor]:
    """Return image_features, text_features (N, D) of pairs, L2-normalised, float32, on the CPU."""
    assert model.picture_transform is not None
    images, texts = [], []
    for begin in tqdm(range(0, len(pairs), BATCH_SAMPLES), desc=name, leave=False):
        batch = pairs[begin : begin + BATCH_SAMPLES]
        pixels = torch.stack([model.picture_transform(pair.picture()) for pair in batch])
        images.append(model.images(pixels).cpu())
        texts.append(model.texts([pair.caption for pair in batch]).cpu())
    return torch.cat(images), torch.cat(texts)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


def measure(
    pairs: Sequence[Pair],
    images: Tensor,
    texts: Tensor,
    logit_scale: float,
    *,
    trained: int | None = None,
    seed: int = 0,
) -> dict[str, tuple[Measure, float]]:
    """Measure one model.

    Args:
        pairs: of two sources or more, those of one source one after the other.
        images, texts: (N, D) its features of them.
        logit_scale: the factor `model.logit_scale.exp()`.
        trained: pairs of sources of the training, which come first; None for all.
        seed: seed of the probe's folds.

    Returns:
        kind -> its number as a function of the drawn units, and that of a model that guesses.

    Raises:
        UserError: a probe that does not converge.
    """
    source, concepts = [pair.source for pair in pairs], [pair.concept for pair in pairs]
    unit = units_of(concepts)
    units = int(unit.max()) + 1
    by_kind: dict[str, list[Pool]] = {}
    for pool in pools_of(source, concepts, [pair.held_out for pair in pairs], trained):
        by_kind.setdefault(pool.kind, []).append(pool)
    measures = {}
    for kind, pools in by_kind.items():
        terms, chances = zip(*(hits_of(pool, images, texts, unit) for pool in pools), strict=True)
        of_kind = list(chain.from_iterable(terms))
        measures[kind] = mean_over(of_kind, units, 100 / len(pools)), fmean(chances)
    rows = list(by_kind["mixed"][0].images)  # the held-out pairs
    source, unit = [source[row] for row in rows], unit[rows]
    groups = probe_groups([concepts[row] for row in rows])
    chance = 100 * max(Counter(source).values()) / len(rows)
    for kind, features in (("probe_images", images), ("probe_texts", texts)):
        guesses = source_probe_guesses(features[rows], source, concepts=groups, seed=seed)
        measures[kind] = mean_over([(unit, torch.from_numpy(guesses))], units, 100.0), chance
    # over both directions
    log_p = log_p_by_query(images[rows], texts[rows], source, logit_scale).sum(dim=1)
    for group, kind in enumerate(("log_p_same", "log_p_other")):
        measures[kind] = mean_over([(unit, log_p[:, group])], units), -math.log(len(rows))
    return measures


def rows_of(
    measured: Mapping[str, Mapping[str, tuple[Measure, float]]],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare models on the same draws of units, so that a difference leaves out how difficult the pairs are.

    Returns:
        For each kind of measure its `kind` and `chance`, the numbers of the `models`, and the `differences` of the others to
        the first model; a number has a `value` and an `interval` over queries.
    """
    first, *others = measured
    numbers = {
        f"{name} {kind}": number
        for name, own in measured.items()
        for kind, (number, _) in own.items()
    }
    drawn = resampled(numbers, draws, seed)

    def compared(kind: str, *names: str) -> dict[str, Any]:
        """Write a model's number, or its difference to that of a second model."""
        value, *base = (numbers[f"{name} {kind}"].value for name in names)
        of_draws, *base_of_draws = (drawn[f"{name} {kind}"] for name in names)
        return {
            "value": value - sum(base),
            "interval": interval(of_draws - sum(base_of_draws)),
        }

    return [
        {
            "kind": kind,
            "chance": chance,
            "models": {name: compared(kind, name) for name in measured},
            "differences": {name: compared(kind, name, first) for name in others},
        }
        for kind, (_, chance) in measured[first].items()
    ]


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """Write a row of the table, numbers as `12.3 [11.0 to 13.5]`."""
    form = ".2f" if row["kind"].startswith("log_p") else ".1f"
    cells = [TITLES[row["kind"]], f"{row['chance']:{form}}"]
    for part, sign in (("models", ""), ("differences", "+")):
        for number in row[part].values():
            low, high = number["interval"]
            value, low, high = (f"{each:{sign}{form}}" for each in (number["value"], low, high))
            cells.append(f"{value} [{low} to {high}]")
    return cells


def bias(
    *given: A[str, "as for zerovl retrieval", "[NAME=]MODEL"],
    data: A[str, "of the training", "NAME=SHARDS::..."],
    unseen: A[str | None, "sources of no training", "NAME=SHARDS::..."] = None,
    concept: A[
        str | None, "json field or column by which pairs match across sources", "FIELD"
    ] = None,
    held_out: A[
        str | None,
        "field that is true for held-out pairs; captions of other pairs serve in RSUM across alone",
        "FIELD",
    ] = None,
    samples: A[int, "pairs of each source, at most", "N"] = 1000,
    draws: A[int, "of concepts, for the intervals", "N"] = DRAWS,
    seed: A[int, "of draws and folds"] = 0,
    out: A[Path | None, "folder for bias.json", "DIR"] = None,
    device: str = "auto",
) -> None:
    """Measure, print, and write what `--out` asks for.

    Raises:
        UserError: data or a model that cannot be read or do not fit.
    """
    models = {name: Encoder(path, device=device) for name, path in name_models(given).items()}
    for encoder in models.values():
        encoder.check()
    sources = parse_sources(data, evaluation=True, split="test")
    others = parse_sources(unseen, evaluation=True, split="test") if unseen else ()
    if len(sources) < 2:
        raise UserError(
            f"--data {data!r} names one source; name those that the models were trained on: a=SHARDS::b=SHARDS"
        )
    seen = read_pairs(sources, samples, concept_field=concept, held_out_field=held_out)
    rest = read_pairs(others, samples, concept_field=concept)
    kept = [pair for pair in seen if pair.held_out]
    owners = [pair.source for pair in kept]
    if lacking := {source.name for source in sources} - {*owners}:
        raise UserError(f"source {min(lacking)} has no held-out pair; leave --held-out out")
    check_source_probe(owners, probe_groups([pair.concept for pair in kept]))
    measured: dict[str, dict[str, tuple[Measure, float]]] = {}
    for name, encoder in models.items():
        model = FrozenModel.load(encoder)
        images, texts = encode(model, [*seen, *rest], name)
        measured[name] = measure(
            [*seen, *rest], images, texts, model.logit_scale, trained=len(seen), seed=seed
        )
    rows = rows_of(measured, draws=draws, seed=seed)
    first, *rest_names = models
    header = ["", "chance", *models, *(f"{name} - {first}" for name in rest_names)]
    print(text_table(header, list(map(cells_of, rows))))
    print(
        f"Brackets: 95 % intervals over queries, from {draws:,} draws of concepts (a pair without one counts by "
        "itself). Another seed of training may turn any difference."
    )
    if out is not None:
        write_atomically(out / "bias.json", json.dumps(rows, indent=1) + "\n")
        print(f"Written: {out / 'bias.json'}")


if __name__ == "__main__":
    sys.exit(program(bias))
