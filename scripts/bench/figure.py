"""README's first picture: memory and time of a step over the contrastive batch, from the rows that `scripts.bench.step` wrote.

python -m scripts.bench.figure        # docs/results/performance/dga-one-process.csv -> docs/figures/batch.svg
"""

import csv
import io
from pathlib import Path

import matplotlib

from open_clip_zerovl.report.plot import FAINT, INK, MODEL_COLOURS, new_figure, plain_axes

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs/results/performance/dga-one-process.csv"
PICTURE = ROOT / "docs/figures/batch.svg"
MICRO_BATCH = 16
# Label -> its rows' way, and colour.
WAYS = {
    "one graph over the whole batch": ("one graph", FAINT),
    "open_clip --accum-freq": ("open_clip --accum-freq", MODEL_COLOURS[1]),
    "--dga-steps": ("ours, retain 1", MODEL_COLOURS[0]),
}


def series(way: str) -> tuple[list[int], list[float], list[float]]:
    """Read a way's batch sizes, memory and time, the last two as ratios to training on micro-batches."""
    batches, memory, time = [MICRO_BATCH], [1.0], [1.0]
    with open(ROWS, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["way"] == way:
                batches.append(MICRO_BATCH * int(row["K"]))
                memory.append(float(row["memory"]))
                time.append(float(row["time / plain (range)"].partition(" ")[0]))
    return batches, memory, time


def draw() -> bytes:
    """Draw both charts as one SVG, the same bytes for the same rows."""
    figure = new_figure(8.4, 2.9)
    for place, (title, limits) in enumerate(
        (
            ("memory, times a micro-batch's", (0, 14)),
            ("time a sample, times plain training", (0, 2)),
        )
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        for label, (way, colour) in WAYS.items():
            batches, *values = series(way)
            axes.plot(batches, values[place], color=colour, marker="o", label=label, linewidth=2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_ylim(*limits)
        axes.set_xlabel("contrastive batch", color=INK)
        axes.set_title(title, color=INK, fontsize=11)
        plain_axes(axes)
        if place == 0:
            axes.legend(frameon=False, fontsize=9)
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "batch"}):  # names of shapes, else random
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


if __name__ == "__main__":
    PICTURE.write_bytes(draw())
