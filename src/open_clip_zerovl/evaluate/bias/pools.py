"""Retrieval within one source, across two, over all, and in sources that no training has seen: each pool's queries and hits.

Legend: `n` pairs of one source, `Q` queries of one direction, `D` embedding width, `U` units. A unit is what is drawn at once
when queries are resampled (`resampling`): all pairs of one concept, or a pair that has no concept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.retrieval.metrics import RECALL_KS, hit_probabilities, ranks_by_label

POOLS = ("within", "across", "mixed")

MIXED_POOL_NOTE = (
    "The mixed pool rewards a model that recognises sources: it has to search only the pairs of the query's source. So a less "
    "biased model can score lower there even if it matches contents better."
)
#: What each kind of pool rewards.
POOL_NOTES = {
    "within": "Within: pictures and captions of one source. The source is the same for all, so that only content counts.",
    "across": "Across: pictures of one source, captions of another, matched by concept. Who relies on the source fails here.",
    "mixed": f"Mixed: all sources in one pool, where only a picture's own caption is right. {MIXED_POOL_NOTE}",
    "unseen": "Unseen: pairs of sources that were in no training. It rewards what carries over to new data.",
}


@dataclass(frozen=True)
class SourceFeatures:
    """The pairs of one source.

    Attributes:
        image_features, text_features: (n, D), L2-normalised.
        concepts: (n,) what each pair shows, None for a pair that shares it with no other; pairs of two sources with the same
            concept are matches.
        held_out: (n,) whether the pair was kept out of training.

    Raises:
        UserError: lengths that differ.
    """

    image_features: Tensor
    text_features: Tensor
    concepts: Sequence[str | None]
    held_out: Sequence[bool]

    def __post_init__(self) -> None:
        if len({len(self.image_features), len(self.text_features), len(self.concepts), len(self.held_out)}) != 1:
            raise UserError("a source's features, concepts and held-out marks must have one length")

    def held_out_rows(self) -> list[int]:
        """Rows of the held-out pairs."""
        return [row for row, held_out in enumerate(self.held_out) if held_out]


@dataclass(frozen=True)
class PoolHits:
    """The hits of one pool.

    Attributes:
        images, texts: (Q,) of each image query and each text query, the sum over K = 1, 5, 10 of the probability that a match
            is among the K best (0 to 3; without ties whole numbers).
        image_units, text_units: (Q,) the unit of each query.
    """

    images: Tensor
    texts: Tensor
    image_units: Tensor
    text_units: Tensor

    @property
    def rsum(self) -> float:
        """Recall at 1, 5 and 10 both ways in percent points, 0 to 600."""
        return 100 * float(self.images.mean() + self.texts.mean())

    @property
    def size(self) -> int:
        """Pictures of the pool, among which each caption is looked for."""
        return len(self.images)


@dataclass(frozen=True)
class SourcePools:
    """All pools of some sources.

    Attributes:
        within: source -> the pool of its held-out pairs.
        across: (source of the pictures, source of the captions) -> its pool; only pairs of sources that share concepts.
        mixed: the held-out pairs of all sources.
        unseen: source that was in no training -> the pool of its pairs.
        units: number of units U.
        unit_of: (rows,) unit of each held-out pair of all sources, in their order: the rows of the mixed pool.
    """

    within: Mapping[str, PoolHits]
    across: Mapping[tuple[str, str], PoolHits]
    mixed: PoolHits
    unseen: Mapping[str, PoolHits]
    units: int
    unit_of: Tensor

    def kinds(self) -> dict[str, list[PoolHits]]:
        """Kind of pool -> its pools; a kind without pools is left out."""
        every = {
            "within": list(self.within.values()),
            "across": list(self.across.values()),
            "mixed": [self.mixed],
            "unseen": list(self.unseen.values()),
        }
        return {kind: pools for kind, pools in every.items() if pools}


def source_pools(
    features: Mapping[str, SourceFeatures], unseen: Mapping[str, SourceFeatures] | None = None
) -> SourcePools:
    """Rank all queries of all pools.

    - `within`: the held-out pairs of one source. Only the content tells them apart.
    - `across`: held-out pictures of one source, with the captions that another source has of the same concepts. A model that
      relies on the source fails here. (The other source's own pairs of these concepts may have been in training.)
    - `mixed`: the held-out pairs of all sources in one pool; only the own pair is right, also where another source has the
      concept. A model that knows the query's source has to search one S-th of the pool only, so this rewards source bias: it
      can fall while the model gets better.
    - `unseen`: the held-out pairs of each of `unseen`.

    Raises:
        UserError: no source, or a source without held-out pairs.
    """
    unseen = unseen or {}
    if not features:
        raise UserError("retrieval pools need at least one source")
    held_out = {name: one.held_out_rows() for name, one in [*features.items(), *unseen.items()]}
    for name, rows in held_out.items():
        if not rows:
            raise UserError(f"source {name} has no held-out pair to retrieve")
    units, count = _units([*features.values(), *unseen.values()])
    of_source = dict(zip([*features, *unseen], units, strict=True))
    across = {
        (name, partner): pool
        for name, one in features.items()
        for partner, other in features.items()
        if partner != name
        and (pool := _across(one, other, held_out[name], of_source[name], of_source[partner])) is not None
    }
    every = [(one, held_out[name], of_source[name]) for name, one in features.items()]
    return SourcePools(
        within={name: _own_pairs([(one, held_out[name], of_source[name])]) for name, one in features.items()},
        across=across,
        mixed=_own_pairs(every),
        unseen={name: _own_pairs([(one, held_out[name], of_source[name])]) for name, one in unseen.items()},
        units=count,
        unit_of=torch.cat([own[rows] for _, rows, own in every]),
    )


def _units(sources: Sequence[SourceFeatures]) -> tuple[list[Tensor], int]:
    """(n,) unit of each pair of each source, and the number of units."""
    number: dict[Any, int] = {}
    found = []
    for index, one in enumerate(sources):
        keys = [(index, row) if concept is None else concept for row, concept in enumerate(one.concepts)]
        found.append(torch.tensor([number.setdefault(key, len(number)) for key in keys], dtype=torch.long))
    return found, len(number)


def _own_pairs(parts: Sequence[tuple[SourceFeatures, list[int], Tensor]]) -> PoolHits:
    """The pool of some rows of some sources, in which the own pair is right."""
    images = torch.cat([one.image_features[rows] for one, rows, _ in parts])
    texts = torch.cat([one.text_features[rows] for one, rows, _ in parts])
    units = torch.cat([own[rows] for _, rows, own in parts])
    labels = torch.arange(len(images))
    return _pool(images, texts, labels, labels, units, units)


def _across(
    one: SourceFeatures, other: SourceFeatures, held_out: list[int], units: Tensor, other_units: Tensor
) -> PoolHits | None:
    """Held-out pictures of one source against the captions of the same concepts in another; None where they share none."""
    theirs = {concept for concept in other.concepts if concept is not None}
    rows = [row for row in held_out if one.concepts[row] in theirs]
    if not rows:
        return None
    asked = {one.concepts[row] for row in rows}
    partners = [row for row, concept in enumerate(other.concepts) if concept in asked]
    # The unit of a pair with a concept is that of the concept, in all sources.
    own, partner = units[rows], other_units[partners]
    return _pool(one.image_features[rows], other.text_features[partners], own, partner, own, partner)


def _pool(
    images: Tensor, texts: Tensor, image_labels: Tensor, text_labels: Tensor, image_units: Tensor, text_units: Tensor
) -> PoolHits:
    image_ranks = ranks_by_label(images, texts, image_labels, text_labels)
    text_ranks = ranks_by_label(texts, images, text_labels, image_labels)
    return PoolHits(
        hit_probabilities(image_ranks, RECALL_KS).sum(dim=0),
        hit_probabilities(text_ranks, RECALL_KS).sum(dim=0),
        image_units,
        text_units,
    )


def pool_metrics(features: Mapping[str, SourceFeatures]) -> dict[str, Any]:
    """RSUM (0 to 600) of the three kinds of pools of `source_pools`.

    Returns:
        `within` (mean over sources), `across` (mean over ordered pairs of sources that share concepts; None where none do),
        `mixed`; `by_source` and `by_pair` ("image source->text source") with the single values; `pool_sizes` of the three
        kinds, since the chance level depends on the size.

    Raises:
        UserError: as `source_pools`.
    """
    return pool_numbers(source_pools(features))


def pool_numbers(pools: SourcePools) -> dict[str, Any]:
    """`pool_metrics` of pools that have been ranked."""
    by_source = {name: pool.rsum for name, pool in pools.within.items()}
    by_pair = {f"{name}->{partner}": pool.rsum for (name, partner), pool in pools.across.items()}
    return {
        "within": sum(by_source.values()) / len(by_source),
        "across": sum(by_pair.values()) / len(by_pair) if by_pair else None,
        "mixed": pools.mixed.rsum,
        "by_source": by_source,
        "by_pair": by_pair,
        "pool_sizes": {
            "within": [pool.size for pool in pools.within.values()],
            "across": [pool.size for pool in pools.across.values()],
            "mixed": pools.mixed.size,
        },
    }
