"""What a person looks at after a run: a table, and one picture (the HTML pages of figures 3 and 4 have their own module).

Everything here is handed in: numbers come from `bias` and `retrieval`, loss curves from open_clip's own training log.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.errors import UserError

POOLS = ("within", "across", "mixed")

MIXED_POOL_NOTE = (
    "The mixed pool rewards guessing the source: a model that knows the query's source has only that source's pairs left "
    "to tell apart, so a model without the bias can score lower there although it knows the content better."
)

# Okabe and Ito's colours, told apart with any common colour blindness; runs take them in this order.
_COLOURS = ("#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9")
_INK, _FAINT, _RIGHT = "#222222", "#888888", "#009E73"


@dataclass(frozen=True)
class RunRecord:
    """What the table and the picture show of one run.

    `loss_curve` holds (samples seen, loss) pairs. `rsum` maps `within`, `across`, `mixed` to 0..600 (`bias.pool_metrics`).
    Probe accuracies and their chance level are shares (`bias.source_probe_accuracy`), the log p are means over negative
    pairs (`bias.mean_log_p_negatives`).
    """

    loss_curve: Sequence[tuple[int, float]]
    rsum: Mapping[str, float]
    probe_images: float
    probe_texts: float
    probe_chance: float
    log_p_same_source: float
    log_p_other_source: float


@dataclass(frozen=True)
class RetrievedPicture:
    """One picture of a ranking, (H, W, 3) uint8: which source drew it, and whether the query's caption is its own."""

    pixels: np.ndarray
    source: str
    right: bool


@dataclass(frozen=True)
class RetrievalExample:
    """A caption as query: its own picture, and for each run the best pictures and the rank (from 1) of its own one."""

    query: str
    source: str
    target: np.ndarray
    top: Mapping[str, Sequence[RetrievedPicture]]
    rank: Mapping[str, int]


# ---------------------------------------------------------------------------------------------------------------------
# Reading and gathering
# ---------------------------------------------------------------------------------------------------------------------

_TRAIN_LINE = re.compile(r"Train Epoch: (\d+) \[\s*(\d+)/(\d+) .*\bLoss: (\S+) \(")


