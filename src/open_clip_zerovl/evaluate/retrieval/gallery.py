"""`zerovl retrieval --gallery out.html`: hits and misses of a model, as one page that needs no other file.

In a hit an item that belongs to the query comes first, without a tie; in a miss none is among the ten best. The queries shown
are spread evenly over the set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from open_clip_zerovl.evaluate.retrieval.examples import RetrievalExample, best_of, retrieval_examples, spread
from open_clip_zerovl.evaluate.retrieval.metrics import RECALL_KS, QueryRanks
from open_clip_zerovl.evaluate.retrieval.sets import RetrievalSet
from open_clip_zerovl.report.html import thumbnail, write_page

MISSED_BEYOND = max(RECALL_KS)


@dataclass(frozen=True)
class GallerySet:
    """One evaluated set.

    Attributes:
        name, dataset, captions_per_image: what was evaluated.
        image_features, text_features: (I, D) and (T, D).
        text_to_image: (T,) image of each caption.
        ranks: of `retrieval_ranks`.
        metrics: of `recalls`, with the counts `images` and `captions`.
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
        """Some captions with their best pictures; of None six captions, spread evenly over the set."""
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
        {"name": one.name, "metrics": one.metrics, "parts": [_part(one, *way, queries, best) for way in _PARTS]}
        for one in sets
    ]
    return write_page(path, "gallery.html", title=f"Retrieval: {model}", sections=sections, beyond=MISSED_BEYOND)


_PARTS = [(way, kind) for way in ("text_to_image", "image_to_text") for kind in ("hit", "miss")]


def _part(shown: GallerySet, way: str, kind: str, queries: int, best: int) -> dict[str, Any]:
    """The hits or the misses of one direction."""
    ranks = shown.ranks[way]
    mask = (ranks.above == 0) & (ranks.tied == ranks.tied_positives) if kind == "hit" else ranks.above >= MISSED_BEYOND
    found = mask.nonzero().flatten().tolist()
    chosen = spread(found, queries)
    cards = shown.examples(chosen, best) if way == "text_to_image" else [_picture(shown, i, best) for i in chosen]
    places = [_rank(ranks, query) for query in chosen]
    return {
        "way": way,
        "kind": kind,
        "cards": list(zip(cards, places, strict=True)),
        "found": len(found),
        "of": len(ranks),
    }


def _picture(shown: GallerySet, query: int, best: int) -> dict[str, Any]:
    """A picture with its best captions: (caption, whether it is its own), and its own ones where none is among them."""
    scores = shown.text_features.double() @ shown.image_features[query].double()
    own = [shown.captions[text] for text in (shown.text_to_image == query).nonzero().flatten().tolist()]
    top = [(shown.captions[text], int(shown.text_to_image[text]) == query) for text in best_of(scores.float(), best)]
    missed = [] if any(right for _, right in top) else own
    return {"picture": shown.dataset.read_image(query), "words": own[0], "top": top, "missed": missed}


def _rank(ranks: QueryRanks, query: int) -> str:
    above, tied = int(ranks.above[query]), int(ranks.tied[query] - ranks.tied_positives[query])
    return f"rank {above + 1}" + (f" to {above + tied + 1}, tied" if tied else "")
