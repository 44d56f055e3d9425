"""`zerovl linear-probe`: the accuracy of a linear classifier on the frozen image tower.

The features are the tower's pooled output *before* the projection into the shared space (CLIP's protocol). The classifier is
logistic regression by L-BFGS on the features of the pictures as they are.

Legend: `N` images, `F` width of the features, `C` classes.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.core.processes import take_product_buffer
from open_clip_zerovl.data.sets import class_list, open_probe_set
from open_clip_zerovl.evaluate.metrics import (
    accuracies,
    class_indices,
    distinct_names,
    in_percent,
)
from open_clip_zerovl.features.embed import picture_features
from open_clip_zerovl.features.encoder import (
    FrozenModel,
    autocast,
    module_digest,
    split_transform,
    tower_before_projection,
)

Transform = Callable[[Any], Tensor]
C_GRID = tuple(10.0**k for k in range(-5, 3))

log = logging.getLogger(__name__)


def run_linear_probe(
    encoder: Encoder,
    train: str,
    test: str,
    *,
    out: str | os.PathLike[str],
    label: str = "cls",
    amp: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Probe a model, and write `linear_probe.json` into `out`.

    Args:
        encoder: the model.
        train, test: labelled sets, see `data.sets.open_probe_set`.
        out: folder of the results and of the features, which a later call reads again.
        label: where shards keep the class.
        amp: run the tower (not the classifier) in bf16.
        seed: of the images by which C is chosen.

    Returns:
        The content of the JSON.

    Raises:
        UserError: data or a model that cannot be read or do not fit, an `out` that cannot be written, a missing package.
    """
    out = Path(out)
    check_writable(out, folder=True)
    # The cheap checks come before the model is loaded.
    train_set = open_probe_set(train, "train", label=label)
    test_set = open_probe_set(test, "test", label=label)
    classes = class_list(train_set, test_set)
    loaded, preprocess, _, device = encoder.load()
    model = probed_model(
        tower_before_projection(loaded.visual).eval(), preprocess, device=device, amp=amp
    )
    features, test_features = (
        picture_features(
            model,
            images,
            out / "features",
            batch_size=encoder.batch_size,
            workers=encoder.workers,
            name=name,
        )
        for images, name in ((train_set, "train"), (test_set, "test"))
    )
    targets, test_targets = (
        class_indices(images.labels, classes) for images in (train_set, test_set)
    )
    fit = fit_logistic(features, targets, seed=seed)
    facts = {
        "model": str(encoder.model),
        "train": {"path": train_set.path, "images": len(train_set)},
        "test": {"path": test_set.path, "images": len(test_set)},
        "feature_width": test_features.shape[1],
        "C": fit.chosen_c,
        "split_accuracy_by_C": {
            f"{c:.3g}": value for c, value in sorted(fit.split_accuracy.items())
        },
        "converged": fit.converged,
    }
    names = distinct_names({label: train_set.names.get(label, label) for label in classes})
    scored = accuracies(fit.scores(test_features), test_targets, names)
    result = {**facts, "classes": len(names), **scored}
    write_atomically(out / "linear_probe.json", json.dumps(result, indent=1) + "\n")
    return result


def probe_row(report: dict[str, Any]) -> str:
    """Format the accuracies of a report as a line."""
    words = {"top5": "top-5", "mean_per_class": "mean per class", "chance": "chance"}
    row = ", ".join(
        f"{name} {100 * report[key]:.1f} %" for key, name in words.items() if key in report
    )
    counts = f"{report['classes']} classes, {report['images']} test images"
    return f"linear probe, {counts}: top-1 {in_percent(report)} %, {row}"


# ---------------------------------------------------------------------------------------------------------------------
# Features
# ---------------------------------------------------------------------------------------------------------------------


def probed_model(
    tower: nn.Module, transform: Transform, *, device: str | torch.device = "cpu", amp: bool = False
) -> FrozenModel:
    """Wrap a tower, images (b, 3, H, W) -> features (b, F), with the transform of its pictures."""
    device = torch.device(device)
    precision = "amp_bf16" if amp else "fp32"
    digest = module_digest(tower, inputs=transform, precision=precision)
    picture_transform, mean, std = split_transform(transform)
    return FrozenModel(
        "probed",
        tower,
        device=device,
        picture_transform=picture_transform,
        mean=mean,
        std=std,
        context=autocast(device, amp),
        unit_length=False,
        fingerprints={"image": digest},
    )


# ---------------------------------------------------------------------------------------------------------------------
# The classifier
# ---------------------------------------------------------------------------------------------------------------------


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
        """Return log p of each class (N, C) for features (N, F) on the CPU."""
        x = (features.double().numpy() - self.mean) / self.scale
        return torch.from_numpy(self.classifier.predict_log_proba(x))


def fit_logistic(features: Tensor, targets: Tensor, *, seed: int = 0) -> LogisticFit:
    """Fit logistic regression by L-BFGS (scikit-learn). C is chosen on a held-out fifth, then all images are fitted.

    After the grid, its best C divided and multiplied by sqrt(10) are tried. Among several Cs with the best accuracy the middle
    one is taken: the ends of the grid, which fit nothing or penalise nothing, are the worst guesses. If all Cs are equally
    good, a warning is logged. Features are standardised, so that one grid serves any tower.

    Args:
        features: (N, F) on the CPU.
        targets: (N,) class indices 0..C-1, each of which occurs.
        seed: seed of the held-out fifth.

    Raises:
        UserError: too few images to hold some out.
    """
    import scipy.linalg
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    take_product_buffer()
    take_product_buffer(scipy.linalg.inv)
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
    best = 1.0  # the values of C_GRID are factors of it
    for candidates in (C_GRID, (10**-0.5, 10**0.5)):
        for factor in tqdm(candidates, desc="choosing C", leave=False):
            c = best * factor
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
    """Return the rows of a random fifth of each class, and the other rows, from class indices (N,).

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
    """Choose the middle one of the Cs with the best accuracy.

    Of two, the smaller one, which penalises more.
    """
    best = max(accuracy.values())
    tied = sorted(c for c, value in accuracy.items() if value == best)
    return tied[(len(tied) - 1) // 2]
