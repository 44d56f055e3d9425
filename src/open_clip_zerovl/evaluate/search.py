"""`zerovl search`: the pictures of a collection that are nearest to words, to a picture, or to both, by one or several models.

A model's query is its embedding of the words, or of the picture; with both, the sum of the two, each of length 1. Pictures are
ranked by the cosine with it. Cosines of two models are not on one scale: compare ranks.

Embeddings are computed once and kept, by the digests of the image tower and of the pictures (`features.embed`): a copy of the
pictures is known, and a changed picture is embedded again with those of its run.

`--serve` answers searches in a browser, on Gradio (extra `[app]`). Pictures are sent as thumbnails within the answer, so that
no path of this machine can be fetched; words and names are escaped.

Legend: `P` pictures, `D` embedding width.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.core.errors import UserError, printable
from open_clip_zerovl.core.files import (
    check_writable,
    digest_of,
    file_digests,
    user_cache,
    write_atomically,
)
from open_clip_zerovl.data.collection import Collection, open_collection, picture_file
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.data.reader import samples_of
from open_clip_zerovl.data.sources import contents_of_shards
from open_clip_zerovl.evaluate.settings import SearchSettings, ServeSettings
from open_clip_zerovl.features.embed import Parts, Pictures, embed_pictures
from open_clip_zerovl.features.encoder import FrozenModel
from open_clip_zerovl.report.pages import render, thumbnail, write_page
from open_clip_zerovl.shards.pictures import BadFile, BadPicture, read_foreign

CAPTION_CHARACTERS = 60  # of a caption in the terminal


@dataclass(frozen=True)
class Hit:
    """A picture that was found.

    Attributes:
        picture: its name in lists: its path, or shard and key with the file or URL that the sample's json names.
        score: its cosine with the query.
        caption: the first caption beside it in its shard. "" if there is none.
        content: its encoded bytes. None if it has gone since it was embedded.
    """

    picture: str
    score: float
    caption: str
    content: bytes | None = field(repr=False)

    def open(self) -> Image.Image:
        """Decode the picture, upright and in RGB.

        Raises:
            UserError: it has gone or changed since it was embedded.
        """
        if (picture := _picture_or_none(self.content)) is None:
            raise UserError(
                f"{self.picture} has gone or changed since it was embedded; search again"
            )
        return picture


@dataclass(frozen=True)
class SearchResult:
    """The result of one model.

    Attributes:
        hits: best first.
        pictures, bad: pictures that were searched, and that cannot be decoded or are not there.
        computed: pictures that this call has embedded. The rest was stored before.
    """

    hits: tuple[Hit, ...]
    pictures: int
    bad: int
    computed: int


def run_search(
    encoders: Mapping[str, Encoder], data: str, settings: SearchSettings
) -> tuple[dict[str, SearchResult], str]:
    """Search with each model, and write the files that the settings ask for.

    Args:
        encoders: models by name.
        data: see `open_collection`.

    Returns:
        The result of each model, and the list of its best pictures as text.

    Raises:
        UserError: a file that cannot be written, a query picture that cannot be decoded, or an error of
            `open_collection`, `Encoder.load` or `Searcher`.
    """
    for file in (settings.page, settings.output):
        if file is not None:
            check_writable(file)
    for encoder in encoders.values():
        encoder.check()
    query = None if settings.image is None else query_picture(settings.image)
    collection = open_collection(data)
    results = {
        name: Searcher(encoder, collection, cache=settings.cache, name=name).find(
            settings.words, query, settings.best
        )
        for name, encoder in encoders.items()
    }
    text = table(results)
    for name, result in results.items():
        known = result.pictures + result.bad - collection.lost - result.computed
        bad = f" and {result.bad} that cannot be decoded or are not there" if result.bad else ""
        text += f"\n{name}: {result.pictures} pictures{bad}; {known} of all known from before."
    if settings.page is not None:
        write_search_page(settings.page, results, collection, query, settings)
    if settings.output is not None:
        write_atomically(
            settings.output, json.dumps(_as_data(results, data, settings), indent=2) + "\n"
        )
    return results, text


def nearest(blocks: Iterable[Tensor], query: Tensor, best: int) -> list[tuple[int, float]]:
    """Find the (row, cosine) of the `best` features (P, D) nearest to a query (D,), best first.

    Equal cosines keep their order.

    Args:
        blocks: the features, some thousand rows at a time. A row of zeros, of a picture that cannot be shown, is left out.
    """
    scores = torch.cat([_cosines(block, query.double()) for block in blocks])
    order = torch.argsort(scores, descending=True, stable=True)[:best]
    return [(int(row), float(scores[row])) for row in order if scores[row] > -math.inf]


def _cosines(block: Tensor, query: Tensor) -> Tensor:
    scores = (block.double() @ query).float()
    zeros = (scores == 0).nonzero()[:, 0]  # a row of zeros is one of these
    scores[zeros[~block[zeros].any(dim=1)]] = -math.inf
    return scores


def table(results: Mapping[str, SearchResult]) -> str:
    """Format the hits of all models side by side, as text.

    A picture's caption stands below its name.
    """
    columns = [
        [name, *(line for hit in result.hits for line in _lines(hit))]
        for name, result in results.items()
    ]
    widths = [max(map(len, column)) for column in columns]
    ranks = [
        "",
        *(line for rank in range(max(map(len, columns)) // 2) for line in (f"{rank + 1:3d}", "")),
    ]
    rows = zip_longest(ranks, *columns, fillvalue="")
    text = (f"{rank:<4}" + "  ".join(map(str.ljust, cells, widths)) for rank, *cells in rows)
    return "\n".join(line.rstrip() for line in text if line.strip())


def _lines(hit: Hit) -> tuple[str, str]:
    caption = (
        hit.caption
        if len(hit.caption) <= CAPTION_CHARACTERS
        else hit.caption[: CAPTION_CHARACTERS - 3] + "..."
    )
    return f"{hit.score:6.3f}  {printable(hit.picture)}", " " * 8 + printable(
        caption
    ) if caption else ""


def write_search_page(
    path: Path,
    results: Mapping[str, SearchResult],
    collection: Collection,
    query: Image.Image | None,
    settings: SearchSettings,
) -> None:
    """Write one HTML page with the best pictures of each model."""
    asked = filter(None, (settings.words.strip(), settings.image.name if settings.image else ""))
    hits = {
        name: [(hit, thumbnail_of(hit)) for hit in result.hits] for name, result in results.items()
    }
    write_page(
        path,
        "search.html",
        title=f"Search: {' + '.join(asked)}",
        best=settings.best,
        collection=collection.name,
        query=query,
        results=results,
        hits=hits,
    )


class Searcher:
    """A model and the embedded pictures of a collection, in which `find` answers a query.

    Args:
        encoder: the model.
        cache: folder of all embeddings. None: one in the user's cache folder.
        name: the model's name, for the progress bar and in sentences.

    Raises:
        UserError: as `embed_pictures`, a cache that cannot be written, a shard that cannot be read, or no picture that can be
            decoded.
    """

    def __init__(
        self,
        encoder: Encoder,
        collection: Collection,
        *,
        cache: Path | None = None,
        name: str = "model",
    ) -> None:
        self.name, self.collection = name, collection
        cache = cache or user_cache("zerovl") / "search"
        check_writable(cache, folder=True)
        self.model = FrozenModel.load(encoder)
        in_files = collection.shards is None
        pictures: Parts = _files(collection) if in_files else _Shards(collection)
        self.features, self.computed = embed_pictures(
            self.model,
            pictures,
            cache,
            batch_size=encoder.batch_size,
            workers=encoder.workers,
            desc=name,
        )
        ids = self.features.ids
        self.pictures = int(np.count_nonzero(ids))
        self.bad = len(ids) - self.pictures + collection.lost
        if not self.pictures:
            raise UserError(f"none of the {self.bad} pictures of {collection.name} can be decoded")

    @torch.no_grad()
    def find(self, words: str, query: Image.Image | None, best: int) -> SearchResult:
        """Find the `best` pictures nearest to words, to a picture, or to both.

        Raises:
            UserError: the model's embedding of the query is not finite.
        """
        asked = []
        if words.strip():
            asked.append(self.model.texts([words])[0].cpu())
        if query is not None:
            assert self.model.picture_transform is not None
            asked.append(self.model.images(self.model.picture_transform(query)[None])[0].cpu())
        direction = torch.stack(asked).sum(dim=0)
        if not direction.isfinite().all():
            raise UserError(
                f"{self.name} gives the query an embedding that is not finite; its training has diverged"
            )
        ranked = nearest(self.features.blocks(), F.normalize(direction, dim=0), best)
        hits = tuple(
            _hit(self.collection, *self.collection.place(row), score) for row, score in ranked
        )
        return SearchResult(hits, self.pictures, self.bad, self.computed)


def query_picture(path: Path) -> Image.Image:
    try:
        return decode_image(read_foreign(path))
    except BadFile as error:
        raise UserError(f"{error}; correct --image") from error
    except BadPicture as error:
        raise UserError(f"the picture {path} {error}; give another one by --image") from error


def _hit(collection: Collection, file: int, number: int, score: float) -> Hit:
    """Read a hit with its name, caption and picture from picture `number` of a file."""
    if collection.shards is None:
        return Hit(collection.shown(file), score, "", picture_file(collection.files[file]))
    sample = next(islice(samples_of(*collection.shards[file]), number, None))
    caption = "".join(sample.captions[:1])
    return Hit(collection.shown(file, sample), score, caption, sample.image)


def thumbnail_of(hit: Hit) -> str | None:
    """Make the thumbnail of a hit.

    Returns:
        None if its picture has gone or changed since it was embedded.
    """
    picture = _picture_or_none(hit.content)
    return None if picture is None else thumbnail(picture)


def _as_data(
    results: Mapping[str, SearchResult], data: str, settings: SearchSettings
) -> dict[str, Any]:
    def plain(result: SearchResult) -> dict[str, Any]:
        shown = ("picture", "score", "caption")
        hits = [{name: getattr(hit, name) for name in shown} for hit in result.hits]
        return vars(result) | {"hits": hits}

    image = None if settings.image is None else str(settings.image)
    return {
        "data": data,
        "words": settings.words,
        "image": image,
        "models": {n: plain(r) for n, r in results.items()},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------------------------------------------------


class _Shards:
    """The pictures of shards (`features.embed.Parts`)."""

    def __init__(self, collection: Collection) -> None:
        assert collection.shards is not None
        self.collection, self.counts = collection, collection.sizes
        sources = {source.name: source for source, _ in collection.shards}
        contents = {name: contents_of_shards(source) for name, source in sources.items()}
        self.contents = [contents[source.name][shard] for source, shard in collection.shards]

    def read(self, part: int) -> Iterator[tuple[int, Image.Image]]:
        for row, (_, content) in enumerate(self.collection.pictures(part)):
            if (picture := _picture_or_none(content)) is not None:
                yield row, picture


def _picture_or_none(content: bytes | None) -> Image.Image | None:
    try:
        return None if content is None else decode_image(content)
    except BadPicture:
        return None


def _files(collection: Collection) -> Pictures:
    """Take the pictures of a folder, or of a list of files."""
    paths = collection.files
    digests = file_digests(paths)
    contents = [digests[path] or digest_of(path) for path in paths]
    return Pictures(contents, lambda row: _picture_or_none(picture_file(paths[row])))


BEST, MOST = 10, 50  # pictures shown of each model
WORDS = 300  # characters of a query
UPLOAD = "20mb"
WAITING = 32  # requests; more are refused


def serve(
    encoders: Mapping[str, Encoder], data: str, settings: ServeSettings, cache: Path | None = None
) -> None:
    """Embed the pictures that are not stored yet, then answer searches until Ctrl-C.

    Args:
        encoders: models by name.
        data: see `open_collection`.
        cache: folder of stored embeddings. None: the default.

    Raises:
        UserError: an error of `Searcher`.
        ImportError: Gradio is not installed.
        OSError: the port is taken.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing is reported anywhere
    import gradio  # noqa: F401  refused here, before the pictures are embedded

    collection = open_collection(data)
    searchers = {
        name: Searcher(encoder, collection, cache=cache, name=name)
        for name, encoder in encoders.items()
    }
    print(f"Search {collection.name} at http://{settings.host}:{settings.port} (Ctrl-C ends it)")
    launch(build_app(searchers), host=settings.host, port=settings.port)


