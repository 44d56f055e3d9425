"""The flags of `zerovl trial`. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.flags import NOT_NEGATIVE, POSITIVE, Range, at_least, flag
from open_clip_zerovl.finetune.request import SETS
from open_clip_zerovl.recipe.flags import Settings, without_switches
from open_clip_zerovl.report.verdicts import MARGIN

PLAIN = "plain"
ARMS = {
    PLAIN: "open_clip's step at the micro-batch",
    "dga": "the exact gradient of a batch that is K times larger",
    "debiased": "dga with each batch from one source",
    "recipe": "debiased with coin-flip mixup",
}

Arms = Sequence[str] | Mapping[str, Settings]


def arms(text: str) -> Arms:
    """Read `plain,dga` as names, or `FILE.json` as arm -> training flags (the others are compared with the first arm)."""
    if text.endswith(".json"):
        arms = json.loads(Path(text).expanduser().read_text(encoding="utf-8"))
        if not (isinstance(arms, dict) and len(arms) > 1 and all(map(_is_arm, arms.values()))):
            raise argparse.ArgumentTypeError(
                'give {"ARM": {"FLAG": VALUE}, ...}, two arms or more, a VALUE text, a number, true of a switch, or null'
            )
        return {
            arm: without_switches({flag: _setting(value) for flag, value in flags.items()})
            for arm, flags in arms.items()
        }
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ARMS]
    if unknown or names[0] != PLAIN or len(names) < 2:
        raise argparse.ArgumentTypeError(
            f"give {PLAIN} and then {', '.join([*ARMS][1:])}, or a FILE.json"
        )
    return names


def _is_arm(flags: Any) -> bool:
    """Return whether an entry of an arms' file is flags, each with one value."""
    return isinstance(flags, dict) and not any(
        isinstance(value, list | dict) for value in flags.values()
    )


def _setting(value: Any) -> str | None:
    """Write a value of an arms' file as a training flag's, None for a flag that the arm leaves out."""
    if value is None or isinstance(value, bool):
        return "" if value else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 2.0, which no flag for a number of steps takes
    return str(value)


def rates(text: str) -> tuple[float, ...]:
    """Read `1e-4,3e-4` as ascending learning rates."""
    return tuple(sorted({float(word) for word in text.split(",")}))


@dataclass(frozen=True, kw_only=True)
class TrialFlags:
    """Data, arms and length of a trial."""

    retrieval_data: str | None = flag(
        None, "test sets (default: those that come with --data, else a part of it)", metavar=SETS
    )
    zero_shot_data: str | None = flag(
        None, "labelled sets, whose zero-shot top-1 is measured too", metavar=SETS
    )
    arms: Arms = flag(
        (),
        "; ".join(f"{name}: {words}" for name, words in ARMS.items())
        + " (default: all; debiased needs two sources). FILE.json holds arms of your own: {ARM: {FLAG: VALUE}}",
        kind=arms,
        metavar="ARM,...|FILE",
    )
    seeds: int = flag(5, "runs of each arm; a later call may ask for more", range=at_least(2))
    minutes: float = flag(60.0, "time of all trainings together", range=POSITIVE)
    equal: str = flag(
        "time", "what the runs of all arms have the same amount of", choices=("time", "samples")
    )
    micro_batch: int = flag(16, "samples in one forward pass", range=at_least(1), metavar="B")
    effective_batch: int = flag(
        0,
        "batch of dga (default: 256, at most a quarter of the smallest source)",
        range=at_least(1),
        metavar="N",
    )
    rates: Sequence[float] = flag(
        (1e-4, 3e-4, 1e-3),
        "learning rates; each arm takes the best one on validation pictures, and tries up to two more beyond an end "
        "(default 1e-4,3e-4,1e-3)",
        kind=rates,
        range=Range(
            "positive numbers", lambda rates, _: all(0 < rate < math.inf for rate in rates)
        ),
        metavar="RATE,...",
    )
    margin: float = flag(
        MARGIN,
        "the smallest difference that matters, in points of mean recall (RSUM / 6), or of top-1 where the data has classes",
        range=NOT_NEGATIVE,
    )
    gpus: int | None = flag(None, "processes (default: one a GPU)", range=at_least(1))
