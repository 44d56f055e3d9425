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


@dataclass(frozen=True)
class RetrievalExample:
    """A caption as query.

    Attributes:
        query, source: the caption, and the set that it is of.
        target: its own picture, as a data URI.
        top: the best pictures, each with whether the query is its caption, also where other pictures have it too.
        rank: the rank of its own picture, from 1.
    """

    query: str
    source: str
    target: str
    top: Sequence[tuple[str, bool]]
    rank: int


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

    def examples(self) -> list[RetrievalExample]:
        """Choose some captions, spread evenly over the set, with their best pictures."""
        return [self.example(query, BEST) for query in spread(range(len(self.text_to_image)), 6)]

    def example(self, query: int, k: int) -> RetrievalExample:
        """Rank the pictures for a caption, in float64 and rounded as for the metrics, so that equal features tie."""
        words, target = self.captions[query], int(self.text_to_image[query])
        scores = (self.image_features.double() @ self.text_features[query].double()).float()
        top = [
            (thumbnail(self.read_image(image)), words in self.captions_of[image])
            for image in _best_of(scores, k)
        ]
        rank = 1 + int((scores > scores[target]).sum())
        return RetrievalExample(words, self.name, thumbnail(self.read_image(target)), top, rank)


def write_gallery(path: str | os.PathLike[str], sets: Sequence[GallerySet], *, model: str) -> Path:
    """Write the page.

    Args:
        path: the HTML file. Its folder is made.
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
    example = shown.example(query, MISSED_BEYOND)
    return {"words": example.query, "picture": example.target, "top": example.top}


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
