"""Small things that several test modules share: dual encoders of some thousand parameters, runs, retrieval sets."""

from __future__ import annotations

import io
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import (
    BertConfig,
    BertTokenizer,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaTokenizer,
    XLMRobertaTokenizerFast,
)

from support.tars import write_tar

WORDS = [
    "red",
    "green",
    "blue",
    "small",
    "big",
    "round",
    "cat",
    "dog",
    "house",
    "tree",
    "sun",
    "moon",
    "face",
    "of",
]
WORDS += ["a", "the", "with", "and"]
# With these words a tokenizer keeps apart the captions of `tars.write_source`, which are numbered.
NUMBERED = [*WORDS, "sample", *"0123456789", *(f"##{digit}" for digit in "0123456789")]
IMAGE_SIZE_PX = 32


def _sizes(width: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
    }


def write_bert(folder: Path, *, words: list[str] = WORDS, width: int = 32) -> Path:
    """Write a folder as `from_pretrained` reads it: BERT's config and a WordPiece tokenizer, no weights."""
    folder.mkdir(parents=True)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *"abcdefghijklmnopqrstuvwxyz"]
    vocab += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocab = list(dict.fromkeys(vocab))
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    BertConfig(vocab_size=len(vocab), **_sizes(width), max_position_embeddings=32).save_pretrained(
        folder
    )
    return folder


def write_xlm_roberta(folder: Path, *, words: list[str] = WORDS, width: int = 32) -> Path:
    """Write a folder as `from_pretrained` reads it: XLM-RoBERTa's config and a SentencePiece tokenizer, no weights."""
    folder.mkdir(parents=True)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [f"\u2581{word}" for word in words] + list(
        "\u2581abcdefghijklmnopqrstuvwxyzäöü猫犬赤い"
    )
    vocab = [(word, 0.0) for word in special] + [
        (piece, -1.0 - 0.01 * i) for i, piece in enumerate(pieces)
    ]
    vocab.append(("<mask>", 0.0))
    if version("transformers").startswith("4."):  # its own class asks for the package sentencepiece
        pieces = Tokenizer(Unigram(vocab, unk_id=3))
        pieces.pre_tokenizer, pieces.decoder = Metaspace(), MetaspaceDecoder()
        pieces.post_processor = TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        XLMRobertaTokenizerFast(tokenizer_object=pieces).save_pretrained(folder)
    else:
        XLMRobertaTokenizer(vocab=vocab).save_pretrained(folder)
    places = {
        "max_position_embeddings": 80,
        "type_vocab_size": 1,
    }  # 78 places after the offset of 2
    XLMRobertaConfig(vocab_size=len(vocab), **_sizes(width), **places).save_pretrained(folder)
    return folder


def write_modernbert(
    folder: Path, *, words: list[str] = WORDS, width: int = 32, dropout: float = 0.1
) -> Path:
    """Write a folder as `from_pretrained` reads it: ModernBERT's config, layers of both kinds, a byte-level BPE."""
    modern = pytest.importorskip(
        "transformers.models.modernbert", reason="transformers before 4.48 has no ModernBERT"
    )
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer, bpe.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=2000,
        special_tokens=special,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([f" {word} {word}" for word in words], trainer)
    first, last = (("[CLS]", bpe.token_to_id("[CLS]")), ("[SEP]", bpe.token_to_id("[SEP]")))
    bpe.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[first, last])
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=8192, **names)
    tokenizer.save_pretrained(folder)
    ids = {
        name: getattr(tokenizer, f"{name}_id") for name in ("pad_token", "cls_token", "sep_token")
    }
    modern.ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=48, num_attention_heads=2,
        num_hidden_layers=4,  # all tokens, window, window, all tokens
        max_position_embeddings=128, local_attention=8,  # 4 tokens to either side
        initializer_range=0.2, attention_dropout=dropout, embedding_dropout=dropout, mlp_dropout=dropout,
        bos_token_id=ids["cls_token"], eos_token_id=ids["sep_token"],
        **{f"{name}_id": value for name, value in ids.items()},
    ).save_pretrained(folder)  # fmt: skip
    return folder


