"""Retrieval examples and `zerovl retrieval --gallery out.html`: hits and misses of a model on one page without other files.

In a hit an item that belongs to the query comes first, without a tie; in a miss neither one of those nor one with the same
caption is among the ten best. The queries shown are spread evenly over the set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from open_clip_zerovl.evaluate.metrics import (
    RECALL_KS,
    QueryRanks,
    recall_bounds,
    recalls,
    retrieval_ranks,
)
from open_clip_zerovl.report.html import thumbnail, write_page
from open_clip_zerovl.report.verdicts import bounds_remarks

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
                RetrievedPicture(picture(i), sources[i], i in right) for i in _best_of(scores, k)
            ]
            rank[model] = 1 + int((scores > scores[target]).sum())
        examples.append(
            RetrievalExample(captions[query], sources[target], picture(target), top, rank)
        )
    return examples


def _best_of(scores: Tensor, k: int) -> list[int]:
    """Find the indices of the k largest scores, best first.

    Equal scores keep their order.
    """
    return torch.argsort(scores, descending=True, stable=True)[:k].tolist()


def spread(positions: Sequence[Any], count: int) -> list[Any]:
    """Choose at most `count` of the items, evenly spaced among them, whatever their results."""
    if len(positions) <= count:
        return list(positions)
    return [positions[(2 * i + 1) * len(positions) // (2 * count)] for i in range(count)]


MISSED_BEYOND = max(RECALL_KS)
QUERIES = 6  # hits to show, and misses, in each direction
BEST = 5  # items to show of a ranking


@dataclass(frozen=True)
class GallerySet:
    """One evaluated set.

    Attributes:
        captions_of: the captions of each image.
        read_image: number of an image -> the image.
        image_features, text_features: (I, D) and (T, D).
        text_to_image: (T,) image of each caption.
        ranks: result of `retrieval_ranks`.
        metrics: result of `recalls`, with the counts `images` and `captions`.
    """

    name: str
    captions_of: Sequence[Sequence[str]]
    read_image: Callable[[int], Image.Image]
    image_features: Tensor
    text_features: Tensor
    text_to_image: Tensor
    ranks: Mapping[str, QueryRanks]
    metrics: Mapping[str, float]

    @classmethod
    def scored(
        cls,
        name: str,
        captions_of: Sequence[Sequence[str]],
        read_image: Callable[[int], Image.Image],
        features: tuple[Tensor, Tensor, Tensor],
    ) -> GallerySet:
        """Make a set with the ranks and metrics of its features.

        The captions lie image by image.

        Raises:
            UserError: as `retrieval_ranks`.
        """
        ranks = retrieval_ranks(*features)
        captions = [caption for image_captions in captions_of for caption in image_captions]
        counts = {"images": len(captions_of), "captions": len(captions)}
        metrics = {**counts, **recalls(ranks), **recall_bounds(captions, features[2])}
        return cls(name, captions_of, read_image, *features, ranks, metrics)

    @property
    def captions(self) -> list[str]:
        """Read the captions (T,)."""
        return [caption for image_captions in self.captions_of for caption in image_captions]

    def examples(self, queries: Sequence[int] | None = None, k: int = 5) -> list[RetrievalExample]:
        """Choose some captions with their best pictures, by default six spread evenly over the set."""
        return retrieval_examples(
            lambda image: thumbnail(self.read_image(image)),
            self.captions,
            [self.name] * len(self.captions_of),
            {"": (self.image_features, self.text_features)},
            spread(range(len(self.text_to_image)), 6) if queries is None else queries,
            text_to_image=self.text_to_image.tolist(),
            k=k,
        )


def write_gallery(path: str | os.PathLike[str], sets: Sequence[GallerySet], *, model: str) -> Path:
    """Write the page.

    Args:
        path: the HTML file; its folder is made.
        model: the model's name on the page.

    Returns:
        The path.

    Raises:
        UserError: a picture that cannot be read.
    """
    return write_page(path, "gallery.html", title=f"Retrieval: {model}", gallery=gallery_of(sets))


def gallery_of(sets: Sequence[GallerySet]) -> dict[str, Any]:
    """Make the variable `gallery` of the template `gallery_parts.html`.

    Arguments and errors as for `write_gallery`.
    """
    sections = [
        {
            "name": gallery_set.name,
            "metrics": gallery_set.metrics,
            "remarks": bounds_remarks({gallery_set.name: gallery_set.metrics}),
            "parts": [_part(gallery_set, *way) for way in _PARTS],
        }
        for gallery_set in sets
    ]
    return {"sections": sections, "beyond": MISSED_BEYOND}


_PARTS = [(way, kind) for way in ("text_to_image", "image_to_text") for kind in ("hit", "miss")]


def _part(shown: GallerySet, way: str, kind: str) -> dict[str, Any]:
    """Select the hits or the misses of one direction."""
    ranks = shown.ranks[way]
    mask = (
        (ranks.above == 0) & (ranks.tied == ranks.tied_positives)
        if kind == "hit"
        else ranks.above >= MISSED_BEYOND
    )
    candidates = mask.nonzero().flatten().tolist()
    make_card = _caption if way == "text_to_image" else _picture
    cards = []
    # A query that the metric counts as missed may have found another picture with the caption, or the same words.
    for query in spread(candidates, 2 * QUERIES):
        card = make_card(shown, query)
        if kind == "hit" or not any(right for _, right in card["top"]):
            cards.append({**card, "top": card["top"][:BEST], "rank": _rank(ranks, query)})
    return {
        "way": way,
        "kind": kind,
        "cards": spread(cards, QUERIES),
        "found": len(candidates),
        "of": len(ranks),
    }


def _caption(shown: GallerySet, query: int) -> dict[str, Any]:
    """Describe a caption with its ten best pictures, (picture, whether the caption is its own), and its own picture."""
    (example,) = shown.examples([query], MISSED_BEYOND)
    return {
        "words": example.query,
        "picture": example.target,
        "top": [(retrieved.pixels, retrieved.right) for retrieved in example.top[""]],
    }


def _picture(shown: GallerySet, query: int) -> dict[str, Any]:
    """Describe a picture with its ten best captions, (caption, whether it is its own), and its own captions."""
    scores = shown.text_features.double() @ shown.image_features[query].double()
    captions = shown.captions_of[query]
    top = [shown.captions[text] for text in _best_of(scores.float(), MISSED_BEYOND)]
    return {
        "words": "; ".join(captions),
        "picture": thumbnail(shown.read_image(query)),
        "top": [(caption, caption in captions) for caption in top],
    }


def _rank(ranks: QueryRanks, query: int) -> str:
    above, tied = int(ranks.above[query]), int(ranks.tied[query] - ranks.tied_positives[query])
    return f"rank {above + 1}" + (f" to {above + tied + 1}, tied" if tied else "")
