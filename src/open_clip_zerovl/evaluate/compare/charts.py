"""Charts of `zerovl compare`, as PNG bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.evaluate.compare.comparison import KINDS, Comparison
from open_clip_zerovl.report.plot import (
    FAINT,
    GRID,
    INK,
    MODEL_COLOURS,
    SOURCE_COLOURS,
    colours_of,
    mark_base,
    new_figure,
    plain,
    plain_axes,
    png_bytes,
    top_legend,
)

MAP_POINTS = 1000
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


def principal_components(features: Tensor) -> np.ndarray:
    """The first two principal components (N, 2) of features (N, D)."""
    centred = features.double() - features.double().mean(dim=0)
    return (centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T).numpy()


def map_picture(
    features: Mapping[str, tuple[Tensor, Tensor]],
    sources: Sequence[str],
    project: Callable[[Tensor], np.ndarray] = principal_components,
) -> bytes:
    """Image and text embeddings in two dimensions, a row a model, coloured by source.

    Args:
        features: model -> image features, text features (N, D).
        sources: (N,).
        project: features (n, D) -> points (n, 2).
    """
    colours = colours_of(sources, SOURCE_COLOURS)
    # In shuffled order: drawn source by source, the last source would cover the others.
    order = np.random.default_rng(0).permutation(len(sources))[:MAP_POINTS]
    shades = [colours[sources[row]] for row in order]
    figure = new_figure(8.4, 3.9 * len(features) + 0.4)
    grid = figure.subplots(len(features), 2, squeeze=False)
    for (name, sides), line in zip(features.items(), grid, strict=True):
        for axes, embeddings, modality in zip(line, sides, ("images", "texts"), strict=True):
            points = project(embeddings[order])
            axes.scatter(*points.T, s=9, c=shades, alpha=0.75, linewidths=0)
            axes.set(xticks=[], yticks=[])
            axes.set_title(plain(f"{name}: {modality}"), fontsize=11, color=INK)
            for spine in axes.spines.values():
                spine.set_color(GRID)
    dot = {"marker": "o", "linestyle": ""}
    top_legend(figure, {source: {**dot, "color": colour} for source, colour in colours.items()})
    return png_bytes(figure)


def comparison_picture(comparison: Comparison) -> bytes:
    """Points with their intervals, a panel for each unit of numbers."""
    panels = {
        title: {k: label for k, label in labels.items() if k in comparison.sides}
        for title, labels in _COMPARED.items()
    }
    labelled = {kind: kind.removeprefix("top-1 ") for kind in comparison.sides if kind not in KINDS}
    if labelled:
        panels["zero-shot top-1, %"] = labelled
    figure = new_figure(9.6, 3.2)
    grid = figure.subplots(
        1, len(panels), width_ratios=[max(1, len(kinds)) for kinds in panels.values()]
    )
    colours = colours_of(comparison.names, MODEL_COLOURS)
    for (title, kinds), axes in zip(panels.items(), grid, strict=True):
        plain_axes(axes)
        for place, kind in enumerate(kinds):
            for i, (name, colour) in enumerate(colours.items()):
                side = comparison.sides[kind][name]
                x = place + (i - (len(colours) - 1) / 2) * 0.5 / len(colours)
                axes.plot([x, x], side.interval, color=colour, linewidth=2)
                axes.plot(x, side.value, "o", color=colour, markersize=6)
                axes.plot(
                    [x] * len(side.runs), side.runs, "_", color=colour, markersize=9, alpha=0.6
                )
            axes.hlines(
                comparison.chance[kind],
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
