"""Labelled images: folders of classes, packed folders, webdataset shards.

`open_probe_set` reads:

    DIR                         a folder of class folders, `DIR/CLASS/picture.jpg` (ImageNet ...)
    DIR                         an output of `zerovl data pack` with classes: its training or test split
    DIR or DIR/{000..146}.tar   webdataset shards with `key.jpg` and `key.cls` (a number, as CLIP_benchmark writes them),
                                or with the class in a field of `key.json`
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.class_words import class_order, names_beside
from open_clip_zerovl.data.components import expand_shards, kind_of
from open_clip_zerovl.data.indexed import IndexedSample, IndexedSet, index_shards
from open_clip_zerovl.data.splits import shards_of_split
from open_clip_zerovl.shards.pictures import PICTURE_WORDS, list_pictures, notes_of


def class_list(train: IndexedSet, test: IndexedSet) -> list[str]:
    """Return the classes of the training set in the order of `class_order`.

    Raises:
        UserError: one class only, or a class of the test set that the training set lacks.
    """
    classes = sorted(set(train.labels), key=class_order)
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


def open_probe_set(spec: str | os.PathLike[str], role: str, *, label: str = "cls") -> IndexedSet:
    """Index a labelled set; the module's text lists the forms of `spec`.

    Args:
        role: `train` or `test`; it chooses the split of a packed folder.
        label: where shards keep the class: `cls`, or `json:FIELD`.

    Raises:
        UserError: a path that is not there or holds nothing, a sample without image or class.
    """
    spec = os.fspath(spec)
    path = Path(spec).expanduser()
    if path.is_dir() and kind_of(str(path)).kind == "packed":
        path = path / role
    in_folders = path.is_dir() and not any(path.glob("*.tar"))
    if label != "cls" and in_folders:
        raise UserError(
            f"--label {label} is for shards, and {spec} has a folder for each class; leave it out"
        )
    if in_folders:
        return _read_folder(path)
    return _read_shards(spec, shards_of_split(expand_shards(str(path)), role), label)


def _of_files(
    path: str, files: Sequence[str | os.PathLike[str]], labels: Sequence[str]
) -> IndexedSet:
    """A set of pictures that are files of their own."""
    pairs = zip(files, labels, strict=True)
    return IndexedSet(
        path, [IndexedSample(os.path.basename(file), file, label=label) for file, label in pairs]
    )


def _read_folder(path: Path) -> IndexedSet:
    classes = sorted(
        entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    listed = {name: list_pictures(path / name, path) for name in classes}
    pictures = [(file, name) for name, each in listed.items() for file in each.pictures]
    if not pictures:
        raise UserError(
            f"{path} is not a folder of class folders (no picture in {', '.join(classes[:5]) or 'a folder'}); expected "
            f"{path}/CLASS/PICTURE.jpg"
        )
    for note in notes_of(listed):
        logging.warning(f"{path}: {note}")
    labels = sorted({name for _, name in pictures}, key=class_order)
    files = _of_files(str(path), [file for file, _ in pictures], [name for _, name in pictures])
    return replace(files, names=names_beside(path, labels))


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
        raise UserError(f"the shards of {spec} hold no image ({PICTURE_WORDS})")
    names = names_beside(Path(shards[0]).parent) if kind == "cls" else {}
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
