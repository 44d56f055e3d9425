"""The choices of data flags, the syntax of named sources, and the words for a class. Imports nothing heavy, so that help texts
come at once.

`data pack`, zero-shot sets and the labels of parquet files take the words for a class by one rule:

    001.Black_footed_Albatross   Black footed Albatross
    n02085620-Chihuahua          Chihuahua
    n01440764                    tench, ImageNet's word
    0                            the first line of classnames.txt; without it the class is refused
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError

NAME = re.compile(r"(?P<name>[^\W_][\w.-]*)=(?P<shards>.*)", re.DOTALL)

#: Characters and schemes of a pattern or URL; the path of one local file or folder has none of them.
_PATTERN = re.compile(r"[{}*?@#\[\]]|^[A-Za-z][A-Za-z0-9+.-]*:")

TEMPLATES = "zeroshot_classification_templates.txt"  # beside it, if given: a template a line, as CLIP_benchmark has them
CLASS_NAMES = (
    "classnames.txt"  # of a labelled set and of pairs packed from folders of classes: a name a line
)
FEWEST_PICTURES = 40  # of which some can be held out
# of an image with several: one of them each epoch, each a sample of its own, the first alone, or all in one text
PER_EPOCH = "one-per-epoch"
CAPTIONS = (PER_EPOCH, "all", "first", "joined")
POLICIES = ("replace", "fail")  # what happens at a bad sample
AUTO_AUGMENTS = ("imagenet",)  # policies of AutoAugment
_WORDNET = re.compile(r"n\d{8}")
_ENUMERATED = re.compile(r"\d+[._\- ]+(?=\D)")


def file_of_words(folder: Path, name: str) -> Path | None:
    """Find CLASS_NAMES or TEMPLATES of a labelled set: in its folder or, as CLIP_benchmark has it, above its split."""
    return next((file for file in (folder / name, folder.parent / name) if file.is_file()), None)


@functools.cache
def caption_fields(captions: str | None) -> tuple[tuple[str, float], ...]:
    """Parse the fields from which captions are drawn, each with its probability, () for values of another form.

        caption_fields("txt=0.5,syn=0.5")  ->  (("txt", 0.5), ("syn", 0.5))

    A field is `txt`, KEY of the sample's json, or MEMBER:KEY of another JSON member (`syn.json:syn_text`).

    Raises:
        UserError: a share that is not a positive number, shares that do not sum to 1, or a field given twice.
    """
    if captions is None or "=" not in captions:
        return ()
    fields = []
    for part in captions.split(","):
        name, _, text = part.strip().partition("=")
        try:
            share = float(text)
        except ValueError:
            share = float("nan")
        if not name or not 0 < share <= 1:
            raise UserError(
                f"--captions {captions}: {part!r} does not have the form FIELD=SHARE with a share above 0; "
                "write txt=0.5,KEY=0.5"
            )
        fields.append((name, share))
    total = sum(share for _, share in fields)
    if abs(total - 1) > 1e-6 or len(dict(fields)) < len(fields):
        raise UserError(
            f"--captions {captions}: each field is given once, and the shares sum to 1, not to {total:g}"
        )
    return tuple(fields)


def field_names(captions: str | None) -> tuple[str, ...]:
    """Return the fields that `--captions` names, () for none."""
    return tuple(name for name, _ in caption_fields(captions))


def is_captions(captions: str) -> bool:
    """Return whether a `--captions` value is in CAPTIONS, or of the form of `caption_fields`. UserError as there."""
    return captions in CAPTIONS or bool(field_names(captions))


def is_named(train_data: str | None) -> bool:
    """Return whether a `--train-data` value names at least one of its sources, and so selects this package's mixture."""
    return bool(train_data) and any(NAME.fullmatch(part) for part in str(train_data).split("::"))


def name_of_folder(folder: str, given: str) -> str:
    """Name a source by its folder.

    Args:
        given: as it was written.

    Raises:
        UserError: the folder's name cannot be a source's.
    """
    name = os.path.basename(folder)
    if not NAME.fullmatch(f"{name}="):
        raise UserError(
            f"the name of the folder of {given!r} cannot be a source's name; write NAME={given}"
        )
    return name


def check_paths(train_data: str) -> None:
    """Look at named sources quickly, before anything is loaded for reading them.

    Raises:
        UserError: a folder or file of this machine, written without braces, that is not there.
    """
    for component in train_data.split("::"):
        match = NAME.fullmatch(component)
        shards = match["shards"] if match else ""
        if (
            shards
            and not _PATTERN.search(shards)
            and not os.path.exists(os.path.expanduser(shards))
        ):
            assert match is not None
            raise UserError(
                f"source {match['name']!r}: {shards} does not exist; correct the path or the range"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Words for a class
# ---------------------------------------------------------------------------------------------------------------------


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
    from open_clip_zerovl.shards.texts import text_of  # loads the readers of archives

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
