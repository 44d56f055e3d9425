"""Captions to tokens: words are augmented in training (sections 2.2 and A.9), tokens are those of open_clip's tokenizers.

`WordAugment` processes a fifth of the *words* (split at white space, not word pieces): they are masked (50 %), replaced by a
random word (10 %) or deleted (40 %). The draws come from a seed that is passed in, so that a resumed run repeats them.

`fast_tokenizer` takes a third of the time. open_clip cleans each caption by ftfy, which repairs broken encodings, and Hugging
Face's tokenizer turns its results into Python lists and dicts before they become a tensor. Here captions of plain ASCII, which
ftfy leaves as they are, go round it, and tokens are taken from the tokenizer's compiled part.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from open_clip.tokenizer import HFTokenizer, get_clean_fn
from torch import Tensor

from open_clip_zerovl.core.errors import UserError

# Captions that both tokenizers must treat alike: cut, empty, with entities, accents and control characters, upper case.
_PROBES = (
    "a dog",
    "A  Photo of TWO dogs, 3 cats & a bird's nest_",
    "",
    " ",
    "caf\u00e9 &amp; th\u00e9",
    "na\u00efve \ufb01ne \u201cquoted\u201d",
    "sch\u00c3\u00b6n",
    "tab\tand\nline",
    "\u72d7 \U0001f415",
    "[MASK] of [SEP] <mask> </s>",
    "&lt;b&gt; &eacute",
    "word " * 200,
)


def fast_tokenizer(tokenizer: Any) -> Callable[[list[str]], Tensor]:
    """Return a tokenizer with the tokens of `tokenizer`, faster if it is an open_clip `HFTokenizer` in its default mode.

    The two are compared on a few captions. Where they differ, or transformers has no such part, `tokenizer` is returned.
    """
    if type(tokenizer) is not HFTokenizer or tokenizer.tokenizer_mode:
        return tokenizer
    fast = _CompiledTokenizer(tokenizer)
    try:
        same = torch.equal(fast(list(_PROBES)), tokenizer(list(_PROBES)))
    except (
        AttributeError,
        TypeError,
        ValueError,
        NotImplementedError,
    ):  # another release of transformers
        same = False
    if not same:
        logging.info(f"Captions are tokenized by {type(tokenizer.tokenizer).__name__} itself.")
    return fast if same else tokenizer


class _CompiledTokenizer:
    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.tokenizer = tokenizer
        self._short = _SHORT.get(tokenizer.clean_fn)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        inner, length = self.tokenizer.tokenizer, self.tokenizer.context_length
        from transformers.tokenization_utils_base import PaddingStrategy, TruncationStrategy

        inner.set_truncation_and_padding(  # does nothing if they are set already
            padding_strategy=PaddingStrategy.MAX_LENGTH,
            truncation_strategy=TruncationStrategy.LONGEST_FIRST,
            max_length=length,
            stride=0,
            pad_to_multiple_of=None,
            padding_side=None,
        )
        clean, short = self.tokenizer.clean_fn, self._short
        cleaned = [
            short(text) if short is not None and is_plain(text) else clean(text) for text in texts
        ]
        encoded = inner.backend_tokenizer.encode_batch_fast(cleaned, add_special_tokens=True)
        tokens = torch.from_numpy(np.array([encoding.ids for encoding in encoded], dtype=np.int64))
        if self.tokenizer.strip_sep_token:
            tokens = torch.where(tokens == inner.sep_token_id, torch.zeros_like(tokens), tokens)
        return tokens


def is_plain(text: str) -> bool:
    """Return whether ftfy and HTML's entities leave a text alone: printable ASCII without &."""
    return text.isascii() and text.isprintable() and "&" not in text


def _one_space(text: str) -> str:
    return " ".join(text.split())


def _lower(text: str) -> str:
    return " ".join(text.split()).lower()


# open_clip's ways of cleaning -> their effect on a plain text
_SHORT = {get_clean_fn("whitespace"): _one_space, get_clean_fn("lower"): _lower}