def build_app(searchers: Mapping[str, Searcher]) -> Any:
    """Build the page: words, a picture, how many, and a column of pictures for each model."""
    import gradio

    def search(words: str, picture: str | None, best: float, lowest: float) -> list[str]:
        # Gradio itself refuses a number of pictures beyond the slider's, and uploads beyond UPLOAD.
        words = (words or "")[:WORDS]
        if not words.strip() and picture is None:
            return ["<p>Type words, or drop a picture.</p>"] * len(searchers)
        try:
            query = None if picture is None else uploaded_picture(Path(picture))
            return [
                answer(searcher, words, query, int(best), lowest) for searcher in searchers.values()
            ]
        except UserError as error:
            raise gradio.Error(html.escape(str(error))) from error

    first = next(iter(searchers.values()))
    with gradio.Blocks(
        title="Picture search", analytics_enabled=False, delete_cache=(3600, 3600)
    ) as app:
        gradio.Markdown(f"# Picture search\n{first.pictures:,} pictures")
        with gradio.Row():
            with gradio.Column(scale=2, min_width=280):
                words = gradio.Textbox(
                    label="Words",
                    placeholder="a red house at the sea",
                    max_length=WORDS,
                    autofocus=True,
                )
                best = gradio.Slider(1, MOST, value=BEST, step=1, label="Pictures")
                lowest = gradio.Slider(
                    -1, 1, value=-1, step=0.01, label="Lowest score (-1: all, however far)"
                )
                button = gradio.Button("Search", variant="primary")
            # Without a mode the file stays as it is, and our own checks decode it.
            picture: Any = gradio.Image(
                label="A picture like this",
                type="filepath",
                image_mode=None,
                sources=["upload"],
                height=220,
            )
            # Gradio's own opens the file first, and its error is not shown.
            picture.preprocess = lambda payload: None if payload is None else payload.path
        with gradio.Row():
            columns = []
            for name in searchers:
                with gradio.Column(min_width=280):
                    gradio.Markdown(f"### {html.escape(name)}")
                    columns.append(gradio.HTML(padding=False))
        inputs = [words, picture, best, lowest]
        gradio.on(
            [words.submit, button.click, picture.upload], search, inputs, columns, api_name="search"
        )
    return app


