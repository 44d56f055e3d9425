"""Retrieval examples: the best pictures of a caption and the rank of its own."""

import torch
import torch.nn.functional as F
from PIL import Image

from open_clip_zerovl.evaluate import retrieval
from open_clip_zerovl.evaluate.retrieval import GallerySet


def scored(images, texts, captions) -> GallerySet:
    """A set of pictures that are grey by their number, one caption each."""
    links = torch.arange(len(texts))
    captions_of = [[caption] for caption in captions]
    return GallerySet.scored(
        "s", captions_of, lambda n: Image.new("L", (9, 9), n), (images, texts, links)
    )


def test_examples_hold_the_best_pictures_and_the_rank(monkeypatch):
    monkeypatch.setattr(retrieval, "thumbnail", lambda image: image.getpixel((0, 0)))
    texts = F.normalize(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    shifted = texts.roll(1, dims=0)  # here picture i matches caption i - 1
    captions = [f"caption {n}" for n in range(12)]
    good = scored(texts, texts, captions).example(3, 3)
    assert good.rank == 1 and [right for _, right in good.top] == [True, False, False]
    assert (good.query, good.target, good.top[0]) == (captions[3], 3, (3, True))
    bad = scored(shifted, texts, captions).example(4, 3)
    scores = shifted @ texts[4]
    assert bad.rank == 1 + int((scores > scores[4]).sum()) > 1
    assert bad.top[0] == (int(scores.argmax()), False)
    assert len(scored(texts, texts, captions).examples()) == 6


def test_a_picture_with_the_same_caption_is_right(monkeypatch):
    monkeypatch.setattr(retrieval, "thumbnail", lambda image: image.getpixel((0, 0)))
    images = torch.eye(4)
    texts = images[[1, 1, 2, 0]]  # the model finds picture 1 for "a person"; its own is picture 0
    shown = scored(images, texts, ["a person", "a person", "a dog", "a cat"])
    person, cat = shown.example(0, 2), shown.example(3, 2)
    assert person.top == [(1, True), (0, True)] and (person.target, person.rank) == (0, 2)
    assert [right for _, right in cat.top] == [False, False]
