"""After the training of a fine-tuning: the curve between before and after, the chosen model, the reports."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.checkpoints.export import loading_notes
from open_clip_zerovl.core.errors import Say
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.splits import as_keys
from open_clip_zerovl.evaluate.curve import (
    Curve,
    Ends,
    Point,
    open_ends,
    recall_table,
    score_curve,
    write_between,
)
from open_clip_zerovl.evaluate.metrics import difference_of_shares, in_percent
from open_clip_zerovl.evaluate.retrieval import (
    GallerySet,
    rsum_difference,
    score_set,
    write_gallery,
)
from open_clip_zerovl.evaluate.settings import RetrievalSettings
from open_clip_zerovl.evaluate.zero_shot import score_loaded
from open_clip_zerovl.finetune import data as pairs
from open_clip_zerovl.finetune.data import labelled_sets
from open_clip_zerovl.finetune.proposal import Setting
from open_clip_zerovl.finetune.request import FinetuneRequest
from open_clip_zerovl.finetune.split import Prepared
from open_clip_zerovl.models.configs import LOCAL_DIR
from open_clip_zerovl.report.pages import (
    FAINT,
    MODEL_COLOURS,
    RIGHT_COLOUR,
    Line,
    draw_levels,
    line_chart,
    write_page,
)
from open_clip_zerovl.report.verdicts import MARGIN, Estimate, sentence

RESULT = "finetune.json"


def write_outcome(
    request: FinetuneRequest,
    prepared: Prepared,
    settings: Sequence[Setting],
    trained: Mapping[int, float],
    epoch: int,
    checkpoint: Path,
    say: Say,
) -> None:
    """Choose the weights between before and a trained epoch, and write model, gallery, report and `finetune.json`.

    Args:
        trained: score of each epoch on the held-out sets.
        epoch: the best of them.
    """
    out = request.out
    scorer = Encoder(
        prepared.before,
        device=request.start.device,
        batch_size=request.start.batch_size,
        workers=request.start.workers,
    )
    say(f"weights between before and epoch {epoch}, the best:")
    ends = open_ends(scorer, Encoder(str(checkpoint), device="cpu"))
    classes: dict[str, Any] = {}
    kept = prepared.arguments.kept
    for sets in (prepared.split.new, kept) if pairs.all_classes(prepared.split.new) else ():
        classes |= labelled_sets(sets) if sets and pairs.all_classes(sets) else {}
    split = prepared.split
    new = pairs.sets_of(split.new)
    kept_sets = pairs.sets_of(kept) if kept else {}
    curve = score_curve(ends, scorer, request, new, kept_sets, classes=classes, say=say)
    model = write_between(ends, curve, out / "model", trained=split.trained)
    shown: list[GallerySet] = []
    for name, dataset in new.items():
        for label, point in (("before", curve.points[0]), ("chosen", curve.chosen)):
            called = f"{name}, {label}"
            scored = score_set(
                ends.at(point.alpha), called, dataset, RetrievalSettings(), encoder=scorer
            )
            assert scored is not None
            shown.append(scored)
    accuracies = zero_shot_accuracies(request, prepared, curve, ends, scorer)
    write_gallery(out / "gallery.html", shown, model="before and after fine-tuning")
    notes = [*prepared.notes, *_reading_notes(curve), *zero_shot_sentences(accuracies)]
    if curve.chosen.alpha and not pairs.all_classes(prepared.split.new):
        notes += recall_verdicts(shown)
    moving = loading_notes(model)
    facts = [f"From {request.start.model} on {request.data}.", *notes, *moving]
    scores = {0: curve.points[0].mean_score(curve.new), **trained}
    commands = next_commands(model, prepared.split.new, request.kept)
    write_report(out / "report.html", facts, commands, settings, scores, epoch, curve)
    table = before_after(curve, notes)
    content = {
        **request.of_training(),
        "held_out": as_keys(split.held_out),
        "best epoch": epoch,
        "checkpoint": str(checkpoint),
        "epochs": {str(number): score for number, score in trained.items()},
        "zero_shot": accuracies,
        "curve": {"asked": request.of_curve(prepared.arguments), **curve.as_dict()},
        "model": str(model),
        "table": "\n".join([f"{table}\n\n{commands}", *moving]),
    }
    write_atomically(out / RESULT, json.dumps(content, indent=2) + "\n")


def zero_shot_accuracies(
    request: FinetuneRequest, prepared: Prepared, curve: Curve, ends: Ends, scorer: Encoder
) -> dict[str, dict[str, dict[str, Any]]]:
    """Score the points of `Curve.labelled` on each labelled set."""
    sets = labelled_sets(prepared.split.new, prepared.arguments.labelled)

    @cache
    def scored(name: str, alpha: float) -> Mapping[str, Any]:
        return score_loaded(ends.at(alpha), sets[name], encoder=scorer, name=name)

    def accuracy(name: str, point: Point) -> dict[str, Any]:
        known = None if request.zero_shot_data else point.accuracies.get(name)
        return dict(known or scored(name, point.alpha))

    return {
        name: {label: accuracy(name, point) for label, point in curve.labelled.items()}
        for name in sets
    }


def zero_shot_sentences(accuracies: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Say the accuracies on each labelled set, for the table and the report."""
    sentences = []
    for name, by_label in accuracies.items():
        before = by_label["before"]
        shares = ", ".join(f"{label} {in_percent(scored)} %" for label, scored in by_label.items())
        sentences.append(
            f"Zero-shot top-1 on {name} ({before['images']:,} pictures, {before['classes']} classes, chance "
            f"{100 * before['chance']:.1f} %, the commonest class {100 * before['commonest']:.1f} %): {shares}."
        )
        chosen = [*by_label.values()][-1]
        if chosen != before:
            estimate = difference_of_shares(before["top1"], chosen["top1"], before["images"])
            sentences.append(_verdict(name, "top-1", estimate))
    return sentences