# ---------------------------------------------------------------------------------------------------------------------
# Augmentation
# ---------------------------------------------------------------------------------------------------------------------

# Shares of the processed words (section 2.2); the other 0.4 are deleted.
MASK_SHARE = 0.5
REPLACE_SHARE = 0.1

# Marks that begin a word in the vocabularies of byte-level BPE (RoBERTa) and of SentencePiece (XLM-R).
_WORD_MARKS = "\u0120\u2581"


class WordAugment:
    """Masks, replaces or deletes words of a caption, before it is tokenized.

    Each word is processed with probability `share`, independently of the other words. A caption never becomes empty: where all
    its words would be deleted, one of them, drawn at random, stays as it was. Other words keep their spelling; runs of white
    space become one space, which is how open_clip's tokenizers read them.

    The object holds strings only, so that it can be pickled for loader workers.

    Args:
        tokenizer: open_clip's tokenizer of the model, around a Hugging Face tokenizer with a mask token.
        share: share of words that are processed, 0..1; the paper's is 0.2.

    Raises:
        UserError: a share out of range; a tokenizer without a mask token, one whose cleaning of captions changes the mask
            token's text, or one whose vocabulary has no whole words as replacements.
    """

    def __init__(self, tokenizer: Any, share: float = 0.2) -> None:
        self.share = float(share)
        self.mask, self.vocabulary = _mask_and_words(tokenizer)

    def __call__(self, caption: str, seed: int | random.Random) -> str:
        """Augment a caption, by caption and seed alone.

        Args:
            seed: the seed of this sample in this epoch (`randomness.stream_seed`), or a generator to draw from.
        """
        rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        draw, share = rng.random, self.share
        masked, replaced = share * MASK_SHARE, share * (MASK_SHARE + REPLACE_SHARE)
        words = caption.split()
        augmented = []
        for word in words:
            u = draw()  # one number decides: [masked | replaced | deleted | left alone]
            if u >= share:
                augmented.append(word)
            elif u < masked:
                augmented.append(self.mask)
            elif u < replaced:
                augmented.append(self.vocabulary[int(draw() * len(self.vocabulary))])
        if not augmented and words:
            augmented.append(words[int(draw() * len(words))])
        return " ".join(augmented)


def _mask_and_words(tokenizer: Any) -> tuple[str, tuple[str, ...]]:
    """Return the mask token's text, and the words that are one token each, in the order of their ids."""
    # open_clip's HFTokenizer wraps the Hugging Face one
    inner = getattr(tokenizer, "tokenizer", None)
    mask = getattr(inner, "mask_token", None)
    if inner is None or mask is None:
        raise UserError(
            f"word augmentation needs a mask token, and this model's tokenizer ({type(inner or tokenizer).__name__}) has "
            "none; use a model with a BERT text tower, or leave the text augmentation out."
        )
    in_order = sorted(inner.get_vocab().items(), key=lambda entry: entry[1])
    special = set(inner.all_special_tokens)
    words = [token.lstrip(_WORD_MARKS) for token, _ in in_order if token not in special]
    words = list(dict.fromkeys(word for word in words if len(word) > 1 and word.isalpha()))
    # A vocabulary also has pieces that only continue words; after a space these become several tokens.
    pieces = (
        inner([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
        if words
        else []
    )
    whole = tuple(
        word
        for word, ids in zip(words, pieces, strict=True)
        if len(ids) == 1 and ids[0] not in inner.all_special_ids
    )
    if not whole:
        raise UserError(
            f"the vocabulary of {type(inner).__name__} has no whole words as replacements."
        )
    tokens = tokenizer([f"{whole[0]} {mask} {whole[-1]}"])[0].tolist()
    if tokens.count(inner.mask_token_id) != 1:
        raise UserError(
            f"this model's tokenizer does not read the text {mask!r} as its mask token (its cleaning of captions changes "
            "it, as clean='lower' and 'canonicalize' do); leave the text augmentation out."
        )
    return mask, whole
