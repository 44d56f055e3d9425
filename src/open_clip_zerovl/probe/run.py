"""`zerovl linear-probe`: how well a linear classifier does on the frozen image tower (section 5.3, A.7).

The features are the tower's pooled output *before* the projection into the shared space (CLIP's protocol).

`paper`  LARS on augmented images (lars.py).
`quick`  features of the unaugmented images, cached; logistic regression by L-BFGS (logistic.py); C chosen on a fifth of the
         training set.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from open_clip_zerovl.checkpoints.loading import choose_device, load_model
from open_clip_zerovl.data.transforms import image_transform_train
from open_clip_zerovl.errors import UserError
from open_clip_zerovl.figures.plot import require_matplotlib
from open_clip_zerovl.files import check_writable, write_atomically
from open_clip_zerovl.probe.charts import confusion_picture
from open_clip_zerovl.probe.features import cached_features, tower_before_projection
from open_clip_zerovl.probe.lars import LarsSettings, train_lars
from open_clip_zerovl.probe.logistic import fit_logistic
from open_clip_zerovl.probe.scores import classification_metrics, head_scores, most_confused
from open_clip_zerovl.probe.sets import class_list, open_probe_set


def run_linear_probe(
    model: str,
    train: str,
    test: str,
    *,
    out: str | os.PathLike[str],
    way: str = "paper",
    settings: LarsSettings | None = None,
    label: str = "cls",
    model_name: str | None = None,
    text_model: str | None = None,
    num_workers: int = 0,
    device: str = "auto",
    amp: bool = False,
) -> dict[str, Any]:
    """Probe a checkpoint; prints a row, writes `linear_probe.json` and `confusion.png` into `out`.

    Args:
        model: what `checkpoints.load_model` takes.
        train, test: what `sets.open_probe_set` takes.
        out: folder of the results, the cache of features and the state that a later call goes on from.
        way: `paper` or `quick`, see the module's text. `settings` belong to the paper's way; their seed and micro-batch
            to both.
        label: where shards keep the class.
        amp: run the tower (not the classifier) in bf16.

    Returns:
        What the JSON holds.

    Raises:
        UserError: whatever of this cannot be read, does not fit, or is missing.
    """
    if way not in ("paper", "quick"):
        raise UserError(f"a linear probe goes the 'paper' or the 'quick' way, not {way!r}")
    require_matplotlib()  # before hours of training
    settings = settings or LarsSettings()
    out = Path(out)
    check_writable(out, folder=True)
    # The cheap checks come before the model is loaded.
    train_set, test_set = open_probe_set(train, "train", label=label), open_probe_set(test, "test", label=label)
    classes = class_list(train_set, test_set)
    where = choose_device(device)
    loaded, preprocess, _ = load_model(model, model_name=model_name, text_model=text_model, device=where)
    tower = tower_before_projection(loaded.visual).eval()
    common: dict[str, Any] = {"num_workers": num_workers, "device": where, "amp": amp}
    cache: dict[str, Any] = {**common, "folder": out / "features", "micro_batch": settings.micro_batch}
    test_features, test_targets = cached_features(tower, test_set, preprocess, classes, name="test", **cache)
    details: dict[str, Any]
    if way == "quick":
        features, targets = cached_features(tower, train_set, preprocess, classes, name="train", **cache)
        fit = fit_logistic(features, targets, seed=settings.seed)
        scores = fit.scores(test_features)
        details = {
            "C": fit.chosen_c,
            "split_accuracy_by_C": {f"{c:.3g}": value for c, value in sorted(fit.split_accuracy.items())},
            "converged": fit.converged,
        }
    else:
        visual_cfg = loaded.visual.preprocess_cfg
        side = visual_cfg["size"] if isinstance(visual_cfg["size"], int) else visual_cfg["size"][0]
        augment = image_transform_train(
            side, visual_cfg["mean"], visual_cfg["std"], area=(0.08, 1.0), auto_augment="imagenet"
        )

        def evaluate(head: nn.Module) -> float:
            return classification_metrics(head_scores(head, test_features), test_targets)[0]["top1"]

        head, history = train_lars(
            tower, train_set, augment, classes, settings, state_file=out / "state.pt", evaluate=evaluate, **common
        )
        scores = head_scores(head, test_features)
        details = {"settings": asdict(settings), "history": history}
    metrics, counts = classification_metrics(scores, test_targets)
    names = [train_set.names.get(label, label) for label in classes]
    result = {
        "model": str(model),
        "way": way,
        "train": {"path": train_set.path, "images": len(train_set)},
        "test": {"path": test_set.path, "images": len(test_set)},
        "classes": len(classes),
        "feature_width": test_features.shape[1],
        **metrics,
        "most_confused": most_confused(counts, names),
        **details,
    }
    out.mkdir(parents=True, exist_ok=True)
    title = f"{100 * metrics['top1']:.1f} % of {len(test_set)} test images right ({way} linear probe of {model})"
    write_atomically(out / "confusion.png", confusion_picture(counts, names, title=title))
    write_atomically(out / "linear_probe.json", json.dumps(result, indent=1) + "\n")
    row = "  ".join(f"{name} {100 * value:.1f} %" for name, value in metrics.items())
    print(f"{way} linear probe, {len(classes)} classes, {len(test_set)} test images: {row}\nWritten to {out}")
    return result
