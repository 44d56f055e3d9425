"""Samples a second of one source, of its clusters read from the original shards, and of its clusters after --reshard (A.6).

    python scripts/bench/clusters.py [--clusters 8,100] [--samples 20000] [--rounds 5] [--folder DIR] [--json clusters.json]

Three ways to train on the same pairs: `source`, its shards one after the other (random sampling); `index`, debiased sampling
over K clusters whose samples are read from those shards by index; `reshard`, debiased sampling over K clusters that
`zerovl cluster --reshard` has written. Clusters are drawn at random, so that their samples are scattered as far as possible.

*reading* reads encoded samples as a loader worker does, and nothing more. *loader* is the whole mixture (JPEG decoding, a
random crop to 224 px, tokens) with `--workers` processes: the first `--loader-samples` of an epoch, with the start of the
processes. *cold*: all shards are dropped from the page cache before (posix_fadvise, which needs no privileges); *warm*: they
are all in it. A round measures every way once, each round in another order; medians over rounds, with the lowest and highest.

Takes two to three minutes a round on two busy cores, and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader import BATCH, photograph, picture_of, write_shards
from open_clip import SimpleTokenizer
from open_clip.transform import image_transform

from open_clip_zerovl.data.clusters import Clustering, save_clustering
from open_clip_zerovl.data.images import split_normalize
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.mixture import Mixture, Preprocessing, Sampling
from open_clip_zerovl.data.reading import Reading
from open_clip_zerovl.data.sample_stream import SliceReader
from open_clip_zerovl.data.schedule import Batching, epoch_slices
from open_clip_zerovl.data.sources import parse_sources
from open_clip_zerovl.prepare.clusters.folders import write_clusters
from open_clip_zerovl.shards.index import open_index

WAYS = ("source", "index", "reshard")


def prepare(folder: Path, samples: int, per_shard: int, clusters: list[int]) -> dict[int, dict[str, str]]:
    """The `--train-data` value of each way, for each number of clusters."""
    pictures = [photograph(seed, 341, 256) for seed in range(64)]
    write_shards(folder / "source", samples // per_shard, per_shard, partial(picture_of, pictures))
    (source,) = parse_sources(f"bench={folder}/source")
    for shard in source.shards:
        open_index(shard)  # writes the index, as `zerovl cluster` does
    values = {}
    for count in clusters:
        out = folder / f"clusters-{count}"
        out.mkdir()
        labels = np.random.default_rng(0).permutation(np.arange(samples, dtype=np.int32) % count)
        sizes = tuple(os.path.getsize(shard) for shard in source.shards)
        clustering = Clustering(
            "bench",
            source.shards,
            source.sizes,
            labels,
            np.zeros(samples, np.float32),
            np.zeros((count, 1), np.float32),
            sizes,
        )
        write_clusters(clustering, out, progress=False)
        save_clustering(clustering, out)
        values[count] = {
            "source": f"bench={folder}/source",
            "index": f"bench={out}/assignment.npz",
            "reshard": f"bench={out}",
        }
    return values


def set_cache(folder: Path, *, warm: bool) -> None:
    """Read all shards below a folder into the page cache, or drop them from it."""
    os.sync()  # pages not yet written cannot be dropped
    for path in folder.rglob("*.tar"):
        descriptor = os.open(path, os.O_RDONLY)
        if warm:
            while os.read(descriptor, 1 << 24):
                pass
        else:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read(train_data: str) -> float:
    """Encoded samples a second of one epoch, read batch by batch in the order of the schedule."""
    mixture = _mixture(train_data, workers=1, decode=False)
    schedule = mixture.schedule(0)
    begin = time.perf_counter()
    streams = []
    for index, source in enumerate(mixture.sources):
        slices = epoch_slices(source.sizes, schedule, index)
        streams.append(SliceReader(Reading(source, index), slices, slices).samples())
    for step in schedule.source_of_step.tolist():
        for _ in range(BATCH):
            next(streams[max(0, step)])
    return schedule.steps * BATCH / (time.perf_counter() - begin)


def load(train_data: str, workers: int, samples: int) -> float:
    """Samples a second of the whole loader."""
    loader = MixtureLoader(_mixture(train_data, workers), workers=workers)
    begin = time.perf_counter()
    count = sum(len(images) for images, _ in itertools.islice(loader, samples // BATCH))
    return count / (time.perf_counter() - begin)


def _mixture(train_data: str, workers: int, decode: bool = True) -> Mixture:
    sources = parse_sources(train_data)
    return Mixture(
        sources,
        Batching(BATCH, workers=workers),
        Preprocessing(
            split_normalize(image_transform(224, True, aug_cfg={"scale": (0.6, 1.0)}))[0],
            SimpleTokenizer(context_length=25) if decode else lambda texts: torch.zeros(len(texts), 1),
        ),
        sampling=Sampling("random" if len(sources) == 1 else "debiased"),
    )


def measure(folder: Path, values: dict[str, str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Rates of each kind of measurement and way, a list over the rounds."""
    kinds: dict[str, tuple[Callable[[str], float], bool]] = {
        "reading, cold": (read, False),
        "reading, warm": (read, True),
    }
    if args.loader_samples:
        kinds["loader, cold"] = (partial(load, workers=args.workers, samples=args.loader_samples), False)
    rates: dict[str, dict[str, Any]] = {kind: {way: [] for way in WAYS} for kind in kinds}
    for turn in range(args.rounds):
        for kind, (run, warm) in kinds.items():
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                set_cache(folder, warm=warm)
                rates[kind][way].append(run(values[way]))
    return rates


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| clusters | samples/s of | source | index | reshard |", "|---|---|---|---|---|"]
    for clusters, rates in results["rates"].items():
        for kind, ways in rates.items():
            cells = [f"{statistics.median(r):,.0f} ({min(r):,.0f} to {max(r):,.0f})" for r in ways.values()]
            lines.append(f"| {clusters} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", default="8,100", help="K")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--per-shard", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="loader processes")
    parser.add_argument("--loader-samples", type=int, default=4000, help="of each loader measurement; 0: only reading")
    parser.add_argument("--folder", type=Path, help="folder for the shards, on the disk to measure; they are removed")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        values = prepare(folder, args.samples, args.per_shard, [int(count) for count in args.clusters.split(",")])
        megabytes = sum(path.stat().st_size for path in (folder / "source").glob("*.tar")) / 1e6
        results: dict[str, Any] = {"samples": args.samples, "source_megabytes": megabytes, "rates": {}}
        for count, ways in values.items():
            results["rates"][count] = measure(folder, ways, args)
    print(
        f"{args.samples:,} samples, {megabytes:,.0f} MB a way, {args.per_shard:,} a shard, {args.workers} loader workers"
    )
    print(table(results))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
