"""Words are processed at the paper's rates; tokens of the short way are open_clip's own, for every way of cleaning."""

from __future__ import annotations

import itertools
import math
import pickle
import random

import numpy as np
import pytest
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from tokenizers import ByteLevelBPETokenizer
from transformers import RobertaTokenizer

from open_clip_zerovl.data.tokens import _PROBES, WordAugment, fast_tokenizer, is_plain
from support.tiny_clip import WORDS, write_bert

CAPTION = "a small red cat with the round face of the moon"
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = [*WORDS, "[unused1]", "!", "7", "cafe"]
    folder = write_bert(tmp_path_factory.mktemp("augment") / "bert", words=words)
    return HFTokenizer(str(folder), context_length=32)


def test_rates_are_the_papers(tokenizer):
    """20 % of 200,000 distinct words are processed: 50 / 10 / 40 % masked, replaced, deleted; bounds of 5 deviations."""
    augment = WordAugment(tokenizer, 0.2)
    given = [f"w{index}" for index in range(50)]
    shown = [augment(" ".join(given), seed).split() for seed in range(4000)]
    left = [[word for word in words if word in given] for words in shown]
    assert all(words == sorted(words, key=given.index) for words in left)  # order stays
    assert set(itertools.chain(*shown)) == {*given, "[MASK]", *augment.vocabulary}
    masked = sum(words.count("[MASK]") for words in shown)
    kept = sum(map(len, left))
    replaced = sum(map(len, shown)) - masked - kept
    n = 200_000
    for count, share in ((masked, 0.1), (replaced, 0.02), (kept, 0.8)):
        assert abs(count - n * share) < 5 * math.sqrt(n * share * (1 - share)), (count, share)
    # word by word, not a fixed number of each caption
    assert abs(np.var([len(words) for words in left]) / (50 * 0.2 * 0.8) - 1) < 0.12
    assert set(augment.vocabulary) == {word for word in [*WORDS, "cafe"] if len(word) > 1}


def test_no_caption_becomes_empty(tokenizer):
    augment = WordAugment(tokenizer, 1.0)
    results = [augment("cat dog", seed) for seed in range(500)]
    assert all(results) and augment("", 1) == ""
    assert {"cat", "dog"} <= set(results)  # where both were deleted, either stays
    assert {augment("zebra", seed) for seed in range(100)} >= {"[MASK]", "zebra"}


def test_the_same_seed_gives_the_same_caption_and_the_process_generator_stays(tokenizer):
    augment = WordAugment(tokenizer, 0.5)
    state = random.getstate()
    results = [augment(CAPTION, seed) for seed in range(20)]
    assert random.getstate() == state
    assert [augment(CAPTION, seed) for seed in range(20)] == results
    assert len(set(results)) > 15


def test_the_mask_becomes_the_mask_token(tokenizer):
    augment = WordAugment(tokenizer, 0.6)
    texts = [augment("Cat &amp; Dog of the Moon", seed) for seed in range(50)]
    masks = (tokenizer(texts) == tokenizer.tokenizer.mask_token_id).sum(dim=1).tolist()
    assert masks == [text.split().count("[MASK]") for text in texts] and sum(masks) > 20


def test_byte_level_vocabularies_work_too(tmp_path):
    corpus = [CAPTION, "two dogs in the snow", "snowing again", "the moon above a tower"] * 20
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        corpus, vocab_size=500, min_frequency=1, special_tokens=["<s>", "<pad>", "</s>", "<unk>"]
    )
    bpe.save_model(str(tmp_path))
    RobertaTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    augment = WordAugment(HFTokenizer(str(tmp_path), context_length=32), 1.0)
    assert augment.mask == "<mask>"
    assert {"snow", "moon", "tower", "dogs"} <= set(augment.vocabulary)
    assert not {"owing", "ow", "nowing"} & set(augment.vocabulary)
