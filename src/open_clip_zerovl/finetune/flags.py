"""The flags of `zerovl finetune`. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass

from open_clip_zerovl.core.flags import FROM_0_TO_1, NOT_NEGATIVE, SEED, flag

SETS = "NAME=SET::..."


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
        range=FROM_0_TO_1,
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
