"""`zerovl retrieval --gallery out.html`: what a model finds, as one page that needs no other file.

The page shows hits (an item that belongs to the query comes first, without a tie) and misses (none is among the ten best) of
both directions, with the ranked pictures and captions. The queries shown are spread evenly over the set. Pictures are shrunk
and embedded as data URIs; the page loads nothing from a server.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from open_clip_zerovl.core.files import write_atomically
from open_clip_zerovl.data.retrieval import RetrievalSet
from open_clip_zerovl.evaluate.retrieval.metrics import DIRECTIONS, RECALL_KS, QueryRanks

MISSED_BEYOND = max(RECALL_KS)
_THUMBNAIL_PX = (240, 180)
_EXAMPLE_PX = (128, 128)


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


def write_gallery(
    path: str | os.PathLike[str], sets: Sequence[GallerySet], *, model: str, queries: int = 6, best: int = 5
) -> Path:
    """Writes the page.

    Args:
        path: the HTML file; its folder is made.
        model: what to call the model.
        queries: number of hits to show, and of misses, in each direction.
        best: number of items to show of a ranking.

    Returns:
        The path.

    Raises:
        UserError: a picture that cannot be read.
    """
    sections = "".join(_Section(shown, best).html(queries) for shown in sets)
    title = f"Retrieval: {escape(model)}"
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><header><h1>{title}</h1><p>In a <b>hit</b> an item of the query comes first, in a <b>miss</b> none is "
        f"among the {MISSED_BEYOND} best. The queries are spread evenly over the set; none was picked by hand.</p></header>\n"
        f"<main>{sections}</main></body></html>\n"
    )
    write_atomically(path, page)
    return Path(path)


def retrieval_examples(
    name: str,
    dataset: RetrievalSet,
    image_features: Tensor,
    text_features: Tensor,
    text_to_image: Tensor,
    ranks: QueryRanks,
    captions_per_image: int | None = None,
    *,
    queries: int = 6,
    best: int = 5,
) -> list[dict[str, Any]]:
    """Some captions of a set, spread evenly over it, with their best pictures: what a training run's page shows.

    Args:
        name: of the set.
        image_features, text_features: (I, D) and (T, D).
        text_to_image: (T,) image of each caption.
        ranks: of the captions.
        captions_per_image: how many captions of each image were encoded, the first ones; None for all.

    Returns:
        For each: `set`, `caption`, `rank` (of its own picture), `own` (a data URI), `top` (with `picture` and `own`).
    """
    captions = [caption for sample in dataset.samples for caption in sample.captions[:captions_per_image]]
    examples = []
    for query in pick(torch.ones(len(captions), dtype=torch.bool), queries):
        own = int(text_to_image[query])
        top = torch.argsort(image_features @ text_features[query], descending=True, stable=True)[:best].tolist()
        pictures = {image: data_uri(dataset.read_image(image), _EXAMPLE_PX) for image in {own, *top}}
        shown = [{"picture": pictures[image], "own": image == own} for image in top]
        examples.append(
            {
                "set": name,
                "caption": captions[query],
                "rank": int(ranks.above[query]) + 1,
                "own": pictures[own],
                "top": shown,
            }
        )
    return examples


def pick(mask: Tensor, count: int) -> list[int]:
    """At most `count` of the positions where the mask (Q,) is true, evenly spaced among them."""
    found = mask.nonzero().flatten().tolist()
    if len(found) <= count:
        return found
    return [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]


class _Section:
    """The HTML of one set."""

    def __init__(self, shown: GallerySet, best: int) -> None:
        self.shown = shown
        self.best = best
        self.captions = [
            caption for sample in shown.dataset.samples for caption in sample.captions[: shown.captions_per_image]
        ]
        self.thumbnails: dict[int, str] = {}

    def html(self, queries: int) -> str:
        row = self.shown.metrics
        recalls = "".join(
            f"<td>{100 * row[f'{direction}_R@{k}']:.1f}</td>" for direction in DIRECTIONS for k in RECALL_KS
        )
        heads = "".join(f"<th>R@{k}</th>" for _ in DIRECTIONS for k in RECALL_KS)
        table = (
            '<table><tr><td colspan="2"></td><th colspan="3">image to text</th><th colspan="3">text to image</th><td></td>'
            f"</tr><tr><th>images</th><th>captions</th>{heads}<th>RSUM</th></tr>"
            f"<tr><td>{row['images']}</td><td>{row['captions']}</td>{recalls}<td><b>{row['rsum']:.1f}</b></td></tr></table>"
        )
        parts = [f"<section><h2>{escape(self.shown.name)}</h2>{table}"]
        for direction, title, card in (
            ("text_to_image", "Caption to picture", self._caption_card),
            ("image_to_text", "Picture to captions", self._picture_card),
        ):
            ranks = self.shown.ranks[direction]
            hits = (ranks.above == 0) & (ranks.tied == ranks.tied_positives)
            misses = ranks.above >= MISSED_BEYOND
            for kind, mask in (("hit", hits), ("miss", misses)):
                plural = {"hit": "hits", "miss": "misses"}[kind]
                number = int(mask.sum())
                chosen = pick(mask, queries)
                parts.append(
                    f"<h3>{title}: {plural} <small>{number} of {len(ranks)}, {len(chosen)} shown</small></h3>"
                    + ("".join(card(query, kind) for query in chosen) or f"<p>No {plural}.</p>")
                )
        return "".join(parts) + "</section>\n"

    def _caption_card(self, query: int, kind: str) -> str:
        own = int(self.shown.text_to_image[query])
        top = self._top(self.shown.image_features, self.shown.text_features[query])
        found = "".join(self._picture(image, "own" if image == own else "") for image in top)
        wanted = "" if own in top else self._picture(own, "own wanted")
        return (
            f'<article class="{kind}"><div class="query"><p>&ldquo;{escape(self.captions[query])}&rdquo;</p>'
            f'<p class="rank">{self._rank("text_to_image", query)}</p></div>'
            f'<div class="row">{found}{wanted}</div></article>'
        )

    def _picture_card(self, query: int, kind: str) -> str:
        top = self._top(self.shown.text_features, self.shown.image_features[query])
        items = []
        for text in top:
            own = int(self.shown.text_to_image[text]) == query
            items.append(f'<li class="{"own" if own else ""}">{escape(self.captions[text])}</li>')
        wanted = ""
        if not any(int(self.shown.text_to_image[text]) == query for text in top):
            own_texts = (self.shown.text_to_image == query).nonzero().flatten().tolist()
            wanted = f'<p class="rank">its own: {"; ".join(escape(self.captions[text]) for text in own_texts)}</p>'
        return (
            f'<article class="{kind}"><div class="query">{self._picture(query, "")}'
            f'<p class="rank">{self._rank("image_to_text", query)}</p></div>'
            f'<div class="row"><div><ol>{"".join(items)}</ol>{wanted}</div></div></article>'
        )

    def _top(self, features: Tensor, query: Tensor) -> list[int]:
        scores = (features.double() @ query.double()).float()
        return torch.argsort(scores, descending=True, stable=True)[: self.best].tolist()

    def _rank(self, direction: str, query: int) -> str:
        ranks = self.shown.ranks[direction]
        above, tied = int(ranks.above[query]), int(ranks.tied[query] - ranks.tied_positives[query])
        return f"rank {above + 1}" + (f" to {above + tied + 1}, tied" if tied else "")

    def _picture(self, image: int, kind: str) -> str:
        if image not in self.thumbnails:
            self.thumbnails[image] = data_uri(self.shown.dataset.read_image(image))
        captions = self.shown.dataset.samples[image].captions
        note = {"own": "own", "own wanted": "own, not found"}.get(kind, "")
        return (
            f'<figure class="{kind}"><img src="{self.thumbnails[image]}" alt="{escape(captions[0], quote=True)}" '
            f'loading="lazy"><figcaption>{note}</figcaption></figure>'
        )


def data_uri(image: Image.Image, size: tuple[int, int] = _THUMBNAIL_PX) -> str:
    """The data URI of a picture, shrunk to a thumbnail of at most this width and height, as JPEG."""
    small = image.copy()
    small.thumbnail(size)
    buffer = BytesIO()
    small.save(buffer, format="JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --faint: #6b6b70; --paper: #fafafa; --card: #fff; --line: #dcdce0;
  --right: #00794f; --wrong: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --ink: #f0f0f2; --faint: #a0a0a8; --paper: #161618; --card: #202024;
  --line: #3a3a40; --right: #3ccf95; --wrong: #ff9a5c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1240px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 20px; margin: 36px 0 8px; }
h3 { font-size: 16px; margin: 28px 0 8px; } small, header p, .rank, figcaption { color: var(--faint); }
small { font-weight: normal; margin-left: 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px; text-align: right; } th { font-weight: 600; color: var(--faint); }
th[colspan] { text-align: center; } tr:last-child td { border-top: 1px solid var(--line); }
article { display: flex; gap: 20px; align-items: flex-start; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid var(--wrong); border-radius: 6px; padding: 12px 14px; margin: 8px 0; }
article.hit { border-left-color: var(--right); }
.query { flex: 0 0 230px; overflow-wrap: anywhere; } .query p { margin: 0 0 4px; }
.row { display: flex; flex-wrap: wrap; gap: 10px; flex: 1; min-width: 0; }
figure { margin: 0; width: 142px; } .query figure { width: 200px; }
img { width: 100%; height: 108px; object-fit: contain; background: var(--paper); border: 1px solid var(--line);
  border-radius: 4px; display: block; }
.query img { height: 150px; } figcaption { font-size: 12px; min-height: 16px; margin-top: 5px; text-align: center; }
figure.own img { outline: 3px solid var(--right); } figure.own figcaption { color: var(--right); font-weight: 600; }
figure.wanted { margin-left: 14px; } figure.wanted img { outline-style: dashed; }
ol { margin: 0; padding-left: 24px; } li { padding: 2px 6px; }
li.own { color: var(--right); font-weight: 600; } li.own::after { content: " (own)"; }
@media (max-width: 700px) { article { flex-direction: column; } .query { flex-basis: auto; } }
"""
