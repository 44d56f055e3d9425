"""`zerovl linear-probe`: how well a linear classifier does on the frozen image tower (section 5.3, A.7).

The features are the tower's pooled output *before* the projection into the shared space (CLIP's protocol).

    paper   LARS on augmented images (lars.py); test images pass the paper's transform, squash to 256 and crop 224 (2.2, A.9)
    quick   logistic regression by L-BFGS (logistic.py) on cached features of the unaugmented images
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.indexed import IndexedSet
from open_clip_zerovl.data.labelled import class_list, open_probe_set
from open_clip_zerovl.data.transforms import image_transform_train, paper_transform_of
from open_clip_zerovl.embeddings.encoder import tower_before_projection
from open_clip_zerovl.evaluate.accuracy import (
    accuracies,
    confusion_counts,
    distinct_names,
    in_percent,
    most_confused,
)
from open_clip_zerovl.evaluate.probe.features import TowerSettings, Transform, cached_features
from open_clip_zerovl.evaluate.probe.lars import (
    LarsSettings,
    head_scores,
    recorded_settings,
    train_lars,
)
from open_clip_zerovl.evaluate.probe.logistic import fit_logistic
from open_clip_zerovl.report.plot import INK, new_figure, plain, png_bytes

NAMED_CLASSES = 40  # more names do not fit beside a confusion matrix
COUNTED_CLASSES = 15  # more numbers do not fit into its cells


def run_linear_probe(
    encoder: Encoder,
    train: str,
    test: str,
    *,
    out: str | os.PathLike[str],
    way: str = "paper",
    settings: LarsSettings | None = None,
    label: str = "cls",
    amp: bool = False,
) -> dict[str, Any]:
    """Probe a checkpoint; prints a row, writes `linear_probe.json` and `confusion.png` into `out`.

    Args:
        encoder: the checkpoint; its `batch_size` is the number of images in the tower at once.
        train, test: labelled sets, see `data.labelled.open_probe_set`.
        out: folder of the results, the cached features and the state that a later call continues from.
        way: `paper` or `quick`, see the module's text.
        settings: settings of the paper's way; the quick way takes its seed.
        label: where shards keep the class.
        amp: run the tower (not the classifier) in bf16.

    Returns:
        The content of the JSON.

    Raises:
        UserError: data or a checkpoint that cannot be read or do not fit, an `out` that cannot be written, a missing package.
    """
    settings = settings or LarsSettings()
    out = Path(out)
    check_writable(out, folder=True)
    # The cheap checks come before the model is loaded.
    train_set = open_probe_set(train, "train", label=label)
    test_set = open_probe_set(test, "test", label=label)
    classes = class_list(train_set, test_set)
    loaded, preprocess, _, device = encoder.load()
    if way == "paper":
        preprocess = paper_transform_of(loaded.visual)
    tower = tower_before_projection(loaded.visual).eval()
    tower_settings = TowerSettings(encoder.batch_size, encoder.workers, device, amp)

    def features_of(images: IndexedSet, name: str) -> tuple[Tensor, Tensor]:
        return cached_features(
            tower, images, preprocess, classes, out / "features", tower_settings, name=name
        )

    test_features, test_targets = features_of(test_set, "test")
    if way == "quick":
        scores, details = _quick(*features_of(train_set, "train"), test_features, settings.seed)
    else:

        def evaluate(head: nn.Module) -> float:
            return accuracies(head_scores(head, test_features), test_targets)["top1"]

        head, history = train_lars(
            tower,
            train_set,
            _paper_augmentation(loaded.visual),
            classes,
            settings,
            tower_settings,
            state_file=out / "state.pt",
            evaluate=evaluate,
        )
        scores = head_scores(head, test_features)
        details = {"settings": recorded_settings(settings, tower_settings), "history": history}
    facts = {
        "model": str(encoder.model),
        "way": way,
        "train": {"path": train_set.path, "images": len(train_set)},
        "test": {"path": test_set.path, "images": len(test_set)},
        "classes": len(classes),
        "feature_width": test_features.shape[1],
        "test_transform": "squash 256, crop 224" if way == "paper" else "checkpoint",
    }
    named = {label: train_set.names.get(label, label) for label in classes}
    return _write(out, facts, details, named, scores, test_targets)


def _quick(
    features: Tensor, targets: Tensor, test_features: Tensor, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    """Scores (N, C) of the test set by logistic regression, and the entries on the fit for the JSON."""
    fit = fit_logistic(features, targets, seed=seed)
    return fit.scores(test_features), {
        "C": fit.chosen_c,
        "split_accuracy_by_C": {
            f"{c:.3g}": value for c, value in sorted(fit.split_accuracy.items())
        },
        "converged": fit.converged,
    }


def _paper_augmentation(visual: Any) -> Transform:
    """The paper's training transform for a probe (A.7), at the size, mean and standard deviation of a tower."""
    config = visual.preprocess_cfg
    side = config["size"] if isinstance(config["size"], int) else config["size"][0]
    return image_transform_train(
        side, config["mean"], config["std"], area=(0.08, 1.0), auto_augment="imagenet"
    )


