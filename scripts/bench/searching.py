"""The time of an answer of the search page over many pictures.

    python -m scripts.bench.searching MODEL PICTURES [--rows 100000]

The pictures' embeddings are joined by random ones up to the number of rows, so that hits are real pictures with thumbnails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch.nn.functional import normalize

from open_clip_zerovl.checkpoints.loading import Encoder
from open_clip_zerovl.data.collection import open_collection
from open_clip_zerovl.evaluate.search.ranking import Searcher
from open_clip_zerovl.evaluate.search.serve import BEST, answer

QUERIES = ("a pair of shoes", "a red hat", "a man in a suit", "a white shirt", "long trousers")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Seconds of an answer of zerovl search --serve.")
    parser.add_argument("model")
    parser.add_argument("pictures")
    parser.add_argument("--rows", type=int, default=100_000)
    arguments = parser.parse_args(argv)
    searcher = Searcher(Encoder(arguments.model), open_collection(arguments.pictures), keep=True)
    rows = torch.cat(list(searcher.blocks()))
    others = torch.randn(arguments.rows - len(rows), rows.shape[1])
    searcher.rows_in_memory = list(torch.cat([rows, normalize(others, dim=1)]).split(4096))
    answer(searcher, QUERIES[0], None, BEST)
    walls, cpus = [], []
    for query in QUERIES:
        wall, cpu = time.perf_counter(), time.process_time()
        answer(searcher, query, None, BEST)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    print(
        f"{arguments.rows:,} rows of width {rows.shape[1]}, {BEST} pictures shown, median of {len(QUERIES)} queries: "
        f"{statistics.median(cpus):.3f} s of CPU, {statistics.median(walls):.3f} s by the clock"
    )


if __name__ == "__main__":
    main()
