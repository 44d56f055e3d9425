"""Time and memory of the losses alone, beside open_clip's.

    python -m scripts.bench.loss [--pairs 4096,16384,65536] [--width 512] [--chunk 256] [--out FILE.json]
    python -m scripts.bench.loss --options [--pairs 65536]

The first form takes one forward and backward pass of `ContrastiveLoss` and, where the memory suffices, of open_clip's
`ClipLoss` on N pairs of unit features in fp32 in one process. Memory counts the features and their gradients.

The second form needs neither GPU nor time: tensors have shapes only. A line holds the GiB of live tensors at the peak of the
loss and its gradient with each option, without and with the inputs (features in fp32).
An allocator's overhead and the products' scratch memory are not included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from open_clip.loss import ClipLoss
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from open_clip_zerovl.core.memory import PeakBytes, available_bytes
from open_clip_zerovl.losses import ContrastiveLoss, SigmoidLoss
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import Setup, seconds, write

SEED = 1
WARM_UP_PAIRS = 4096
OPTIONS: dict[str, dict[str, Any]] = {
    "InfoNCE": {},
    "sigmoid": {"sigmoid": True},
    "same caption or picture": {"positives": "both"},
}


def measure(
    pairs: Sequence[int], width: int, chunk: int, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each number of pairs and loss: seconds, peak MiB and the gradient of the logit scale."""
    rows = []
    for n in pairs:
        torch.manual_seed(SEED)
        features = [
            nn.functional.normalize(torch.randn(n, width, device=device), dim=1) for _ in range(2)
        ]
        losses: dict[str, nn.Module] = {
            f"ContrastiveLoss(chunk_size={chunk})": ContrastiveLoss(chunk_size=chunk)
        }
        # Two logit matrices, their softmaxes and gradients: six matrices of N^2 floats, and some room.
        if (available_bytes(device) or 0) > 7 * 4 * n * n:
            losses["open_clip ClipLoss"] = ClipLoss()
        for name, loss in losses.items():
            rows.append({"loss": name, "pairs": n, "width": width, **_step(loss, features, device)})
            print(rows[-1], flush=True)
    return rows


def _step(loss: nn.Module, features: list[torch.Tensor], device: torch.device) -> dict[str, float]:
    """Seconds and peak memory of one step, with the features and their gradients."""
    leaves = [part.clone().requires_grad_() for part in features]
    scale: Any = torch.tensor(50.0, device=device, requires_grad=True)
    setup = Setup(nn.Linear(1, 1), device)
    inputs = sum(part.nbytes for part in leaves)
    live = PeakBytes()

    def step(_batches: Sequence[Any]) -> None:
        loss(leaves[0], leaves[1], scale).backward()

    if device.type == "cuda":
        small = [part[:WARM_UP_PAIRS].detach().clone().requires_grad_() for part in leaves]
        loss(
            small[0], small[1], scale
        ).backward()  # loads kernels; a step of a million pairs would take a minute
        scale.grad = None
        del small
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        took = seconds(setup, step, [], "wall")
        peak = torch.cuda.max_memory_allocated(device) - before + inputs
    else:
        with live:  # a few operations a chunk: counting takes hardly any time
            took = seconds(setup, step, [], "cpu")
        peak = live.peak + inputs
    return {"seconds": took, "peak_mib": peak / 2**20, "logit_scale_gradient": scale.grad.item()}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            str(row["pairs"]),
            str(row["width"]),
            row["loss"],
            f"{row['peak_mib']:.0f}",
            f"{row['seconds']:.2f}",
        ]
        for row in rows
    ]
    return markdown_table(["pairs", "width", "loss", "peak memory, MiB", "seconds"], cells)


def peak_gib(
    options: dict[str, Any],
    pairs: int,
    *,
    width: int = 512,
    chunk: int = 256,
) -> tuple[float, float]:
    """Peak GiB of a loss with these options of OPTIONS, without and with its inputs."""
    with FakeTensorMode():
        features = [torch.empty(pairs, width, requires_grad=True) for _ in range(2)]
        ids = {
            name: torch.empty(pairs, dtype=torch.long) for name in ("source", "caption", "image")
        }
        kind = SigmoidLoss if options.get("sigmoid") else ContrastiveLoss
        loss = kind(
            chunk_size=chunk,
            **{name: value for name, value in options.items() if name != "sigmoid"},
        )
        with PeakBytes() as seen:
            value = loss(*features, torch.tensor(100.0), ids=ids)
            torch.autograd.grad(value, features)
        given = sum(rows.nbytes for rows in (*features, *ids.values()))
    return seen.peak / 2**30, (seen.peak + given) / 2**30


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default="65536", metavar="N,N")
    parser.add_argument("--width", type=int, default=512, metavar="D")
    parser.add_argument("--chunk", type=int, default=256, help="rows of the logits alive at once")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--options", action="store_true", help="count the memory of each option, without computing"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    pairs = [int(n) for n in args.pairs.split(",")]
    if not args.options:
        rows = measure(pairs, args.width, args.chunk, torch.device(args.device))
        write({"loss": rows}, markdown(rows), args.out)
        return
    counted = [
        (n, name, *peak_gib(options, n, width=args.width, chunk=args.chunk))
        for n in pairs
        for name, options in OPTIONS.items()
    ]
    cells = [[str(n), name, f"{made:.2f}", f"{whole:.2f}"] for n, name, made, whole in counted]
    write(counted, markdown_table(["pairs", "loss", "GiB", "with its inputs"], cells), args.out)


if __name__ == "__main__":
    main()
