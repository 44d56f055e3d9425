"""The labelled sets of Tables 11 and 12 (5.3, A.7), as their authors publish them; nothing is downloaded.

    food101:DIR  pets:DIR  aircraft:DIR  places365:DIR  inat2021:DIR      as torchvision lays them out
    cub:DIR                     CUB-200-2011 with its images.txt and train_test_split.txt (torchvision does not know it)
    inat17:DIR                  iNaturalist 2017 with its train2017.json and val2017.json (torchvision knows no split of it)

Any other text is a set of `zerovl linear-probe`, such as a folder of class folders (ImageNet).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torchvision.datasets as tvd

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sets import IndexedSet, Picture, open_probe_set

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
    pairs = zip(files, labels, strict=True)
    return IndexedSet(
        f"{kind}:{root} ({role})",
        [Picture(os.path.basename(file), file, label=label) for file, label in pairs],
    )


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


def open_set(spec: str, role: str) -> IndexedSet:
    """Index a labelled set; the module's text lists the forms of `spec`.

    Args:
        role: `train` or `test`; it chooses the split of a dataset that has splits of its own.

    Raises:
        UserError: a set that is not there or is incomplete.
    """
    kind, colon, root = spec.partition(":")
    if not colon or "/" in kind:
        return open_probe_set(spec, role)
    if kind not in _DATASETS:
        raise UserError(
            f"{spec!r} names the unknown dataset {kind!r}; known: {', '.join(_DATASETS)}, or give a folder"
        )
    return _open_dataset(kind, Path(root).expanduser(), role)
