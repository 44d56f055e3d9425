"""Did the model learn its sources instead of their content? The measurements of section 3.1, figures 3 and 4.

- `log_p_by_query` (figure 4): `log p_jk` of negative pairs. p is the softmax of eq. 2, which is the stop-gradient weight of a
  negative pair in eq. 3. The lower its mean, the less such pairs contribute to the gradient: a model that tells sources apart
  pushes the negatives of other sources down without learning their content.
- `source_probe_guesses`: figure 3 shows embeddings that separate by source; a linear probe measures how far they do.
- `pools_of`: retrieval within one source, across two, over all, and in sources that no training has seen.

Legend: `N` pairs, `B` pairs of one batch, `Q` queries of one direction, `D` width, `U` units.
A unit is drawn as a whole when queries are resampled: all pairs of one concept, or a pair without a concept. Features are
L2-normalised, float, on any device; row i of images and row i of texts are a pair.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
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
    """Sum log p_jk over the negative pairs j != k of each query of one batch, by whether both come from one source.

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
    features: Tensor,
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
        UserError: a probe that does not converge.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = features.double().cpu().numpy(), np.asarray(source)
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
class Pool:
    """Pictures and captions in which to search for each other.

    Attributes:
        kind: "within", "across", "mixed" or "unseen".
        images, texts: rows of the pairs whose pictures and captions are in it.
        by_concept: whether all captions of a picture's concept are right, or the own pair's alone.
    """

    kind: str
    images: Sequence[int]
    texts: Sequence[int]
    by_concept: bool = False


def pools_of(
    source: Sequence[str],
    concepts: Sequence[str | None],
    held_out: Sequence[bool],
    trained: int | None = None,
) -> list[Pool]:
    """List the pools of some pairs.

    - `within`: the held-out pairs of one source. Only the content tells them apart.
    - `across`: held-out pictures of one source, with the captions that another source has of the same concepts; only pairs of
      sources that share concepts. A model that relies on the source fails here. (The other source's own pairs of these
      concepts may have been in training: their captions are matches of the image queries, and themselves the text queries.)
    - `mixed`: the held-out pairs of all sources in one pool; only the own pair is right, also where another source has the
      concept. A model that knows the query's source has to search one S-th of the pool only, so this rewards source bias: it
      can fall while the model gets better.
    - `unseen`: the pairs of each source of no training.

    Args:
        source, concepts, held_out: (N,) of each pair; None is a concept that no other pair has.
        trained: pairs of sources of the training, which come first; None for all.
    """
    every: dict[str, list[int]] = {}
    for row, name in enumerate(source[:trained]):
        every.setdefault(name, []).append(row)
    held = {name: [row for row in rows if held_out[row]] for name, rows in every.items()}
    pools = [Pool("within", rows, rows) for rows in held.values()]
    for name, partner in permutations(every, 2):
        there = {concepts[row] for row in every[partner]} - {None}
        mine = [row for row in held[name] if concepts[row] in there]
        asked = {concepts[row] for row in mine}
        theirs = [row for row in every[partner] if concepts[row] in asked]
        pools += [Pool("across", mine, theirs, by_concept=True)] * bool(mine)
    mixed = [row for rows in held.values() for row in rows]
    pools.append(Pool("mixed", mixed, mixed))
    rest = range(len(source))[len(source) if trained is None else trained :]
    for name in dict.fromkeys(source[row] for row in rest):
        rows = [row for row in rest if source[row] == name]
        pools.append(Pool("unseen", rows, rows))
    return pools


def units_of(concepts: Sequence[str | None]) -> Tensor:
    """Number the units (N,) of pairs in the order of their first rows."""
    numbers: dict[str | int, int] = {}
    keys = (row if concept is None else concept for row, concept in enumerate(concepts))
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def hits_of(
    pool: Pool, image_features: Tensor, text_features: Tensor, units: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Rank all queries of a pool.

    Args:
        image_features, text_features, units: (N, D), (N, D) and (N,) of all pairs.

    Returns:
        For the image queries and for the text queries their units (Q,) and hits (Q,), and the RSUM of random orders. A hit is
        the sum over K = 1, 5, 10 of the probability that a match is among the K best (0 to 3, without ties a whole number).
    """
    labels = units if pool.by_concept else torch.arange(len(units))
    images, texts = ((rows, features[rows]) for rows, features in
                     ((pool.images, image_features), (pool.texts, text_features)))  # fmt: skip
    terms, ties = [], {}
    ways = zip(DIRECTIONS, (images, texts), (texts, images), strict=True)
    for name, (rows, queries), (key_rows, keys) in ways:
        ranks = ranks_by_label(queries, keys, labels[rows], labels[key_rows])
        terms.append((units[rows], hit_probabilities(ranks, RECALL_KS).sum(dim=0)))
        matches = torch.bincount(labels[key_rows], minlength=len(units))[labels[rows]]  # (Q,)
        none, all_ = torch.zeros_like(matches), torch.full_like(matches, len(keys))
        ties[name] = QueryRanks(none, all_, matches)
    return terms, recalls(ties)["rsum"]
