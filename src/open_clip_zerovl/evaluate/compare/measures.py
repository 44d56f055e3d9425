"""Did the model learn its sources instead of their content? The measurements of section 3.1, figures 3 and 4.

- `log_p_by_query` (figure 4): `log p_jk` of negative pairs. p is the softmax of eq. 2, which is the stop-gradient weight of a
  negative pair in eq. 3. The lower its mean, the less such pairs contribute to the gradient: a model that tells sources apart
  pushes the negatives of other sources down without learning their content.
- `source_probe_guesses`: figure 3 shows embeddings that separate by source; a linear probe measures how far they do.

`pools` measures the cost of it, as RSUM of retrieval.

Legend: `N` pairs, `B` pairs of one batch, `D` embedding width, `S` sources. Features are
L2-normalised, float, on any device; row i of images and row i of texts are a pair.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.core.errors import UserError

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
    """(N,) True where a linear probe guesses the source from one embedding; chance is the largest source's share.

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
    """Check sources and concepts for `source_probe_guesses` before anything is encoded; UserError if they do not fit."""
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
    """(N,) concepts for the source probe, a pair without one being a concept of its own; None if no pair has one."""
    if all(concept is None for concept in concepts):
        return None
    return [f"\0{row}" if concept is None else concept for row, concept in enumerate(concepts)]
