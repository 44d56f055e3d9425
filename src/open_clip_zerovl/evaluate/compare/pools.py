"""Retrieval within one source, across two, over all, and in sources that no training has seen: each pool's queries and hits.

Legend: `n` pairs of one source, `Q` queries of one direction, `D` embedding width, `U` units. A unit is drawn as a whole
when queries are resampled (`resampling`): all pairs of one concept, or a pair without a concept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.evaluate.retrieval.metrics import (
    DIRECTIONS,
    RECALL_KS,
    QueryRanks,
    chance_bounds,
    hit_probabilities,
    ranks_by_label,
)

MIXED_POOL_NOTE = (
    "The mixed pool rewards a model that recognises sources: it has to search only the pairs of the query's source. So a less "
    "biased model can score lower there even if it matches contents better."
)
#: The ability that each kind of pool rewards.
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
        concepts: (n,) concept of each pair, None for a pair that shares it with no other; pairs of two sources with the same
            concept are matches.
        held_out: (n,) whether the pair was kept out of training.

    Raises:
        UserError: lengths that differ.
    """

    image_features: Tensor
    text_features: Tensor
    concepts: Sequence[str | None]
    held_out: Sequence[bool]

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
        chance, chance_upper: RSUM of random orders, and two standard deviations above it.
    """

    images: Tensor
    texts: Tensor
    image_units: Tensor
    text_units: Tensor
    chance: float
    chance_upper: float

    @property
    def rsum(self) -> float:
        """Recall at 1, 5 and 10 both ways in percent points, 0 to 600."""
        return 100 * float(self.images.mean() + self.texts.mean())

    @property
    def size(self) -> int:
        """Pictures of the pool, from which each caption retrieves."""
        return len(self.images)


@dataclass(frozen=True)
class SourcePools:
    """All pools of some sources.

    Attributes:
        kinds: `within`, `across`, `mixed` and `unseen` -> pools by name; a kind without pools is left out. The names are the
            source, "image source->text source", "mixed", the unseen source.
        units: number of units U.
        unit_of: (rows,) unit of each held-out pair of all sources, in their order: the rows of the mixed pool.
    """

    kinds: Mapping[str, Mapping[str, PoolHits]]
    units: int
    unit_of: Tensor

    @property
    def single(self) -> dict[str, PoolHits]:
        """All pools but the mixed one, by name."""
        return {
            name: pool
            for kind, pools in self.kinds.items()
            if kind != "mixed"
            for name, pool in pools.items()
        }


@dataclass(frozen=True)
class _Rows:
    """Some rows of a source with the unit of each."""

    images: Tensor
    texts: Tensor
    units: Tensor


def source_pools(
    features: Mapping[str, SourceFeatures], unseen: Mapping[str, SourceFeatures] | None = None
) -> SourcePools:
    """Rank all queries of all pools.

    - `within`: the held-out pairs of one source. Only the content tells them apart.
    - `across`: held-out pictures of one source, with the captions that another source has of the same concepts; only pairs of
      sources that share concepts. A model that relies on the source fails here. (The other source's own pairs of these
      concepts may have been in training: their captions are matches of the image queries, and themselves the text queries.)
    - `mixed`: the held-out pairs of all sources in one pool; only the own pair is right, also where another source has the
      concept. A model that knows the query's source has to search one S-th of the pool only, so this rewards source bias: it
      can fall while the model gets better.
    - `unseen`: the held-out pairs of each of `unseen`.
    """
    every = [*features.items(), *(unseen or {}).items()]
    number: dict[Any, int] = {}  # of units
    units: dict[str, Tensor] = {}  # (n,) of each source
    held_out: dict[str, _Rows] = {}
    for name, pairs in every:
        keys = [
            (name, row) if concept is None else concept
            for row, concept in enumerate(pairs.concepts)
        ]
        units[name] = torch.tensor(
            [number.setdefault(key, len(number)) for key in keys], dtype=torch.long
        )
        rows = pairs.held_out_rows()
        held_out[name] = _Rows(
            pairs.image_features[rows], pairs.text_features[rows], units[name][rows]
        )
    across = {}
    for name, pairs in features.items():
        for partner, other in features.items():
            asked = {pairs.concepts[row] for row in pairs.held_out_rows()} & set(other.concepts) - {
                None
            }
            if partner != name and asked:
                mine = [row for row in pairs.held_out_rows() if pairs.concepts[row] in asked]
                theirs = [row for row, concept in enumerate(other.concepts) if concept in asked]
                # The unit of a pair with a concept is that of the concept, in all sources.
                labels = units[name][mine], units[partner][theirs]
                across[f"{name}->{partner}"] = _pool(
                    pairs.image_features[mine], other.text_features[theirs], *labels
                )
    all_held_out = [held_out[name] for name in features]
    mixed = _Rows(
        *(
            torch.cat([getattr(rows, part) for rows in all_held_out])
            for part in ("images", "texts", "units")
        )
    )
    kinds = {
        "within": {name: _own_pairs(held_out[name]) for name in features},
        "across": across,
        "mixed": {"mixed": _own_pairs(mixed)},
        "unseen": {name: _own_pairs(held_out[name]) for name in unseen or {}},
    }
    return SourcePools(
        {kind: pools for kind, pools in kinds.items() if pools}, len(number), mixed.units
    )


def _own_pairs(rows: _Rows) -> PoolHits:
    """The pool in which the own pair is right."""
    labels = torch.arange(len(rows.images))
    hits = _pool(rows.images, rows.texts, labels, labels)
    return replace(hits, image_units=rows.units, text_units=rows.units)


def _pool(images: Tensor, texts: Tensor, image_labels: Tensor, text_labels: Tensor) -> PoolHits:
    """The pool in which all items of the query's label are right; the labels are the units."""
    ways = ((images, texts, image_labels, text_labels), (texts, images, text_labels, image_labels))
    hits, ties = [], {}
    for name, (queries, keys, labels, key_labels) in zip(DIRECTIONS, ways, strict=True):
        hits.append(
            hit_probabilities(ranks_by_label(queries, keys, labels, key_labels), RECALL_KS).sum(
                dim=0
            )
        )
        matches = torch.bincount(key_labels, minlength=int(labels.max()) + 1)[labels]  # (Q,)
        ties[name] = QueryRanks(
            torch.zeros_like(matches), torch.full_like(matches, len(keys)), matches
        )
    bounds = chance_bounds(ties)
    return PoolHits(
        hits[0],
        hits[1],
        image_labels,
        text_labels,
        bounds["rsum_chance"],
        bounds["rsum_chance_upper"],
    )
