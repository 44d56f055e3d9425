"""The cost of encoding pictures by a frozen tower on a CPU, beside the tower's own arithmetic.

    python -m scripts.encoders --out encoders
    python -m scripts.bench.encoding [--image timm:encoders/effnet_lite0] [--batches 4,16,64] [--out FILE.json]

    tower, memory returned    the tower's forward pass in a process in which glibc returns freed blocks to the kernel
    tower, memory kept        the same in a process that keeps them
    FrozenModel               `FrozenModel.images`, by which align, retrieval, search and zero-shot encode

A cell is the median over rounds of this process's CPU time a picture, user and system. The arithmetic is the user time of the
tower's forward pass at the best batch, in memory that is kept.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from open_clip_zerovl.align.encoders import open_tower
from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import write

RETURNED, FROZEN, KEPT = "tower, memory returned", "FrozenModel", "tower, memory kept"


def milliseconds(
    encode: Callable[[Tensor], Any], pixels: Tensor, pictures: int
) -> tuple[float, float]:
    """User and system CPU milliseconds a picture over at least this many pictures; the first call warms up."""
    encode(pixels)
    calls = -(-pictures // len(pixels))
    before = os.times()
    for _ in range(calls):
        encode(pixels)
    after = os.times()
    count = calls * len(pixels) / 1000
    return (after.user - before.user) / count, (after.system - before.system) / count


def measure(
    name: str, batches: Sequence[int], rounds: int, pictures: int, threads: int
) -> list[dict[str, Any]]:
    """A row for each way and batch size."""
    torch.set_num_threads(threads)
    tower = open_tower(name, "image")
    module = tower.module.eval().requires_grad_(False)
    pixels = torch.rand(max(batches), 3, *tower.size, generator=torch.Generator().manual_seed(0))

    def medians(ways: Sequence[tuple[str, int]], of: dict[str, Callable[[Tensor], Any]]) -> None:
        times = [
            {way: milliseconds(of[way[0]], pixels[: way[1]], pictures) for way in ways}
            for _ in range(rounds)
        ]
        for way in ways:
            user, system = zip(*(of_round[way] for of_round in times), strict=True)
            cells[way] = statistics.median(user), statistics.median(system)

    cells: dict[tuple[str, int], tuple[float, float]] = {}
    encoders: dict[str, Callable[[Tensor], Any]] = {RETURNED: module}
    medians([(RETURNED, batch) for batch in batches], encoders)
    # Only now: a process that keeps its memory does so from then on.
    encoders |= {FROZEN: tower.frozen(torch.device("cpu")).images, KEPT: module}
    medians([(way, batch) for way in (FROZEN, KEPT) for batch in batches], encoders)
    arithmetic = min(cells[KEPT, batch][0] for batch in batches)
    return [
        {
            "way": way,
            "batch": batch,
            "user_ms": round(user, 2),
            "system_ms": round(system, 2),
            "of_the_arithmetic": round((user + system) / arithmetic, 2),
        }
        for (way, batch), (user, system) in cells.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", default="timm:encoders/effnet_lite0", metavar="ENCODER")
    parser.add_argument("--batches", default="4,16,64", metavar="N,N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=128, help="pictures of a round, at least")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    batches = [int(word) for word in args.batches.split(",")]
    rows = measure(args.image, batches, args.rounds, args.pictures, args.threads)
    table = markdown_table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])
    write({"encoding": rows, "threads": args.threads}, table, args.out)


if __name__ == "__main__":
    main()
