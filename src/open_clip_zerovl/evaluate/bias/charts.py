"""Charts of `zerovl bias` (figures 3 and 4, A.5) and of `zerovl compare`, as PNG bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from open_clip_zerovl.evaluate.bias.comparison import KINDS, Comparison
from open_clip_zerovl.evaluate.bias.report import BiasReport
from open_clip_zerovl.report.plot import (
    FAINT,
    GRID,
    INK,
    MODEL_COLOURS,
    SOURCE_COLOURS,
    Line,
    colours_of,
    draw_lines,
    line_chart,
    mark_base,
    new_figure,
    plain,
    plain_axes,
    png_bytes,
    top_legend,
)

_COMPARED = {
    "RSUM, 600 at most": {
        "within": "within",
        "across": "across",
        "mixed": "mixed",
        "unseen": "unseen",
    },
    "source probe, %": {"probe_images": "images", "probe_texts": "texts"},
    "log p of negatives": {"log_p_same": "same\nsource", "log_p_other": "other\nsource"},
}


def bias_values(report: BiasReport) -> dict[str, Any]:
    """Values that the template `bias_parts.html` shows."""
    pictures = {
        "probe": probe_picture,
        "log_p": log_p_picture,
        "maps": map_picture,
        "captions": caption_picture,
    }
    return {"bias": report, "charts": {name: picture(report) for name, picture in pictures.items()}}


def log_p_picture(report: BiasReport) -> bytes:
    """Figure 4: mean log p of negatives by batch size, a panel for each source of the query."""
    sources, models = report.sources, report.models
    colours = colours_of(list(models), MODEL_COLOURS)
    columns = min(4, len(sources))
    rows = math.ceil(len(sources) / columns)
    figure = new_figure(2.6 * columns + 0.6, 2.6 * rows + 0.5)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(sources) :]:
        axes.set_visible(False)
    sizes = sorted(next(iter(models.values())).log_p)
    uniform = Line(
        "", sizes, [-math.log(size) for size in sizes], FAINT, {"linewidth": 1, "linestyle": ":"}
    )
    for source, axes in zip(sources, grid.flat, strict=False):
        plain_axes(axes)
        lines = [
            Line("", sizes, [one.log_p[size]["by_source"][source][group] for size in sizes], colours[name],
                 {"linestyle": style, "marker": "o"})
            for name, one in models.items()
            for group, style in (("same_source", "-"), ("other_source", "--"))
        ]  # fmt: skip
        draw_lines(axes, [uniform, *lines])
        axes.set_xscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title(plain(source), fontsize=10)
    figure.supxlabel("batch size", fontsize=10)
    figure.supylabel("mean log p of negatives", fontsize=10)
    looks = {name: {"color": colour, "linewidth": 3} for name, colour in colours.items()}
    styles = {
        "same source": (INK, "-"),
        "other source": (INK, "--"),
        "uniform softmax: -ln(batch)": (FAINT, ":"),
    }
    top_legend(
        figure,
        looks | {label: {"color": c, "linestyle": style} for label, (c, style) in styles.items()},
    )
    return png_bytes(figure)


def probe_picture(report: BiasReport) -> bytes:
    """Accuracy of the source probe on images and on texts, beside the chance level."""
    figure = new_figure(6.2, 2.8)
    axes = figure.add_subplot()
    colours = colours_of(list(report.models), MODEL_COLOURS)
    thick = 0.8 / len(colours)
    for i, (name, colour) in enumerate(colours.items()):
        one = report.models[name]
        for position, value in enumerate((100 * one.probe_images, 100 * one.probe_texts)):
            x = position + (i - (len(colours) - 1) / 2) * thick
            axes.bar(
                x, value, 0.92 * thick, color=colour, label=plain(name) if position == 0 else None
            )
            axes.annotate(
                f"{value:.0f} %",
                (x, value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    chance = 100 * report.probe_chance
    axes.axhline(chance, color=INK, linewidth=1, linestyle="--", label=f"chance, {chance:.0f} %")
    plain_axes(axes)
    axes.set_xticks((0, 1), ("from images", "from texts"), fontsize=10)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 25))
    axes.set_ylabel("source guessed, %")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return png_bytes(figure)


def map_picture(report: BiasReport) -> bytes:
    """Figure 3: t-SNE maps of image and text embeddings, a row for each model, coloured by source."""
    colours = colours_of(report.sources, SOURCE_COLOURS)
    owners = np.array([report.samples[row].source for row in report.map_rows])
    figure = new_figure(8.4, 3.9 * len(report.models) + 0.4)
    grid = figure.subplots(len(report.models), 2, squeeze=False)
    # In shuffled order: drawn source by source, the last source would cover the other sources.
    order = np.random.default_rng(0).permutation(len(owners))
    shades = np.array([colours[owner] for owner in owners], dtype=object)
    for (name, one), line in zip(report.models.items(), grid, strict=True):
        for axes, points, modality in zip(
            line, (one.map_images, one.map_texts), ("images", "texts"), strict=True
        ):
            axes.scatter(
                points[order, 0],
                points[order, 1],
                s=9,
                c=list(shades[order]),
                alpha=0.75,
                linewidths=0,
            )
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set_color(GRID)
            axes.set_title(plain(f"{name}: {modality}"), fontsize=11, color=INK)
    looks = {
        source: {"marker": "o", "linestyle": "", "color": colour}
        for source, colour in colours.items()
    }
    top_legend(figure, looks)
    return png_bytes(figure)


def caption_picture(report: BiasReport) -> bytes:
    """Words of the captions by source: the share of captions of each length."""
    most = int(np.percentile(np.concatenate(list(report.caption_words.values())), 99.5))
    lines = []
    for name, colour in colours_of(report.sources, SOURCE_COLOURS).items():
        words = np.asarray(report.caption_words[name])
        percent = (
            100
            * np.bincount(np.minimum(words, most + 1), minlength=most + 2)[: most + 1]
            / len(words)
        )
        lines.append(
            Line(
                f"{name}, mean {words.mean():.1f}",
                range(most + 1),
                percent,
                colour,
                {"marker": "o"},
            )
        )

    return line_chart(
        lines,
        x="words in a caption",
        y="% of captions",
        size=(8, 2.8),
        finish=lambda axes: axes.set(xlim=(0, most + 0.5), ylim=(0, None)),
    )


def comparison_picture(found: Comparison) -> bytes:
    """Points with their intervals, a panel for each unit of numbers."""
    panels = {
        title: {k: label for k, label in own.items() if k in found.sides}
        for title, own in _COMPARED.items()
    }
    if labelled := {kind: kind.removeprefix("top-1 ") for kind in found.sides if kind not in KINDS}:
        panels["zero-shot top-1, %"] = labelled
    figure = new_figure(9.6, 3.2)
    grid = figure.subplots(
        1, len(panels), width_ratios=[max(1, len(kinds)) for kinds in panels.values()]
    )
    colours = colours_of(found.names, MODEL_COLOURS)
    for (title, kinds), axes in zip(panels.items(), grid, strict=True):
        plain_axes(axes)
        for place, kind in enumerate(kinds):
            for i, (name, colour) in enumerate(colours.items()):
                side = found.sides[kind][name]
                x = place + (i - (len(colours) - 1) / 2) * 0.5 / len(colours)
                axes.plot([x, x], side.interval, color=colour, linewidth=2)
                axes.plot(x, side.value, "o", color=colour, markersize=6)
                axes.plot(
                    [x] * len(side.runs), side.runs, "_", color=colour, markersize=9, alpha=0.6
                )
            axes.hlines(
                found.chance[kind],
                place - 0.4,
                place + 0.4,
                color=FAINT,
                linewidth=1.2,
                linestyle=":",
            )
        axes.set_xticks(range(len(kinds)), list(kinds.values()), fontsize=9)
        axes.set_xlim(-0.5, len(kinds) - 0.5)
        axes.set_title(title, fontsize=10, color=INK)
        mark_base(axes)
    looks = {name: {"marker": "o", "color": colour} for name, colour in colours.items()}
    top_legend(figure, {**looks, "chance": {"color": FAINT, "linestyle": ":"}})
    return png_bytes(figure)
