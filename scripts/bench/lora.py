"""Memory and time of training with adapters (--lora) beside training whole towers.

    python -m scripts.bench.lora [--rank 16] [--micro-batch 128] [--steps 4] [--rounds 15] [--out FILE.json]

Trained numbers, AdamW's bytes and peak bytes of a step of K micro-batches are of of ViT-B/16 with BERT-base at 25 tokens and
bf16, counted without computing (see `scripts.bench.memory`). The CPU time is that of a step and AdamW's on the harness's small
model, as a ratio to the step of whole towers just before; median over rounds, with range.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss
from open_clip_zerovl.recipe.lora import add_lora
from open_clip_zerovl.recipe.optimizer import parameter_groups
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import Setup, build, keep_heap, make_batches, register, seconds, simulated_peak_bytes, write


def model_of(name: str, rank: int | None) -> torch.nn.Module:
    model = build(name, 0.25, torch.device("cpu"), torch.float32)
    if rank is not None:
        add_lora(model, rank, "both")
    return model


def counted(name: str, rank: int | None, micro_batch: int, steps: int) -> tuple[float, float, float]:
    """Millions of trained numbers; GiB of AdamW's moments; peak GiB of a step with weights, gradients and moments."""
    model = model_of(name, rank)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    dga = DecoupledGradientAccumulation(
        model, ContrastiveLoss(chunk_size=1024), autocast=autocast, retain=1, check="never"
    )

    def step() -> None:
        dga.backward([(torch.randn(micro_batch, 3, 224, 224), torch.randint(1, 30_000, (micro_batch, 25)))] * steps)

    moments = 8 * trained / 2**30
    return trained / 1e6, moments, simulated_peak_bytes(model, step) / 2**30 + moments


def ratios(name: str, rank: int, steps: int, rounds: int) -> list[float]:
    """CPU seconds of a step with adapters over those of the step of whole towers before it."""
    setups, ways = [], []
    for each in (None, rank):
        setup = Setup(model_of(name, each), torch.device("cpu"))
        optimizer = torch.optim.AdamW(parameter_groups(setup.inner, 0.1), lr=1e-5)
        dga = DecoupledGradientAccumulation(setup.inner, ContrastiveLoss(), retain=1, check="never")

        def way(batches, setup=setup, optimizer=optimizer, dga=dga) -> None:
            dga.backward(batches, prepare=setup.prepare)
            optimizer.step()

        setups.append(setup)
        ways.append(way)
    batches = make_batches(name, setups[0].inner, [16] * steps, seed=0)
    times = [
        [seconds(setup, way, batches, "cpu") for setup, way in zip(setups, ways, strict=True)]
        for _ in range(rounds + 1)
    ]
    return [adapted / whole for whole, adapted in times[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="K")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    keep_heap()
    with tempfile.TemporaryDirectory() as scratch:
        small = register("small", None, 0.1, Path(scratch))
        found = sorted(ratios(small, args.rank, args.steps, args.rounds))
        (Path(scratch) / "base").mkdir()
        large = register("ViT-B-16+BERT-base", None, 0.1, Path(scratch) / "base")
        times = ("1", f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})")
        rows = [
            [label, f"{trained:.2f} M", f"{moments:.3f}", f"{peak:.2f}", time]
            for label, rank, time in (("whole towers", None, times[0]), (f"--lora {args.rank}", args.rank, times[1]))
            for trained, moments, peak in (counted(large, rank, args.micro_batch, args.steps),)
        ]
    header = ["", "trained", "AdamW's moments, GiB", "peak of a step with them, GiB", "CPU time of a step"]
    write(rows, markdown_table(header, rows), args.out)


if __name__ == "__main__":
    main()
