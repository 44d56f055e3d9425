"""The demo's data: four emoji sets as webdataset shards.

    python -m scripts.drawn emoji --out data/emoji
    python -m scripts.drawn emoji --out data/emoji --pairs pairs    # also as pictures and a table, as your own pairs may be

Fetches npm packages, draws their pictures and writes the shards of each source, held-out retrieval sets and a small BERT folder
(docs/datasets.md). A second call does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated as A
from typing import Literal

from scripts.drawn.make import prepare_emoji, write_pairs
from scripts.program import program


def drawn(
    name: A[Literal["emoji"], "four emoji sets as four sources"],
    /,
    *,
    out: A[Path, "folder to write", "DIR"],
    pairs: A[Path | None, "write the training pairs as DIR/pairs.csv and pictures", "DIR"] = None,
) -> None:
    """Make the data of the demo."""
    prepare_emoji(out)
    if pairs is not None:
        count = write_pairs(out, pairs)
        print(f"{count:,} pairs are in {pairs / 'pairs.csv'}")


if __name__ == "__main__":
    sys.exit(program(drawn))
