"""The report of a fine-tuning as one HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from open_clip_zerovl.evaluate.interpolation.curve import Curve
from open_clip_zerovl.finetune.settings import Setting
from open_clip_zerovl.report.html import write_page
from open_clip_zerovl.report.plot import FAINT, MODEL_COLOURS, RIGHT_COLOUR, Line, draw_levels, line_chart


def write_report(
    path: str | os.PathLike[str],
    facts: Sequence[str],
    settings: Sequence[Setting],
    scores: Mapping[int, float],
    best: int,
    curve: Curve,
    held_out: Sequence[str],
) -> Path:
    """Write the page.

    Args:
        facts: sentences about model and data.
        scores: epoch -> RSUM on the held-out pairs; epoch 0 is the model before.
        best: the best of the epochs.
        held_out: the sets of the pairs.
    """

    def finish(axes: Any) -> None:
        axes.plot([best], [scores[best]], marker="o", markersize=8, color=RIGHT_COLOUR)
        axes.axhline(scores[0], color=FAINT, linewidth=1, linestyle=":")
        draw_levels(axes, {"chance": (curve.points[0].mean_chance(held_out), FAINT)})
        axes.xaxis.get_major_locator().set_params(integer=True)

    epochs = sorted(scores)
    line = Line("RSUM", epochs, [scores[epoch] for epoch in epochs], MODEL_COLOURS[1], {"marker": "o"})
    return write_page(
        path,
        "finetune.html",
        title="A fine-tuning",
        facts=facts,
        settings=[(f"--{s.flag}", "not used" if s.value is None else s.value, s.reason) for s in settings],
        training=line_chart([line], x=f"epoch (0: before); the best is {best}", y="RSUM, held out", finish=finish),
        curve=curve,
        picture=curve.picture(),
    )
