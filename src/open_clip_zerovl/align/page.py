"""An alignment as one HTML page: every pairing's scores, and the curves of the best ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from open_clip_zerovl.report.html import write_page
from open_clip_zerovl.report.plot import FAINT, MODEL_COLOURS, Line, draw_levels, line_chart

# (epoch, held-out RSUM, mean loss) of each check
Checks = Sequence[tuple[int, float, float]]


def write_align_page(
    path: Path,
    facts: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    curves: Mapping[str, Checks],
    chance: float,
    settings: Mapping[str, Any],
) -> Path:
    """Write the page.

    Args:
        facts: sentences about data and result.
        header, rows: the table of pairings.
        curves: a pairing's name -> its checks; of those that are drawn.
        chance: RSUM of random orders.
        settings: the settings of the best pairing's training.
    """

    def finish(axes: Any) -> None:
        draw_levels(axes, {"chance": (chance, FAINT)})

    def lines(number: int) -> list[Line]:
        return [
            Line(name, [one[0] for one in checks], [one[number] for one in checks], colour, {"marker": "o"})
            for (name, checks), colour in zip(curves.items(), MODEL_COLOURS, strict=False)
        ]

    return write_page(
        path,
        "align.html",
        title="An alignment",
        facts=facts,
        header=header,
        rows=rows,
        training=line_chart(lines(1), x="epoch", y="RSUM, held out", finish=finish),
        losses=line_chart(lines(2), x="epoch", y="loss"),
        settings=[(name.replace("_", " "), str(value)) for name, value in settings.items()],
    )
