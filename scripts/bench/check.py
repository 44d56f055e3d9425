"""`zerovl data check` compared with the speed of the disk.

    python scripts/bench/check.py [--gigabytes 2] [--threads 1,2,4] [--rounds 5] [--folder DIR] [--json check.json]

Shards of JPEGs as `zerovl data` writes them (341 x 256 px; 6,000 a shard) are read in three ways, in turn: by as many `dd` at a
time as there are threads, each with a part of the shards and blocks of a megabyte; by the check; by the check with `--hash`.
*cold*: the shards are dropped from the page cache before each (posix_fadvise, which needs no privileges); *warm*: they are all
in it, so that `dd` measures memory. Expected, cold: the check reads at 80 % of dd's speed or more, if it gets enough CPU time:
0.3 to 0.4 s a gigabyte.

Takes about five minutes on two cores, and `--gigabytes` of disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from clusters import set_cache
from loader import photograph, picture_of, write_shards

from open_clip_zerovl.prepare.public.index import check_shards
from open_clip_zerovl.prepare.public.manifest import sha256_of

PER_SHARD = 6000


def read_by_dd(shards: list[Path], threads: int) -> None:
    """Every byte once, by `threads` processes."""
    line = 'for shard in "$@"; do dd if="$shard" of=/dev/null bs=1M status=none || exit 1; done'
    running = [subprocess.Popen(["sh", "-c", line, "sh", *map(str, shards[n::threads])]) for n in range(threads)]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise SystemExit("dd could not read the shards")


def check(folder: Path, threads: int, hashes: bool) -> None:
    """Run `zerovl data check`'s function; the shards have no faults."""
    result = check_shards(folder, threads=threads, hashes=hashes, progress=False)
    assert not result.faults, result.faults


def measure(folder: Path, threads: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Megabytes a second of each way over the rounds, cold and warm."""
    shards = sorted(folder.glob("*.tar"))
    megabytes = sum(shard.stat().st_size for shard in shards) / 1e6
    ways: dict[str, Callable[[], None]] = {
        "dd": partial(read_by_dd, shards, threads),
        "check": partial(check, folder, threads, False),
        "check --hash": partial(check, folder, threads, True),
    }
    names = list(ways)
    rates: dict[str, dict[str, list[float]]] = {cache: {name: [] for name in names} for cache in ("cold", "warm")}
    for cache, of_cache in rates.items():
        for turn in range(rounds):
            for name in names[turn % 3 :] + names[: turn % 3]:
                set_cache(folder, warm=cache == "warm")
                begin = time.perf_counter()
                ways[name]()
                of_cache[name].append(megabytes / (time.perf_counter() - begin))
    return rates


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| threads | page cache | dd, MB/s | check, MB/s | of dd | check --hash, MB/s | of dd |"]
    lines.append("|---|---|---|---|---|---|---|")
    for threads, caches in results["rates"].items():
        for cache, rates in caches.items():
            dd = statistics.median(rates["dd"])
            cells = [f"{dd:,.0f} ({min(rates['dd']):,.0f} to {max(rates['dd']):,.0f})"]
            for name in ("check", "check --hash"):
                own = rates[name]
                cells.append(f"{statistics.median(own):,.0f} ({min(own):,.0f} to {max(own):,.0f})")
                cells.append(f"{statistics.median(own) / dd:.0%}")
            lines.append(f"| {threads} | {cache} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--threads", default="1,2,4", help="shards at the same time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder for the shards, on the disk to measure; they are removed")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary) / "shards"
        pictures = [photograph(seed, 341, 256) for seed in range(64)]
        a_shard = PER_SHARD * sum(map(len, pictures)) / len(pictures)
        write_shards(folder, max(1, round(args.gigabytes * 1e9 / a_shard)), PER_SHARD, partial(picture_of, pictures))
        shards = {shard.name: {"sha256": sha256_of(shard)} for shard in folder.glob("*.tar")}
        (folder / "manifest.json").write_text(json.dumps({"shards": shards}))
        results: dict[str, Any] = {"shards": len(shards), "rates": {}}
        for threads in map(int, args.threads.split(",")):
            results["rates"][threads] = measure(folder, threads, args.rounds)
    print(f"{results['shards']} shards of {PER_SHARD:,} pairs")
    print(table(results))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
