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
from tqdm import tqdm

from open_clip_zerovl.errors import UserError

C_GRID = tuple(10.0**k for k in range(-5, 3))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogisticFit:
    """A fitted logistic regression on standardised features.

    `chosen_c` is scikit-learn's C (inverse strength of the L2 penalty), `split_accuracy` the accuracy by C on the fifth
    of the training set that chose it.
    """

    mean: np.ndarray  # (F,)
    scale: np.ndarray  # (F,)
    classifier: Any
    chosen_c: float
    split_accuracy: dict[float, float]
    converged: bool

    def scores(self, features: Tensor) -> Tensor:
        """log p of each class, (n, C)."""
        x = (features.double().numpy() - self.mean) / self.scale
        return torch.from_numpy(self.classifier.predict_log_proba(x))


def fit_logistic(features: Tensor, targets: Tensor, *, seed: int = 0, grid: Sequence[float] = C_GRID) -> LogisticFit:
    """L-BFGS logistic regression (scikit-learn); C by the accuracy on a fifth of each class, then fitted again on everything.

    After the grid, half-decades beside its best C are tried too. Of equally good ones the middle C is taken: the ends of the
    grid, no fit and no penalty, are the worst guesses. Where all are equally good, a warning says that nothing was chosen.
    Features are standardised, so that one grid serves any tower.

    Args:
        features: (N, F) on the CPU.
        targets: (N,) class indices 0..C-1, each there at least once.

    Raises:
        UserError: scikit-learn is missing, fewer than 5 images, or one class only.
    """
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise UserError("the quick probe needs scikit-learn; pip install 'open_clip_zerovl[demo]'") from error
    if len(features) < 5:
        raise UserError(f"a fifth of {len(features)} training images cannot choose C; give at least 5")
    x, y = features.double().numpy(), targets.numpy()
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)  # a feature that never changes says nothing, and must not become NaN
    x = (x - mean) / scale
    if len(np.unique(y)) < 2:
        raise UserError("the training images show one class only; a probe needs at least two to tell apart")
    held, rest = stratified_fifth(y, seed)

    def fit(rows: np.ndarray, c: float) -> tuple[Any, bool]:
        classifier = LogisticRegression(C=c, max_iter=1000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            classifier.fit(x[rows], y[rows])
        return classifier, not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)

    accuracy: dict[float, float] = {}
    best = math.nan
    for candidates in (grid, (10**-0.5, 10**0.5)):
        for factor in tqdm(candidates, desc="choosing C", leave=False):
            c = factor if math.isnan(best) or candidates is grid else best * factor
            accuracy[c] = float((fit(rest, c)[0].predict(x[held]) == y[held]).mean())
        best = middle_of_best(accuracy)
    if len(set(accuracy.values())) == 1:
        log.warning(
            "Every C gives %.1f %% on the fifth of the training images that chooses it (%d images), so that C = %g is a guess; "
            "give more images.", 100 * accuracy[best], len(held), best,
        )  # fmt: skip
    classifier, converged = fit(np.arange(len(x)), best)
    if not converged:
        log.warning("L-BFGS did not converge in 1000 steps at C = %g; the accuracy may be a little low.", best)
    return LogisticFit(mean, scale, classifier, best, accuracy, converged)


def stratified_fifth(targets: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a random fifth of each class, and the others: (N,) class indices -> rows held out, rows left.

    Each class keeps a row at least. Small classes share the fifth: of five classes with one to four images each, about a fifth
    of all images is held out, from some of them.
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
    if not len(out):  # a fifth of five classes with one image each
        raise UserError(f"{len(targets)} training images leave none to choose C with; give several of each class")
    return out, np.setdiff1d(np.arange(len(targets)), out)


def middle_of_best(accuracy: dict[float, float]) -> float:
    """The middle of the Cs with the best accuracy; of an even number of them the smaller, which penalises more."""
    best = max(accuracy.values())
    tied = sorted(c for c, value in accuracy.items() if value == best)
    return tied[(len(tied) - 1) // 2]
