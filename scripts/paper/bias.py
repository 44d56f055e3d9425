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

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from open_clip_zerovl.api import name_models
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError, ended
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
    SourceFeatures,
    check_source_probe,
    log_p_by_query,
    probe_groups,
    source_pools,
    source_probe_guesses,
)

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


def _by_source(pairs: Sequence[Pair], images: Tensor, texts: Tensor) -> dict[str, SourceFeatures]:
    rows: dict[str, list[int]] = {}
    for row, pair in enumerate(pairs):
        rows.setdefault(pair.source, []).append(row)
    return {
        name: SourceFeatures(
            images[own],
            texts[own],
            [pairs[row].concept for row in own],
            [pairs[row].held_out for row in own],
        )
        for name, own in rows.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


def measure(
    features: Mapping[str, SourceFeatures],
    logit_scale: float,
    unseen: Mapping[str, SourceFeatures] | None = None,
    *,
    seed: int = 0,
) -> dict[str, tuple[Measure, float]]:
    """Measure one model.

    Args:
        features: source -> its pairs, two sources or more.
        logit_scale: the factor `model.logit_scale.exp()`.
        unseen: sources that were in no training.
        seed: seed of the probe's folds.

    Returns:
        kind -> its number as a function of the drawn units, and that of a model that guesses.

    Raises:
        UserError: what `source_pools`, the probe and log p refuse.
    """
    pools = source_pools(features, unseen)
    units, unit = pools.units, pools.unit_of
    measures = {}
    for kind, of_kind in pools.kinds.items():
        terms = []
        for pool in of_kind.values():
            terms += [(pool.image_units, pool.images), (pool.text_units, pool.texts)]
        chance = fmean(pool.chance for pool in of_kind.values())
        measures[kind] = mean_over(terms, units, 100 / len(of_kind)), chance
    rows = {name: pairs.held_out_rows() for name, pairs in features.items()}
    images = torch.cat([pairs.image_features[rows[name]] for name, pairs in features.items()])
    texts = torch.cat([pairs.text_features[rows[name]] for name, pairs in features.items()])
    sources = [name for name in features for _ in rows[name]]
    groups = probe_groups(
        [pairs.concepts[row] for name, pairs in features.items() for row in rows[name]]
    )
    for kind, embeddings in (("probe_images", images), ("probe_texts", texts)):
        guesses = source_probe_guesses(embeddings, sources, concepts=groups, seed=seed)
        chance = 100 * max(len(own) for own in rows.values()) / len(unit)
        measures[kind] = mean_over([(unit, torch.from_numpy(guesses))], units, 100.0), chance
    log_p = log_p_by_query(images, texts, sources, logit_scale).sum(dim=1)  # over both directions
    for group, kind in enumerate(("log_p_same", "log_p_other")):
        measures[kind] = mean_over([(unit, log_p[:, group])], units), -math.log(len(unit))
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


def bias(options: argparse.Namespace) -> None:
    """Measure, print, and write what `--out` asks for.

    Raises:
        UserError: data or a model that cannot be read or do not fit.
    """
    models = {
        name: Encoder(path, device=options.device)
        for name, path in name_models(options.models).items()
    }
    for encoder in models.values():
        encoder.check()
    sources = parse_sources(options.data, evaluation=True, split="test")
    unseen = parse_sources(options.unseen, evaluation=True, split="test") if options.unseen else ()
    if len(sources) < 2:
        raise UserError(
            f"--data {options.data!r} names one source; name those that the models were trained on: a=SHARDS::b=SHARDS"
        )
    seen = read_pairs(
        sources, options.samples, concept_field=options.concept, held_out_field=options.held_out
    )
    rest = read_pairs(unseen, options.samples, concept_field=options.concept)
    held_out = [row for row, pair in enumerate(seen) if pair.held_out]
    owners = [seen[row].source for row in held_out]
    if lacking := {source.name for source in sources} - {*owners}:
        raise UserError(f"source {min(lacking)} has no held-out pair; leave --held-out out")
    check_source_probe(owners, probe_groups([seen[row].concept for row in held_out]))
    measured: dict[str, dict[str, tuple[Measure, float]]] = {}
    for name, encoder in models.items():
        model = FrozenModel.load(encoder)
        images, texts = encode(model, [*seen, *rest], name)
        own = _by_source(seen, images[: len(seen)], texts[: len(seen)])
        others = _by_source(rest, images[len(seen) :], texts[len(seen) :])
        measured[name] = measure(own, model.logit_scale, others, seed=options.seed)
    rows = rows_of(measured, draws=options.draws, seed=options.seed)
    first, *rest_names = models
    header = ["", "chance", *models, *(f"{name} - {first}" for name in rest_names)]
    print(text_table(header, list(map(cells_of, rows))))
    print(
        f"Brackets: 95 % intervals over queries, from {options.draws:,} draws of concepts (a pair without one counts by "
        "itself). Another seed of training may turn any difference."
    )
    if options.out is not None:
        write_atomically(options.out / "bias.json", json.dumps(rows, indent=1) + "\n")
        print(f"Written: {options.out / 'bias.json'}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL")
    parser.add_argument("--data", required=True, metavar="NAME=SHARDS::...", help="of the training")
    parser.add_argument("--unseen", metavar="NAME=SHARDS::...", help="sources of no training")
    parser.add_argument(
        "--concept",
        metavar="FIELD",
        help="json field or column by which pairs match across sources",
    )
    parser.add_argument(
        "--held-out",
        metavar="FIELD",
        help="field that is true for held-out pairs; captions of other pairs serve in RSUM across alone",
    )
    parser.add_argument(
        "--samples", type=int, default=1000, metavar="N", help="pairs of each source, at most"
    )
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of draws and folds")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    return ended(lambda: bias(options), "bias.py")


if __name__ == "__main__":
    sys.exit(main())
