"""The protocol of the trainings on emoji, whose records are docs/results/runs.json.

The page lists the changes that came after results were seen (`results.md.j2`).

1. A run is scored on data that it was not trained on: the pairs of a source that it never saw (in pools of 200), as COCO and
   Flickr30K are not a source of the paper's training. Seed s leaves out source s mod 4 of a miniature's four, so that 8 seeds
   leave each out twice.
2. Two conditions are compared seed by seed: same initialisation, same sources, same order where the sampling is the same.
   A verdict follows from the 95 % interval of the mean difference (`rows.py`).
3. Settings that a claim depends on (`CHOICES`) are chosen on the validation split by pilot runs with other seeds, and written
   to `choices.json`, each but Table 4's committed before the runs that use it. Where the best value is at the end of its
   grid, the grid is made longer there and the choice made again. The test split is scored once. `FIXED` settings are those of
   the demo, which were chosen on validation too (docs/models.md), and lengths that the CPU hours allow.
4. Every comparison of `protocol.yaml` is reported, with any result.

The program that trained and measured these runs is in the history (`git log -- scripts/ablation/run.py`); `zerovl trial` asks
the same question on any data.

`protocol.yaml` holds the choices, conditions and comparisons; the classes here define its entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from open_clip_zerovl.core.errors import UserError

LEAST_SEEDS = 5
MARGIN_RSUM = (
    10.0  # differences within it count as none; a random order of 200 pairs has an RSUM of 16
)
#: The same for other measures than RSUMs: the logarithm of a ratio of costs, and those of which any sure difference counts.
MARGINS = {
    "reach": 0.05,
    "probe, images %": 0.0,
    "probe, texts %": 0.0,
    "log p, same source": 0.0,
    "log p, other source": 0.0,
}
POOL = 200  # pairs of an unseen source that are ranked together
CHANCE = 2 * 100 * (1 + 5 + 10) / POOL  # RSUM of a random order

ALL_UNSEEN = "all unseen"  # the score's name among a record's RSUMs; "unseen" is that of the held-out test pairs alone

CHOICES_FILE = Path(__file__).with_name("choices.json")
#: Of every run (A.9, section 2.2). In pilots without it, 16 epochs more on top of 8 lowered the score in the unseen source.
AUGMENTED = ("--aug-cfg", "scale=(0.6,1.0)", "--text-augment", "0.2")

Choices = Mapping[str, str]  # by name; a value as it stands in a command line
Claim = Literal["higher", "lower", "same"]
POOLS = ("within", "across", "mixed")


@dataclass(frozen=True)
class Choice:
    """A setting that pilot runs choose on the validation split.

    Attributes:
        what: the setting in words.
        grid: the values tried, the first being the cheapest.
        conditions: whose mean score decides.
        rule: "best": the highest score; "shortest": the first value within 5 RSUM of the highest. A value that gains less
            than that over the one before ended the pilots of a "shortest" choice.
        quick: the value of a quick run, which has no pilots.
        seeds: of its pilot runs.
        during: other settings of its pilot runs.
    """

    what: str
    grid: Sequence[str]
    conditions: Sequence[str]
    rule: Literal["best", "shortest"]
    quick: str
    seeds: Sequence[int] = (100, 102)  # they leave out the first and the third source
    during: Choices = field(default_factory=dict)


@dataclass(frozen=True)
class Condition:
    """A configuration of the training program, trained once for each seed.

    Attributes:
        label: in tables and figures.
        sampling: value of --sampling.
        flags: training flags that differ from the demo's (`emoji.runs.drawn_flags`: effective batch 64 as two micro-batches of
            32); `{NAME}` stands for a choice of the protocol.
        miniature: the sources.
        trained: which of them are trained on: "three", without the seed's unseen one; "one", the source after that; "four".
        kind: "plain"; "contexts", one source in two halves (A.5); "clusters", the trained sources as one, clustered (A.6);
            "groups", half of the captions replaced by the name of the picture's group; "apart": each source keeps its share of
            the concepts; "alike": one source in parts of other groups of pictures; "large": one source whole, of each other
            one pair in 18.
        epochs: a number, or the choice that holds it.
        share: share of these epochs, for runs of equal steps.
        ranks: processes under torchrun, on gloo.
        init_from: the condition whose last checkpoint of the same seed it starts from.
        clusters_of: the condition whose features of the same seed make the clusters.
        teacher: the condition whose last checkpoint of the same seed it is distilled from.
        sort_text: whether --sort-text is given: the same gradient in four fifths of the time.
        every_epoch: whether each epoch's checkpoint is scored.
    """

    label: str
    sampling: str = "debiased"
    flags: str = ""
    miniature: Literal["emoji", "icons"] = "emoji"
    trained: Literal["three", "one", "four"] = "three"
    kind: Literal["plain", "contexts", "clusters", "groups", "apart", "alike", "large"] = "plain"
    epochs: int | str = "epochs"
    share: float = 1.0
    ranks: int = 1
    init_from: str | None = None
    clusters_of: str | None = None
    teacher: str | None = None
    sort_text: bool = True
    every_epoch: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The conditions whose runs of the same seed have to come first."""
        return tuple(
            dict.fromkeys(name for name in (self.init_from, self.clusters_of, self.teacher) if name)
        )

    @property
    def score(self) -> str:
        """The number by which it is compared: RSUM in a source that it never saw, if there is one."""
        if self.kind == "contexts":
            return "plain"
        return "seen" if self.trained == "four" else "unseen"

    @property
    def choices(self) -> set[str]:
        """The choices, and fixed settings, that its runs and those that it needs depend on."""
        named = {word[1:-1] for word in self.flags.split() if word.startswith("{")}
        named |= {self.epochs} if isinstance(self.epochs, str) else set()
        named |= {"clusters"} if self.clusters_of is not None else set()
        return named.union(*(CONDITIONS[name].choices for name in self.needs))

    def run_epochs(self, choices: Choices) -> int:
        """The number of epochs of its training."""
        epochs = int(choices[self.epochs]) if isinstance(self.epochs, str) else self.epochs
        return max(1, round(epochs * self.share))

    def run_flags(self, choices: Choices) -> list[str]:
        """Its flags, with the choices in their places."""
        own = [choices[word[1:-1]] if word.startswith("{") else word for word in self.flags.split()]
        return [*AUGMENTED, *(["--sort-text"] if self.sort_text else []), *own]


