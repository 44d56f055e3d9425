"""The demo's picture (loss, RSUM by pool, signs of bias, retrieval examples), and its loss curve alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.evaluate.bias.pools import POOLS
from open_clip_zerovl.evaluate.retrieval.examples import RetrievalExample
from open_clip_zerovl.report.plot import (
    FAINT,
    GRID,
    INK,
    MODEL_COLOURS,
    RIGHT_COLOUR,
    colours_of,
    moving_average,
    new_figure,
    plain_axes,
    png_bytes,
)
from scripts.emoji.records import RunRecord


def loss_picture(records: Mapping[str, RunRecord]) -> bytes:
    """Training loss by samples seen, as logged and as a running mean."""
    figure = new_figure(8, 3.2)
    axes = figure.add_subplot()
    for name, colour in colours_of(list(records), MODEL_COLOURS).items():
        samples, losses = np.array(records[name].loss_curve, dtype=float).reshape(-1, 2).T
        if not len(samples):
            continue
        smooth = moving_average(losses, max(1, len(losses) // 20))
        axes.plot(samples, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(samples, smooth, color=colour, linewidth=2, label=name)
    plain_axes(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("samples seen")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    return png_bytes(figure)


def demo_picture(
    path: str | Path,
    runs: Mapping[str, RunRecord],
    examples: Sequence[RetrievalExample] = (),
    *,
    title: str = "What the runs learned",
    width_px: int = 1600,
) -> Path:
    """Draw runs side by side in one PNG: loss, retrieval in three pools, signs of bias, and retrieval examples.

    Args:
        path: the PNG; its folder is made.
        runs: by name, one to five, in the order of colours.
        examples: see `retrieval_examples`.
        title: one line at the top.
        width_px: the picture's width; text is sized for 1600.

    Raises:
        UserError: matplotlib is missing, no run, more runs than colours, or an example without one of the runs.
    """
    if not 1 <= len(runs) <= len(MODEL_COLOURS):
        raise UserError(f"a picture shows 1 to {len(MODEL_COLOURS)} runs, got {len(runs)}")
    for example in examples:
        if missing := [name for name in runs if name not in example.top]:
            raise UserError(f"the retrieval example {example.query!r} has no pictures of run {missing[0]}")
    colours = colours_of(list(runs), MODEL_COLOURS)

    # Heights in inches (100 px each at the default width): title and legend, the four panels, a gap, a row of examples.
    head, panels, gap, row = 0.95, 3.5, 1.25, 0.92
    height = head + panels + 0.55 + (gap + row * len(examples) + 0.2 if examples else 0)
    figure = new_figure(16, height, dpi=width_px / 16, layout=None)

    def place(left: float, top: float, width: float, tall: float) -> Any:
        """Axes at inches from the upper left corner."""
        axes = figure.add_axes((left / 16, 1 - (top + tall) / height, width / 16, tall / height))
        axes.tick_params(labelsize=11, colors=INK, length=0)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(side == "bottom")
            axes.spines[side].set_color(FAINT)
        return axes

    figure.text(0.35 / 16, 1 - 0.38 / height, title, fontsize=19, fontweight="bold", color=INK, va="center")
    for i, (name, colour) in enumerate(colours.items()):
        x = (15.65 - 2.3 * (len(runs) - i)) / 16
        figure.text(x, 1 - 0.38 / height, "\u25a0", fontsize=19, color=colour, va="center")
        figure.text(x + 0.28 / 16, 1 - 0.38 / height, name, fontsize=14, color=INK, va="center")

    top = head + 0.35
    _draw_loss(place(0.75, top, 3.75, panels - 0.4), runs, colours)
    _draw_pools(place(5.0, top, 4.3, panels - 0.4), runs, colours)
    _draw_probe(place(9.8, top, 2.7, panels - 0.4), runs, colours)
    _draw_log_p(place(13.0, top, 2.65, panels - 0.4), runs, colours)
    note = "Mixed: knowing the source helps, so a less biased model can have a lower bar."
    figure.text(5.0 / 16, 1 - (top + panels + 0.3) / height, note, fontsize=10.5, color=FAINT, va="center")
    if examples:
        _draw_examples(figure, height, head + panels + 0.55 + gap, row, runs, colours, examples)
    write_atomically(path, png_bytes(figure))
    return Path(path)


def _title(axes: Any, statement: str, detail: str) -> None:
    axes.annotate(statement, (0, 1), (0, 27), xycoords="axes fraction", textcoords="offset points",
                  fontsize=13, fontweight="bold", color=INK)  # fmt: skip
    axes.annotate(detail, (0, 1), (0, 11), xycoords="axes fraction", textcoords="offset points",
                  fontsize=11, color=FAINT)  # fmt: skip


def _draw_loss(axes: Any, runs: Mapping[str, RunRecord], colours: Mapping[str, str]) -> None:
    _title(axes, "Training loss by samples seen", "each on its own kind of batch")
    most = max((samples for run in runs.values() for samples, _ in run.loss_curve), default=1)
    unit, name = (1000, " k") if most >= 5000 else (1, "")
    for run, record in runs.items():
        if not record.loss_curve:
            continue
        samples, losses = np.array(record.loss_curve, dtype=float).T
        axes.plot(samples / unit, losses, color=colours[run], alpha=0.25, linewidth=1)
        smooth = moving_average(losses, max(1, len(losses) // 20))
        axes.plot(samples / unit, smooth, color=colours[run], linewidth=2.2)
    axes.set_xlim(0, most / unit)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(_ticks(4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{name if value else ''}")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def _ticks(count: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count)


def _draw_bars(
    axes: Any, groups: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], form: str, *, down: bool = False
) -> None:
    """Grouped bars with their values; `groups` maps a group's label to each run's value."""
    thick = 0.8 / len(colours)
    if len(colours) > 2:
        form = form.replace(".1f", ".0f").replace(" %", "")  # narrow bars have no room for more
    for position, values in enumerate(groups.values()):
        for i, (run, colour) in enumerate(colours.items()):
            x = position + (i - (len(colours) - 1) / 2) * thick
            axes.bar(x, values[run], 0.92 * thick, color=colour)
            axes.annotate(form.format(values[run]), (x, values[run]), (0, -4 if down else 3), textcoords="offset points",
                          ha="center", va="top" if down else "bottom", fontsize=11.5, color=INK)  # fmt: skip
    axes.set_xticks(range(len(groups)), list(groups), fontsize=12)
    axes.set_yticks([])
    axes.set_xlim(-0.5, len(groups) - 0.5)


def _draw_pools(axes: Any, runs: Mapping[str, RunRecord], colours: Mapping[str, str]) -> None:
    _title(axes, "RSUM, retrieval of held-out pairs", "higher is better, 600 at most")
    labels = {"within": "within\na source", "across": "across\ntwo sources", "mixed": "all sources\nmixed"}
    groups = {labels[pool]: {name: run.rsum[pool] for name, run in runs.items()} for pool in POOLS}
    _draw_bars(axes, groups, colours, "{:.0f}")
    axes.set_ylim(0, 1.1 * max(max(values.values()) for values in groups.values()) or 1)


def _draw_probe(axes: Any, runs: Mapping[str, RunRecord], colours: Mapping[str, str]) -> None:
    _title(axes, "Source guessed by a probe", "% of embeddings, lower is less bias")
    groups = {
        "from\npictures": {name: 100 * run.probe_images for name, run in runs.items()},
        "from\ncaptions": {name: 100 * run.probe_texts for name, run in runs.items()},
    }
    _draw_bars(axes, groups, colours, "{:.0f} %")
    axes.set_ylim(0, 110)
    chance = 100 * next(iter(runs.values())).probe_chance
    axes.axhline(chance, color="white", linewidth=3)
    axes.axhline(chance, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate("chance", (1, chance), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=11, color=INK, va="center", rotation=90)  # fmt: skip


def _draw_log_p(axes: Any, runs: Mapping[str, RunRecord], colours: Mapping[str, str]) -> None:
    _title(axes, "Mean log p of negatives", "lower: easier negatives")
    groups = {
        "same\nsource": {name: run.log_p_same_source for name, run in runs.items()},
        "other\nsource": {name: run.log_p_other_source for name, run in runs.items()},
    }
    _draw_bars(axes, groups, colours, "{:.1f}", down=True)
    axes.set_ylim(1.12 * min(min(values.values()) for values in groups.values()), 0)
    axes.spines["bottom"].set_visible(False)
    axes.spines["top"].set_visible(True)


def _draw_examples(
    figure: Any,
    height: float,
    top: float,
    row: float,
    runs: Mapping[str, RunRecord],
    colours: Mapping[str, str],
    examples: Sequence[RetrievalExample],
) -> None:
    """Rows of a query and each run's best pictures; sizes in inches from the upper left corner of the figure."""
    left, text_width = 0.35, 4.3
    pictures = max(len(example.top[name]) for example in examples for name in runs)
    block = (15.65 - left - text_width) / len(runs)
    side = min(row - 0.14, (block - 0.85) / max(pictures, 1) - 0.1)

    def write(x: float, y: float, text: str, size: float, **style: Any) -> None:
        figure.text(x / 16, 1 - y / height, text, fontsize=size, va="center", **{"color": INK, **style})

    def show(x: float, y: float, pixels: np.ndarray, frame: str, line: float) -> None:
        axes = figure.add_axes((x / 16, 1 - (y + side) / height, side / 16, side / height))
        axes.imshow(pixels, interpolation="antialiased")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(color=frame, linewidth=line)

    write(left, top - 0.55, "Text to picture, all sources mixed", 13, fontweight="bold")
    write(left, top - 0.25, "caption and its own picture", 11, color=FAINT)
    for i, name in enumerate(runs):
        x = left + text_width + i * block
        write(x, top - 0.55, name, 13, fontweight="bold", color=colours[name])
        write(x, top - 0.25, f"best {pictures}, the right one framed; its rank", 11, color=FAINT)
    for number, example in enumerate(examples):
        y = top + number * row
        lines = textwrap.wrap(example.query, 34, max_lines=3, placeholder=" ...")
        write(left, y + side / 2 - 0.12, "\n".join(lines), 11.5 if len(lines) < 3 else 10, linespacing=1.1)
        write(left, y + side - 0.06, example.source, 9.5, color=FAINT)
        show(left + text_width - side - 0.45, y, example.target, FAINT, 0.8)
        for i, name in enumerate(runs):
            x = left + text_width + i * block
            for place, picture in enumerate(example.top[name]):
                right = picture.right
                show(
                    x + place * (side + 0.1),
                    y,
                    picture.pixels,
                    RIGHT_COLOUR if right else "#dddddd",
                    4 if right else 0.8,
                )
            rank = example.rank[name]
            found = any(picture.right for picture in example.top[name])
            write(x + pictures * (side + 0.1) + 0.08, y + side / 2, f"{rank}", 12,
                  fontweight="bold" if found else "normal", color=RIGHT_COLOUR if found else FAINT)  # fmt: skip
