"""The figures of docs/results.md: one for each table, a row for each comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from open_clip_zerovl.figures.plot import INK, MODEL_COLOURS, colours_of, new_figure, plain_axes, png_bytes
from scripts.ablation.comparisons import Comparison, PaperTable
from scripts.ablation.verdicts import Verdict

_DPI = 110
_PAPER = "the paper (COCO, Flickr30K)"


def differences_figure(table: PaperTable, judged: Sequence[tuple[Comparison, Verdict]]) -> bytes:
    """PNG of a table's comparisons: mean difference with its interval, the margin, and the paper's differences beside it.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = [(one, verdict) for one, verdict in judged if verdict.seeds and one.measure == "score"]
    figure = new_figure(7.2, 1.3 + 0.42 * max(1, len(rows)), dpi=_DPI)
    axes = figure.subplots()
    colour = colours_of(["here"], MODEL_COLOURS)["here"]
    for position, (one, verdict) in enumerate(rows):
        reach = (verdict.high - verdict.low) / 2
        bar = 0 if math.isinf(reach) else reach
        axes.errorbar(
            verdict.difference, position, xerr=bar, fmt="o", color=colour, capsize=3, label="here, 95 % interval"
        )
        if one.paper is not None:
            of_paper = [ours - theirs for ours, theirs in zip(*one.paper, strict=True)]
            axes.plot(of_paper, [position + 0.25] * len(of_paper), "|", color=INK, markersize=9, label=_PAPER)
    margin = rows[0][0].margin if rows else 0
    axes.axvspan(-margin, margin, color=INK, alpha=0.08, linewidth=0, label=f"counts as none (within {margin:g})")
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{one.run} - {one.against}" for one, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("difference in RSUM", fontsize=9, color=INK)
    axes.set_title(f"{table.name}: {table.title}", fontsize=10, loc="left", color=INK)
    plain_axes(axes)
    axes.tick_params(length=0)
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return png_bytes(figure)
