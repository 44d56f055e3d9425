"""The choices of data flags and the syntax of named sources. Imports nothing heavy, so that help texts come at once."""

from __future__ import annotations

import re

NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)=(?P<shards>.*)", re.DOTALL)

STRATEGIES = ("random", "sequential", "debiased")  # how sources make batches
DRAWS = ("exact", "iid")  # how debiased sampling chooses the source of a step
CAPTIONS = ("one-per-epoch", "all")  # of an image with several: one of them each epoch, or each a sample of its own
POLICIES = ("replace", "fail")  # what happens at a bad sample
PIXEL_PATHS = ("pil", "arrays")  # what decodes and resizes pictures
AUTO_AUGMENTS = ("imagenet",)  # policies of AutoAugment


def is_named(train_data: str | None) -> bool:
    """Whether a `--train-data` value names at least one of its sources, and so selects this package's mixture."""
    return bool(train_data) and any(NAME.fullmatch(part) for part in str(train_data).split("::"))
