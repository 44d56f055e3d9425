"""Random text towers of the shape of known ones, for plans where the hub's files are not on this machine.

Time, memory and FLOPs depend on a tower's shape and not on its weights or its words.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from pathlib import Path


def _pieces(count: int) -> list[str]:
    """Letters, letters inside of words, and combinations of letters: a vocabulary that spells any text."""
    letters = string.ascii_lowercase
    combinations = ("".join(parts) for length in (2, 3, 4) for parts in itertools.product(letters, repeat=length))
    every = itertools.chain(letters, (f"##{letter}" for letter in letters), combinations)
    return list(itertools.islice(every, count))


def _write_bert_base(folder: Path) -> None:
    from transformers import BertConfig

    config = BertConfig()
    config.save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *_pieces(config.vocab_size - len(special))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def _write_modernbert_base(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import ModernBertConfig, PreTrainedTokenizerFast

    config = ModernBertConfig()
    config.save_pretrained(folder)
    first, last, padding = config.cls_token_id, config.sep_token_id, config.pad_token_id
    special = {"[UNK]": first - 1, "[CLS]": first, "[SEP]": last, "[PAD]": padding, "[MASK]": padding + 1}
    words = {piece: number for number, piece in enumerate(_pieces(first - 1))}
    inner = Tokenizer(WordPiece({**words, **special}, unk_token="[UNK]"))
    inner.pre_tokenizer = BertPreTokenizer()
    ends = [("[CLS]", first), ("[SEP]", last)]
    inner.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)


#: The hub's name of a text tower -> the function that writes a folder of its shape.
STAND_INS: dict[str, Callable[[Path], None]] = {
    "bert-base-uncased": _write_bert_base,
    "google-bert/bert-base-uncased": _write_bert_base,
    "answerdotai/ModernBERT-base": _write_modernbert_base,
}


def write_stand_in(tower: str, folder: Path) -> Path:
    """Write config and tokenizer of a tower of STAND_INS into a new folder, and return the folder."""
    folder.mkdir(parents=True)
    STAND_INS[tower](folder)
    return folder
