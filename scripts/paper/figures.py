"""Figures 3 and 4 of the paper, which `scripts.paper.bias` draws: t-SNE maps, and log p of negatives by batch size.

Legend: `N` samples of all sources together, `B` samples of one batch, `D` embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.report.plot import (
    FAINT,
    GRID,
    INK,
    MODEL_COLOURS,
    SOURCE_COLOURS,
    Line,
    colours_of,
    draw_lines,
    new_figure,
    plain,
    plain_axes,
    png_bytes,
    top_legend,
)
from scripts.paper.bias_measures import log_p_by_query

MAP_POINTS = 1000
BATCH_SIZES = (16, 64, 256, 1024, 4096)
DIRECTIONS = ("image_to_text", "text_to_image")
GROUPS = ("all", "same_source", "other_source")
Features = Mapping[str, tuple[Tensor, Tensor, float]]  # model -> images, texts (N, D), logit scale


def tsne(features: Tensor) -> np.ndarray:
    """Map features by t-SNE (scikit-learn, started from PCA): (N, D) to (N, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    return TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(
        features.double().numpy()
    )


def map_picture(features: Features, sources: Sequence[str]) -> bytes:
    """Figure 3: draw image and text embeddings in two dimensions, a row a model, coloured by source (N,)."""
    colours = colours_of(sources, SOURCE_COLOURS)
    # In shuffled order: drawn source by source, the last source would cover the others.
    order = np.random.default_rng(0).permutation(len(sources))[:MAP_POINTS]
    shades = [colours[sources[row]] for row in order]
    figure = new_figure(8.4, 3.9 * len(features) + 0.4)
    grid = figure.subplots(len(features), 2, squeeze=False)
    for (name, (images, texts, _)), line in zip(features.items(), grid, strict=True):
        for axes, embeddings, modality in zip(
            line, (images, texts), ("images", "texts"), strict=True
        ):
            points = tsne(embeddings[order])
            axes.scatter(*points.T, s=9, c=shades, alpha=0.75, linewidths=0)
            axes.set(xticks=[], yticks=[])
            axes.set_title(plain(f"{name}: {modality}"), fontsize=11, color=INK)
            for spine in axes.spines.values():
                spine.set_color(GRID)
    dot = {"marker": "o", "linestyle": ""}
    top_legend(figure, {source: {**dot, "color": colour} for source, colour in colours.items()})
    return png_bytes(figure)


def log_p_picture(features: Features, owners: Sequence[str]) -> bytes:
    """Figure 4: mean log p of negatives by batch size, a panel for each source of the query."""
    sizes = [size for size in BATCH_SIZES if size <= len(owners)] or [len(owners)]
    models = {
        name: {
            size: mean_log_p_negatives(images, texts, owners, scale, batch_size=size)
            for size in sizes
        }
        for name, (images, texts, scale) in features.items()
    }
    sources = list(dict.fromkeys(owners))
    colours = colours_of(list(models), MODEL_COLOURS)
    columns = min(4, len(sources))
    rows = math.ceil(len(sources) / columns)
    figure = new_figure(2.6 * columns + 0.6, 2.6 * rows + 0.5)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(sources) :]:
        axes.set_visible(False)
    uniform = Line(
        "", sizes, [-math.log(size) for size in sizes], FAINT, {"linewidth": 1, "linestyle": ":"}
    )
    for source, axes in zip(sources, grid.flat, strict=False):
        plain_axes(axes)
        lines = [
            Line("", sizes, [by_size[size]["by_source"][source][group] for size in sizes], colours[name],
                 {"linestyle": style, "marker": "o"})
            for name, by_size in models.items()
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


def mean_log_p_negatives(
    image_features: Tensor,
    text_features: Tensor,
    source: Sequence[Any],
    logit_scale: float,
    *,
    batch_size: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean of log p_jk over negative pairs j != k, by whether both come from one source (figure 4).

    For image queries `p_jk = exp(s I_j.T_k) / sum_l exp(s I_j.T_l)`, where the sum runs over the batch, positive included; text
    queries sum over images. The lower the mean of a group, the less its pairs contribute to the gradient. A model that tells
    sources apart pushes the other-source negatives down without learning their content.

    Args:
        image_features, text_features: (N, D).
        source: (N,) the source of each pair, any sortable names.
        logit_scale: the factor s itself (open_clip's `logit_scale.exp()`), 50 for a temperature of 0.02.
        batch_size: `B`; the pairs are shuffled and cut into batches of B, and a last incomplete one is left out. None takes
            all pairs as one batch. The mean falls as B grows: log p of a uniform softmax is -ln B.
        seed: seed of the shuffle.

    Returns:
        `image_to_text`, `text_to_image` and `mean` (of both), each a dict of `all`, `same_source`, `other_source`; and
        `by_source`: for each source of the query such a dict, the mean of both directions. A value is None if a group
        has no pair.
    """
    total = len(source)
    size = total if batch_size is None else batch_size
    names, codes = np.unique(np.asarray(source), return_inverse=True)
    order = torch.arange(total)
    if batch_size is not None:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    # Sums and counts over pairs: [sum or count, direction, same (0) or other (1) source, source of the query].
    totals = torch.zeros(2, 2, 2, len(names), dtype=torch.float64)
    for batch in order[: total // size * size].split(size):
        images, texts = (
            features[batch.to(features.device)] for features in (image_features, text_features)
        )
        own = codes[batch.numpy()]
        totals.index_add_(3, torch.from_numpy(own), log_p_by_query(images, texts, own, logit_scale))
    result: dict[str, Any] = {
        way: _group_means(totals[:, i].sum(dim=2)) for i, way in enumerate(DIRECTIONS)
    }
    # Both directions hold the same pairs, so the mean over both is the mean of the two.
    result["mean"] = _group_means(totals.sum(dim=(1, 3)))
    result["by_source"] = {
        name: _group_means(totals[..., i].sum(dim=1)) for i, name in enumerate(names.tolist())
    }
    return result


def _group_means(totals: Tensor) -> dict[str, float | None]:
    """The mean of each of GROUPS, from sums and counts (2, 2) for same and other source."""
    every = [totals.sum(dim=1), *totals.T]
    return {
        group: float(value / n) if n > 0 else None
        for group, (value, n) in zip(GROUPS, every, strict=True)
    }
