"""Retrieval examples: a caption, its own picture, and the best pictures of each model; as data and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from torch import Tensor

from open_clip_zerovl.report.html import thumbnail


@dataclass(frozen=True)
class RetrievedPicture:
    """One picture of a ranking, (H, W, 3) uint8, with its source; `right` if the query is its caption."""

    pixels: np.ndarray
    source: str
    right: bool


@dataclass(frozen=True)
class RetrievalExample:
    """A caption as query: its own picture, and for each model the best pictures and the rank (from 1) of its own picture."""

    query: str
    source: str
    target: np.ndarray
    top: Mapping[str, Sequence[RetrievedPicture]]
    rank: Mapping[str, int]


def retrieval_examples(
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    sources: Sequence[str],
    features: Mapping[str, tuple[Tensor, Tensor]],
    queries: Sequence[int],
    *,
    k: int = 5,
) -> list[RetrievalExample]:
    """Rank the pictures of a pool of N pairs for some of its captions, by each model's features.

    Args:
        pictures, captions, sources: (N,) the pool; pictures are (H, W, 3) uint8.
        features: by model, image_features and text_features (N, D), L2-normalised.
        queries: indices of the captions to rank for.
        k: pictures to keep.
    """
    examples = []
    for query in queries:
        top, rank = {}, {}
        for model, (image_features, text_features) in features.items():
            scores = image_features @ text_features[query]  # (N,)
            best = torch.argsort(scores, descending=True, stable=True)[:k].tolist()
            top[model] = [RetrievedPicture(np.asarray(pictures[i]), sources[i], i == query) for i in best]
            rank[model] = 1 + int((scores > scores[query]).sum())
        examples.append(RetrievalExample(captions[query], sources[query], np.asarray(pictures[query]), top, rank))
    return examples


def middle_of_each(sources: Sequence[str]) -> list[int]:
    """One index of each source, the middle one: examples that are chosen whatever their results."""
    indices: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        indices.setdefault(source, []).append(index)
    return [own[len(own) // 2] for own in indices.values()]


def example_html(example: RetrievalExample, models: Sequence[str]) -> str:
    """An example as HTML for `figures.html.html_page`, the right picture framed; a line for each model."""
    lines = []
    for model in models:
        shown = "".join(
            thumbnail(
                one.pixels, f"{one.source}{', the right picture' if one.right else ''}", "right" if one.right else ""
            )
            for one in example.top[model]
        )
        lines.append(
            f'<div class="ranking"><div class="run">{escape(model)}<br><small>right picture at rank {example.rank[model]}'
            f"</small></div>{shown}</div>"
        )
    query = f"<span>{escape(example.query)}<br><small>{escape(example.source)}</small></span>"
    return (
        f'<div class="example"><div class="query">{thumbnail(example.target, "the own picture")}{query}</div>'
        f"{''.join(lines)}</div>"
    )
