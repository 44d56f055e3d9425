"""Retrieval examples: a caption, its own picture, and the best pictures of each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Features = tuple[Tensor, Tensor]  # image_features (I, D) and text_features (T, D), L2-normalised


@dataclass(frozen=True)
class RetrievedPicture:
    """One picture of a ranking, with its source; `right` if the query is its caption, also where other pictures have it too."""

    pixels: Any
    source: str
    right: bool


@dataclass(frozen=True)
class RetrievalExample:
    """A caption as query: its own picture, and for each model the best pictures and the rank (from 1) of its own picture.

    Pictures are arrays (H, W, 3) uint8 or PIL images.
    """

    query: str
    source: str
    target: Any
    top: Mapping[str, Sequence[RetrievedPicture]]
    rank: Mapping[str, int]


def retrieval_examples(
    pictures: Sequence[Any] | Callable[[int], Any],
    captions: Sequence[str],
    sources: Sequence[str],
    features: Mapping[str, Features],
    queries: Sequence[int],
    *,
    text_to_image: Sequence[int] | None = None,
    k: int = 5,
) -> list[RetrievalExample]:
    """Rank the pictures of a pool for some of its captions, by each model's features.

    Args:
        pictures: (I,), or a function from the index of an image to the picture.
        captions: (T,) of the pool.
        sources: (I,) of the images.
        features: by model.
        queries: indices of the captions to rank for.
        text_to_image: (T,) image of each caption; None if captions and images are pairs.
        k: pictures to keep.
    """
    picture = pictures if callable(pictures) else pictures.__getitem__
    # As for the metrics, in float64 and rounded, so that equal features tie.
    exact = {
        model: (images.double(), texts.double()) for model, (images, texts) in features.items()
    }
    examples = []
    for query in queries:
        images = range(len(captions)) if text_to_image is None else text_to_image
        target = int(images[query])
        right = {
            int(image)
            for image, text in zip(images, captions, strict=True)
            if text == captions[query]
        }
        top, rank = {}, {}
        for model, (image_features, text_features) in exact.items():
            scores = (image_features @ text_features[query]).float()  # (I,)
            top[model] = [
                RetrievedPicture(picture(i), sources[i], i in right) for i in best_of(scores, k)
            ]
            rank[model] = 1 + int((scores > scores[target]).sum())
        examples.append(
            RetrievalExample(captions[query], sources[target], picture(target), top, rank)
        )
    return examples


def best_of(scores: Tensor, k: int) -> list[int]:
    """Find the indices of the k largest scores, best first.

    Equal scores keep their order.
    """
    return torch.argsort(scores, descending=True, stable=True)[:k].tolist()


def spread(positions: Sequence[Any], count: int) -> list[Any]:
    """Choose at most `count` of the items, evenly spaced among them, whatever their results."""
    if len(positions) <= count:
        return list(positions)
    return [positions[(2 * i + 1) * len(positions) // (2 * count)] for i in range(count)]
