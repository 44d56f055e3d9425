"""`zerovl zero-shot`: the accuracy of a model that classifies pictures by the captions of the classes.

Legend: `N` pictures, `C` classes, `D` embedding width.

A class is the normalised mean of the normalised embeddings of its captions; a picture belongs to the class with the largest
inner product (CLIP's ensembles; CLIP_benchmark computes the same).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.data.retrieval import parse_retrieval_data
from open_clip_zerovl.evaluate.accuracy import (
    accuracies,
    class_indices,
    confusion_counts,
    distinct_names,
    in_percent,
    is_above_chance,
    most_confused,
)
from open_clip_zerovl.evaluate.settings import ZeroShotSettings
from open_clip_zerovl.evaluate.zero_shot.sets import LabelledSet, open_labelled_set
from open_clip_zerovl.features.embed import picture_features
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.report.tables import Scores, text_table

ROWS_AT_ONCE = 4096  # of the scores in float64
SHOWN_CLASSES = 40  # of a set, in the terminal; the JSON holds all


def class_features(
    captions: Sequence[Sequence[str]],
    encode: Callable[[list[str]], Tensor],
    *,
    progress: bool = True,
) -> Tensor:
    """Embed one vector a class (C, D): the normalised mean over its captions.

    Args:
        captions: for each class.
        encode: captions -> embeddings (b, D), L2-normalised.
    """
    bar = tqdm(
        captions, desc="captions of the classes", unit=" classes", leave=False,
        disable=None if progress else True,
    )  # fmt: skip
    return torch.stack(
        [
            F.normalize(encode(list(class_captions)).cpu().mean(dim=0), dim=0)
            for class_captions in bar
        ]
    )


def classify(images: Tensor, classes: Tensor) -> Tensor:
    """Score image features (N, D) by classes (N, C), in float64 and rounded, so that equal features tie."""
    exact = classes.double().T
    return torch.cat([(block.double() @ exact).float() for block in images.split(ROWS_AT_ONCE)])


def labelled_scores(
    model: FrozenModel,
    dataset: LabelledSet,
    folder: Path | None,
    *,
    batch_size: int,
    workers: int,
    name: str,
    progress: bool = True,
) -> tuple[Tensor, Tensor]:
    """Score a model on one set: scores (N, C) and class indices (N,).

    Args:
        folder: folder for the pictures' features; None stores nothing.
        name: name of the set, for the progress bar.
        progress: show bars.

    Raises:
        UserError: a picture that cannot be read, embeddings that are not finite.
    """
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "progress": progress}
    images = picture_features(model, dataset.images, folder, name=name, **reading)
    scores = classify(images, class_features(dataset.captions(), model.texts, progress=progress))
    return scores, class_indices(dataset.images.labels, dataset.classes)


def score_labelled(
    model: FrozenModel, dataset: LabelledSet, folder: Path | None, **reading: Any
) -> dict[str, Any]:
    """Compute `accuracies` of a model on one set, with classes by name, and by source.

    Arguments as `labelled_scores`.
    """
    scores, targets = labelled_scores(model, dataset, folder, **reading)
    shown = distinct_names(dict(zip(dataset.classes, dataset.names, strict=True)))

    def metrics(rows: Tensor) -> dict[str, Any]:
        scored = accuracies(scores[rows], targets[rows])
        return {
            **scored,
            "per_class": {
                shown[index]: class_metrics for index, class_metrics in scored["per_class"].items()
            },
        }

    result = {**metrics(torch.arange(len(targets))), "classes": len(dataset.classes)}
    result["most_confused"] = most_confused(confusion_counts(scores, targets), shown)
    places: dict[str, list[int]] = {}
    for number, sample in enumerate(dataset.images.samples):
        places.setdefault(sample.source, []).append(number)
    if "" not in places:
        result["sources"] = {name: metrics(torch.tensor(rows)) for name, rows in places.items()}
    return result


def score_loaded(
    loaded: tuple[Any, Any, Any, torch.device], dataset: LabelledSet, *, encoder: Encoder, name: str
) -> dict[str, Any]:
    """Score a loaded model, as `Encoder.load` gives it, by `score_labelled` without bars.

    `encoder` has batch size and workers.
    """
    model = FrozenModel.of(name, loaded, fingerprints={"image": name})
    reading: dict[str, Any] = {"batch_size": encoder.batch_size, "workers": encoder.workers}
    return score_labelled(model, dataset, None, name=name, progress=False, **reading)


def run_zero_shot(encoder: Encoder, data: str, settings: ZeroShotSettings | None = None) -> Scores:
    """Score a checkpoint on labelled sets, and write the JSON that the settings ask for.

    Args:
        data: `name=set::name=set`; see `open_labelled_set`.

    Returns:
        Set -> its metrics, as `score_labelled` gives them.

    Raises:
        UserError: bad data or settings, a checkpoint that cannot be loaded or gives scores that are not finite, a file that
            cannot be written.
    """
    settings = settings or ZeroShotSettings()
    if settings.output is not None:
        check_writable(settings.output)
    # The cheap checks come before the model is loaded.
    sets = {
        name: open_labelled_set(str(where), settings)
        for name, where in parse_retrieval_data(data).items()
    }
    model = FrozenModel.load(encoder)
    reading: dict[str, Any] = {"batch_size": encoder.batch_size, "workers": encoder.workers}
    results = {
        name: score_labelled(model, dataset, settings.cache, name=name, **reading)
        for name, dataset in sets.items()
    }
    if settings.output is not None:
        templates = {name: list(dataset.templates) for name, dataset in sets.items()}
        content = {
            "model": encoder.model,
            "split": settings.split,
            "templates": templates,
            "results": results,
        }
        write_atomically(settings.output, json.dumps(content, indent=1) + "\n")
    return Scores(results, format_zero_shot(results))


def format_zero_shot(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format tables in percent: a row for each set and source, then one for each class.

    A sentence on each set at chance.
    """
    rows, classes, remarks = [], [], []
    for name, result in results.items():
        sources = {f"  {source}": metrics for source, metrics in result.get("sources", {}).items()}
        for label, metrics in {name: result, **sources}.items():
            top5 = f"{100 * metrics['top5']:.1f}" if "top5" in metrics else ""
            shares = (
                in_percent(metrics),
                top5,
                *(f"{100 * metrics[key]:.1f}" for key in ("mean_per_class", "chance", "commonest")),
            )
            rows.append([label, f"{metrics['images']}", f"{result['classes']}", *shares])
        if not is_above_chance(result):
            scores = f"top-1 {in_percent(result)} %, mean per class {100 * result['mean_per_class']:.1f} %"
            remarks.append(
                f"{name} is not above chance: {scores}, where guessing has {100 * result['chance']:.1f} %."
            )
        if result["classes"] <= SHOWN_CLASSES:
            class_metrics = result["per_class"].items()
            header = [f"class of {name}" if len(results) > 1 else "class", "images", "top-1 %"]
            classes += [
                "",
                text_table(
                    header,
                    [
                        [label, f"{metrics['images']}", in_percent(metrics)]
                        for label, metrics in class_metrics
                    ],
                ),
            ]
    header = [
        "set",
        "images",
        "classes",
        "top-1 %",
        "top-5 %",
        "mean per class %",
        "chance %",
        "commonest %",
    ]
    return "\n".join([text_table(header, rows), *remarks, *classes])
