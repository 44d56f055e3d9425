"""Charts of a run's record, as PNG bytes. Positions are in epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from open_clip_zerovl.report.plot import (
    FAINT,
    INK,
    MODEL_COLOURS,
    SOURCE_COLOURS,
    colours_of,
    moving_average,
    new_figure,
    plain_axes,
    png_bytes,
)

Lines = Sequence[Mapping[str, Any]]
_SMOOTHED_SHARE = 40  # a loss is averaged over 1/20 of the curve: 1/40 on either side
_WIDTH = 8.6


def number(value: Any) -> float:
    """A number of the record; NaN where there is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def loss_picture(steps: Lines, sources: Sequence[str]) -> bytes:
    """The loss of each logged step, its moving average, and that of each source's pairs."""
    figure = new_figure(_WIDTH, 3.6)
    axes = figure.add_subplot()
    plain_axes(axes)
    at = np.array([step["at"] for step in steps])
    losses = np.array([number(step.get("loss")) for step in steps])
    reach = max(1, len(steps) // _SMOOTHED_SHARE)
    if len(sources) < 2:
        axes.plot(at, losses, color=FAINT, linewidth=0.6, alpha=0.5)
    for name, colour in (colours_of(sources, SOURCE_COLOURS) if len(sources) > 1 else {}).items():
        own = np.array([number((step.get("by_source") or {}).get(name)) for step in steps])
        seen = np.isfinite(own)
        if seen.any():
            axes.plot(at[seen], moving_average(own[seen], max(1, seen.sum() // _SMOOTHED_SHARE)),
                      color=colour, linewidth=1.3, label=name)  # fmt: skip
    axes.plot(at, moving_average(losses, reach), color=INK, linewidth=2, label="all" if len(sources) > 1 else "loss")
    axes.set_xlabel("epochs")
    axes.set_ylabel("loss")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return png_bytes(figure)


def retrieval_picture(evaluations: Lines) -> bytes:
    """RSUM of each retrieval set over the epochs."""
    figure = new_figure(_WIDTH, 3.2)
    axes = figure.add_subplot()
    plain_axes(axes)
    names = list(dict.fromkeys(name for line in evaluations for name in line["metrics"]))
    for name, colour in colours_of(names, MODEL_COLOURS).items():
        own = [
            (line["at"], number(line["metrics"][name].get("rsum"))) for line in evaluations if name in line["metrics"]
        ]
        axes.plot(*zip(*own, strict=True), color=colour, linewidth=2, marker="o", markersize=4, label=name)
    axes.set_xlabel("epochs")
    axes.set_ylabel("RSUM")
    axes.xaxis.get_major_locator().set_params(integer=True)
    places = {line["at"] for line in evaluations}
    if len(places) == 1:  # matplotlib would show fractions of one epoch and of one RSUM around it
        (only,) = places
        axes.set_xticks([only])
        axes.set_ylim(bottom=0, top=1.1 * axes.get_ylim()[1])
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return png_bytes(figure)


def course_picture(steps: Lines) -> bytes:
    """Learning rate, samples a second, and the share of the time in which the first rank waited for data."""
    panels: list[tuple[str, str, Callable[[float], float]]] = [
        ("learning rate", "lr", float),
        ("samples a second", "samples_per_second", float),
        ("waiting for data, %", "waited", lambda share: 100 * share),
    ]
    figure = new_figure(_WIDTH, 2.6)
    at = [step["at"] for step in steps]
    for axes, (title, key, scale) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        plain_axes(axes)
        axes.plot(at, [scale(number(step.get(key))) for step in steps], color=MODEL_COLOURS[1], linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    figure.supxlabel("epochs", fontsize=10)
    return png_bytes(figure)
