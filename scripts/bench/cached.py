"""One step of sentence-transformers on a batch of K mini-batches: its plain loss, its cached loss (GradCache), DecoupledLoss.

    python scripts/bench/cached.py [--mini-batch 16] [--steps 8] [--rounds 7] [--columns 2]

A BERT with random weights and dropout 0.1, fp32, on the CPU. Each round takes one step of every way, in turn. Columns:

    time      this process's CPU time, as a ratio to the plain loss in the same round: median (smallest to largest)
    memory    peak of live tensors, as a ratio to the plain loss on one mini-batch
    error     of the gradient against one graph under the same masks: the worst parameter, in fp64 (each way draws masks in an
              order of its own, so that each has its own reference)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from accumulation import keep_heap
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertTokenizer

from open_clip_zerovl.core.memory import PeakBytes
from open_clip_zerovl.dga.sentence_transformers import DecoupledLoss

WORDS = [f"w{i}" for i in range(500)]
SEED = 1
Columns = list[dict[str, Tensor]]


def make_model(folder: Path, dtype: torch.dtype) -> SentenceTransformer:
    """BERT of 4 layers of width 256, with mean pooling."""
    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    AutoModel.from_config(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    model = SentenceTransformer(str(folder), device="cpu").to(dtype).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)  # mean pooling leaves it without gradient
    return model


def make_batch(model: SentenceTransformer, rows: int, columns: int) -> Columns:
    draw = torch.Generator().manual_seed(SEED)
    picked = torch.randint(len(WORDS), (columns, rows, 30), generator=draw).tolist()
    return [model.preprocess([" ".join(WORDS[i] for i in row) for row in column]) for column in picked]


def ways(model: nn.Module, mini: int, steps: int) -> dict[str, nn.Module]:
    plain = MultipleNegativesRankingLoss(model)
    return {
        "plain loss, one graph": plain,
        "CachedMultipleNegativesRankingLoss": CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini),
        "DecoupledLoss, one graph kept": DecoupledLoss(plain, mini),
        "DecoupledLoss, half of the graphs kept": DecoupledLoss(plain, mini, retain=steps // 2),
        "DecoupledLoss, all graphs kept": DecoupledLoss(plain, mini, retain=steps),
    }


def step(model: nn.Module, loss: nn.Module, batch: Columns) -> None:
    model.zero_grad(set_to_none=True)
    loss([dict(column) for column in batch], None).backward()


def peak_bytes(model: nn.Module, loss: nn.Module, batch: Columns) -> int:
    model.zero_grad(set_to_none=True)
    with PeakBytes() as live:
        step(model, loss, batch)
    return live.peak + sum(parameter.nbytes for parameter in model.parameters())


def worst_error(model: nn.Module, of: nn.Module, batch: Columns, mini: int) -> float:
    """The gradient of `of` against one graph whose masks are drawn by mini-batches, or by columns for the cached loss."""
    plain = MultipleNegativesRankingLoss(model)
    rows = len(batch[0]["input_ids"])
    parts = [slice(start, start + mini) for start in range(0, rows, mini)]

    def cut(column: dict, part: slice) -> Tensor:
        held = {k: v[part] if isinstance(v, Tensor) else v for k, v in column.items()}
        return model(held)["sentence_embedding"]

    def embeddings() -> list[Tensor]:
        if isinstance(of, DecoupledLoss):
            by_part = [[cut(column, part) for column in batch] for part in parts]
            return [torch.cat(column) for column in zip(*by_part, strict=True)]
        if isinstance(of, CachedMultipleNegativesRankingLoss):
            return [torch.cat([cut(column, part) for part in parts]) for column in batch]
        return [cut(column, slice(None)) for column in batch]

    found = []
    for run in (
        lambda: plain.compute_loss_from_embeddings(embeddings(), None).backward(),
        lambda: step(model, of, batch),
    ):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        run()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    wanted, seen = found
    total = sum(g.square().sum() for g in wanted).sqrt()
    return max(
        ((s - w).norm() / torch.maximum(w.norm(), 1e-6 * total)).item() for s, w in zip(seen, wanted, strict=True)
    )


def cpu_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8, metavar="K")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--columns", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_heap()
    with tempfile.TemporaryDirectory() as scratch:
        exact = make_model(Path(scratch), torch.float64)
        small = make_batch(exact, 4 * args.steps, args.columns)
        errors = {name: worst_error(exact, way, small, 4) for name, way in ways(exact, 4, args.steps).items()}
        model = make_model(Path(scratch), torch.float32)
    batch = make_batch(model, args.mini_batch * args.steps, args.columns)
    contestants = ways(model, args.mini_batch, args.steps)
    plain = next(iter(contestants.values()))
    one = peak_bytes(model, plain, make_batch(model, args.mini_batch, args.columns))
    memory = {name: peak_bytes(model, way, batch) / one for name, way in contestants.items()}  # also the warm-up
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(args.rounds):
        taken = {name: cpu_seconds(partial(step, model, way, batch)) for name, way in contestants.items()}
        for name, seconds in taken.items():
            ratios[name].append(seconds / next(iter(taken.values())))
    said = f"K = {args.steps} mini-batches of {args.mini_batch}, {args.columns} columns, {args.rounds} rounds"
    print(f"{said}; torch {torch.__version__}\n")
    print("| way | time | memory | error |\n|---|--:|--:|--:|")
    for name, of in ratios.items():
        middle, least, most = statistics.median(of), min(of), max(of)
        print(f"| {name} | {middle:.2f} ({least:.2f} to {most:.2f}) | {memory[name]:.2f} | {errors[name]:.0e} |")


if __name__ == "__main__":
    main()