def read_training_log(path: str | Path) -> list[tuple[int, float]]:
    """The loss curve of a run, from the `Train Epoch:` lines of open_clip's `out.log`.

    Each value is the loss of the one step that was logged, on the first rank. Where a resumed run repeats a step, the
    later line counts.

    Returns:
        (samples seen since the start of training, loss), ascending.

    Raises:
        UserError: no such file, or no training step in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no training log {path}")
    curve: dict[int, float] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if match := _TRAIN_LINE.search(line):
                epoch, samples, samples_per_epoch = (int(match[i]) for i in (1, 2, 3))
                curve[epoch * samples_per_epoch + samples] = float(match[4])
    if not curve:
        raise UserError(f"{path} holds no 'Train Epoch:' line, so no step was logged; lower --log-every-n-steps")
    return sorted(curve.items())


def retrieval_examples(
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    sources: Sequence[str],
    features: Mapping[str, tuple[Tensor, Tensor]],
    queries: Sequence[int],
    *,
    k: int = 5,
) -> list[RetrievalExample]:
    """Rank a pool of N pairs for some of its captions, by each run's features.

    Args:
        pictures, captions, sources: (N,) the pool; pictures are (H, W, 3) uint8.
        features: by run, image_features and text_features (N, D), L2-normalised.
        queries: indices of the captions to ask with.
        k: pictures to keep.
    """
    examples = []
    for query in queries:
        top, rank = {}, {}
        for run, (image_features, text_features) in features.items():
            scores = image_features @ text_features[query]  # (N,)
            best = torch.argsort(scores, descending=True, stable=True)[:k].tolist()
            top[run] = [RetrievedPicture(np.asarray(pictures[i]), sources[i], i == query) for i in best]
            rank[run] = 1 + int((scores > scores[query]).sum())
        examples.append(RetrievalExample(captions[query], sources[query], np.asarray(pictures[query]), top, rank))
    return examples


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


def results_table(runs: Mapping[str, RunRecord], *, markdown: bool = False) -> str:
    """One row a run: RSUM in the three pools, the source probe in percent, mean log p of negatives.

    Args:
        markdown: pipes and a rule for a Markdown file; else two header lines and blanks, for a terminal.

    Raises:
        UserError: no run.
    """
    if not runs:
        raise UserError("a table of results needs at least one run")
    groups = ("", "RSUM", "RSUM", "RSUM", "source probe", "source probe", "log p negatives", "log p negatives")
    columns = ("run", *POOLS, "images", "texts", "same source", "other source")
    rows = [
        (
            name,
            *(f"{run.rsum[pool]:.1f}" for pool in POOLS),
            f"{100 * run.probe_images:.1f} %",
            f"{100 * run.probe_texts:.1f} %",
            f"{run.log_p_same_source:.2f}",
            f"{run.log_p_other_source:.2f}",
        )
        for name, run in runs.items()
    ]
    if markdown:
        header = tuple(f"{group} {column}".strip() for group, column in zip(groups, columns, strict=True))
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = [
            [_padded(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
            for row in (header, *rows)
        ]
        rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
        return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    # A group's name stands over the first of its columns, as wide as all of them.
    over, i = [], 0
    while i < len(groups):
        span = [j for j in range(i, len(groups)) if groups[j] == groups[i]]
        over.append(groups[i].center(sum(widths[j] for j in span) + 2 * (len(span) - 1)))
        i += len(span)
    body = ("  ".join(_padded(cell, widths[i], i) for i, cell in enumerate(row)) for row in (columns, *rows))
    return "\n".join(line.rstrip() for line in ("  ".join(over), *body))


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


# ---------------------------------------------------------------------------------------------------------------------
# The picture
# ---------------------------------------------------------------------------------------------------------------------


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
        runs: by name, one to five; the order is the order of colours.
        examples: see `retrieval_examples`.
        title: one line above everything.
        width_px: the picture's width; text is sized for 1600.

    Raises:
        UserError: matplotlib is missing, no run, more runs than colours, or an example that lacks a run.
    """
    if not 1 <= len(runs) <= len(_COLOURS):
        raise UserError(f"a picture shows 1 to {len(_COLOURS)} runs, got {len(runs)}")
    for example in examples:
        if missing := [name for name in runs if name not in example.top]:
            raise UserError(f"the retrieval example {example.query!r} has no pictures of run {missing[0]}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("the picture needs matplotlib; pip install 'open_clip_zerovl[demo]'") from error
    colours = dict(zip(runs, _COLOURS, strict=False))

    # Inches at 100 dpi of a 1600 px picture: title and legend, the four panels, the examples.
    head, panels, gap, row = 0.95, 3.5, 1.25, 0.92
    height = head + panels + 0.55 + (gap + row * len(examples) + 0.2 if examples else 0)
    figure = Figure(figsize=(16, height), dpi=width_px / 16, facecolor="white")
    FigureCanvasAgg(figure)

    def place(left: float, top: float, width: float, tall: float) -> Any:
        """Axes at inches from the upper left corner."""
        axes = figure.add_axes((left / 16, 1 - (top + tall) / height, width / 16, tall / height))
        axes.tick_params(labelsize=11, colors=_INK, length=0)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(side == "bottom")
            axes.spines[side].set_color(_FAINT)
        return axes

    figure.text(0.35 / 16, 1 - 0.38 / height, title, fontsize=19, fontweight="bold", color=_INK, va="center")
    for i, (name, colour) in enumerate(colours.items()):
        x = (15.65 - 2.3 * (len(runs) - i)) / 16
        figure.text(x, 1 - 0.38 / height, "\u25a0", fontsize=19, color=colour, va="center")
        figure.text(x + 0.28 / 16, 1 - 0.38 / height, name, fontsize=14, color=_INK, va="center")

    top = head + 0.35
    _draw_loss(place(0.75, top, 3.75, panels - 0.4), runs, colours)
    _draw_pools(place(5.0, top, 4.3, panels - 0.4), runs, colours)
    _draw_probe(place(9.8, top, 2.7, panels - 0.4), runs, colours)
    _draw_log_p(place(13.0, top, 2.65, panels - 0.4), runs, colours)
    note = "Mixed: knowing the source helps there, so less bias can mean a lower bar."
    figure.text(5.0 / 16, 1 - (top + panels + 0.3) / height, note, fontsize=10.5, color=_FAINT, va="center")
    if examples:
        _draw_examples(figure, height, head + panels + 0.55 + gap, row, runs, colours, examples)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})
    return path


