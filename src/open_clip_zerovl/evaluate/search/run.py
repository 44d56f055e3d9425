"""`zerovl search`: the pictures of a collection that are nearest to words, to a picture, or to both, by one or several models.

A model's query is its embedding of the words, or of the picture; with both, the sum of the two, each of length 1. Pictures are
ranked by the cosine with it. Cosines of two models are not on one scale: compare ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError, printable
from open_clip_zerovl.core.files import check_writable, write_atomically
from open_clip_zerovl.evaluate.search.collection import Collection, open_collection
from open_clip_zerovl.evaluate.search.index import default_cache, embed_collection
from open_clip_zerovl.report.html import thumbnail, write_page
from open_clip_zerovl.report.tables import text_table
from open_clip_zerovl.shards.pictures import BadPicture, decoded, rgb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchSettings:
    """What is asked for.

    Attributes:
        words: the query in words; "" for none.
        image: a picture as the query, too.
        best: how many pictures are shown.
        cache: where embeddings are kept; None for the user's cache folder.
        page, output: files to write, HTML with thumbnails and JSON.
    """

    words: str = ""
    image: Path | None = None
    best: int = 10
    cache: Path | None = None
    page: Path | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        if self.best < 1:
            raise UserError(f"the number of pictures to show must be 1 or more, but is {self.best}.")
        if not self.words.strip() and self.image is None:
            raise UserError("there is nothing to search for: give words, or a picture by --image")


@dataclass(frozen=True)
class Hit:
    """A picture that was found: what it is called, its cosine with the query, and where it lies."""

    picture: str
    score: float
    file: int
    key: str


@dataclass(frozen=True)
class Found:
    """What one model found, best first, and what its pictures were."""

    hits: tuple[Hit, ...]
    pictures: int
    bad: int
    computed: int


def run_search(encoders: Mapping[str, Encoder], data: str, settings: SearchSettings) -> dict[str, Found]:
    """Searches, prints the best pictures of each model, and writes the files asked for.

    Args:
        encoders: models by name.
        data: see `open_collection`.

    Returns:
        What each model found.

    Raises:
        UserError: a file that cannot be written, a query picture that cannot be decoded, and what `open_collection`,
            `Encoder.load` and `embed_collection` raise.
    """
    for file in (settings.page, settings.output):
        if file is not None:
            check_writable(file)
    for encoder in encoders.values():
        encoder.check()
    query = None if settings.image is None else _query_picture(settings.image)
    collection = open_collection(data)
    found = {name: _search(name, encoder, collection, query, settings) for name, encoder in encoders.items()}
    print(table(found))
    for name, result in found.items():
        kept = result.pictures + result.bad - collection.lost - result.computed
        bad = f" and {result.bad} that cannot be decoded or are not there" if result.bad else ""
        print(f"{name}: {result.pictures} pictures{bad}; {kept} of all known from before.")
    if settings.page is not None:
        write_search_page(settings.page, found, collection, query, settings)
    if settings.output is not None:
        write_atomically(settings.output, json.dumps(_as_data(found, data, settings), indent=2) + "\n")
    return found


def nearest(features: Tensor, query: Tensor, best: int) -> list[tuple[int, float]]:
    """(row, cosine) of the `best` features (P, D) nearest to a query (D,), best first; of equal ones the first comes first."""
    scores = (features.double() @ query.double()).float()
    order = torch.argsort(scores, descending=True, stable=True)[:best]
    return [(int(row), float(scores[row])) for row in order]


def table(found: Mapping[str, Found]) -> str:
    """The hits of all models side by side, as text."""
    rows = []
    for rank in range(max(len(result.hits) for result in found.values())):
        hits = (result.hits[rank : rank + 1] for result in found.values())
        rows.append(
            [str(rank + 1), *("".join(f"{hit.score:.3f}  {printable(hit.picture)}" for hit in own) for own in hits)]
        )
    return text_table(["", *found], rows, left=1 + len(found))


def write_search_page(
    path: Path,
    found: Mapping[str, Found],
    collection: Collection,
    query: Image.Image | None,
    settings: SearchSettings,
) -> None:
    """Write one HTML page with the best pictures of each model."""
    thumbnails: dict[tuple[int, str], str | None] = {}
    for hit in (hit for result in found.values() for hit in result.hits):
        if (hit.file, hit.key) not in thumbnails:
            thumbnails[hit.file, hit.key] = _thumbnail(collection, hit)
    asked = filter(None, (settings.words.strip(), settings.image.name if settings.image else ""))
    write_page(
        path,
        "search.html",
        title=f"Search: {' + '.join(asked)}",
        best=settings.best,
        collection=collection.name,
        query=query,
        found=found,
        thumbnails=thumbnails,
    )


def _search(
    name: str, encoder: Encoder, collection: Collection, query: Image.Image | None, settings: SearchSettings
) -> Found:
    model, preprocess, tokenizer, device = encoder.load()
    embedded = embed_collection(
        collection,
        model,
        preprocess,
        cache=settings.cache or default_cache(),
        device=device,
        batch_size=encoder.batch_size,
        workers=encoder.workers,
        name=name,
    )
    asked = torch.zeros(embedded.features.shape[1])
    with torch.no_grad():
        if settings.words.strip():
            tokens = tokenizer([settings.words]).to(device)
            asked = asked + F.normalize(model.encode_text(tokens).float(), dim=-1)[0].cpu()
        if query is not None:
            pixels = preprocess(query)[None].to(device)
            asked = asked + F.normalize(model.encode_image(pixels).float(), dim=-1)[0].cpu()
    if not asked.isfinite().all():
        raise UserError(f"{name} gives the query an embedding that is not finite; its training has diverged")
    hits = []
    for row, score in nearest(embedded.features, F.normalize(asked, dim=0), settings.best):
        file, key = embedded.places[row]
        hits.append(Hit(collection.shown(file, key), score, file, key))
    return Found(tuple(hits), len(embedded.places), embedded.bad, embedded.computed)


def _query_picture(path: Path) -> Image.Image:
    try:
        return decoded(path.read_bytes(), lambda image: rgb(image).copy())
    except OSError as error:
        raise UserError(f"the picture {path} cannot be read ({error.strerror}); correct --image") from error
    except BadPicture as error:
        raise UserError(f"the picture {path} {error.detail}; give another one by --image") from error


def _thumbnail(collection: Collection, hit: Hit) -> str | None:
    """The thumbnail of a hit; None where its picture has gone or changed since it was embedded."""
    for key, content in collection.pictures(hit.file):
        if key == hit.key and content is not None:
            try:
                return decoded(content, lambda image: thumbnail(rgb(image)))
            except BadPicture:
                break
    return None


def _as_data(found: Mapping[str, Found], data: str, settings: SearchSettings) -> dict[str, Any]:
    def plain(result: Found) -> dict[str, Any]:
        hits: Sequence[Hit] = result.hits
        return {
            **asdict(replace(result, hits=())),
            "hits": [{"picture": hit.picture, "score": hit.score} for hit in hits],
        }

    image = None if settings.image is None else str(settings.image)
    return {"data": data, "words": settings.words, "image": image, "models": {n: plain(r) for n, r in found.items()}}