def uploaded_picture(path: Path) -> Any:
    """Decode a file that a visitor has sent.

    Raises:
        UserError: it is no picture. The sentence names the file without its folder on this machine.
    """
    try:
        return decode_image(read_foreign(path))
    except (BadFile, BadPicture) as error:
        raise UserError(
            f"{path.name} cannot be read as a picture; drop a whole JPEG, PNG or WebP of two pixels or more a side"
        ) from error


def answer(searcher: Searcher, words: str, query: Any, best: int, lowest: float = -1.0) -> str:
    """Render the best pictures of a model from a score on as HTML, with thumbnails inside."""
    figures = [
        (thumbnail_of(hit), f"{hit.score:.3f} {hit.picture} {hit.caption}".strip())
        for hit in searcher.find(words, query, best).hits
        if hit.score >= lowest
    ]
    return render(
        "hits.html", figures=figures, **({} if figures else {"note": "No picture is as near."})
    )


def launch(app: Any, *, host: str, port: int | None, wait: bool = True) -> str:
    """Serve requests at an address, one at a time, without Gradio's share links, and return the address."""
    import gradio

    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    app.queue(max_size=WAITING, default_concurrency_limit=1)
    _, address, _ = app.launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=not wait,
        max_file_size=UPLOAD,
        theme=theme,
        ssr_mode=False,
    )
    return address
