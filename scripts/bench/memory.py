"""Peak memory of a training step at paper size, without a GPU: tensors have shapes only, and nothing is computed.

    python scripts/bench/memory.py [--micro-batch 128] [--steps 1,16] [--retain 1,2]

ViT-B/16 at 224 px with token drop 0.25, BERT-base at 25 tokens, bf16 autocast, decoupled gradient accumulation with the loss
in chunks of 1,024 rows. A line has the GiB of live tensors at the peak of a step and their ratio to K = 1. Parameters and
gradients are included; AdamW's averages, waiting micro-batches and an allocator's overhead are not. About a minute.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial

import torch
from accumulation import simulated_peak_bytes
from methods import build
from transformers import BertConfig

from open_clip_zerovl.dga.step import DecoupledGradientAccumulation
from open_clip_zerovl.losses import ContrastiveLoss


def peak_gib(text_folder: str, micro_batch: int, steps: int, retain: int) -> float:
    model = build("token drop 0.25", text_folder)
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

    return simulated_peak_bytes(model, step) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--steps", default="1,16", help="K,K")
    parser.add_argument("--retain", default="1,2", help="R,R")
    args = parser.parse_args()
    print("| K | graphs retained | GiB | of K = 1 |\n|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as text_folder:
        BertConfig().save_pretrained(text_folder)
        single = peak_gib(text_folder, args.micro_batch, 1, 1)
        for steps in map(int, args.steps.split(",")):
            for retain in map(int, args.retain.split(",")):
                if retain <= steps:
                    peak = peak_gib(text_folder, args.micro_batch, steps, retain)
                    print(f"| {steps} | {retain} | {peak:.2f} | {peak / single:.3f} |", flush=True)


if __name__ == "__main__":
    main()