NATIVE_VISION = {
    "image_size": IMAGE_SIZE_PX,
    "layers": 2,
    "width": 32,
    "head_width": 16,
    "patch_size": 8,
}
TIMM_VISION = {
    "image_size": 160,
    "timm_model_name": "test_vit.r160_in1k",
    "timm_model_pretrained": False,
}
TIMM_VISION |= {"timm_pool": "token", "timm_proj": "linear"}
CLIP_TEXT = {"context_length": 16, "width": 32, "heads": 2, "layers": 2}


def bert_text(folder: Path | str) -> dict:
    return {
        "hf_model_name": str(folder),
        "hf_tokenizer_name": str(folder),
        "hf_model_pretrained": False,
        "hf_proj_type": "linear",
        "hf_pooler_type": "cls_last_hidden_state_pooler",
        "context_length": 12,
    }


def register(folder: Path, name: str, vision_cfg: dict, text_cfg: dict, **extra: object) -> str:
    """Writes a model config and registers it with open_clip."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"embed_dim": 24, "vision_cfg": vision_cfg, "text_cfg": text_cfg, **extra}
    (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    open_clip.add_model_config(folder / f"{name}.json")
    return name


def random_model(name: str, *, seed: int = 0, **forced: object) -> torch.nn.Module:
    """Weights far from their initial ones, so that a tensor left behind shows in the embeddings."""
    torch.manual_seed(seed)
    model = open_clip.create_model(name, pretrained_text=False, **forced)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def write_run(
    folder: Path, weights: torch.nn.Module, params: dict[str, object], *, prefix: str = ""
) -> Path:
    """Write a run's folder as open_clip's main does: params.txt and checkpoints/epoch_1.pt with an optimizer's state."""
    (folder / "checkpoints").mkdir(parents=True)
    lines = "".join(f"{key}: {value}\n" for key, value in sorted(params.items()))
    (folder / "params.txt").write_text(lines, encoding="utf-8")
    optimizer = torch.optim.AdamW(weights.parameters()).state_dict()
    state = {prefix + key: value for key, value in weights.state_dict().items()}
    checkpoint = {"epoch": 1, "name": folder.name, "state_dict": state, "optimizer": optimizer}
    torch.save(checkpoint, folder / "checkpoints" / "epoch_1.pt")
    return folder / "checkpoints" / "epoch_1.pt"


def picture(rng: np.random.Generator, format: str = "PNG") -> bytes:
    """Draw a blurred random picture, not square."""
    pixels = rng.integers(0, 256, size=(5, 6, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((48, 40)).save(buffer, format=format)
    return buffer.getvalue()


def write_classes(root: Path, classes: str, each: int = 2) -> Path:
    """Folders CLASS/NUMBER.png of random pictures. Returns root."""
    rng = np.random.default_rng(len(classes))
    for label in classes.split():
        (root / label).mkdir(parents=True)
        for i in range(each):
            (root / label / f"{i}.png").write_bytes(picture(rng))
    return root


def captions(rng: np.random.Generator, count: int) -> list[str]:
    return [" ".join(rng.choice(WORDS, size=6)) for _ in range(count)]


def write_retrieval_set(
    folder: Path,
    counts: list[int],
    *,
    shards: int = 2,
    seed: int = 0,
    extensions: tuple[str, ...] = ("png", "jpg"),
) -> list[list[str]]:
    """Write CLIP_benchmark's layout with `counts[i]` captions for picture i, and return the captions."""
    rng = np.random.default_rng(seed)
    (folder / "test").mkdir(parents=True)
    (folder / "dataset_type.txt").write_text("retrieval\n")
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    texts = [captions(rng, count) for count in counts]
    for shard, members in enumerate(np.array_split(np.arange(len(counts)), shards)):
        files = []
        for i in members.tolist():
            extension = extensions[i % len(extensions)]
            image = picture(rng, "JPEG" if extension.startswith("jp") else extension.upper())
            files += [
                (f"{i:05d}.{extension}", image),
                (f"{i:05d}.txt", "\n".join(texts[i]).encode()),
            ]
        write_tar(folder / "test" / f"{shard}.tar", files)
    return texts
