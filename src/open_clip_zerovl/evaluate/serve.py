"""`zerovl search --serve`: searches in a browser, on Gradio (extra `[app]`).

Pictures are sent as thumbnails within the answer, so that no path of this machine can be fetched; words and names are escaped.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.collection import open_collection
from open_clip_zerovl.data.images import decode_image
from open_clip_zerovl.evaluate.search import Searcher, thumbnail_of
from open_clip_zerovl.evaluate.settings import ServeSettings
from open_clip_zerovl.report.html import render
from open_clip_zerovl.shards.pictures import BadFile, BadPicture, read_foreign

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
        name: Searcher(encoder, collection, cache=cache, name=name, keep=True)
        for name, encoder in encoders.items()
    }
    print(f"Search {collection.name} at http://{settings.host}:{settings.port} (Ctrl-C ends it)")
    launch(build_app(searchers), host=settings.host, port=settings.port)


def build_app(searchers: Mapping[str, Searcher]) -> Any:
    """Build the page: words, a picture, how many, and a column of pictures for each model."""
    import gradio

    def search(words: str, picture: str | None, best: float) -> list[str]:
        # Gradio itself refuses a number of pictures beyond the slider's, and uploads beyond UPLOAD.
        words = (words or "")[:WORDS]
        if not words.strip() and picture is None:
            return ["<p>Type words, or drop a picture.</p>"] * len(searchers)
        try:
            query = None if picture is None else uploaded_picture(Path(picture))
            return [answer(searcher, words, query, int(best)) for searcher in searchers.values()]
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
        inputs = [words, picture, best]
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


def answer(searcher: Searcher, words: str, query: Any, best: int) -> str:
    """Render the best pictures of a model as HTML, with thumbnails inside."""
    figures = [
        (thumbnail_of(hit), f"{hit.score:.3f} {hit.picture} {hit.caption}".strip())
        for hit in searcher.find(words, query, best).hits
    ]
    return render("hits.html", figures=figures)


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
