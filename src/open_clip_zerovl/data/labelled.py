"""Labelled images for the linear probe (section 5.3, A.7): folders of classes, torchvision's datasets, webdataset shards.

`open_probe_set` reads:

    DIR                         a folder of class folders, `DIR/CLASS/picture.jpg` (ImageNet ...)
    DIR                         an output of `zerovl data pack` with classes: its training or test split
    DIR or DIR/{000..146}.tar   webdataset shards with `key.jpg` and `key.cls` (a number, as CLIP_benchmark writes them),
                                or with the class in a field of `key.json`
    food101:DIR  pets:DIR  aircraft:DIR  places365:DIR  inat2021:DIR      as torchvision lays them out
    cub:DIR                     CUB-200-2011 with its images.txt and train_test_split.txt (torchvision does not know it)
    inat17:DIR                  iNaturalist 2017 with its train2017.json and val2017.json (torchvision knows no split of it)

Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torchvision.datasets as tvd

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.components import expand_shards, kind_of
from open_clip_zerovl.data.indexed import IndexedSample, IndexedSet, index_shards
from open_clip_zerovl.data.names import CLASS_NAMES, file_of_words
from open_clip_zerovl.shards.foreign import text_of
from open_clip_zerovl.shards.members import IMAGE_EXTENSIONS

ROLES = ("train", "test")


def class_list(train: IndexedSet, test: IndexedSet) -> list[str]:
    """The classes of the training set: numbers first, in numerical order, then names.

    Raises:
        UserError: one class only, or a class of the test set that the training set lacks.
    """
    classes = sorted(
        set(train.labels),
        key=lambda label: (0, int(label), "") if label.isdigit() else (1, 0, label),
    )
    if len(classes) < 2:
        raise UserError(
            f"{train.path} has the one class {classes[0]!r}; a probe needs at least two to tell apart"
        )
    if unknown := sorted(set(test.labels) - set(classes)):
        raise UserError(
            f"{test.path} has {len(unknown)} classes that {train.path} lacks, first {unknown[0]!r}; give a training and "
            "a test set of the same classes"
        )
    return classes


def is_dataset(spec: str) -> bool:
    """True for `NAME:DIR`, a dataset with splits of its own."""
    kind, colon, _ = spec.partition(":")
    return bool(colon) and "/" not in kind


def open_probe_set(spec: str | os.PathLike[str], role: str, *, label: str = "cls") -> IndexedSet:
    """Index a labelled set; the module's text lists the forms of `spec`.

    Args:
        role: `train` or `test`; it chooses the split of a dataset that has splits of its own.
        label: where shards keep the class: `cls`, or `json:FIELD`.

    Raises:
        UserError: a path that is not there or holds nothing, a dataset that is incomplete, a sample
            without image or class.
    """
    spec = os.fspath(spec)
    path = Path(spec).expanduser()
    if path.is_dir() and kind_of(str(path)).kind == "packed":
        path = path / role
    in_folders = path.is_dir() and not any(path.glob("*.tar"))
    if label != "cls" and (in_folders or is_dataset(spec)):
        raise UserError(
            f"--label {label} is for shards, and {spec} has a folder or a list for its classes; leave it out"
        )
    if is_dataset(spec):
        kind, _, root = spec.partition(":")
        if kind not in _DATASETS:
            raise UserError(
                f"{spec!r} names the unknown dataset {kind!r}; known: {', '.join(_DATASETS)}, or give a folder"
            )
        return _open_dataset(kind, Path(root).expanduser(), role)
    if in_folders:
        return _read_folder(path)
    return _read_shards(spec, expand_shards(str(path)), label)


def _of_files(
    path: str, files: Sequence[str | os.PathLike[str]], labels: Sequence[str]
) -> IndexedSet:
    """A set of pictures that are files of their own."""
    pairs = zip(files, labels, strict=True)
    return IndexedSet(
        path, [IndexedSample(os.path.basename(file), file, label=label) for file, label in pairs]
    )


def _read_folder(path: Path) -> IndexedSet:
    try:
        folder = tvd.ImageFolder(str(path))
    except FileNotFoundError as error:  # no class folder, or one without a picture
        raise UserError(
            f"{path} is not a folder of class folders ({str(error).splitlines()[0]}); expected {path}/CLASS/PICTURE.jpg"
        ) from error
    return _of_files(
        str(path), [file for file, _ in folder.samples], [folder.classes[i] for i in folder.targets]
    )


# ---------------------------------------------------------------------------------------------------------------------
# Datasets with splits of their own: (root, role) -> files and classes of the images
# ---------------------------------------------------------------------------------------------------------------------

Listing = tuple[Sequence[str | os.PathLike[str]], Sequence[str]]


def _open_dataset(kind: str, root: Path, role: str) -> IndexedSet:
    try:
        files, labels = _DATASETS[kind](root, role)
        if not files:
            raise ValueError(f"it lists no image for {role}")
        if not Path(files[0]).is_file():
            raise ValueError(f"{files[0]}, its first image, is not there")
    except (RuntimeError, OSError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = reason.replace(" You can use download=True to download it", "").rstrip(".")
        raise UserError(
            f"{kind} is not complete under {root} ({reason}); nothing is downloaded here: fetch and unpack it first, as "
            "docs/probing.md shows"
        ) from error
    return _of_files(f"{kind}:{root} ({role})", files, labels)


def _torchvision(
    dataset: Callable[..., Any], train: str, test: str, files: str, targets: str, **options: Any
) -> Callable[[Path, str], Listing]:
    """The listing of a dataset of torchvision, whose attributes hold the files and the numbers of their classes.

    The files are opened by this package: torchvision opens pictures of any format.
    """

    def listing(root: Path, role: str) -> Listing:
        split = train if role == "train" else test
        opened = dataset(str(root), split=split, download=False, **options)
        labels = [opened.classes[target] for target in getattr(opened, targets)]
        listed = getattr(opened, files)
        return [file[0] if isinstance(file, tuple) else file for file in listed], labels

    return listing


def _inat2021(root: Path, role: str) -> Listing:
    version = "2021_train" if role == "train" else "2021_valid"
    opened = tvd.INaturalist(str(root), version=version, download=False)
    labels = [opened.all_categories[category] for category, _ in opened.index]
    names = [name for _, name in opened.index]
    return [Path(opened.root, *place) for place in zip(labels, names, strict=True)], labels


def _inat17(root: Path, role: str) -> Listing:
    annotations = root / ("train2017.json" if role == "train" else "val2017.json")
    content = json.loads(annotations.read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in content["categories"]}
    category_of = {row["image_id"]: names[row["category_id"]] for row in content["annotations"]}
    images = content["images"]
    return [root / image["file_name"] for image in images], [
        category_of[image["id"]] for image in images
    ]


def _cub(root: Path, role: str) -> Listing:
    root = root / "CUB_200_2011" if (root / "CUB_200_2011").is_dir() else root

    def column(name: str) -> dict[str, str]:
        """The second column of a file by the first, an image's number."""
        rows = (
            line.split(maxsplit=1)
            for line in (root / name).read_text(encoding="utf-8").splitlines()
        )
        return {row[0]: row[1].strip() for row in rows if row}

    of_training, files = column("train_test_split.txt"), column("images.txt")
    chosen = [
        file
        for number, file in files.items()
        if of_training[number] == ("1" if role == "train" else "0")
    ]
    return [root / "images" / file for file in chosen], [file.split("/")[0] for file in chosen]


