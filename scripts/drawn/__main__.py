"""The demo's data: four emoji sets as webdataset shards.

    python -m scripts.drawn emoji --out data/emoji
    python -m scripts.drawn emoji --out data/emoji --pairs pairs    # also as pictures and a table, as your own pairs may be

Fetches npm packages, draws their pictures and writes the shards of each source, held-out retrieval sets and a small BERT folder
(docs/datasets.md). A second call does nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from open_clip_zerovl.core.errors import ended
from scripts.drawn.make import prepare_emoji, write_pairs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.drawn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=["emoji"], help="four emoji sets as four sources")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--px", type=int, default=64, help="side of the pictures in pixels (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split (default %(default)s)"
    )
    parser.add_argument(
        "--pairs",
        type=Path,
        metavar="DIR",
        help="write the training pairs as DIR/pairs.csv and pictures",
    )
    options = parser.parse_args(argv)

    def run() -> None:
        prepare_emoji(options.out, px=options.px, seed=options.seed)
        if options.pairs is not None:
            count = write_pairs(options.out, options.pairs)
            print(f"{count:,} pairs are in {options.pairs / 'pairs.csv'}")

    return ended(run, "drawn")


if __name__ == "__main__":
    sys.exit(main())
