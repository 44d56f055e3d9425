"""`record.jsonl` in a run's folder: the course of a training, one JSON object a line.

    kind        when                                   besides `kind`, `at` and `time`
    start       a process begins or continues            settings, sources, model, batch
    step        an optimizer step is logged            loss, lr, samples_per_second, waited, memory_bytes, by_source
    retrieval   an epoch was evaluated                 metrics: set -> metric -> value
    zero-shot   an epoch was evaluated                 metrics: set -> top1, top1_chance
    lost        an epoch ends, or the run stops in it  delivered, lost: source -> samples; source -> reason -> samples
    end         the process ends                       how: done, stopped or failed; words

`at` is the position in training, in epochs: 3.25 is a quarter into the fourth. It holds for any batch and any number of ranks.
A process that continues from a checkpoint first removes the later lines, so that each position comes once.

`run.html`: the record on one page that needs no other file, with its charts. Training writes it at its end.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.files import reading, write_atomically
from open_clip_zerovl.report.pages import (
    FAINT,
    INK,
    MODEL_COLOURS,
    SOURCE_COLOURS,
    Line,
    colours_of,
    draw_levels,
    draw_lines,
    line_chart,
    moving_average,
    new_figure,
    plain_axes,
    png_bytes,
    write_page,
)
from open_clip_zerovl.report.verdicts import LOW_BEST, SHARED_CAPTIONS, bounds_remarks

log = logging.getLogger(__name__)

RECORD = "record.jsonl"
_SAME = 1e-9  # positions closer than this are the same one, computed in two ways
_KINDS = ("start", "step", "retrieval", "zero-shot", "lost", "end")


class Record:
    """Writes the record of a run, on its first rank.

    Args:
        folder: folder of the run, which exists.
        at: the position from which the run begins or continues, in epochs. Later entries are taken back.
    """

    def __init__(self, folder: str | os.PathLike[str], at: float) -> None:
        self.path = Path(folder) / RECORD
        self.at = at
        if self.path.exists():
            earlier = [
                line
                for line in _read(self.path)
                if line["at"] <= at + _SAME and line["kind"] != "end"
            ]
            write_atomically(self.path, "".join(_as_line(line) for line in earlier))

    def add(self, kind: str, at: float, **entries: Any) -> None:
        """Write a line at the record's end.

        Raises:
            OSError: it cannot be written.
        """
        self.at = at
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_as_line({"kind": kind, "at": at, "time": round(time.time(), 3), **entries}))


def read_record(folder: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """Read the lines of a run's record, by kind, each in order of its position.

    If a position comes twice, the last line is kept.

    Raises:
        OSError: there is no record.
    """
    path = Path(folder) / RECORD
    lines_by_kind: dict[str, dict[Any, dict[str, Any]]] = {kind: {} for kind in _KINDS}
    for number, line in enumerate(_read(path)):
        once = line["kind"] in ("step", "retrieval", "zero-shot")
        lines_by_kind[line["kind"]][round(line["at"] / _SAME / 10) if once else number] = line
    return {
        kind: sorted(entries.values(), key=lambda line: line["at"])
        for kind, entries in lines_by_kind.items()
    }


def _as_line(line: Mapping[str, Any]) -> str:
    return json.dumps(_finite(line)) + "\n"


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines.

    A killed process may have left half a line, and a disk may have lost some.
    """
    lines, left_out = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if (
            isinstance(line, dict)
            and line.get("kind") in _KINDS
            and isinstance(line.get("at"), int | float)
        ):
            lines.append(line)
        else:
            left_out += 1
    if left_out:
        log.warning(
            "%s: %d lines are cut off or not as training writes them, and are left out.",
            path,
            left_out,
        )
    return lines


Lines = Sequence[Mapping[str, Any]]
_SMOOTHED_SHARE = 40  # a loss is averaged over 1/20 of the curve: 1/40 on either side
_COURSE = (
    ("learning rate", "lr", 1),
    ("samples a second", "samples_per_second", 1),
    ("waiting for data, %", "waited", 100),
)


