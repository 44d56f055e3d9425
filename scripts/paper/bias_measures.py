"""Did the model learn its sources instead of their content? The measurements of section 3.1, figures 3 and 4.

- `log_p_by_query` (figure 4): `log p_jk` of negative pairs. p is the softmax of eq. 2, which is the stop-gradient weight of a
  negative pair in eq. 3. The lower its mean, the less such pairs contribute to the gradient: a model that tells sources apart
  pushes the negatives of other sources down without learning their content.
- `source_probe_guesses`: figure 3 shows embeddings that separate by source; a linear probe measures how far they do.
- `source_pools`: retrieval within one source, across two, over all, and in sources that no training has seen.

Legend: `N` pairs, `B` pairs of one batch, `n` pairs of one source, `Q` queries of one direction, `D` width, `U` units.
A unit is drawn as a whole when queries are resampled: all pairs of one concept, or a pair without a concept. Features are
L2-normalised, float, on any device; row i of images and row i of texts are a pair.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.evaluate.metrics import (
    DIRECTIONS,
    RECALL_KS,
    QueryRanks,
    hit_probabilities,
    recalls,
)

_ROWS_AT_ONCE = 1024  # of the logit matrix


# ---------------------------------------------------------------------------------------------------------------------
# Figure 4: log p of negatives
# ---------------------------------------------------------------------------------------------------------------------


def log_p_by_query(
    image_features: Tensor, text_features: Tensor, source: Sequence[Any], logit_scale: float
) -> Tensor:
    """Sums of log p_jk over the negative pairs j != k of each query of one batch, by whether both come from one source.

    For image queries `p_jk = exp(s I_j.T_k) / sum_l exp(s I_j.T_l)`, where the sum runs over the batch, positive included; text
    queries sum over images.

    Args:
        image_features, text_features: (B, D).
        source: (B,) the source of each pair, any sortable names.
        logit_scale: the factor s itself (open_clip's `logit_scale.exp()`), 50 for a temperature of 0.02.

    Returns:
        (2, 2, 2, B) sums of log p, and counts of negatives: [sum or count, direction, same (0) or other (1) source, query],
        float64, on the CPU.
    """
    codes = torch.from_numpy(np.unique(np.asarray(source), return_inverse=True)[1]).to(
        image_features.device
    )
    places = torch.arange(len(codes), device=codes.device)
    images, texts = image_features.double(), text_features.double()
    ways = []
    for queries, keys in ((images, texts), (texts, images)):
        blocks = []
        for rows in places.split(_ROWS_AT_ONCE):
            log_p = (logit_scale * queries[rows] @ keys.T).log_softmax(dim=1)  # (rows, B)
            negative = rows[:, None] != places
            same = codes[rows][:, None] == codes
            masks = torch.stack([negative & same, negative & ~same])  # (2, rows, B)
            blocks.append(
                torch.stack([(log_p * masks).sum(dim=2), masks.sum(dim=2).double()]).cpu()
            )
        ways.append(torch.cat(blocks, dim=2))
    return torch.stack(ways, dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Figure 3 as a number: how well a linear probe guesses the source
# ---------------------------------------------------------------------------------------------------------------------


FOLDS = 5


def source_probe_guesses(
    features: Tensor | np.ndarray,
    source: Sequence[Any],
    *,
    concepts: Sequence[Any] | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Return (N,) True where a linear probe guesses the source from one embedding.

    The probe is logistic regression on standardised features with an L2 penalty (C = 0.1, fixed: without one, 0.2 dimensions a
    sample are enough to overfit). Folds are stratified and shuffled; each sample is guessed once, by a probe that was not
    fitted on it.

    Args:
        features: (N, D).
        source: (N,).
        concepts: (N,) concept of each sample. All samples of a concept go to one fold, so that remembering a concept does
            not help the probe. None: each sample is a concept of its own.
        seed: seed of the folds.

    Raises:
        UserError: fewer than two sources, a source with fewer samples or concepts than folds, or a probe that does not
            converge.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x = np.asarray(
        features.detach().cpu() if isinstance(features, Tensor) else features, dtype=np.float64
    )
    y = np.asarray(source)
    check_source_probe(y.tolist(), concepts)
    splits = (StratifiedKFold if concepts is None else StratifiedGroupKFold)(
        FOLDS, shuffle=True, random_state=seed
    )
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return cross_val_predict(probe, x, y, groups=concepts, cv=splits) == y
        except ConvergenceWarning as error:
            raise UserError(
                "the source probe did not converge in 2000 steps; look for NaN or huge features"
            ) from error


def check_source_probe(source: Sequence[Any], concepts: Sequence[Any] | None = None) -> None:
    """Check sources and concepts for `source_probe_guesses` before anything is encoded."""
    sizes = Counter(source)
    least = min(sizes.values())
    if least < FOLDS:
        raise UserError(
            f"{FOLDS} folds cannot be cut from a source of {least} samples; give at least {FOLDS}"
        )
    if concepts is None:
        return
    distinct = Counter(name for name, _ in set(zip(source, concepts, strict=True)))
    name = min(distinct, key=lambda name: (distinct[name], str(name)))
    # a fold of all concepts of a source would leave none to fit the probe on
    if distinct[name] < FOLDS:
        raise UserError(
            f"{FOLDS} folds cannot be cut from the {distinct[name]} concepts of source {name!r}; give more samples, or name "
            "no field of concepts (--concept)"
        )


def probe_groups(concepts: Sequence[str | None]) -> list[str] | None:
    """Return (N,) concepts for the source probe, a pair without one being a concept of its own, or None if no pair has one."""
    if all(concept is None for concept in concepts):
        return None
    return [f"\0{row}" if concept is None else concept for row, concept in enumerate(concepts)]


# ---------------------------------------------------------------------------------------------------------------------
# Retrieval by source
# ---------------------------------------------------------------------------------------------------------------------


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


def ranks_by_label(
    queries: Tensor, keys: Tensor, query_labels: Tensor, key_labels: Tensor
) -> QueryRanks:
    """Rank each query's best match, where a query may have several: all keys of its label.

    Scores are accumulated in float64 and rounded to float32, so that equal features tie in blocks of any size.

    Args:
        queries, keys: (Q, D) and (T, D), L2-normalised.
        query_labels, key_labels: (Q,) and (T,) whole numbers; each query has a match.
    """
    exact_keys = keys.double().T
    parts = []
    for rows in torch.arange(len(queries)).split(_ROWS_AT_ONCE):
        scores = (queries[rows].double() @ exact_keys).float()  # (rows, T)
        match = query_labels[rows, None] == key_labels
        best = scores.masked_fill(~match, -torch.inf).amax(dim=1, keepdim=True)
        tied = scores == best
        parts.append(((scores > best).sum(dim=1), tied.sum(dim=1), (tied & match).sum(dim=1)))
    return QueryRanks(*(torch.cat(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class PoolHits:
    """The hits of one pool.

    Attributes:
        images, texts: (Q,) of each image query and each text query, the sum over K = 1, 5, 10 of the probability that a match
            is among the K best (0 to 3; without ties whole numbers).
        image_units, text_units: (Q,) the unit of each query.
        chance: RSUM of random orders.
    """

    images: Tensor
    texts: Tensor
    image_units: Tensor
    text_units: Tensor
    chance: float


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
    held_out: dict[str, tuple[Tensor, ...]] = {}  # images, texts, units
    for name, pairs in every:
        keys = [
            (name, row) if concept is None else concept
            for row, concept in enumerate(pairs.concepts)
        ]
        units[name] = torch.tensor(
            [number.setdefault(key, len(number)) for key in keys], dtype=torch.long
        )
        rows = pairs.held_out_rows()
        own = pairs.image_features[rows], pairs.text_features[rows], units[name][rows]
        held_out[name] = own
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
    mixed = tuple(map(torch.cat, zip(*(held_out[name] for name in features), strict=True)))
    kinds = {
        "within": {name: _own_pairs(*held_out[name]) for name in features},
        "across": across,
        "mixed": {"mixed": _own_pairs(*mixed)},
        "unseen": {name: _own_pairs(*held_out[name]) for name in unseen or {}},
    }
    return SourcePools(
        {kind: pools for kind, pools in kinds.items() if pools}, len(number), mixed[2]
    )


def _own_pairs(images: Tensor, texts: Tensor, units: Tensor) -> PoolHits:
    """Rank a pool in which the own pair is right."""
    labels = torch.arange(len(images))
    return replace(_pool(images, texts, labels, labels), image_units=units, text_units=units)


def _pool(images: Tensor, texts: Tensor, image_labels: Tensor, text_labels: Tensor) -> PoolHits:
    """Rank a pool in which all items of the query's label are right, and labels are the units."""
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
    return PoolHits(hits[0], hits[1], image_labels, text_labels, recalls(ties)["rsum"])