def _title(axes: Any, statement: str, detail: str) -> None:
    axes.annotate(statement, (0, 1), (0, 27), xycoords="axes fraction", textcoords="offset points",
                  fontsize=13, fontweight="bold", color=_INK)  # fmt: skip
    axes.annotate(detail, (0, 1), (0, 11), xycoords="axes fraction", textcoords="offset points",
                  fontsize=11, color=_FAINT)  # fmt: skip


def _draw_loss(axes: Any, runs: Mapping[str, RunRecord], colours: Mapping[str, str]) -> None:
    _title(axes, "Training loss by samples seen", "each on its own kind of batch")
    most = max((samples for run in runs.values() for samples, _ in run.loss_curve), default=1)
    unit, name = (1000, " k") if most >= 5000 else (1, "")
    for run, record in runs.items():
        if not record.loss_curve:
            continue
        samples, losses = np.array(record.loss_curve, dtype=float).T
        axes.plot(samples / unit, losses, color=colours[run], alpha=0.25, linewidth=1)
        smooth = _moving_average(losses, max(1, len(losses) // 20))
        axes.plot(samples / unit, smooth, color=colours[run], linewidth=2.2)
    axes.set_xlim(0, most / unit)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(_ticks(4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{name if value else ''}")
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)


def _ticks(count: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count)


def _moving_average(values: np.ndarray, reach: int) -> np.ndarray:
    """Mean over `reach` neighbours on each side, fewer at the ends. NaN (a diverged step) stays visible as a gap."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _draw_bars(
    axes: Any, groups: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], form: str, *, down: bool = False
) -> None:
    """Grouped bars with their value at the end; `groups` maps a group's label to each run's value."""
    thick = 0.8 / len(colours)
    if len(colours) > 2:
        form = form.replace(".1f", ".0f").replace(" %", "")  # narrow bars leave no room
    for position, values in enumerate(groups.values()):
        for i, (run, colour) in enumerate(colours.items()):
            x = position + (i - (len(colours) - 1) / 2) * thick
            axes.bar(x, values[run], 0.92 * thick, color=colour)
            axes.annotate(form.format(values[run]), (x, values[run]), (0, -4 if down else 3), textcoords="offset points",
                          ha="center", va="top" if down else "bottom", fontsize=11.5, color=_INK)  # fmt: skip
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
    axes.axhline(chance, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate("chance", (1, chance), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=11, color=_INK, va="center", rotation=90)  # fmt: skip


def _draw_log_p(axes: Any, runs: Mapping[str, RunRecord], colours: Mapping[str, str]) -> None:
    _title(axes, "Mean log p of negatives", "lower: pushed away, teaches less")
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
        figure.text(x / 16, 1 - y / height, text, fontsize=size, va="center", **{"color": _INK, **style})

    def show(x: float, y: float, pixels: np.ndarray, frame: str, line: float) -> None:
        axes = figure.add_axes((x / 16, 1 - (y + side) / height, side / 16, side / height))
        axes.imshow(pixels, interpolation="antialiased")
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(color=frame, linewidth=line)

    write(left, top - 0.55, "Text to picture, all sources mixed", 13, fontweight="bold")
    write(left, top - 0.25, "caption and its own picture", 11, color=_FAINT)
    for i, name in enumerate(runs):
        x = left + text_width + i * block
        write(x, top - 0.55, name, 13, fontweight="bold", color=colours[name])
        write(x, top - 0.25, f"best {pictures}, the right one framed; its rank", 11, color=_FAINT)
    for number, example in enumerate(examples):
        y = top + number * row
        lines = textwrap.wrap(example.query, 34, max_lines=3, placeholder=" ...")
        write(left, y + side / 2 - 0.12, "\n".join(lines), 11.5 if len(lines) < 3 else 10, linespacing=1.1)
        write(left, y + side - 0.06, example.source, 9.5, color=_FAINT)
        show(left + text_width - side - 0.45, y, example.target, _FAINT, 0.8)
        for i, name in enumerate(runs):
            x = left + text_width + i * block
            for place, picture in enumerate(example.top[name]):
                right = picture.right
                show(x + place * (side + 0.1), y, picture.pixels, _RIGHT if right else "#dddddd", 4 if right else 0.8)
            rank = example.rank[name]
            found = any(picture.right for picture in example.top[name])
            write(x + pictures * (side + 0.1) + 0.08, y + side / 2, f"{rank}", 12,
                  fontweight="bold" if found else "normal", color=_RIGHT if found else _FAINT)  # fmt: skip
