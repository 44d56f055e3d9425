"""The quick linear probe: logistic regression by L-BFGS on cached features, the protocol of CLIP's own evaluation.

Legend: `N` images, `F` width of the features, `C` classes.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from open_clip_zerovl.core.errors import UserError

C_GRID = tuple(10.0**k for k in range(-5, 3))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogisticFit:
    """A fitted logistic regression on standardised features.

    Attributes:
        mean, scale: (F,) by which features are standardised.
        classifier: scikit-learn's.
        chosen_c: scikit-learn's C, the inverse strength of the L2 penalty.
        split_accuracy: C -> accuracy on the held-out fifth of the training set, by which C was chosen.
        converged: True if L-BFGS converged.
    """

    mean: np.ndarray
    scale: np.ndarray
    classifier: Any
    chosen_c: float
    split_accuracy: dict[float, float]
    converged: bool

    def scores(self, features: Tensor) -> Tensor:
        """log p of each class (N, C) for features (N, F) on the CPU."""
        x = (features.double().numpy() - self.mean) / self.scale
        return torch.from_numpy(self.classifier.predict_log_proba(x))


def fit_logistic(
    features: Tensor, targets: Tensor, *, seed: int = 0, grid: Sequence[float] = C_GRID
) -> LogisticFit:
    """L-BFGS logistic regression (scikit-learn). C is chosen on a held-out fifth, then the fit is repeated on all images.

    After the grid, its best C divided and multiplied by sqrt(10) are tried. Among several Cs with the best accuracy the middle
    one is taken: the ends of the grid, which fit nothing or penalise nothing, are the worst guesses. If all Cs are equally
    good, a warning is logged. Features are standardised, so that one grid serves any tower.

    Args:
        features: (N, F) on the CPU.
        targets: (N,) class indices 0..C-1, each of which occurs.
        seed: seed of the held-out fifth.
        grid: values of C.

    Raises:
        UserError: too few images to hold some out.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    x, y = features.double().numpy(), targets.numpy()
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)  # a constant feature becomes 0, not NaN
    x = (x - mean) / scale
    held, rest = stratified_fifth(y, seed)

    def fit(rows: np.ndarray, c: float) -> tuple[Any, bool]:
        classifier = LogisticRegression(C=c, max_iter=1000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            classifier.fit(x[rows], y[rows])
        return classifier, not any(
            issubclass(warning.category, ConvergenceWarning) for warning in caught
        )

    accuracy: dict[float, float] = {}
    best = math.nan
    for candidates in (grid, (10**-0.5, 10**0.5)):
        for factor in tqdm(candidates, desc="choosing C", leave=False):
            c = factor if math.isnan(best) or candidates is grid else best * factor
            accuracy[c] = float((fit(rest, c)[0].predict(x[held]) == y[held]).mean())
        best = middle_of_best(accuracy)
    classifier, converged = fit(np.arange(len(x)), best)
    if not converged:
        log.warning(
            "L-BFGS did not converge in 1000 steps at C = %g; the accuracy may be a little low.",
            best,
        )
    return LogisticFit(mean, scale, classifier, best, accuracy, converged)


def stratified_fifth(targets: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a random fifth of each class, and the other rows: (N,) class indices -> rows held out, rows left.

    Each class keeps at least one row. Rows that five does not divide are added to the next class: of three classes with
    two images each, one image is held out.

    Raises:
        UserError: no row could be held out.
    """
    rng = np.random.default_rng(seed)
    held: list[np.ndarray] = []
    seen = 0
    for label in np.unique(targets):
        rows = rng.permutation(np.flatnonzero(targets == label))
        share = (seen + len(rows)) // 5 - seen // 5
        held.append(rows[: min(share, len(rows) - 1)])
        seen += len(rows)
    out = np.concatenate(held)
    if not len(out):  # one image in each class, for instance
        raise UserError(
            f"{len(targets)} training images leave none to choose C with; give several of each class"
        )
    return out, np.setdiff1d(np.arange(len(targets)), out)


def middle_of_best(accuracy: dict[float, float]) -> float:
    """The middle one of the Cs with the best accuracy; if two are in the middle, the smaller one, which penalises more."""
    best = max(accuracy.values())
    tied = sorted(c for c, value in accuracy.items() if value == best)
    return tied[(len(tied) - 1) // 2]
