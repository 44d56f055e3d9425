"""`DecoupledLoss` beside sentence-transformers' own Cached losses: exactness, time and memory of a step.

    python -m scripts.bench.sentence_losses [--samples 128] [--mini 16] [--rounds 7] [--out FILE.csv]

For each loss one graph over the whole batch is the reference. The other ways compute the same gradient in mini-batches: the
library's Cached loss, and DecoupledLoss with one graph kept and with all that fit. A BERT of 2 layers and width 128 with random
weights, without dropout, in fp32. Time is the ratio to the one graph in the same round, the median of the rounds with its
range; memory the peak of live tensors and parameters, as such a ratio; error |g - g_ref| / |g_ref| over all weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, losses
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from open_clip_zerovl.core.memory import PeakBytes, keep_freed_memory
from open_clip_zerovl.dga.sentence_transformers import DecoupledLoss
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import BERT_SIZES

WORDS = 24  # of a sentence
HEADER = ("loss", "way", "time", "least", "most", "memory", "error")


def make_model(seed: int) -> SentenceTransformer:
    """A sentence-transformers model of random weights, read from a folder as the library wants it."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        BertModel(BertConfig(**BERT_SIZES["small"], **rates)).save_pretrained(folder)
        marks = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        names = [*marks.values(), *(f"w{number}" for number in range(500))]
        words = Tokenizer(WordLevel({name: n for n, name in enumerate(names)}, "[UNK]"))
        words.pre_tokenizer = Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder)
        model = SentenceTransformer(folder, device="cpu").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)  # mean pooling leaves BERT's own unused
    return model


def make_columns(model: SentenceTransformer, samples: int) -> list[dict[str, Tensor]]:
    """Tokens of anchors and positives."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for _ in range(2):
        numbers = torch.randint(500, (samples, WORDS), generator=generator).tolist()
        tokenize = getattr(model, "preprocess", None) or model.tokenize
        columns.append(tokenize([" ".join(f"w{n}" for n in row) for row in numbers]))
    return columns


def ways_of(model: Any, guide: Any, mini: int) -> dict[str, dict[str, nn.Module]]:
    """Loss -> way -> module."""
    plain: dict[str, Callable[[], nn.Module]] = {
        "MNRL": lambda: losses.MultipleNegativesRankingLoss(model),
        "symmetric MNRL": lambda: losses.MultipleNegativesSymmetricRankingLoss(model),
        "GIST": lambda: losses.GISTEmbedLoss(model, guide),
    }
    size = {"mini_batch_size": mini}
    cached = {
        "MNRL": losses.CachedMultipleNegativesRankingLoss(model, **size),
        "symmetric MNRL": losses.CachedMultipleNegativesSymmetricRankingLoss(model, **size),
        "GIST": losses.CachedGISTEmbedLoss(model, guide, **size),
    }
    return {
        name: {
            "one graph": make(),
            "the library's Cached loss": cached[name],
            "DecoupledLoss, 1 graph kept": DecoupledLoss(make(), mini),
            "DecoupledLoss, auto": DecoupledLoss(make(), mini, retain="auto"),
        }
        for name, make in plain.items()
    }


def measure(model: nn.Module, loss: nn.Module, columns: Any) -> tuple[float, Tensor]:
    """CPU seconds of a step, and the gradient of all weights as one vector."""
    model.zero_grad(set_to_none=True)
    begin = time.process_time()
    loss([dict(column) for column in columns], None).backward()
    seconds = time.process_time() - begin
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return seconds, torch.cat(grads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--mini", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model, guide = make_model(0), make_model(1)
    columns = make_columns(model, given.samples)
    rows = []
    for name, ways in ways_of(model, guide, given.mini).items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        errors, peaks = {}, {}
        reference = measure(model, ways["one graph"], columns)[1]
        for way, loss in ways.items():
            found = measure(model, loss, columns)[1]
            errors[way] = ((found - reference).norm() / reference.norm()).item()
            with PeakBytes() as live:
                measure(model, loss, columns)
            peaks[way] = live.peak + sum(p.nbytes for p in model.parameters())
        for _ in range(given.rounds):
            seconds = {way: measure(model, loss, columns)[0] for way, loss in ways.items()}
            for way in ways:
                times[way].append(seconds[way] / seconds["one graph"])
        for way in ways:
            memory = peaks[way] / peaks["one graph"]
            spread = (statistics.median(times[way]), min(times[way]), max(times[way]))
            numbers = [f"{value:.2f}" for value in (*spread, memory)]
            rows.append([name, way, *numbers, f"{errors[way]:.0e}"])
    print(markdown_table(HEADER, rows))
    if given.out is not None:
        lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
        given.out.write_text("\n".join([",".join(HEADER), *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
