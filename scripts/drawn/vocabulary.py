"""A small BERT to train from scratch: a WordPiece vocabulary from given captions, and the model's `config.json`.

The folder is used like a downloaded `bert-base-uncased`: `AutoTokenizer.from_pretrained` and `AutoConfig.from_pretrained` read
it offline, and so do open_clip's `HFTokenizer` and `HFTextEncoder`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import write_atomically

#: In the order of their ids. [PAD] is 0, as open_clip and BERT expect.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_PREFIX = "##"  # of a piece that continues a word


def write_bert(
    folder: str | Path,
    captions: Iterable[str],
    *,
    vocab_size: int = 2048,
    width: int = 96,
    layers: int = 2,
    heads: int = 4,
    max_positions: int = 64,
) -> int:
    """Train a vocabulary on captions, and write it with the configuration of a BERT of the given size.

    The same captions in the same order give the same files. Captions are lower-cased and lose their accents.

    Args:
        folder: the folder of the files.
        captions: captions of the training set; held-out captions must not influence the vocabulary.
        vocab_size: entries of the vocabulary, at most, special tokens included.
        width: hidden width; the feed-forward layers are four times as wide.
        layers, heads: layers of the Transformer, heads of each.
        max_positions: the longest context, in tokens.

    Returns:
        The size of the vocabulary.

    Raises:
        UserError: a vocabulary too small for the alphabet.
    """
    vocabulary = _train_vocabulary(list(captions), vocab_size)
    config = {
        "model_type": "bert",
        "vocab_size": len(vocabulary),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": max_positions,
    }
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": max_positions}
    folder = Path(folder)
    write_atomically(folder / "vocab.txt", "".join(f"{piece}\n" for piece in vocabulary))
    write_atomically(folder / "tokenizer_config.json", json.dumps(tokenizer, indent=2) + "\n")
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return len(vocabulary)


def _train_vocabulary(captions: list[str], vocab_size: int) -> list[str]:
    """Pieces in the order of their ids: special tokens, then the alphabet, then merges by frequency."""
    tokenizer = Tokenizer(WordPiece({}, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder(prefix=_PREFIX)
    normalized = [tokenizer.normalizer.normalize_str(caption) for caption in captions]
    letters = {
        letter
        for caption in normalized
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(caption)
        for letter in word
    }
    # Every letter is a piece that begins a word and one that continues it, so that an unseen word of seen letters is never
    # [UNK].
    alphabet = [
        *sorted(letters),
        *(_PREFIX + letter for letter in sorted(letters) if letter.isalnum()),
    ]
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise UserError(
            f"A vocabulary of {vocab_size} is too small for these captions: take at least {smallest}."
        )
    fixed = [*SPECIAL_TOKENS, *alphabet]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        # The alphabet is given too: the trainer would number letters in the order of a hash table, which differs from process
        # to process, and it breaks ties between merges by these numbers.
        special_tokens=fixed,
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    ids = tokenizer.get_vocab(with_added_tokens=False)
    learned = sorted(ids.keys() - set(fixed), key=ids.__getitem__)
    return [*fixed, *learned]
