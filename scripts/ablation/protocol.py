"""The protocol of `make ablation`. What was changed after results were seen is said on the page (`report.HOW`).

1. A run is scored where it was not trained: on the pairs of a source that it never saw (`unseen.py`), as COCO and Flickr30K
   are no source of the paper's training. Seed s leaves out source s mod 4 of a miniature's four, so that 8 seeds leave each
   out twice.
2. Two conditions are compared seed by seed: same initialisation, same sources, same order where the sampling is the same.
   A verdict follows from the 95 % interval of the mean difference (`verdicts.py`).
3. Settings that a claim depends on (`CHOICES`) are chosen on the validation split by pilot runs with other seeds, and written
   to `choices.json`, each but Table 4's committed before the runs that use it. Where the best value is at the end of its
   grid, the grid is made longer there and the choice made again. The test split is scored once. `FIXED` settings are those of
   the demo, which were chosen on validation too (docs/models.md), and lengths that the CPU hours allow.
4. Every row of `comparisons.py` is reported, whatever comes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from open_clip_zerovl.core.errors import UserError

SEEDS = tuple(range(8))
PILOT_SEEDS = (100, 102)  # they leave out the first and the third source
CONFIDENCE = 0.95
MARGIN_RSUM = 10.0  # differences within it count as none; a random order of 200 pairs has an RSUM of 16
MARGIN_RATIO = 0.05  # the same for ratios of times
STILL_RISING = 5.0  # RSUM by which a longer training has to be better to be chosen

ALL_UNSEEN = "all unseen"  # the score's name among a record's RSUMs; "unseen" is that of the held-out test pairs alone

CHOICES_FILE = Path(__file__).with_name("choices.json")

Choices = Mapping[str, str]  # by name; a value as it stands in a command line


@dataclass(frozen=True)
class Choice:
    """A setting that pilot runs choose on the validation split.

    Attributes:
        what: for the page.
        grid: the values tried, the first being the cheapest.
        conditions: whose mean score decides.
        rule: "best": the highest score; "shortest": the first value within `STILL_RISING` of the highest. A value that gains
            less than that over the one before ends the pilots of a "shortest" choice.
        quick: the value of a quick run, which has no pilots.
    """

    what: str
    grid: tuple[str, ...]
    conditions: tuple[str, ...]
    rule: Literal["best", "shortest"]
    quick: str

    def decide(self, scores: Mapping[str, float]) -> str:
        """The chosen value, from the mean score of each value of the grid."""
        highest = max(scores.values())
        enough = highest if self.rule == "best" else highest - STILL_RISING
        return next(value for value in self.grid if value in scores and scores[value] >= enough)

    def is_settled(self, scores: Mapping[str, float]) -> bool:
        """Whether the values scored so far, the first ones of the grid, decide."""
        if self.rule == "shortest" and len(scores) > 1:
            before, last = [*scores.values()][-2:]
            return last - before < STILL_RISING
        return len(scores) == len(self.grid)


#: By name as `CHOICES`, and used like them.
FIXED: Choices = {"epochs": "16", "icon-epochs": "8"}

#: In the order in which they are made: a pilot uses the choices before its own, and the quick values of those after it.
CHOICES: dict[str, Choice] = {
    "long-epochs": Choice("epochs of long runs", ("20", "40", "80"), ("long-debiased", "mixup"), "shortest", "2"),
    "lr-256": Choice(
        "learning rate at batch 256", ("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3"), ("batch-256",), "best", "1e-3"
    ),
    "lr-64": Choice("learning rate at batch 64", ("5e-4", "1e-3", "2e-3"), ("batch-64",), "best", "1e-3"),
    "lr-detached": Choice(
        "learning rate at batch 64, gather without gradient",
        ("5e-4", "1e-3", "2e-3"),
        ("detached-gather",),
        "best",
        "1e-3",
    ),
    "lr-16": Choice("learning rate at batch 16", ("2.5e-4", "5e-4", "1e-3"), ("batch-16",), "best", "1e-3"),
    "clusters": Choice("clusters, by features of", ("image-4", "image-16", "text-8"), ("clusters",), "best", "image-4"),
}

QUICK: Choices = {"epochs": "2", "icon-epochs": "1", **{name: choice.quick for name, choice in CHOICES.items()}}


def unseen_source(sources: Sequence[str], seed: int) -> str:
    """The source that a seed's runs are not trained on, and are scored on."""
    return sources[seed % len(sources)]


def read_choices(path: Path = CHOICES_FILE) -> Choices:
    """The fixed settings, and the choices that pilot runs have made so far."""
    return {**FIXED, **{name: one["chosen"] for name, one in read_pilots(path).items()}}


def read_pilots(path: Path = CHOICES_FILE) -> dict[str, dict[str, Any]]:
    """What the pilot runs found, by choice: "what", "rule", "scores" (of each value), "chosen". Empty before the pilots.

    Raises:
        UserError: the file is of another protocol.
    """
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted(set(found) - set(CHOICES)):
        raise UserError(
            f"{path.name} is of another protocol ({', '.join(unknown)}): remove it and run `make ablation PILOT=1` again"
        )
    return found