@dataclass(frozen=True)
class Comparison:
    """A row of the paper that compares two of its runs, and the two conditions here that repeat them.

    Attributes:
        run, against: conditions.
        what: the compared method in words.
        claim: whether the paper's number of `run` is higher or lower than that of `against`, or the same.
        measure: "score"; a pool of the trained sources, the source probe or log p (`rows.value_of`); or "reach": the
            logarithm of the cost at which `run` reaches the final score of `against`, over the cost of `against` (Table 8).
        paper: (COCO, Flickr30K) RSUM of `run` and of `against`, or GPU hours of each; None if the paper has only bars,
            or no such row.
        added: after which results it was added, if after any.
    """

    run: str
    against: str
    what: str
    claim: Claim = "higher"
    measure: str = "score"
    paper: Sequence[Sequence[float]] | None = None
    added: str = ""


@dataclass(frozen=True)
class PaperTable:
    """A table or section of the paper, or a question that it does not ask, and its comparisons."""

    name: str
    setting: str
    comparisons: tuple[Comparison, ...]

    @property
    def conditions(self) -> list[str]:
        """The compared conditions, in the order of CONDITIONS."""
        named = {name for one in self.comparisons for name in (one.run, one.against)}
        return [name for name in CONDITIONS if name in named]


_PROTOCOL = yaml.safe_load(Path(__file__).with_name("protocol.yaml").read_text(encoding="utf-8"))
FIXED: Choices = _PROTOCOL["fixed"]
CHOICES = {name: Choice(**one) for name, one in _PROTOCOL["choices"].items()}
CONDITIONS = {name: Condition(**one) for name, one in _PROTOCOL["conditions"].items()}
TABLES = [
    PaperTable(**{**one, "comparisons": tuple(Comparison(**row) for row in one["comparisons"])})
    for one in _PROTOCOL["tables"]
]


def read_choices(path: Path = CHOICES_FILE) -> Choices:
    """The fixed settings, and the choices that pilot runs have made so far."""
    return {**FIXED, **{name: one["chosen"] for name, one in read_pilots(path).items()}}


def read_pilots(path: Path = CHOICES_FILE) -> dict[str, dict[str, Any]]:
    """The findings of the pilot runs, by choice: "what", "rule", "scores" (of each value), "chosen". Empty before the pilots.

    Raises:
        UserError: the file is of another protocol.
    """
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted(set(found) - set(CHOICES)):
        raise UserError(
            f"{path.name} is of another protocol: protocol.yaml has no choice {', '.join(unknown)}"
        )
    return found
