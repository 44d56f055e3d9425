"""Word augmentation of captions (sections 2.2 and A.9).

A fifth of the *words* (split at white space, not word pieces) is masked (50 %), replaced by a random word (10 %) or deleted
(40 %). The draws come from a seed that is passed in, so that a resumed run repeats them.
"""

from __future__ import annotations

import random
from typing import Any

from open_clip_zerovl.core.errors import UserError

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
        """The augmented caption, a function of caption and seed alone.

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
    """The mask token's text, and the words that are one token each, in the order of their ids."""
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
