"""`zerovl retrieval --gallery out.html`: hits and misses of a model, as one page that needs no other file.

In a hit an item that belongs to the query comes first, without a tie; in a miss neither one of those nor one with the same
caption is among the ten best. The queries shown are spread evenly over the set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from open_clip_zerovl.data.retrieval import RetrievalSet
from open_clip_zerovl.evaluate.retrieval.examples import RetrievalExample, best_of, retrieval_examples, spread
from open_clip_zerovl.evaluate.retrieval.metrics import RECALL_KS, QueryRanks
from open_clip_zerovl.report.bounds import bounds_remarks
from open_clip_zerovl.report.html import thumbnail, write_page

MISSED_BEYOND = max(RECALL_KS)


@dataclass(frozen=True)
class GallerySet:
    """One evaluated set.

    Attributes:
        name, dataset, captions_per_image: the evaluated set.
        image_features, text_features: (I, D) and (T, D).
        text_to_image: (T,) image of each caption.
        ranks: result of `retrieval_ranks`.
        metrics: result of `recalls`, with the counts `images` and `captions`.
    """

    name: str
    dataset: RetrievalSet
    captions_per_image: int | None
    image_features: Tensor
    text_features: Tensor
    text_to_image: Tensor
    ranks: Mapping[str, QueryRanks]
    metrics: Mapping[str, float]

    @property
    def captions(self) -> list[str]:
        """(T,) the captions."""
        return [caption for sample in self.dataset.samples for caption in sample.captions[: self.captions_per_image]]

    def examples(self, queries: Sequence[int] | None = None, k: int = 5) -> list[RetrievalExample]:
        """Some captions with their best pictures; None takes six captions, spread evenly over the set."""
        return retrieval_examples(
            lambda image: thumbnail(self.dataset.read_image(image)),
            self.captions,
            [self.name] * len(self.dataset),
            {"": (self.image_features, self.text_features)},
            spread(range(len(self.text_to_image)), 6) if queries is None else queries,
            text_to_image=self.text_to_image.tolist(),
            k=k,
        )


def write_gallery(
    path: str | os.PathLike[str], sets: Sequence[GallerySet], *, model: str, queries: int = 6, best: int = 5
) -> Path:
    """Write the page.

    Args:
        path: the HTML file; its folder is made.
        model: the model's name on the page.
        queries: number of hits to show, and of misses, in each direction.
        best: number of items to show of a ranking.

    Returns:
        The path.

    Raises:
        UserError: a picture that cannot be read.
    """
    sections = [
        {
            "name": one.name,
            "metrics": one.metrics,
            "remarks": bounds_remarks({one.name: one.metrics}),
            "parts": [_part(one, *way, queries, best) for way in _PARTS],
        }
        for one in sets
    ]
    return write_page(path, "gallery.html", title=f"Retrieval: {model}", sections=sections, beyond=MISSED_BEYOND)


_PARTS = [(way, kind) for way in ("text_to_image", "image_to_text") for kind in ("hit", "miss")]


def _part(shown: GallerySet, way: str, kind: str, queries: int, best: int) -> dict[str, Any]:
    """The hits or the misses of one direction."""
    ranks = shown.ranks[way]
    mask = (ranks.above == 0) & (ranks.tied == ranks.tied_positives) if kind == "hit" else ranks.above >= MISSED_BEYOND
    found = mask.nonzero().flatten().tolist()
    card = _caption if way == "text_to_image" else _picture
    cards = []
    # A query that the metric counts as missed may have found another picture with the caption, or the same words.
    for query in spread(found, 2 * queries):
        one = card(shown, query)
        if kind == "hit" or not any(right for _, right in one["top"]):
            cards.append({**one, "top": one["top"][:best], "rank": _rank(ranks, query)})
    return {"way": way, "kind": kind, "cards": spread(cards, queries), "found": len(found), "of": len(ranks)}


def _caption(shown: GallerySet, query: int) -> dict[str, Any]:
    """A caption with its ten best pictures, (picture, whether the caption is its own), and its own picture."""
    (one,) = shown.examples([query], MISSED_BEYOND)
    return {"words": one.query, "picture": one.target, "top": [(found.pixels, found.right) for found in one.top[""]]}


def _picture(shown: GallerySet, query: int) -> dict[str, Any]:
    """A picture with its ten best captions, (caption, whether it is its own), and its own captions."""
    scores = shown.text_features.double() @ shown.image_features[query].double()
    own = shown.dataset.samples[query].captions[: shown.captions_per_image]
    top = [shown.captions[text] for text in best_of(scores.float(), MISSED_BEYOND)]
    return {
        "words": "; ".join(own),
        "picture": thumbnail(shown.dataset.read_image(query)),
        "top": [(caption, caption in own) for caption in top],
    }


def _rank(ranks: QueryRanks, query: int) -> str:
    above, tied = int(ranks.above[query]), int(ranks.tied[query] - ranks.tied_positives[query])
    return f"rank {above + 1}" + (f" to {above + tied + 1}, tied" if tied else "")
