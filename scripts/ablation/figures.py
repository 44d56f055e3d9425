"""The figures of docs/results.md: one for each table, with a dot for every seed and a bar for their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from open_clip_zerovl.bias.pools import POOLS
from open_clip_zerovl.figures.plot import INK, MODEL_COLOURS, colours_of, new_figure, plain_axes, png_bytes
from scripts.ablation.conditions import CONDITIONS, PaperTable

Records = Mapping[str, Mapping[int, Mapping[str, Any]]]

_DPI = 110


def table_figure(table: PaperTable, records: Records) -> bytes:
    """PNG of a table's conditions: RSUM in three pools, CPU seconds if they are compared, loss curves if the table names some.

    Raises:
        UserError: matplotlib is missing.
    """
    colours = colours_of(list(table.conditions), MODEL_COLOURS)
    timed = any(one.measure == "cpu_seconds" for one in table.comparisons)
    widths = [3.0 * len(POOLS) / 2.2, *([1.6] if timed else []), *([3.0] * len(table.curves))]
    figure = new_figure(max(6.5, 2.2 * sum(widths) / 2), 3.4, dpi=_DPI)
    panels = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])

    axes = panels.pop(0)
    groups = {pool: {n: [run["rsum"][pool] for run in records[n].values()] for n in colours} for pool in POOLS}
    _bars(axes, groups, colours)
    axes.set_title("RSUM, held-out pairs", fontsize=10, loc="left", color=INK)
    if timed:
        axes = panels.pop(0)
        seconds = {n: [run["cpu_seconds"] for run in records[n].values()] for n in colours}
        _bars(axes, {"training": seconds}, colours)
        axes.set_title("CPU seconds", fontsize=10, loc="left", color=INK)
    for names, axes in zip(table.curves, panels, strict=True):
        _curves(axes, {name: records[name] for name in names}, colours)
        axes.set_title("training loss by samples", fontsize=10, loc="left", color=INK)

    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=CONDITIONS[name].label) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=9)
    return png_bytes(figure)


def _bars(axes: Any, groups: Mapping[str, Mapping[str, Sequence[float]]], colours: Mapping[str, str]) -> None:
    """Grouped bars of means with the seeds' values as dots; `groups` maps a label to each condition's values."""
    thick = 0.84 / len(colours)
    for position, values in enumerate(groups.values()):
        for i, (name, colour) in enumerate(colours.items()):
            if not values[name]:
                continue
            x = position + (i - (len(colours) - 1) / 2) * thick
            mean = sum(values[name]) / len(values[name])
            axes.bar(x, mean, 0.9 * thick, color=colour, alpha=0.75)
            axes.plot([x] * len(values[name]), values[name], ".", color=INK, markersize=4)
            axes.annotate(f"{mean:.0f}", (x, max(values[name])), (0, 4), textcoords="offset points", ha="center",
                          fontsize=8, color=INK)  # fmt: skip
    axes.set_xticks(range(len(groups)), list(groups), fontsize=9)
    axes.margins(y=0.12)
    _plain(axes)


def _curves(axes: Any, runs: Mapping[str, Mapping[int, Mapping[str, Any]]], colours: Mapping[str, str]) -> None:
    """One thin line a run. Conditions differ in colour and dashes, so that two curves that coincide are both visible."""
    for i, (name, by_seed) in enumerate(runs.items()):
        for run in by_seed.values():
            samples, losses = zip(*run["loss_curve"], strict=True)
            axes.plot(
                [n / 1000 for n in samples],
                losses,
                color=colours[name],
                linewidth=1.2,
                linestyle=("-", (0, (3, 2)))[i % 2],
            )
    axes.set_xlabel("thousand samples", fontsize=9, color=INK)
    _plain(axes)


def _plain(axes: Any) -> None:
    plain_axes(axes)
    axes.tick_params(length=0)
