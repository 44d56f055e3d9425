"""`make demo-search`: two released encoders, aligned on a CPU, answer ten queries as one page.

    python -m scripts.demo_search                    # three emoji sets are aligned, the fourth is searched
    python -m scripts.demo_search --data mine        # your own pairs, as `zerovl align --data` takes them

The encoders are EfficientNet-Lite0 (ImageNet) and MiniLM-L6 (`python -m scripts.encoders`); the heads between them are all that
is trained. Everything is written below demo-search/. A second call reads the stored features.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated as A

import numpy as np

from open_clip_zerovl.align.rows import open_sources
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.cli import main as zerovl
from open_clip_zerovl.data.collection import open_collection
from open_clip_zerovl.evaluate.search import Searcher, write_search_page
from open_clip_zerovl.evaluate.settings import SearchSettings
from open_clip_zerovl.features.sources import SourceSamples
from open_clip_zerovl.finetune.data import find_data
from scripts.drawn.make import prepare_emoji
from scripts.encoders import fetch_encoders
from scripts.program import program

ALIGNED = ("twemoji", "openmoji", "fluent")
BEST = 5  # pictures of a query
QUERIES = (
    "a slice of pizza",
    "somebody is very angry",
    "an animal that lives in the sea",
    "a red car",
    "winter weather",
    "a musical instrument",
    "two people in love",
    "tools for building a house",
    "a flag with stars",
    "something to drink in the morning",
)


def demo_search(
    *,
    data: A[str | None, "your own pairs (default: emoji)", "DIR"] = None,
    out: A[Path, "folder of all results", "DIR"] = Path("demo-search"),
    encoders: A[Path, "folder of the encoders, fetched if it does not exist", "DIR"] = Path(
        "encoders"
    ),
) -> int:
    """Align two encoders, search for each query, write one page, and return the exit status."""
    begin = time.monotonic()
    fetch_encoders(encoders)
    searched, queries = data or "data/emoji/noto", QUERIES
    if data is None:
        prepare_emoji("data/emoji")
        data = "::".join(f"{name}=data/emoji/{name}" for name in ALIGNED)
    else:  # captions of some samples that are spread evenly over the data
        samples = SourceSamples(open_sources(find_data(data).train_data, "").opened, "text")
        numbers = np.linspace(0, len(samples.caption_starts) - 2, len(QUERIES)).astype(int)
        queries = tuple(samples.sample(number)[0][1] for number in numbers.tolist())
    towers = ["--image", f"timm:{encoders / 'effnet_lite0'}", "--text", f"hf:{encoders / 'minilm'}"]
    if failed := zerovl(["align", *towers, "--data", data, "--out", str(out)]):
        return failed
    collection = open_collection(searched)
    searcher = Searcher(Encoder(str(out / "model")), collection, cache=out / "search")
    best = {query: searcher.find(query, None, BEST) for query in queries}
    words = SearchSettings(words=f"{len(queries)} queries", best=BEST)
    write_search_page(out / "queries.html", best, collection, None, words)
    print(f"{time.monotonic() - begin:.0f} s. The answers are in {out / 'queries.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(program(demo_search))
