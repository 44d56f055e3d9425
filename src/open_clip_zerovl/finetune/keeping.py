"""Forgetting less: old pairs beside the new ones.

--keep-data: new pairs (weight 1) + old pairs (weight w): share = w * old / (new + w * old)
"""

from __future__ import annotations

from collections.abc import Sequence

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.finetune.request import FinetuneRequest

_WEIGHTS = "train-data-upsampling-factors"


def check_keeping(request: FinetuneRequest) -> None:
    """UserError for --keep flags that contradict each other or training flags."""
    if request.keep_share is not None and request.keep_data is None:
        raise UserError(
            f"--keep-share {request.keep_share:g} needs --keep-data NAME=SHARDS, the old pairs"
        )
    if request.keep_data is not None and not 0 < request.share_kept < 1:
        raise UserError(
            f"--keep-share {request.share_kept:g} must lie between 0 and 1; give 0.2, for example"
        )
    if request.keep_data is not None and _WEIGHTS in request.given:
        raise UserError(
            f"--set {_WEIGHTS} and --keep-share both decide the weights of the sources; give one of them"
        )


def with_old_pairs(
    request: FinetuneRequest, train_data: str, old_data: str | None
) -> tuple[tuple[Source, ...], str, str | None]:
    """(sources, `--train-data`, `--train-data-upsampling-factors`) of the new pairs and of --keep-data, with their weights.

    The samples are those of the training: with --set captions=all each caption of a picture is one.

    Raises:
        UserError: old pairs that cannot be opened, or with the name of a new source.
    """
    new = parse_sources(train_data, captions=request.captions)
    if old_data is None:
        return new, train_data, None
    old = parse_sources(old_data, captions=request.captions)
    share = request.share_kept
    weight = (
        share
        / (1 - share)
        * sum(source.num_samples for source in new)
        / sum(source.num_samples for source in old)
    )
    factors = "::".join(f"{source.name}={weight!r}" for source in old)
    both = f"{train_data}::{old_data}"
    return parse_sources(both, factors, captions=request.captions), both, factors


def keeping_notes(
    request: FinetuneRequest, sources: Sequence[Source], factors: str | None
) -> list[str]:
    """A sentence about the old pairs and their cost; none without them."""
    if factors is None:
        return []
    names = {part.partition("=")[0] for part in factors.split("::")}
    old = {
        source.name: source.num_samples * source.weight
        for source in sources
        if source.name in names
    }
    new = sum(source.num_samples for source in sources if source.name not in names)
    shown = ", ".join(f"{count:,.0f} of {name}" for name, count in old.items())
    return [
        f"An epoch has {new:,} new pairs and {request.share_kept:.0%} old ones ({shown}): "
        f"{1 + sum(old.values()) / new:.2f} times the samples."
    ]
