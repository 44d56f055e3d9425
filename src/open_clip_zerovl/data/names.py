"""The choices of data flags and the syntax of named sources. Imports nothing heavy, so that help texts come at once."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

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
CAPTIONS = ("one-per-epoch", "all", "first", "joined")
POLICIES = ("replace", "fail")  # what happens at a bad sample
PIXEL_PATHS = ("pil", "arrays")  # what decodes and resizes pictures
AUTO_AUGMENTS = ("imagenet",)  # policies of AutoAugment


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
