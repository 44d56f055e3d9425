"""Time and memory of one reader before its first sample, from 14 million to 12.8 billion pairs.

    python -m scripts.bench.scale [--pairs 14e6,100e6,1.28e9,12.8e9] [--ranks 1024] [--workers 8] [--out FILE.json]

For each strategy a fresh process repeats the work of a loader worker at the start of an epoch and after a jump into its
middle: the schedule, this reader's quota and the samples that it has delivered, its part of each source's shards, the order of
its first samples, and the first micro-batch's counts. Seconds and the growth of peak resident memory do not include imports.
Four sources hold 6, 4, 20 and 70 % of the pairs, in shards of 10,000 pairs, of 50,000 from 1.28 billion on.

Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from open_clip_zerovl.report.tables import markdown_table
from scripts.bench.harness import write

SHARES = (0.06, 0.04, 0.20, 0.70)
STRATEGIES = ("random", "debiased", "sequential")
MICRO_BATCH = 64


def shard_sizes(pairs: int) -> list[list[int]]:
    """Samples in each shard of each source."""
    per_shard = 50_000 if pairs >= 1_000_000_000 else 10_000
    return [[per_shard] * max(1, round(pairs * share / per_shard)) for share in SHARES]


def start(pairs: int, strategy: str, ranks: int, workers: int, jump: bool) -> dict[str, Any]:
    """Seconds and MiB that one reader takes until its first samples, in this process."""
    from open_clip_zerovl.core.randomness import Purpose, stream
    from open_clip_zerovl.sampling.assignment import Assignment
    from open_clip_zerovl.sampling.order import LocalOrder
    from open_clip_zerovl.sampling.schedule import Batching, source_schedule
    from open_clip_zerovl.sampling.slices import epoch_slices, slice_range

    sizes = shard_sizes(pairs)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    batching = Batching(MICRO_BATCH, 1, ranks, workers)
    totals = [sum(of_shards) for of_shards in sizes]
    schedule = source_schedule(totals, batching.effective_batch, strategy=strategy, seed=0, epoch=1)
    step = schedule.steps // 2 if jump else 0
    rank, worker = ranks // 2, workers // 2
    dealt = Assignment(schedule, batching)
    before, quota, done = (
        dealt.before(rank, worker),
        dealt.quota(rank, worker),
        dealt.quota(rank, worker, step),
    )
    for index, of_shards in enumerate(sizes):
        stretch = slice_range(
            epoch_slices(of_shards, schedule, index), int(before[index]), int(quota[index])
        )
        order = LocalOrder(
            stretch.samples,
            1250,
            partial(stream, 0, Purpose.ORDER, 1, index, rank * workers + worker),
        )
        first = int(done[index])
        if first < len(order):
            lowest = order.lowest(first)
            order.passed(first, lowest)
            next(order.chunks(first))
    next(dealt.counts(rank, worker, step))
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024,
        "steps": schedule.steps,
    }


def in_a_process(*arguments: str) -> dict[str, Any]:
    """`start` in a process of its own, so that its peak memory is that of nothing else."""
    command = [sys.executable, "-m", "scripts.bench.scale", "--one", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", default="14e6,100e6,1.28e9,12.8e9", help="in all sources together"
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=8, help="loader processes of a rank")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--one", nargs=3, metavar=("PAIRS", "STRATEGY", "JUMP"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.one is not None:
        pairs, strategy, jump = args.one
        print(json.dumps(start(int(pairs), strategy, args.ranks, args.workers, jump == "jump")))
        return
    rows, cells = [], []
    options = ("--ranks", str(args.ranks), "--workers", str(args.workers))
    for pairs in (int(float(word)) for word in args.pairs.split(",")):
        shards = sum(map(len, shard_sizes(pairs)))
        for strategy in STRATEGIES:
            row: dict[str, Any] = {"pairs": pairs, "shards": shards, "strategy": strategy}
            for place in ("start", "jump"):
                row[place] = in_a_process(str(pairs), strategy, place, *options)
            rows.append(row)
            cells.append(
                [f"{pairs:,}", f"{row['shards']:,}", strategy, f"{row['start']['steps']:,}"]
            )
            for one in (row["start"], row["jump"]):
                cells[-1].append(
                    f"{one['seconds']:.2f} ({one['cpu_seconds']:.2f}), {one['mib']:.0f}"
                )
            print(*cells[-1], file=sys.stderr, flush=True)
    header = ["pairs", "shards", "strategy", "steps", "start: s (CPU), MiB", "middle: s (CPU), MiB"]
    write(rows, markdown_table(header, cells), args.out)


if __name__ == "__main__":
    main()
