"""`make demo-search`: two released encoders, aligned on a CPU, answer ten queries as one page.

    python -m scripts.demo_search                    # three emoji sets are aligned, the fourth is searched
    python -m scripts.demo_search --data mine        # your own pairs, as `zerovl align --data` takes them

The encoders are EfficientNet-Lite0 (ImageNet) and MiniLM-L6 (`python -m scripts.encoders`); the heads between them are all that
is trained. Everything is written below demo-search/. A second call reads the stored features.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from open_clip_zerovl.align.rows import open_sources
from open_clip_zerovl.checkpoints.encoder import Encoder
from open_clip_zerovl.cli import main as zerovl
from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.data.collection import open_collection
from open_clip_zerovl.evaluate.search import Searcher, write_search_page
from open_clip_zerovl.evaluate.settings import SearchSettings
from open_clip_zerovl.features.sources import SourceSamples
from open_clip_zerovl.finetune.data import find_data
from scripts.drawn.make import prepare_emoji
from scripts.encoders import fetch_encoders

ALIGNED, SEARCHED = ("twemoji", "openmoji", "fluent"), "noto"
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


def queries_of(train_data: str, count: int = len(QUERIES)) -> list[str]:
    """Captions of some samples that are spread evenly over the data."""
    samples = SourceSamples(open_sources(train_data, "").opened, "text")
    numbers = np.linspace(0, len(samples.caption_starts) - 2, count).astype(int)
    return [samples.sample(number)[0][1] for number in numbers.tolist()]


def answer(model: Path, data: str, queries: Sequence[str], page: Path, *, best: int = 5) -> None:
    """Search for each query and write one page with the best pictures of each."""
    collection = open_collection(data)
    searcher = Searcher(Encoder(str(model)), collection, cache=page.parent / "search")
    found = {query: searcher.find(query, None, best) for query in queries}
    words = SearchSettings(words=f"{len(queries)} queries", best=best)
    write_search_page(page, found, collection, None, words)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.demo_search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", metavar="DIR", help="your own pairs (default: emoji)")
    parser.add_argument("--out", type=Path, default=Path("demo-search"), metavar="DIR")
    parser.add_argument("--encoders", type=Path, default=Path("encoders"), metavar="DIR")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    try:
        encoders = fetch_encoders(options.encoders)
        data, searched = options.data, options.data
        queries: tuple[str, ...] = QUERIES
        if data is None:
            emoji = Path("data/emoji")
            prepare_emoji(emoji)
            data = "::".join(f"{name}={emoji / name}" for name in ALIGNED)
            searched = str(emoji / SEARCHED)
        else:
            queries = tuple(queries_of(find_data(data).train_data))
        words = [
            "--image",
            f"timm:{encoders / 'effnet_lite0'}",
            "--text",
            f"hf:{encoders / 'minilm'}",
        ]
        if failed := zerovl(["align", *words, "--data", data, "--out", str(options.out)]):
            return failed
        page = options.out / "queries.html"
        answer(options.out / "model", searched, queries, page)
    except UserError as error:
        print(f"demo-search: error: {error}", file=sys.stderr)
        return 2
    print(f"{time.monotonic() - begin:.0f} s. The answers are in {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
