"""The cost of a step of `zerovl align`, beside its matrix products alone and a plain PyTorch loop.

    python -m scripts.bench.align [--batches 512,2048,4096] [--widths 768,768,512] [--out FILE.json]

Rows are random; nothing is learned. The three ways take turns in one process, round by round; a cell is the median over rounds.

    products    the matrix products that no way can leave out: heads forward, the gradients of their weights, the logits once
                and both gradients of the features (for `mlp` also the gradient of the hidden layer)
    ours        `align.train.take_step` on rows gathered from memory in fp16, as `zerovl align` takes it
    plain       the same heads and rows with autograd's whole logit matrix and cross-entropies

`peak MiB` is the live memory of a step beyond rows, weights and optimizer state (CPU: counted; CUDA: the allocator's).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from open_clip_zerovl.align.heads import Heads
from open_clip_zerovl.align.request import Recipe
from open_clip_zerovl.align.train import chunk_rows, make_loss, make_optimizer, take_step
from open_clip_zerovl.core.memory import PeakBytes, keep_freed_memory
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import write

SEED = 1
SECONDS = 0.5  # that a way takes at least in a round


def matrix_products(heads: Heads, rows: Sequence[Tensor]) -> None:
    """The products of a step; of the layers between them nothing."""
    layers = [
        [layer.weight for layer in head.modules() if isinstance(layer, nn.Linear)]
        for head in (heads.image, heads.text)
    ]
    with torch.no_grad():
        inputs = [[x] for x in rows]
        for seen, weights in zip(inputs, layers, strict=True):
            for weight in weights:
                seen.append(seen[-1] @ weight.T)
        image, text = inputs[0][-1], inputs[1][-1]
        logits = image @ text.T
        for seen, weights, gradient in zip(
            inputs, layers, (logits @ text, logits.T @ image), strict=True
        ):
            for number in reversed(range(len(weights))):
                gradient.T @ seen[number]
                if number:
                    gradient = gradient @ weights[number]


def plain_step(heads: Heads, optimizer: torch.optim.Optimizer, rows: Sequence[Tensor]) -> None:
    """A step as a person writes it."""
    optimizer.zero_grad(set_to_none=True)
    image, text = (
        F.normalize(head(x), dim=1) for head, x in zip((heads.image, heads.text), rows, strict=True)
    )
    logits = heads.logit_scale.exp() * image @ text.T
    target = torch.arange(len(image), device=image.device)
    ((F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2).backward()
    optimizer.step()


def measure(
    batch: int, widths: Sequence[int], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each way at a batch size."""
    torch.manual_seed(SEED)
    recipe = Recipe(
        embed_dim=widths[2],
        batch_size=batch,
        epochs=1,
        lr=1e-4,
        wd=0.0,
        patience=0,
        seed=SEED,
    )
    store = [torch.randn(4 * batch, width, device=device).half() for width in widths[:2]]
    heads = Heads((widths[0], widths[1]), widths[2], seed=SEED).to(device)
    optimizer, loss = (
        make_optimizer(heads, recipe),
        make_loss(recipe, chunk_rows(recipe.batch_size, device)),
    )
    index = torch.randperm(4 * batch, device=device)[:batch]
    ready = [held[index].float() for held in store]

    def gathered() -> list[Tensor]:
        return [held.index_select(0, index).float().mul_(1.0) for held in store]

    ways: dict[str, Callable[[], Any]] = {
        "products": lambda: matrix_products(heads, ready),
        "ours": lambda: take_step(heads, optimizer, loss, gathered(), {}),
        "plain": lambda: plain_step(heads, optimizer, gathered()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    steps = max(1, round(SECONDS / _seconds(ways["products"], 2, device)))
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(_seconds(way, steps, device))
    base = times["products"]
    return [
        {
            "batch": batch,
            "way": name,
            "chunk": chunk_rows(batch, device) if name == "ours" else None,
            "pairs_per_second": batch / statistics.median(times[name]),
            "of_the_products": statistics.median(
                one / other for one, other in zip(times[name], base, strict=True)
            ),
            "range": [
                f(one / other for one, other in zip(times[name], base, strict=True))
                for f in (min, max)
            ],
            "peak_mib": _peak(way, device) / 2**20,
        }
        for name, way in ways.items()
    ]


def _seconds(way: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds of a step: CPU time of this process on a CPU, which other processes disturb less; wall time on a GPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = clock()
    for _ in range(steps):
        way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) / steps


def _peak(way: Callable[[], Any], device: torch.device) -> int:
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        way()
        return torch.cuda.max_memory_allocated() - before
    with PeakBytes() as seen:
        way()
    return seen.peak


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="512,2048,4096", metavar="N,N")
    parser.add_argument("--widths", default="768,768,512", metavar="IMAGE,TEXT,D")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    widths = [int(word) for word in args.widths.split(",")]
    rows = [
        row
        for batch in args.batches.split(",")
        for row in measure(int(batch), widths, args.rounds, device)
    ]
    cells = [
        [
            str(row["batch"]),
            row["way"],
            f"{row['pairs_per_second']:,.0f}",
            f"{row['of_the_products']:.2f}",
            "{:.2f} to {:.2f}".format(*row["range"]),
            f"{row['peak_mib']:.0f}",
        ]
        for row in rows
    ]
    header = ["batch", "way", "pairs/s", "of the products", "range", "peak MiB"]
    write(
        {"align": rows, "threads": torch.get_num_threads()}, markdown_table(header, cells), args.out
    )


if __name__ == "__main__":
    main()
