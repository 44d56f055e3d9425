"""`run.html`: a training run on one page that needs no other file. Training writes it at its end."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.report.bounds import LOW_BEST, SHARED_CAPTIONS, bounds_remarks
from open_clip_zerovl.report.html import write_page
from open_clip_zerovl.report.plot import SOURCE_COLOURS, colours_of
from open_clip_zerovl.report.record import RECORD, read_examples, read_record
from open_clip_zerovl.report.run_charts import (
    course_picture,
    evaluation_picture,
    loss_picture,
    number,
)

PAGE = "run.html"
_STATES = {
    "done": "Ended as planned.",
    "stopped": "Stopped, and can go on.",
    "failed": "Ended by an error.",
}


def write_run_page(folder: str | os.PathLike[str]) -> Path:
    """Write a run's page, `run.html`, from its record.

    Args:
        folder: folder of the run, logs/NAME.

    Returns:
        The page's path.

    Raises:
        UserError: no record there, or one that does not say how the run began.
    """
    folder = Path(folder)
    record = read_record(folder)
    if not record["start"]:
        raise UserError(f"{folder / RECORD} does not say how the run began; its file is cut off")
    with reading(folder / RECORD, "the page of the run is not written"):
        return _written(folder, record)


def _written(folder: Path, record: Mapping[str, list[dict[str, Any]]]) -> Path:
    start = record["start"][-1]
    steps = record["step"]
    evaluations = record["retrieval"]
    labelled = record["zero-shot"]
    sources = start.get("sources") or {}
    # One palette for all charts of the page: a retrieval set of a source's name has its colour.
    colours = colours_of(
        [*sources, *(name for line in [*evaluations, *labelled] for name in line["metrics"])],
        SOURCE_COLOURS,
    )
    epoch, examples = read_examples(folder)
    return write_page(
        folder / PAGE,
        "run.html",
        title=f"Training run {folder.resolve().name}",
        verdict=verdict_words(record),
        lead=_lead(record),
        sources=list(sources),
        steps=steps,
        not_finite=[step["at"] for step in steps if step.get("loss") is None],
        loss=steps
        and loss_picture(
            steps, {name: colours[name] for name in sources}, number(start.get("loss_at_chance"))
        ),
        course=steps and course_picture(steps),
        retrieval=evaluations and evaluation_picture(evaluations, colours),
        zero_shot=labelled
        and evaluation_picture(labelled, colours, "top1", "zero-shot top-1, %", 100),
        evaluated=_best_and_last(evaluations),
        loss_words=_loss_at_end(steps, number(start.get("loss_at_chance"))),
        examples_epoch=epoch,
        examples=examples,
        data=_data(sources, record["lost"]),
        settings=[
            (f"--{key.replace('_', '-')}", value)
            for key, value in (start.get("settings") or {}).items()
        ],
        groups=start.get("groups"),
        resumed=[f"{line['at']:.4g}" for line in record["start"][1:]],
    )


def best_evaluation(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Find the evaluation with the largest RSUM, on average over the sets.

    Returns:
        None if there is none.
    """

    def mean_rsum(line: Mapping[str, Any]) -> float:
        sums = [number(metrics.get("rsum")) for metrics in line["metrics"].values()]
        return sum(sums) / len(sums) if sums else 0.0

    return max(evaluations, key=mean_rsum, default=None)