_DATASETS: dict[str, Callable[[Path, str], Listing]] = {
    "cub": _cub,
    "food101": _torchvision(tvd.Food101, "train", "test", "_image_files", "_labels"),
    "pets": _torchvision(tvd.OxfordIIITPet, "trainval", "test", "_images", "_labels"),
    "aircraft": _torchvision(tvd.FGVCAircraft, "trainval", "test", "_image_files", "_labels"),
    # The 256 px edition, with its validation split: the test split has no labels.
    "places365": _torchvision(
        tvd.Places365, "train-standard", "val", "imgs", "targets", small=True
    ),
    "inat2021": _inat2021,
    "inat17": _inat17,
}


# ---------------------------------------------------------------------------------------------------------------------
# Shards
# ---------------------------------------------------------------------------------------------------------------------


def _read_shards(spec: str, shards: Sequence[str], label: str) -> IndexedSet:
    """The images of shards. Only tar headers and classes are read here; an image is read on access."""
    kind, _, name = label.partition(":")
    other = "json:FIELD" if kind == "cls" else "cls"
    advice = f"if the class is elsewhere, give --label {other} (zero-shot and linear-probe have it)"
    samples = [
        replace(sample, label=_class(content, name, f"{sample.key}.{kind} of {sample.file}"))
        for sample, content in index_shards(shards, kind, advice=advice)
    ]
    if not samples:
        raise UserError(f"the shards of {spec} hold no image ({', '.join(IMAGE_EXTENSIONS)})")
    names = _class_names(Path(shards[0]).parent) if kind == "cls" else {}
    return IndexedSet(spec, samples, names)


def _class(content: bytes, name: str, where: str) -> str:
    try:
        if not name:
            return str(int(content.decode().strip()))
        value = json.loads(content)[name]
    except (ValueError, KeyError, TypeError) as error:
        expected = f"JSON with a field {name!r}" if name else "a class number"
        raise UserError(f"{where} is not {expected}") from error
    if not isinstance(value, (str, int)):
        raise UserError(
            f"the field {name!r} of {where} is {value!r}; a class is a word or a number"
        )
    return str(value)


def _class_names(folder: Path) -> dict[str, str]:
    """Class number -> name, from `classnames.txt` (one name a line)."""
    file = file_of_words(folder, CLASS_NAMES)
    lines = [] if file is None else text_of(file).splitlines()
    return {str(i): name for i, name in enumerate(lines)}
