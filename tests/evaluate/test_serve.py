"""`zerovl search --serve`, by Gradio's client."""

from __future__ import annotations

import html
import re
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.data.collection import open_collection
from open_clip_zerovl.evaluate.search import Searcher, build_app, launch
from support.tiny_clip import picture

# Not imported here: gradio takes seconds, in every worker of pytest-xdist.
pytestmark = pytest.mark.skipif(
    find_spec("gradio") is None, reason="gradio is not installed here (pip install '.[app]')"
)
ODD = "<b>odd & name<b>.png"


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("0.png", "1.png", "2.png", ODD):
        (folder / name).write_bytes(picture(rng))
    (folder.parent / "secret.png").write_bytes(picture(rng))
    return folder


@pytest.fixture(scope="module")
def searchers(bert_runs, photos) -> dict[str, Searcher]:
    collection, cache = open_collection(str(photos)), photos.parent / "cache"
    return {
        name: Searcher(Encoder(run, device="cpu"), collection, cache=cache, name=name)
        for name, run in zip(("<i>one</i>", "two"), bert_runs, strict=True)
    }


@pytest.fixture(scope="module")
def address(searchers):
    app = build_app(searchers)
    yield launch(app, host="127.0.0.1", port=None, wait=False)
    app.close()


@pytest.fixture(scope="module")
def client(address):
    from gradio_client import Client

    return Client(address, verbose=False)


def names(answer: str) -> list[str]:
    """Files' names in an answer, best first."""
    return re.findall(r"<figcaption>-?\d\.\d+ ([^<\s]+)", answer)


def test_words_give_the_pictures_of_each_model(client, searchers):
    answers = client.predict("a cat", None, 3, api_name="/search")
    for answer, searcher in zip(answers, searchers.values(), strict=True):
        best = [hit.picture for hit in searcher.find("a cat", None, 3).hits]
        assert names(answer) == [html.escape(hit).split()[0] for hit in best]
        assert answer.count("data:image/jpeg;base64,") == 3 and 'src="/' not in answer
    third = searcher.find("a cat", None, 3).hits[2].score
    assert len(names(client.predict("a cat", None, 3, third + 1e-6, api_name="/search")[-1])) == 2
    assert "No picture is as near." in client.predict("a cat", None, 3, 1, api_name="/search")[-1]


def test_a_dropped_picture_finds_itself(client, photos):
    from gradio_client import handle_file

    answer = client.predict("", handle_file(photos / "1.png"), 1, api_name="/search")[0]
    assert names(answer) == ["1.png"]


def test_a_file_that_is_no_picture_gives_a_sentence(client, photos, tmp_path):
    from gradio_client import handle_file

    (tmp_path / "cut.png").write_bytes((photos / "1.png").read_bytes()[:200])
    with pytest.raises(Exception, match=r"cut\.png cannot be read as a picture") as caught:
        client.predict("", handle_file(tmp_path / "cut.png"), 1, api_name="/search")
    assert "/tmp" not in str(caught.value)


def test_requests_are_bounded_and_escaped(client):
    answers = client.predict("", None, 3, api_name="/search")
    assert all("Type words" in answer for answer in answers)
    for best in (10**9, -5):
        with pytest.raises(Exception, match="Value"):
            client.predict("a", None, best, api_name="/search")
    answer = client.predict("a", None, 4, api_name="/search")[0]
    assert "<b>odd" not in answer and "&lt;b&gt;odd" in answer


@pytest.mark.parametrize("what", ["secret.png", "photos/0.png"])
def test_no_file_can_be_fetched_by_its_path(address, photos, what):
    """Not even a picture of the folder: answers hold thumbnails alone."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{address}gradio_api/file={photos.parent / what}")
    assert caught.value.code in (403, 404)