def best_words(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Describe the best evaluation in a sentence, with remarks on chance.

    Returns:
        "" if there is none.
    """
    if (best := best_evaluation(evaluations)) is None:
        return ""
    sums = ", ".join(
        f"{name} {number(metrics.get('rsum')):.1f}" for name, metrics in best["metrics"].items()
    )
    numbers = {
        name: {key: value for key, value in metrics.items() if math.isfinite(number(value))}
        for name, metrics in best["metrics"].items()
    }
    remarks = bounds_remarks(
        {name: metrics for name, metrics in numbers.items() if "rsum" in metrics}
    )
    return " ".join([f"Best RSUM: {sums} after epoch {best['at']:.0f}.", *remarks])


def accuracy_words(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Describe the last zero-shot evaluation in a sentence.

    Returns:
        "" if there is none.
    """
    if not evaluations:
        return ""
    shares = ", ".join(
        f"{name} {100 * number(metrics.get('top1')):.1f} % (chance {100 * number(metrics.get('top1_chance')):.1f} %)"
        for name, metrics in evaluations[-1]["metrics"].items()
    )
    return f"Zero-shot top-1 after epoch {evaluations[-1]['at']:.0f}: {shares}."


def _loss_at_end(steps: Sequence[Mapping[str, Any]], chance: float) -> str:
    """Warn in a sentence if the last losses are about that of chance.

    Returns:
        "" if they are lower, or chance is not known.
    """
    last = [number(step.get("loss")) for step in steps[-max(1, len(steps) // 20) :]]
    mean = sum(last) / len(last) if last else math.nan
    if not mean >= 0.98 * chance:
        return ""
    return f"The loss ends at {mean:.3f}; a model that cannot tell pairs apart has {chance:.3f}."


def _lead(record: Mapping[str, list[dict[str, Any]]]) -> str:
    start = record["start"][-1]
    steps = record["step"]
    ends = record["end"]
    at = max([*(line["at"] for line in [*steps, *ends]), 0.0])
    batch = f", {start['batch']}." if start.get("batch") else "."
    words = [f"{start['model']}."] if start.get("model") else []
    words.append(f"{at:.4g} of {number(start.get('epochs')):.0f} epochs{batch}")
    if ends:
        words += [_STATES.get(ends[-1].get("how", ""), ""), str(ends[-1].get("words") or "")]
    else:
        words.append("The record has no end: the run is going on, or was killed.")
    return " ".join(filter(None, words))


def verdict_words(record: Mapping[str, list[dict[str, Any]]]) -> str:
    """Describe the results in sentences, zero-shot accuracy first.

    Returns:
        "" if nothing was evaluated.
    """
    words = [accuracy_words(record["zero-shot"]), best_words(record["retrieval"])]
    if _shares_captions(record):
        words.append(f"{SHARED_CAPTIONS.capitalize()}.")
    return " ".join(filter(None, words))


def _shares_captions(record: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Return whether few captions serve many pictures of a set, and the run trained as if they did not."""
    if not record["start"] or not record["retrieval"]:
        return False
    settings = record["start"][-1].get("settings") or {}
    sets = record["retrieval"][-1]["metrics"].values()
    return "positives" not in settings and any(
        number(metrics.get("rsum_best")) < LOW_BEST for metrics in sets
    )


def _best_and_last(
    evaluations: Sequence[Mapping[str, Any]],
) -> list[tuple[tuple[str, str], dict[str, float]]]:
    """((set, epoch), metrics) of the best and the last evaluation."""
    best = best_evaluation(evaluations)
    rows: list[tuple[tuple[str, str], dict[str, float]]] = []
    for line in [best, *evaluations[-1:]] if best is not None else []:
        which = "best" if line is best else "last"
        for name, metrics in line["metrics"].items():
            row = (
                (f"{name}, {which}", f"{line['at']:.0f}"),
                {key: number(value) for key, value in metrics.items()},
            )
            rows += [row] if row not in rows else []
    return rows


def _data(
    sources: Mapping[str, Any], lost: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """List the table's rows: source, samples, shown, replaced."""
    delivered: Counter[str] = Counter()
    reasons: dict[str, Counter[str]] = {}
    for line in lost:
        delivered.update(line.get("delivered") or {})
        for name, counts in (line.get("lost") or {}).items():
            reasons.setdefault(name, Counter()).update(counts)
    rows = []
    for name in dict.fromkeys([*sources, *delivered]):
        counts = reasons.get(name, Counter())
        words = (
            ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"
        )
        bad, shown = sum(counts.values()), delivered[name]
        share = f" ({100 * bad / shown:.2g} %)" if bad and shown else ""
        samples = sources.get(name)
        rows.append(
            (name, f"{samples:,}" if isinstance(samples, int) else "?", f"{shown:,}", words + share)
        )
    return rows
