"""Charts of the linear probe and of the bias report (figures 3 and 4), as PNG bytes.

Everything is drawn with matplotlib's own canvas: no display, no global state.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from open_clip_zerovl.errors import UserError
from open_clip_zerovl.reports import RunRecord

if TYPE_CHECKING:
    from open_clip_zerovl.bias_report import BiasReport

# Okabe and Ito's colours, told apart with any common colour blindness; models take them in this order.
MODEL_COLOURS = ("#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9")
# Sources are not models: another set (Paul Tol's muted one).
SOURCE_COLOURS = ("#332288", "#DDCC77", "#117733", "#CC6677", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499")
_INK, _FAINT, _GRID = "#222222", "#777777", "#e6e6e6"
DPI = 160
NAMED_CLASSES = 40  # more do not fit beside a confusion matrix
COUNTED_CLASSES = 15


def require_matplotlib() -> None:
    """UserError where matplotlib is missing: before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("the pictures need matplotlib; pip install 'open_clip_zerovl[demo]'") from error


def _figure(width: float, height: float) -> Any:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(labelsize=9, colors=_INK)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)


def _colours(names: Sequence[str], palette: Sequence[str]) -> dict[str, str]:
    """Colours repeat where there are more names than the palette has."""
    return {name: palette[i % len(palette)] for i, name in enumerate(names)}


