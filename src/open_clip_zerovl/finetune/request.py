"""The request of a fine-tuning: its flags, and what they decide. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.flags import NOT_NEGATIVE, SEED, SHARE, flag, flags_of
from open_clip_zerovl.evaluate.settings import CurveFlags
from open_clip_zerovl.recipe.flags import Settings

if TYPE_CHECKING:
    from open_clip_zerovl.finetune.data import DataArguments

SETS = "NAME=SET::..."
KEEP_SHARE = 0.2
SOURCE_WEIGHTS = "train-data-upsampling-factors"
# A later call on the same folder may have other values of these flags; the first decide the curve, which is then scored again.
# Every other flag decides the training, so that one that is added does too. --out is the folder itself.
OF_CURVE = ("kept", "zero_shot_data", "alphas", "rule", "kept_share")
DATA_OF_CURVE = ("--kept", "--zero-shot-data")
FREE = (
    "patience",  # the training goes on if it is not over (`Training.is_over`)
    "compare_pictures",  # a check, made as soon as it is asked for
    *(
        "device",
        "batch_size",
        "workers",
    ),  # where and how fast; the training has its own, in settings.json
)


@dataclass(frozen=True, kw_only=True)
class FinetuneFlags:
    """Held-out data, scoring and end of a fine-tuning."""

    retrieval_data: str | None = flag(
        None,
        "held-out pairs (default: the set that comes with --data, else a part of it)",
        metavar=SETS,
    )
    kept: str | None = flag(
        None, "retrieval sets of the ability to keep, such as coco=/data/coco", metavar=SETS
    )
    zero_shot_data: str | None = flag(
        None,
        "labelled sets, new classes or ones to keep, whose zero-shot accuracy before and after is in the table (default: the "
        "held-out set of class folders)",
        metavar=SETS,
    )
    keep_data: str | None = flag(
        None,
        "old pairs, named sources as in --data, that are trained on beside the new ones so that the model forgets less",
        metavar="NAME=SHARDS::...",
    )
    keep_share: float | None = flag(
        None,
        "share of an epoch's pairs that are of --keep-data (default 0.2); it changes the training, --keep the choice after it",
        range=SHARE,
        metavar="SHARE",
    )
    patience: int = flag(
        5,
        "end after EPOCHS without a better held-out score; 0: never",
        range=NOT_NEGATIVE,
        metavar="EPOCHS",
    )
    seed: int = flag(0, "seed of the split and the training", range=SEED)
    compare_pictures: bool = flag(
        True,
        "also train on pictures of the given held-out sets, without looking for them",
        option="--skip-overlap",
    )


@dataclass(frozen=True)
class FinetuneRequest(FinetuneFlags, CurveFlags):
    """The arguments of `zerovl finetune`.

    Attributes:
        start: the model to start from; its device also trains, and its batch size and workers are those of evaluations.
        data: pairs, see `data`.
        out: folder to write.
        given: training flags that replace the chosen values.
    """

    start: Encoder
    data: str
    out: Path
    given: Settings = field(default_factory=dict, kw_only=True)

    @property
    def share_kept(self) -> float:
        """Return the share of --keep-data in an epoch."""
        return KEEP_SHARE if self.keep_share is None else self.keep_share

    def of_training(self) -> dict[str, Any]:
        """Name the arguments that decide the training, with None for a flag that is not given."""
        flags = [(self.start, each) for each in flags_of(Encoder)] + [
            (self, each) for each in flags_of(FinetuneRequest)
        ]
        flag_values = {
            each.option: None if getattr(values, each.name) is False else getattr(values, each.name)
            for values, each in flags
            if each.name not in OF_CURVE + FREE
        }
        return {
            "--from": self.start.model,
            "--data": self.data,
            **flag_values,
            "--keep-share": self.share_kept if self.keep_data else None,
            **{f"--set {flag}": value for flag, value in self.given.items()},
        }

    def of_curve(self, arguments: DataArguments) -> dict[str, Any]:
        """Name the arguments that decide the curve."""
        values = {
            each.option: getattr(self, each.name)
            for each in flags_of(FinetuneRequest)
            if each.name in OF_CURVE
        }
        return {**values, "--alphas": list(self.alphas), **arguments.entries(DATA_OF_CURVE)}