def _write(
    out: Path,
    facts: dict[str, Any],
    details: dict[str, Any],
    named: Mapping[str, str],
    scores: Tensor,
    targets: Tensor,
) -> dict[str, Any]:
    """Write the picture and the JSON of the scores (N, C), and print the row; returns the content of the JSON."""
    names = distinct_names(named)
    metrics = accuracies(scores, targets)
    counts = confusion_counts(scores, targets)
    per_class = {
        names[index]: class_metrics for index, class_metrics in metrics.pop("per_class").items()
    }
    result = {
        **facts,
        **metrics,
        "most_confused": most_confused(counts, names),
        "per_class": per_class,
        **details,
    }
    out.mkdir(parents=True, exist_ok=True)
    way, images = result["way"], result["test"]["images"]
    title = f"{100 * metrics['top1']:.1f} % of {images} test images right ({way} linear probe of {result['model']})"
    write_atomically(out / "linear_probe.json", json.dumps(result, indent=1) + "\n")
    write_atomically(out / "confusion.png", confusion_picture(counts, names, title=title))
    words_of = {"top5": "top-5", "mean_per_class": "mean per class", "chance": "chance"}
    row = ", ".join(
        f"{words} {100 * metrics[key]:.1f} %" for key, words in words_of.items() if key in metrics
    )
    row = f"top-1 {in_percent(metrics)} %, {row}"
    print(
        f"{way} linear probe, {len(names)} classes, {images} test images: {row}\nWritten to {out}"
    )
    return result


def confusion_picture(counts: np.ndarray, names: Sequence[str], *, title: str) -> bytes:
    """A confusion matrix (C, C), row the class and column the guess, shown as shares of each class.

    Up to 40 classes are named on the axes; up to 15 classes have a percentage in each cell.

    Raises:
        UserError: matplotlib is missing.
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    classes = len(names)
    side = min(9.0, 4.2 + 0.32 * min(classes, NAMED_CLASSES))
    figure = new_figure(side + 1, side)
    axes = figure.add_subplot()
    image = axes.imshow(
        shares,
        cmap="Blues",
        vmin=0,
        vmax=1,
        interpolation="nearest" if classes <= 500 else "antialiased",
    )
    figure.colorbar(image, ax=axes, shrink=0.7, label="share of the class")
    axes.set_xlabel("guess")
    axes.set_ylabel("class")
    if classes <= NAMED_CLASSES:
        short = [plain(name if len(name) <= 24 else name[:22] + "...") for name in names]
        axes.set_xticks(
            range(classes), short, rotation=90 if classes > 6 else 30, fontsize=8, ha="center"
        )
        axes.set_yticks(range(classes), short, fontsize=8)
    if classes <= COUNTED_CLASSES:
        for row in range(classes):
            for column in range(classes):
                if counts[row, column]:
                    colour = "white" if shares[row, column] > 0.5 else INK
                    axes.text(column, row, f"{100 * shares[row, column]:.0f}", ha="center", va="center",
                              fontsize=8, color=colour)  # fmt: skip
    axes.set_title(plain(title), fontsize=10, wrap=True)
    return png_bytes(figure)
