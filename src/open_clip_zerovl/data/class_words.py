"""Words for a class: one rule for `data pack`, zero-shot sets, and the labels of parquet files.

001.Black_footed_Albatross   Black footed Albatross
n02085620-Chihuahua          Chihuahua
n01440764                    tench, ImageNet's word
0                            the first line of classnames.txt; without it the class is refused
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import CLASS_NAMES, file_of_words
from open_clip_zerovl.shards.foreign import text_of

_WORDNET = re.compile(r"n\d{8}")
_ENUMERATED = re.compile(r"\d+[._\- ]+(?=\D)")


def class_order(label: str) -> tuple[Any, ...]:
    """Return the key that sorts classes: numbers first, and numbers in names by their value, `class_10` after `class_2`."""
    parts = re.split(r"(\d+)", label)
    return not label.isdigit(), [int(part) if part.isdigit() else part for part in parts], label


def names_beside(folder: Path, labels: Sequence[str] | None = None) -> dict[str, str]:
    """Return label -> name from the folder's classnames.txt, a name a line, {} without one.

    Args:
        labels: all classes in the order of `class_order`, which the lines name if there are as many; None for the numbers of
            the lines, counted from 0.
    """
    file = file_of_words(folder, CLASS_NAMES)
    lines = [] if file is None else lines_of(file)
    if labels is None:
        return {str(number): line for number, line in enumerate(lines)}
    if all(label.isdigit() for label in labels):
        return {label: lines[int(label)] for label in labels if int(label) < len(lines)}
    return dict(zip(labels, lines, strict=True)) if len(lines) == len(labels) else {}


def lines_of(file: Path) -> list[str]:
    """Read a file of a name or a template a line. Other breaks than that of a line are blanks within one."""
    text = text_of(file).rstrip()
    return [" ".join(line.split()) for line in text.split("\n")] if text else []


def class_words(
    labels: Sequence[str],
    names: Mapping[str, str],
    where: object,
    advice: str,
    *,
    numbers: bool = False,
) -> list[str]:
    """Return the words for each class.

    Args:
        names: words that are known by label.
        where: the data, for messages.
        advice: how words are given.
        numbers: take numbers for words, for templates of the caller such as "the digit {}.".

    Raises:
        UserError: a class without words: a number, or a WordNet id that is not ImageNet's.
    """
    words = {label: " ".join(names.get(label, "").split()) or _words(label) for label in labels}
    unnumbered = {label: _ENUMERATED.sub("", word, count=1) for label, word in words.items()}
    unnamed = [label for label in labels if not names.get(label)]
    enumerated = all(_ENUMERATED.match(words[label]) for label in unnamed)
    if enumerated and len(set(unnumbered.values())) == len(words):
        words |= {label: unnumbered[label] for label in unnamed}
    wordless = [
        label for label in unnamed if not numbers and not re.search(r"[^\W\d_]", words[label])
    ]
    wordless += [label for label in unnamed if _WORDNET.fullmatch(words[label])]
    if wordless:
        raise UserError(
            f"{len(wordless)} of {len(labels)} classes of {where} have no words for captions (first: {wordless[0]!r}): "
            f"{advice}; numbers are words with a --template of yours"
        )
    return list(words.values())


def _words(label: str) -> str:
    if _WORDNET.match(label):
        synset, rest = label[:9], label[9:].strip("-_. ")
        label = rest or _imagenet().get(synset, synset)
    return " ".join(re.sub(r"^\d+\.(?=\D)", "", label).replace("_", " ").split())


@cache
def _imagenet() -> dict[str, str]:
    """Return WordNet id -> open_clip's word for the class of ImageNet."""
    from open_clip import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    return dict(zip(ImageNetInfo("imagenet-1k").label_names(), IMAGENET_CLASSNAMES, strict=True))
