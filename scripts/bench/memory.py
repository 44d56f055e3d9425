"""Peak memory of a training step at paper size, without a GPU: tensors have shapes only, and nothing is computed.

    python -m scripts.bench.memory [--micro-batch 128] [--steps 1,16] [--retain 1,2] [--lora 16] [--out FILE.json]

ViT-B/16 at 224 px with token drop 0.25, BERT-base at 25 tokens, bf16 autocast, decoupled gradient accumulation with the loss
in chunks of 1,024 rows. A line has the millions of trained numbers, the GiB of AdamW's averages, and the GiB of live tensors at
the peak of a step with their ratio to K = 1. Parameters and gradients are included in the peak; AdamW's averages, waiting
micro-batches and an allocator's overhead are not. With --lora, adapters of this rank are trained instead of the towers. About a
minute.

"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.lora import add_lora
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import (
    build,
    register,
    simulated_peak_bytes,
    write,
)


def counted(
    name: str, rank: int | None, micro_batch: int, steps: int, retain: int
) -> tuple[int, float]:
    """Trained numbers, and GiB at the peak of a step."""
    model = build(name, 0.25, torch.device("cpu"), torch.float32)
    if rank is not None:
        add_lora(model, rank, "both")
    dga = DecoupledGradientAccumulation(
        model,
        ContrastiveLoss(chunk_size=1024),
        autocast=partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        retain=retain,
        check="never",
    )

    def step() -> None:
        pair = torch.randn(micro_batch, 3, 224, 224), torch.randint(1, 30_000, (micro_batch, 25))
        dga.backward([pair] * steps)

    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trained, simulated_peak_bytes(model, step) / 2**30


def peaks(
    name: str, rank: int | None, micro_batch: int, steps: Sequence[int], retain: Sequence[int]
) -> list[list[str]]:
    """A line for each K and R: trained numbers, AdamW's averages and the peak."""
    _, single = counted(name, rank, micro_batch, 1, 1)
    rows = []
    for count, graphs in itertools.product(steps, retain):
        if graphs <= count:
            trained, peak = counted(name, rank, micro_batch, count, graphs)
            cells = [
                f"{trained / 1e6:.2f} M",
                f"{8 * trained / 2**30:.3f}",
                f"{peak:.2f}",
                f"{peak / single:.3f}",
            ]
            rows.append([str(count), str(graphs), *cells])
    return rows


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--steps", type=numbers, default=[1, 16], help="K,K")
    parser.add_argument("--retain", type=numbers, default=[1, 2], help="R,R")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters on both towers")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        name = register("ViT-B-16+BERT-base", None, 0.1, Path(scratch))
        header = [
            "K",
            "graphs retained",
            "trained",
            "AdamW's averages, GiB",
            "peak, GiB",
            "of K = 1",
        ]
        rows = peaks(name, args.lora, args.micro_batch, args.steps, args.retain)
    write(rows, markdown_table(header, rows), args.out)


if __name__ == "__main__":
    main()
