"""Charts of the bias report (figures 3 and 4, A.5), as PNG bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from open_clip_zerovl.evaluate.bias.report import BiasReport
from open_clip_zerovl.report.plot import (
    FAINT,
    GRID,
    INK,
    MODEL_COLOURS,
    SOURCE_COLOURS,
    colours_of,
    new_figure,
    plain,
    plain_axes,
    png_bytes,
)


def log_p_picture(report: BiasReport) -> bytes:
    """Figure 4: mean log p of negatives by batch size, a panel for each source of the query."""
    sources = report.sources
    columns = min(4, len(sources))
    rows = math.ceil(len(sources) / columns)
    figure = new_figure(2.6 * columns + 0.6, 2.6 * rows + 0.5)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(sources) :]:
        axes.set_visible(False)
    sizes = sorted(next(iter(report.models.values())).log_p)
    for source, axes in zip(sources, grid.flat, strict=False):
        plain_axes(axes)
        axes.plot(sizes, [-math.log(size) for size in sizes], color=FAINT, linewidth=1, linestyle=":")
        for name, colour in colours_of(list(report.models), MODEL_COLOURS).items():
            for group, line in (("same_source", "-"), ("other_source", "--")):
                values = [report.models[name].log_p[size]["by_source"][source][group] for size in sizes]
                axes.plot(sizes, [math.nan if value is None else value for value in values], line, color=colour,
                          linewidth=1.8, marker="o", markersize=3.5)  # fmt: skip
        axes.set_xscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title(source, fontsize=10)
    figure.supxlabel("batch size", fontsize=10)
    figure.supylabel("mean log p of negatives", fontsize=10)
    _line_legend(figure, report)
    return png_bytes(figure)


def _line_legend(figure: Any, report: BiasReport) -> None:
    from matplotlib.lines import Line2D

    colours = colours_of(list(report.models), MODEL_COLOURS)
    handles = [Line2D([], [], color=colour, linewidth=3, label=plain(name)) for name, colour in colours.items()]
    handles += [
        Line2D([], [], color=INK, linestyle="-", label="same source"),
        Line2D([], [], color=INK, linestyle="--", label="other source"),
        Line2D([], [], color=FAINT, linestyle=":", label="uniform softmax: -ln(batch)"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)), frameon=False, fontsize=9)


def probe_picture(report: BiasReport) -> bytes:
    """How often a linear probe guesses the source, from images and from texts, beside the chance level."""
    figure = new_figure(6.2, 2.8)
    axes = figure.add_subplot()
    colours = colours_of(list(report.models), MODEL_COLOURS)
    thick = 0.8 / len(colours)
    for i, (name, colour) in enumerate(colours.items()):
        one = report.models[name]
        for position, value in enumerate((100 * one.probe_images, 100 * one.probe_texts)):
            x = position + (i - (len(colours) - 1) / 2) * thick
            axes.bar(x, value, 0.92 * thick, color=colour, label=plain(name) if position == 0 else None)
            axes.annotate(f"{value:.0f} %", (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=9)
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
    # In shuffled order: drawn source by source, the last one would cover the others.
    order = np.random.default_rng(0).permutation(len(owners))
    shades = np.array([colours[owner] for owner in owners], dtype=object)
    for (name, one), line in zip(report.models.items(), grid, strict=True):
        for axes, points, modality in zip(line, (one.map_images, one.map_texts), ("images", "texts"), strict=True):
            axes.scatter(points[order, 0], points[order, 1], s=9, c=list(shades[order]), alpha=0.75, linewidths=0)
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set_color(GRID)
            axes.set_title(plain(f"{name}: {modality}"), fontsize=11, color=INK)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=source) for source, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(handles)), frameon=False)
    return png_bytes(figure)


def caption_picture(report: BiasReport) -> bytes:
    """Words of the captions by source: the share of captions of each length."""
    figure = new_figure(7, 2.8)
    axes = figure.add_subplot()
    counts = {name: np.asarray(words) for name, words in report.caption_words.items()}
    most = int(np.percentile(np.concatenate(list(counts.values())), 99.5))
    for name, colour in colours_of(report.sources, SOURCE_COLOURS).items():
        shares = np.bincount(np.minimum(counts[name], most + 1), minlength=most + 2)[: most + 1] / len(counts[name])
        axes.plot(range(most + 1), 100 * shares, color=colour, linewidth=2, marker="o", markersize=3,
                  label=f"{name}, mean {counts[name].mean():.1f}")  # fmt: skip
    plain_axes(axes)
    axes.set_xlim(0, most + 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("words in a caption")
    axes.set_ylabel("% of captions")
    axes.legend(frameon=False, fontsize=9)
    return png_bytes(figure)
