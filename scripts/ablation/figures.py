"""The figure of docs/results/emoji.md: the main effects with their intervals, runs of 16 and of 40 epochs apart."""

from __future__ import annotations

from collections.abc import Callable

from open_clip_zerovl.report.plot import INK, MODEL_COLOURS, new_figure, plain_axes, png_bytes
from scripts.ablation.protocol import MARGIN_RSUM
from scripts.ablation.rows import Row

_DEBIASED = {16: ("debiased", "random"), 40: ("long-debiased", "long-random")}
_MIXUP = {16: ("mixed-bert", "debiased"), 40: ("mixup", "long-debiased")}
#: Axis -> label -> epochs -> the comparison; and its measure.
_PANELS = {
    "difference in RSUM (an interval within the grey counts as no difference)": [
        ("debiased: unseen style", _DEBIASED, "score"),
        ("debiased: across trained sources", _DEBIASED, "across"),
        ("debiased: within a trained source", _DEBIASED, "within"),
        ("debiased: all trained sources in one pool", _DEBIASED, "mixed"),
        (
            "debiased: two kinds of pictures in one source",
            {64: ("contexts-debiased", "contexts-random")},
            "score",
        ),
        ("mixup: unseen style", _MIXUP, "score"),
        (
            "whole recipe over baseline: unseen style",
            {40: ("stack-drop", "stack-baseline")},
            "score",
        ),
    ],
    "difference in percent of probed embeddings whose source is found": [
        ("debiased: source found from a caption", _DEBIASED, "probe, texts %"),
        ("debiased: source found from a picture", _DEBIASED, "probe, images %"),
    ],
    "difference in log p of negatives": [
        ("debiased: negatives of other sources", _DEBIASED, "log p, other source"),
        ("debiased: negatives of the same source", _DEBIASED, "log p, same source"),
    ],
}


def main_effects(row: Callable[[str, str, str], Row]) -> bytes:
    """PNG of the main effects.

    Args:
        row: gives a comparison's row, from its two conditions and a measure.

    Raises:
        UserError: matplotlib is missing.
    """
    figure = new_figure(8.4, 6.6, dpi=110)
    panels = figure.subplots(
        len(_PANELS), height_ratios=[len(lines) + 0.6 for lines in _PANELS.values()]
    )
    colours = dict(zip((16, 40, 64), MODEL_COLOURS, strict=False))
    for axes, (title, lines) in zip(panels, _PANELS.items(), strict=True):
        for position, (_, by_epochs, measure) in enumerate(lines):
            for epochs, names in by_epochs.items():
                shown = row(*names, measure)
                at = position + {16: -0.16, 40: 0.16}.get(epochs, 0)
                reach = (shown.found.high - shown.found.low) / 2
                label = f"{epochs} epochs"
                axes.errorbar(
                    shown.found.mean,
                    at,
                    xerr=reach,
                    fmt="o",
                    color=colours[epochs],
                    capsize=3,
                    label=label,
                )
                axes.annotate(f"n = {len(shown.values)}", (shown.found.high, at), xytext=(5, 0), fontsize=7, color=INK,
                              textcoords="offset points", verticalalignment="center")  # fmt: skip
        plain_axes(axes)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(lines)), [label for label, *_ in lines], fontsize=9)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xlabel(title, fontsize=9, color=INK)
        axes.tick_params(length=0)
    panels[0].axvspan(-MARGIN_RSUM, MARGIN_RSUM, color=INK, alpha=0.08, linewidth=0)
    named = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        named.values(), named, loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    title = "Debiased less random batches, mixup less none, recipe less baseline: 95 % intervals (Student, over n paired seeds)"
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left", color=INK)
    return png_bytes(figure)