def recall_verdicts(shown: Sequence[GallerySet]) -> list[str]:
    """Say sign and size of the change of mean recall on each set.

    Args:
        shown: each set before and after, one after the other.
    """
    sentences = []
    for before, chosen in zip(shown[::2], shown[1::2], strict=True):
        change = rsum_difference(before, chosen)
        estimate = Estimate(*(change[key] / 6 for key in ("difference", "low", "high")))
        sentences.append(_verdict(before.name.removesuffix(", before"), "mean recall", estimate))
    return sentences


def _verdict(name: str, measure: str, estimate: Estimate) -> str:
    return sentence(
        estimate, MARGIN, of=f"{name}, chosen over before", measure=measure, over="pictures"
    )


def _reading_notes(curve: Curve) -> list[str]:
    """Say what helps to read the numbers."""
    notes = [
        "Pictures pass the checkpoint's own transform; of several captions of a picture the first five count.",
        "Epoch and alpha were chosen on the new sets, so that their numbers are a little better than on other data.",
    ]
    if not curve.kept:
        notes.append(
            "No --kept set was given, so forgetting was not measured; call again with --kept NAME=SET."
        )
    return [*notes, *filter(None, [curve.advice])]


def before_after(curve: Curve, notes: Sequence[str]) -> str:
    """Write a table for each set, then the curve and the notes, as text."""
    parts = []
    for name in (*curve.new, *curve.kept):
        row = curve.points[0].metrics[name]
        columns = {label: point.metrics[name] for label, point in curve.labelled.items()}
        kind = "kept" if name in curve.kept else "new"
        parts.append(
            f"\n{name} ({kind}): {row['images']:,} pictures, {row['captions']:,} captions\n{recall_table(columns)}"
        )
    parts.append(f"\n{curve.table()}\n{curve.sentence}")
    return "\n".join([*parts, *notes])


def next_commands(model: Path, new: str, kept_sets: str | None) -> str:
    """Write the commands that load and score the chosen model."""
    sets = "::".join(filter(None, (new, kept_sets)))
    measure = "zero-shot" if pairs.all_classes(sets) else "retrieval"
    return (
        f"Load it: open_clip.create_model_and_transforms('{LOCAL_DIR}{model.absolute()}')\n"
        f"Score it: zerovl {measure} {shlex.quote(str(model))} --data {shlex.quote(sets)}"
    )


def write_report(
    path: Path,
    facts: Sequence[str],
    commands: str,
    settings: Sequence[Setting],
    scores: Mapping[int, float],
    best: int,
    curve: Curve,
) -> None:
    """Write the report as one HTML page.

    Args:
        facts: sentences about model and data.
        commands: what can be done with the model.
        scores: epoch -> score on the held-out pairs; epoch 0 is the model before.
        best: the best of the epochs.
    """

    def finish(axes: Any) -> None:
        axes.plot([best], [scores[best]], marker="o", markersize=8, color=RIGHT_COLOUR)
        axes.axhline(scores[0], color=FAINT, linewidth=1, linestyle=":")
        draw_levels(axes, {"chance": (fmean(map(curve.points[0].chance, curve.new)), FAINT)})
        axes.xaxis.get_major_locator().set_params(integer=True)

    epochs = sorted(scores)
    score = "zero-shot top-1, %" if curve.points[0].accuracies else "RSUM"
    line = Line(
        score, epochs, [scores[epoch] for epoch in epochs], MODEL_COLOURS[1], {"marker": "o"}
    )
    write_page(
        path,
        "finetune.html",
        title="A fine-tuning",
        facts=facts,
        commands=commands,
        settings=[
            (f"--{s.flag}", "not used" if s.value is None else s.value, s.reason) for s in settings
        ],
        training=line_chart(
            [line],
            x=f"epoch (0: before); the best after training is {best}",
            y=f"{score}, held out",
            finish=finish,
        ),
        curve=curve,
        picture=curve.picture(),
    )
