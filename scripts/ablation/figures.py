"""The figures of docs/results.md: differences with their intervals, a row each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from open_clip_zerovl.report.plot import INK, MODEL_COLOURS, new_figure, plain_axes, png_bytes
from scripts.ablation.comparisons import Comparison, PaperTable
from scripts.ablation.protocol import MARGIN_RSUM
from scripts.ablation.verdicts import Verdict

_DPI = 110
_PAPER = "the paper (COCO, Flickr30K)"


@dataclass(frozen=True)
class Row:
    """A difference in RSUM; an infinite end of its interval is not drawn.

    Attributes:
        paper: the paper's differences.
    """

    label: str
    difference: float
    low: float
    high: float
    paper: tuple[float, ...] = ()


def differences_figure(table: PaperTable, judged: Sequence[tuple[Comparison, Verdict]]) -> bytes:
    """PNG of a table's comparisons: mean difference with its interval, the margin, and the paper's differences beside it.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = []
    for one, verdict in judged:
        if one.measure != "score":
            continue
        paper = () if one.paper is None else tuple(ours - theirs for ours, theirs in zip(*one.paper, strict=True))
        label = f"{one.run} - {one.against}"
        rows.append(Row(label, verdict.difference, verdict.low, verdict.high, paper))
    return rows_figure(f"{table.name}: {table.title}".replace("`", ""), rows)


def rows_figure(title: str, rows: Sequence[Row]) -> bytes:
    """PNG of differences, from the first row down, and of the margin.

    Raises:
        UserError: matplotlib is missing.
    """
    figure = new_figure(7.2, 1.3 + 0.42 * max(1, len(rows)), dpi=_DPI)
    axes = figure.subplots()
    for position, row in enumerate(rows):
        reach = (row.high - row.low) / 2
        bar = 0 if math.isinf(reach) else reach
        axes.errorbar(
            row.difference, position, xerr=bar, fmt="o", color=MODEL_COLOURS[0], capsize=3, label="here, 95 % interval"
        )
        if row.paper:
            axes.plot(row.paper, [position + 0.25] * len(row.paper), "|", color=INK, markersize=9, label=_PAPER)
    label = f"counts as none (within {MARGIN_RSUM:g})"
    axes.axvspan(-MARGIN_RSUM, MARGIN_RSUM, color=INK, alpha=0.08, linewidth=0, label=label)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("difference in RSUM", fontsize=9, color=INK)
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left", color=INK)
    plain_axes(axes)
    axes.tick_params(length=0)
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return png_bytes(figure)
