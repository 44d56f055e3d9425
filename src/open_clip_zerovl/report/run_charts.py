"""Charts of a run's record, as PNG bytes. Positions are in epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from open_clip_zerovl.report.plot import (
    FAINT,
    INK,
    MODEL_COLOURS,
    Line,
    draw_levels,
    draw_lines,
    line_chart,
    moving_average,
    new_figure,
    plain_axes,
    png_bytes,
)

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


def course_picture(steps: Lines) -> bytes:
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
