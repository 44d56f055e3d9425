"""Captions of classes: templates with the words of a class in place of `{}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.names import CLASS_NAMES

#: Caption of a class. One alone: pictures of a class then share it, which `--positives caption` needs.
TEMPLATE = "a photo of a {}."
#: CLIP's short list for zero-shot classification, an ensemble over the texts of a class.
ZERO_SHOT_TEMPLATES = (
    *("itap of a {}.", "a bad photo of the {}.", "a origami {}.", "a photo of the large {}."),
    *("a {} in a video game.", "art of the {}.", "a photo of the small {}."),
)
NAME_THEM = f"name the classes by their folders, or in a {CLASS_NAMES} there (a name a line, in the order of the classes)"
# A word that is spoken with a vowel first: an hourglass, an umbrella; but a unicycle, a European.
_VOWEL_FIRST = re.compile(r"hour|heir|honest|honou?r|(?!uni|use|uk|eu|one\b)[aeiou]", re.IGNORECASE)


class ClassTemplates:
    """The templates of a call.

    Args:
        given: those of the command line; None for TEMPLATE.

    Attributes:
        captions: templates of the captions of training.
        zero_shot: those of zero-shot classification.
        given: whether the command line gives them.

    Raises:
        UserError: a template without a place for the class, or with several.
    """

    def __init__(self, given: Sequence[str] | None) -> None:
        self.given = given is not None
        self.captions = tuple(given or (TEMPLATE,))
        self.zero_shot = tuple(given or ZERO_SHOT_TEMPLATES)
        if wrong := [template for template in self.captions if template.count("{}") != 1]:
            raise UserError(
                f"--template {wrong[0]!r} has no place for the class, or several: write {{}} once, as in {TEMPLATE!r}"
            )

    def of(self, words: str) -> list[str]:
        """Return the captions of a class."""
        return [class_caption(template, words) for template in self.captions]


def class_caption(template: str, label: str) -> str:
    """Put a class in place of `{}`; "a" before it becomes "an" where the class begins with a spoken vowel."""
    if _VOWEL_FIRST.match(label):
        template = re.sub(r"\b([Aa]) \{\}", r"\1n {}", template)
    return template.replace("{}", label)