def confusion_picture(counts: np.ndarray, names: Sequence[str], *, title: str) -> bytes:
    """A confusion matrix (C, C), row the class and column the guess, shown as shares of each class.

    Up to 40 classes are named on the axes, up to 15 have their percentage in each cell.
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    classes = len(names)
    side = min(9.0, 4.2 + 0.32 * min(classes, NAMED_CLASSES))
    figure = _figure(side + 1, side)
    axes = figure.add_subplot()
    image = axes.imshow(
        shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest" if classes <= 500 else "antialiased"
    )
    figure.colorbar(image, ax=axes, shrink=0.7, label="share of the class")
    axes.set_xlabel("guess")
    axes.set_ylabel("class")
    if classes <= NAMED_CLASSES:
        short = [name if len(name) <= 24 else name[:22] + "..." for name in names]
        axes.set_xticks(range(classes), short, rotation=90 if classes > 6 else 30, fontsize=8, ha="center")
        axes.set_yticks(range(classes), short, fontsize=8)
    if classes <= COUNTED_CLASSES:
        for row in range(classes):
            for column in range(classes):
                if counts[row, column]:
                    colour = "white" if shares[row, column] > 0.5 else _INK
                    axes.text(column, row, f"{100 * shares[row, column]:.0f}", ha="center", va="center",
                              fontsize=8, color=colour)  # fmt: skip
    axes.set_title(title, fontsize=10, wrap=True)
    return _png(figure)


def loss_picture(records: Mapping[str, RunRecord]) -> bytes:
    """Training loss by samples seen, as logged and as a running mean."""
    figure = _figure(8, 3.2)
    axes = figure.add_subplot()
    for name, colour in _colours(list(records), MODEL_COLOURS).items():
        samples, losses = np.array(records[name].loss_curve, dtype=float).reshape(-1, 2).T
        if not len(samples):
            continue
        reach = max(1, len(losses) // 20)
        smooth = [np.nanmean(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))]
        axes.plot(samples, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(samples, smooth, color=colour, linewidth=2, label=name)
    _plain(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("samples seen")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    return _png(figure)


def log_p_picture(report: BiasReport) -> bytes:
    """Figure 4: mean log p of negatives over the batch size, a panel for each source of the query."""
    sources = report.sources
    columns = min(4, len(sources))
    rows = math.ceil(len(sources) / columns)
    figure = _figure(2.6 * columns + 0.6, 2.6 * rows + 0.5)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(sources) :]:
        axes.set_visible(False)
    sizes = sorted(next(iter(report.models.values())).log_p)
    for source, axes in zip(sources, grid.flat, strict=False):
        _plain(axes)
        axes.plot(sizes, [-math.log(size) for size in sizes], color=_FAINT, linewidth=1, linestyle=":")
        for name, colour in _colours(list(report.models), MODEL_COLOURS).items():
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
    return _png(figure)


def _line_legend(figure: Any, report: BiasReport) -> None:
    from matplotlib.lines import Line2D

    colours = _colours(list(report.models), MODEL_COLOURS)
    handles = [Line2D([], [], color=colour, linewidth=3, label=name) for name, colour in colours.items()]
    handles += [
        Line2D([], [], color=_INK, linestyle="-", label="same source"),
        Line2D([], [], color=_INK, linestyle="--", label="other source"),
        Line2D([], [], color=_FAINT, linestyle=":", label="all alike: -ln(batch)"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)), frameon=False, fontsize=9)


def probe_picture(report: BiasReport) -> bytes:
    """How often a linear probe guesses the source, from images and from texts, with the level of chance."""
    figure = _figure(6.2, 2.8)
    axes = figure.add_subplot()
    colours = _colours(list(report.models), MODEL_COLOURS)
    thick = 0.8 / len(colours)
    for i, (name, colour) in enumerate(colours.items()):
        one = report.models[name]
        for position, value in enumerate((100 * one.probe_images, 100 * one.probe_texts)):
            x = position + (i - (len(colours) - 1) / 2) * thick
            axes.bar(x, value, 0.92 * thick, color=colour, label=name if position == 0 else None)
            axes.annotate(f"{value:.0f} %", (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=9)
    chance = 100 * report.probe_chance
    axes.axhline(chance, color=_INK, linewidth=1, linestyle="--", label=f"chance, {chance:.0f} %")
    _plain(axes)
    axes.set_xticks((0, 1), ("from images", "from texts"), fontsize=10)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 25))
    axes.set_ylabel("source guessed, %")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return _png(figure)


def map_picture(report: BiasReport) -> bytes:
    """Figure 3: t-SNE maps of image and text embeddings, a row for each model, coloured by source."""
    colours = _colours(report.sources, SOURCE_COLOURS)
    owners = np.array([report.samples[row].source for row in report.map_rows])
    figure = _figure(8.4, 3.9 * len(report.models) + 0.4)
    grid = figure.subplots(len(report.models), 2, squeeze=False)
    # Drawn in one shuffled order, or the last source would cover the others.
    order = np.random.default_rng(0).permutation(len(owners))
    shades = np.array([colours[owner] for owner in owners], dtype=object)
    for (name, one), line in zip(report.models.items(), grid, strict=True):
        for axes, points, modality in zip(line, (one.map_images, one.map_texts), ("images", "texts"), strict=True):
            axes.scatter(points[order, 0], points[order, 1], s=9, c=list(shades[order]), alpha=0.75, linewidths=0)
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set_color(_GRID)
            axes.set_title(f"{name}: {modality}", fontsize=11, color=_INK)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=source) for source, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(6, len(handles)), frameon=False)
    return _png(figure)


def caption_picture(report: BiasReport) -> bytes:
    """Words of the captions by source: the share of captions of each length."""
    figure = _figure(7, 2.8)
    axes = figure.add_subplot()
    counts = {name: np.asarray(words) for name, words in report.caption_words.items()}
    most = int(np.percentile(np.concatenate(list(counts.values())), 99.5))
    for name, colour in _colours(report.sources, SOURCE_COLOURS).items():
        shares = np.bincount(np.minimum(counts[name], most + 1), minlength=most + 2)[: most + 1] / len(counts[name])
        axes.plot(range(most + 1), 100 * shares, color=colour, linewidth=2, marker="o", markersize=3,
                  label=f"{name}, mean {counts[name].mean():.1f}")  # fmt: skip
    _plain(axes)
    axes.set_xlim(0, most + 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("words in a caption")
    axes.set_ylabel("% of captions")
    axes.legend(frameon=False, fontsize=9)
    return _png(figure)
