"""Retrieval examples: the best pictures of a caption and the rank of its own."""

import numpy as np
import torch
import torch.nn.functional as F

from open_clip_zerovl.evaluate.gallery import retrieval_examples


def pool(count=12):
    generator = torch.Generator().manual_seed(0)
    texts = F.normalize(torch.randn(count, 8, generator=generator), dim=-1)
    pictures = [np.full((16, 16, 3), 20 * i, dtype=np.uint8) for i in range(count)]
    return (
        pictures,
        [f"caption {i} " * (1 + 5 * i) for i in range(count)],
        ["a", "b"] * (count // 2),
        texts,
    )


def test_examples_hold_the_best_pictures_and_the_rank():
    pictures, captions, sources, texts = pool()
    shifted = texts.roll(1, dims=0)  # here picture i matches caption i - 1
    good, bad = retrieval_examples(
        pictures, captions, sources, {"x": (texts, texts), "y": (shifted, texts)}, [3, 4], k=3
    )
    assert good.rank["x"] == 1 and [picture.right for picture in good.top["x"]] == [
        True,
        False,
        False,
    ]
    assert (good.query, good.source) == (captions[3], "b") and len(good.top["y"]) == 3
    scores = shifted @ texts[4]
    assert bad.rank["y"] == 1 + int((scores > scores[4]).sum()) > 1
    assert int(bad.top["y"][0].pixels[0, 0, 0]) == 20 * int(scores.argmax())


def test_a_picture_with_the_same_caption_is_right():
    images = torch.eye(4)
    texts = images[[1, 1, 2, 0]]  # the model finds picture 1 for "a person"; its own is picture 0
    captions = ["a person", "a person", "a dog", "a cat"]
    person, cat = retrieval_examples(
        list("abcd"), captions, ["s"] * 4, {"m": (images, texts)}, [0, 3], k=2
    )
    assert [(one.pixels, one.right) for one in person.top["m"]] == [("b", True), ("a", True)]
    assert person.target == "a" and person.rank == {"m": 2}
    assert [one.right for one in cat.top["m"]] == [False, False]
