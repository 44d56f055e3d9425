"""Forgetting less: old pairs beside the new ones, and distillation from the model before.

--keep-data     new pairs (weight 1) + old pairs (weight w): share = w * old / (new + w * old)
--keep-teacher  the model before embeds all pairs once (`zerovl teacher`); training takes --teacher, --distill-weight 0.5
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from open_clip_zerovl.core.errors import Say, UserError
from open_clip_zerovl.core.flags import key_value
from open_clip_zerovl.data.names import PIXEL_PATH
from open_clip_zerovl.data.sources import Source, parse_sources
from open_clip_zerovl.distill.embed import TeacherSettings, embed_sources
from open_clip_zerovl.finetune.request import FinetuneRequest, Prepared
from open_clip_zerovl.models.local_dir import CONFIG_FILE, LOCAL_DIR
from open_clip_zerovl.recipe.arguments import Settings

TEACHER = "teacher"
DISTILL_WEIGHT = "0.5"
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
    if request.keep_teacher and request.given.get("teacher") is not None:
        raise UserError("--set teacher and --keep-teacher both name a teacher; give one of them")
    for flag in ("force-image-size", "image-interpolation") if request.keep_teacher else ():
        if request.given.get(flag) is not None:
            raise UserError(
                f"--set {flag} does not work with --keep-teacher, which takes it from the starting model; leave it out"
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
    """Sentences about the old pairs and the teacher, and their cost."""
    notes = []
    if factors is not None:
        names = {part.partition("=")[0] for part in factors.split("::")}
        old = {
            source.name: source.num_samples * source.weight
            for source in sources
            if source.name in names
        }
        new = sum(source.num_samples for source in sources if source.name not in names)
        shown = ", ".join(f"{count:,.0f} of {name}" for name, count in old.items())
        notes.append(
            f"An epoch has {new:,} new pairs and {request.share_kept:.0%} old ones ({shown}): "
            f"{1 + sum(old.values()) / new:.2f} times the samples."
        )
    if request.keep_teacher:
        weight = request.given.get("distill-weight", DISTILL_WEIGHT)
        notes.append(f"A share of {weight} of the loss is distillation from the model before.")
    return notes


def store_teacher(request: FinetuneRequest, prepared: Prepared, say: Say) -> None:
    """Embed all pairs by the model before, or go on with it. UserError as `embed_sources`."""
    folder = Path(prepared.before.removeprefix(LOCAL_DIR))
    preprocess = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["preprocess_cfg"]
    size = preprocess["size"]
    settings = TeacherSettings(
        image_size=size if isinstance(size, int) else size[0],
        interpolation=preprocess["interpolation"],
        aug_cfg=dict(map(key_value, shlex.split(request.given.get("aug-cfg") or ""))),
        auto_augment=request.given.get("auto-augment"),
        pixel_path=request.given.get("pixel-path") or PIXEL_PATH,
        captions=request.captions,
        seed=request.seed,
    )
    say(f"storing the embeddings of {settings.views} views of each picture by the model before")
    encoder = replace(request.start, model=str(folder))
    embed_sources(prepared.train_data, [encoder], request.out / TEACHER, settings, progress=False)
    torch.cuda.empty_cache()  # this process lives on beside the training, whose micro-batch fills the GPU


def teacher_flags(request: FinetuneRequest) -> Settings:
    """The training flags of the stored teacher; --set distill-weight replaces the weight."""
    return {"teacher": str(request.out / TEACHER), "distill-weight": DISTILL_WEIGHT}
