"""Tokens of the short way are open_clip's own, for every way of cleaning and any caption."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

from open_clip_zerovl.data.tokens import _PROBES, fast_tokenizer, is_plain
from support.tiny_clip import WORDS, write_bert

ALPHABET = "abc XYZ 019 ,.'\"!?-_ &;#<>[]()\\/ \t\n\r\x00\x1b\x7f\u00a0\u00e9\u00c3\u2019\ufb01\uff21\u4eba\U0001f415"


def captions(count: int) -> list[str]:
    rng = random.Random(0)
    drawn = ["".join(rng.choices(ALPHABET, k=rng.randrange(60))) for _ in range(count)]
    plain = [
        "".join(rng.choices([chr(c) for c in range(32, 127)], k=rng.randrange(80)))
        for _ in range(count)
    ]
    words = [" ".join(rng.choices(WORDS, k=rng.randrange(40))) for _ in range(count)]
    return [
        *drawn,
        *plain,
        *words,
        *_PROBES,
        "&amp;amp; &lt;b&gt;",
        "&eacute;",
        "x" * 5000,
        "[MASK] a [MASK]",
    ]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(
        tmp_path_factory.mktemp("tokens") / "bert", words=[*WORDS, *"0123456789", "##a", "##b"]
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clean": "lower"},
        {"clean": "canonicalize"},
        {"strip_sep_token": True, "context_length": 9},
    ],
)
def test_tokens_are_open_clips_own(bert, options):
    stock = HFTokenizer(str(bert), **{"context_length": 25, **options})
    fast = fast_tokenizer(stock)
    assert fast is not stock
    texts = captions(300)
    assert sum(map(is_plain, texts)) > 300 and not all(map(is_plain, texts))
    wanted = stock(texts)
    found = fast(texts)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    stock(["short"], context_length=5)  # sets another length in the compiled part
    assert torch.equal(pickle.loads(pickle.dumps(fast))(texts[:40]), wanted[:40]) and torch.equal(
        fast(texts[:3]), wanted[:3]
    )


def test_other_tokenizers_are_left_as_they_are(bert, monkeypatch):
    simple = SimpleTokenizer()
    assert fast_tokenizer(simple) is simple
    clips = HFTokenizer(str(bert), tokenizer_mode="clips", context_length=25)
    assert fast_tokenizer(clips) is clips
    wrong = HFTokenizer(str(bert), context_length=25)
    monkeypatch.setattr(
        type(wrong.tokenizer), "set_truncation_and_padding", lambda self, **options: None
    )
    assert fast_tokenizer(wrong) is wrong  # its tokens are not cut as open_clip's are