def number(value: Any) -> float:
    """Read a number of the record.

    Returns:
        NaN if there is none.
    """
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )


def loss_picture(steps: Lines, sources: Mapping[str, str], chance: float = math.nan) -> bytes:
    """Draw the loss of each logged step, its moving average, and that of each source's pairs.

    Args:
        sources: name -> colour.
        chance: the loss of a model that cannot tell pairs apart; NaN if it is not known.
    """
    at = np.array([step["at"] for step in steps])
    losses = np.array([number(step.get("loss")) for step in steps])

    def smooth(label: str, values: np.ndarray, colour: str, width: float) -> Line:
        seen = np.isfinite(values)
        reach = max(1, int(seen.sum()) // _SMOOTHED_SHARE)
        return Line(
            label, at[seen], moving_average(values[seen], reach), colour, {"linewidth": width}
        )

    if len(sources) < 2:
        lines = [Line("a step", at, losses, FAINT, {"linewidth": 0.6, "alpha": 0.5})]
    else:
        losses_by_source = {
            name: [number((step.get("by_source") or {}).get(name)) for step in steps]
            for name in sources
        }
        lines = [
            smooth(name, np.array(losses_by_source[name]), sources[name], 1.3)
            for name in sources
            if np.isfinite(losses_by_source[name]).any()
        ]
    if np.isfinite(losses).any():
        lines.append(smooth("all" if len(sources) > 1 else "loss", losses, INK, 2))
    return line_chart(
        lines,
        x="epochs",
        y="loss",
        finish=lambda axes: draw_levels(axes, {"chance": (chance, FAINT)}, "{:.2f}"),
    )


def evaluation_picture(
    evaluations: Lines,
    colours: Mapping[str, str],
    key: str = "rsum",
    label: str = "RSUM",
    scale: float = 1,
) -> bytes:
    """Draw a metric of each set over the epochs with its level by chance, `KEY_chance`: RSUM of retrieval sets, or another.

    Args:
        colours: name of a set -> colour.
        scale: factor of the recorded numbers.
    """
    lines, levels = [], {}
    for name in dict.fromkeys(name for line in evaluations for name in line["metrics"]):
        evaluations_of_set = [line for line in evaluations if name in line["metrics"]]
        sums = [scale * number(line["metrics"][name].get(key)) for line in evaluations_of_set]
        lines.append(
            Line(
                name,
                [line["at"] for line in evaluations_of_set],
                sums,
                colours[name],
                {"marker": "o"},
            )
        )
        chance = scale * number(evaluations_of_set[-1]["metrics"][name].get(f"{key}_chance"))
        levels[f"chance, {name}:"] = (chance, colours[name])
    if len({height for height, _ in levels.values()}) == 1:
        levels = {"chance": next(iter(levels.values()))}
    places = {line["at"] for line in evaluations}

    def finish(axes: Any) -> None:
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(places) == 1:  # else matplotlib shows fractions of one epoch
            axes.set_xticks(list(places))
            highest = np.nanmax([axes.get_ylim()[1], *(height for height, _ in levels.values())])
            axes.set_ylim(bottom=0, top=1.1 * highest)
        draw_levels(axes, levels)

    return line_chart(lines, x="epochs", y=label, size=(8.6, 3.2), finish=finish)


def _course_picture(steps: Lines) -> bytes:
    """Draw the learning rate, samples a second, and the share of the time in which the first rank waited for data."""
    figure = new_figure(8.6, 2.6)
    at = [step["at"] for step in steps]
    for axes, (title, key, scale) in zip(figure.subplots(1, len(_COURSE)), _COURSE, strict=True):
        plain_axes(axes)
        values = [scale * number(step.get(key)) for step in steps]
        draw_lines(axes, [Line(title, at, values, MODEL_COLOURS[1], {"linewidth": 1.2})])
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    figure.supxlabel("epochs", fontsize=10)
    return png_bytes(figure)


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
        OSError: there is no record.
        UserError: it does not say how the run began, or holds other values than training writes.
    """
    folder = Path(folder)
    record = read_record(folder)
    with reading(folder / RECORD, "the page of the run is not written"):
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
        return write_page(
            folder / PAGE,
            "run.html",
            title=f"Training run {folder.resolve().name}",
            verdict=verdict_words(record),
            command=next_command(folder),
            lead=_lead(record),
            sources=list(sources),
            steps=steps,
            not_finite=[step["at"] for step in steps if step.get("loss") is None],
            loss=steps
            and loss_picture(
                steps,
                {name: colours[name] for name in sources},
                number(start.get("loss_at_chance")),
            ),
            course=steps and _course_picture(steps),
            retrieval=evaluations and evaluation_picture(evaluations, colours),
            zero_shot=labelled
            and evaluation_picture(labelled, colours, "top1", "zero-shot top-1, %", 100),
            evaluated=_best_and_last(evaluations),
            loss_words=_loss_at_end(steps, number(start.get("loss_at_chance"))),
            data=_data(sources, record["lost"]),
            settings=[
                (f"--{key.replace('_', '-')}", value)
                for key, value in (start.get("settings") or {}).items()
            ],
            groups=start.get("groups"),
            resumed=[f"{line['at']:.4g}" for line in record["start"][1:]],
        )


def next_command(folder: Path) -> str:
    """Write the command that exports the last checkpoint of a run.

    Returns:
        "" if there is none.
    """
    saved = epoch_checkpoints(folder / "checkpoints")
    if not saved:
        return ""
    return shlex.join(["zerovl", "export", str(saved[max(saved)]), str(folder / "exported")])


def epoch_checkpoints(folder: Path) -> dict[int, Path]:
    """List epoch -> its checkpoint, of those in a run's folder `checkpoints`, in their order."""
    found = (
        (re.fullmatch(r"epoch_(\d+)\.pt", file.name), file) for file in folder.glob("epoch_*.pt")
    )
    return dict(sorted((int(match[1]), file) for match, file in found if match))


def best_evaluation(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Find the evaluation with the largest RSUM, on average over the sets.

    Returns:
        None if there is none.
    """

    def mean_rsum(line: Mapping[str, Any]) -> float:
        sums = [number(metrics.get("rsum")) for metrics in line["metrics"].values()]
        return sum(sums) / len(sums) if sums else 0.0

    return max(evaluations, key=mean_rsum, default=None)


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
    """Describe the results in sentences: the last zero-shot accuracy, then the best retrieval with remarks on chance.

    Returns:
        "" if nothing was evaluated.
    """
    words = []
    if labelled := record["zero-shot"]:
        shares = ", ".join(
            f"{name} {100 * number(metrics.get('top1')):.1f} % (chance {100 * number(metrics.get('top1_chance')):.1f} %)"
            for name, metrics in labelled[-1]["metrics"].items()
        )
        words.append(f"Zero-shot top-1 after epoch {labelled[-1]['at']:.0f}: {shares}.")
    best = best_evaluation(record["retrieval"])
    if best is not None:
        numbers = {
            name: {key: value for key, value in metrics.items() if math.isfinite(number(value))}
            for name, metrics in best["metrics"].items()
        }
        sums = ", ".join(
            f"{name} {number(metrics.get('rsum')):.1f}" for name, metrics in numbers.items()
        )
        words.append(f"Best RSUM: {sums} after epoch {best['at']:.0f}.")
        words += bounds_remarks({name: own for name, own in numbers.items() if "rsum" in own})
        settings = record["start"][-1].get("settings") or {}
        low = (number(own.get("rsum_best")) < LOW_BEST for own in numbers.values())
        if "positives" not in settings and any(low):
            words.append(f"{SHARED_CAPTIONS.capitalize()}.")
    return " ".join(words)


def _best_and_last(
    evaluations: Sequence[Mapping[str, Any]],
) -> list[tuple[tuple[str, str], dict[str, float]]]:
    """List ((set, epoch), metrics) of the best and the last evaluation."""
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
