"""The figures of docs/results.md: differences with their intervals, a row each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from open_clip_zerovl.report.plot import INK, MODEL_COLOURS, new_figure, plain_axes, png_bytes
from scripts.ablation.protocol import MARGIN_RSUM
from scripts.ablation.verdicts import Estimate


@dataclass(frozen=True)
class Bar:
    """A difference in RSUM; an infinite interval is not drawn.

    Attributes:
        paper: the paper's numbers of both sides, on COCO and Flickr30K.
    """

    label: str
    found: Estimate
    paper: Sequence[Sequence[float]] | None = None


def differences(title: str, bars: Sequence[Bar]) -> bytes:
    """PNG of differences, from the first down, with the margin, and the paper's differences below each.

    Raises:
        UserError: matplotlib is missing.
    """
    figure = new_figure(7.2, 1.3 + 0.42 * len(bars), dpi=110)
    axes = figure.subplots()
    for position, bar in enumerate(bars):
        reach = (bar.found.high - bar.found.low) / 2
        axes.errorbar(
            bar.found.mean, position, xerr=reach if math.isfinite(reach) else 0, fmt="o", color=MODEL_COLOURS[0], capsize=3,
            label="here, 95 % interval",
        )  # fmt: skip
        if bar.paper:
            paper = [ours - theirs for ours, theirs in zip(*bar.paper, strict=True)]
            label = "the paper (COCO, Flickr30K)"
            axes.plot(paper, [position + 0.25] * len(paper), "|", color=INK, markersize=9, label=label)
    label = f"counts as none (within {MARGIN_RSUM:g})"
    axes.axvspan(-MARGIN_RSUM, MARGIN_RSUM, color=INK, alpha=0.08, linewidth=0, label=label)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel("difference in RSUM", fontsize=9, color=INK)
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left", color=INK)
    plain_axes(axes)
    axes.tick_params(length=0)
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return png_bytes(figure)
