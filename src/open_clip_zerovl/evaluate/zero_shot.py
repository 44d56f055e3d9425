"""`zerovl zero-shot`: the accuracy of a model that classifies pictures by the captions of the classes.

Legend: `N` pictures, `C` classes, `D` embedding width.

A class is the normalised mean of the normalised embeddings of its captions; a picture belongs to the class with the largest
inner product (CLIP's ensembles; CLIP_benchmark computes the same). Labelled sets, besides what `data.sets.open_probe_set`
reads:

    SET/SPLIT/              if there is a folder of the split's name, it is the set
    SET/SOURCE/CLASS/*.jpg  pictures of several sources, scored together and one by one
    SET/classnames.txt, SET/zeroshot_classification_templates.txt, SET/SPLIT/*.tar      CLIP_benchmark's webdataset layout
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from open_clip import SIMPLE_IMAGENET_TEMPLATES
from torch import Tensor
from tqdm.auto import tqdm

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import check_writable, digest_of, write_atomically
from open_clip_zerovl.data.names import CLASS_NAMES, TEMPLATES, class_words, file_of_words, lines_of
from open_clip_zerovl.data.sets import IndexedSet, class_list, open_probe_set, parse_retrieval_data
from open_clip_zerovl.data.splits import split_of_word
from open_clip_zerovl.evaluate.metrics import (
    accuracies,
    class_indices,
    distinct_names,
    in_percent,
    is_above_chance,
)
from open_clip_zerovl.evaluate.settings import ZeroShotSettings
from open_clip_zerovl.features.embed import picture_features
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.report.tables import Scores, text_table
from open_clip_zerovl.shards.pictures import IMAGE_EXTENSIONS
from open_clip_zerovl.shards.texts import text_of

#: CLIP's short list of seven, which its authors found to be nearly as good as all eighty.
CLIP_TEMPLATES = tuple(template("{}") for template in SIMPLE_IMAGENET_TEMPLATES)


@dataclass(frozen=True)
class LabelledSet:
    """Pictures with one class each.

    Attributes:
        classes: labels in the order of their indices, C of them.
        names: (C,) words for the classes.
        templates: captions with `{}` (or CLIP_benchmark's `{c}`) in the place of the class.
    """

    images: IndexedSet
    classes: Sequence[str]
    names: Sequence[str]
    templates: Sequence[str]

    def content(self) -> str:
        """Hash pictures, classes, words and templates, so that a copy is the same set."""
        words = [list(self.classes), list(self.names), list(self.templates)]
        return digest_of(self.images.content(), words)

    def captions(self) -> list[list[str]]:
        """List the captions of each class, one for each template."""
        return [
            [name.join(re.split(r"\{c?\}", template)) for template in self.templates]
            for name in self.names
        ]


def open_labelled_set(where: str, settings: ZeroShotSettings | None = None) -> LabelledSet:
    """Index a labelled set.

    The module's text lists the forms of `where`.

    Raises:
        UserError: what `open_probe_set` refuses, a split that the set does not have, a template without a place for the class,
            class names that do not fit, classes without words.
    """
    settings = settings or ZeroShotSettings()
    root = place = Path(where).expanduser()
    if (root / settings.split).is_dir():
        place = root / settings.split
    split = "train" if settings.split == "train" else "test"
    parts = _sources_of(place)
    others = [part.name for part in parts if split_of_word(part.name) is not None]
    if place == root and others:
        raise UserError(
            f"{root} has no folder {settings.split!r}, but {', '.join(others)}: name one of these folders as the set, or "
            "choose one with --split (zero-shot has it)"
        )
    if (
        place == root and settings.split != "test"
    ):  # the default is the whole of a set without splits
        raise UserError(
            f"{where} has no split {settings.split!r}; leave --split out to score all of it"
        )
    if parts:
        opened = {part.name: open_probe_set(part, split, label=settings.label) for part in parts}
        images = IndexedSet(
            str(place),
            [
                replace(sample, source=name)
                for name, part in opened.items()
                for sample in part.samples
            ],
            next(iter(opened.values())).names,
        )
    else:
        images = open_probe_set(where if place == root else place, split, label=settings.label)
    folder = place if place.is_dir() else Path(images.files[0]).parent
    return LabelledSet(
        images,
        *_classes(images, settings.class_names, numbers=bool(settings.template)),
        _templates(settings, folder),
    )


def _classes(
    images: IndexedSet, given: Path | None, *, numbers: bool
) -> tuple[list[str], list[str]]:
    """List the labels in the order of their indices, and the words for each.

    Raises:
        UserError: labels that classnames.txt does not name, numbers or WordNet ids without words.
    """
    outside = sorted({*images.labels} - images.names.keys())
    classes = class_list(images, images) if outside else list(images.names)
    if given is not None:
        return classes, _class_names(given, classes)
    if outside and images.names:
        raise UserError(
            f"{CLASS_NAMES} names the classes 0 to {len(images.names) - 1}, and {images.path} has the label {outside[0]!r}: "
            "add the missing names, count the labels from 0, or give --class-names (zero-shot has it)"
        )
    advice = f"name them by their folders, in {CLASS_NAMES} beside the pictures, or with --class-names (zero-shot has it)"
    return classes, class_words(classes, images.names, images.path, advice, numbers=numbers)


def _sources_of(folder: Path) -> list[Path]:
    """Find the folders of sources, each with folders of classes.

    Returns:
        [] if the pictures lie one level higher.
    """
    if not folder.is_dir():
        return []
    parts = sorted(
        part for part in folder.iterdir() if part.is_dir() and not part.name.startswith(".")
    )
    inside = [
        [entry for entry in part.iterdir() if not entry.name.startswith(".")] for part in parts
    ]
    pictures = {f".{extension}" for extension in IMAGE_EXTENSIONS}
    two_levels = all(
        any(entry.is_dir() for entry in entries)
        and not any(entry.suffix.lower() in pictures for entry in entries)
        for entries in inside
    )
    return parts if two_levels and not any(folder.glob("*.tar")) else []


def _class_names(file: Path, classes: Sequence[str]) -> list[str]:
    try:
        if file.suffix == ".json":
            table = json.loads(text_of(file))
            names = [str(table[label]).strip() for label in classes]
        else:
            names = lines_of(file)
        if len(names) != len(classes):
            raise ValueError(f"it has {len(names)} lines")
        if "" in names:
            raise ValueError(f"the name of class {classes[names.index('')]!r} is empty")
        return names
    except Exception as error:
        raise UserError(
            f"--class-names {file} does not name the {len(classes)} classes ({type(error).__name__}: {error}); give JSON of "
            f"label and name, or a name a line in the order of the labels: {', '.join(classes)[:200]}"
        ) from error


# A caption in quotes, as open_clip's and CLIP's own lists write it: lambda c: f"a photo of a {c}.",
_PYTHON = re.compile(r"""^(?:lambda c: *)?f?(["'])(.+)\1,?$""")


def _templates(settings: ZeroShotSettings, folder: Path) -> tuple[str, ...]:
    """Read the templates of `--template`, captions or files of them.

    Without it those of the set's folder, or CLIP's short list.
    """
    template_file = file_of_words(folder, TEMPLATES)
    given: list[str] = []
    for template in settings.template or (
        CLIP_TEMPLATES if template_file is None else (str(template_file),)
    ):
        is_file = "{" not in template and Path(template).is_file()
        lines = lines_of(Path(template)) if is_file else [template]
        given += [_PYTHON.sub(r"\2", line.strip()) for line in lines if line.strip()]
    if wrong := [template for template in given or [""] if not re.search(r"\{c?\}", template)]:
        raise UserError(
            f"the template {wrong[0]!r} is no file and has no place for the class; write {{}} there: 'a photo of a {{}}'"
        )
    return tuple(given)


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


def score_labelled(
    model: FrozenModel,
    dataset: LabelledSet,
    folder: Path | None,
    *,
    batch_size: int,
    workers: int,
    name: str,
    progress: bool = True,
) -> dict[str, Any]:
    """Compute `accuracies` of a model on one set, and by source.

    Args:
        folder: folder for the pictures' features. None stores nothing.
        name: name of the set, for the progress bar.
        progress: show bars.

    Raises:
        UserError: a picture that cannot be read, embeddings that are not finite.
    """
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "progress": progress}
    images = picture_features(model, dataset.images, folder, name=name, **reading)
    scores = classify(images, class_features(dataset.captions(), model.texts, progress=progress))
    targets = class_indices(dataset.images.labels, dataset.classes)
    shown = distinct_names(dict(zip(dataset.classes, dataset.names, strict=True)))
    result = {**accuracies(scores, targets, shown), "classes": len(dataset.classes)}
    places: dict[str, list[int]] = {}
    for number, sample in enumerate(dataset.images.samples):
        places.setdefault(sample.source, []).append(number)
    if "" not in places:
        result["sources"] = {
            name: accuracies(scores[rows], targets[rows], shown) for name, rows in places.items()
        }
    return result


def score_loaded(
    loaded: tuple[Any, Any, Any, torch.device], dataset: LabelledSet, *, encoder: Encoder, name: str
) -> dict[str, Any]:
    """Score a loaded model, as `Encoder.load` gives it, by `score_labelled` without bars.

    `encoder` has batch size and workers.
    """
    model = FrozenModel.of(name, loaded)
    reading: dict[str, Any] = {"batch_size": encoder.batch_size, "workers": encoder.workers}
    return score_labelled(model, dataset, None, name=name, progress=False, **reading)


def run_zero_shot(encoder: Encoder, data: str, settings: ZeroShotSettings | None = None) -> Scores:
    """Score a checkpoint on labelled sets, and write the JSON that the settings ask for.

    Args:
        data: `name=set::name=set`. See `open_labelled_set`.

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
