"""Memory of the losses at a large batch, without a GPU: tensors have shapes only, and nothing is computed.

    python scripts/bench/losses.py [--samples 65536] [--width 512] [--chunk 256] [--teachers 2] [--teacher-width 768]

A line has the GiB of live tensors at the peak of one rank's loss and gradient in fp32, without and with its inputs (features in
fp32, teachers' features in fp16). An allocator's overhead and the products' scratch memory are not included. A minute a line.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from open_clip_zerovl.core.memory import PeakBytes
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss

LOSSES: dict[str, dict[str, Any]] = {
    "InfoNCE": {},
    "sigmoid": {"sigmoid": True},
    "other sources a twentieth": {"cross_source_weight": 0.05},
    "same caption or picture": {"positives": "both"},
    "teachers": {"distill_weight": 0.9},
    "all of these": {"cross_source_weight": 0.05, "positives": "both", "distill_weight": 0.9},
}


def peak_gib(options: dict[str, Any], args: argparse.Namespace) -> tuple[float, float]:
    """GiB at the peak: of the loss, and with its inputs."""
    n = args.samples
    with FakeTensorMode():
        return _peak_gib(options, args, n)


def _peak_gib(options: dict[str, Any], args: argparse.Namespace, n: int) -> tuple[float, float]:
    features = [torch.empty(n, args.width, requires_grad=True) for _ in range(2)]
    ids = {name: torch.empty(n, dtype=torch.long) for name in ("source", "caption", "image")}
    teachers = [
        tuple(torch.empty(n, args.teacher_width, dtype=torch.float16) for _ in range(2))
        for _ in range(args.teachers if options.get("distill_weight") else 0)
    ]
    kind = SigmoidLoss if options.get("sigmoid") else ContrastiveLoss
    loss = kind(chunk_size=args.chunk, **{name: value for name, value in options.items() if name != "sigmoid"})
    with PeakBytes() as seen:
        value = loss(*features, torch.tensor(100.0), ids=ids, teacher_features=teachers)
        torch.autograd.grad(value, features)
    given = sum(rows.nbytes for rows in (*features, *ids.values(), *(rows for pair in teachers for rows in pair)))
    return seen.peak / 2**30, (seen.peak + given) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=65536, help="N")
    parser.add_argument("--width", type=int, default=512, help="D")
    parser.add_argument("--chunk", type=int, default=256, help="rows of the logits alive at once")
    parser.add_argument("--teachers", type=int, default=2)
    parser.add_argument("--teacher-width", type=int, default=768)
    args = parser.parse_args()
    print("| loss | GiB | with its inputs |\n|---|--:|--:|")
    for name, options in LOSSES.items():
        made, whole = peak_gib(options, args)
        print(f"| {name} | {made:.2f} | {whole:.2f} |", flush=True)


if __name__ == "__main__":
    main()
