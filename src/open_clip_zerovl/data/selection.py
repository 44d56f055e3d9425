"""A source without some of its samples, as a list in a file: they are held out of training without a copy of the data.

    mine=/out/data/mine.selection.json

    {"data": "mine=/d/mine/train", "source": "mine", "contents": ["1f3a..."], "left_out": [3, 17]}

`left_out` counts the samples of the source from 0, shard after shard; of a table its rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import UNREADABLE, write_atomically
from open_clip_zerovl.shards.urls import shard_digests

SELECTION = ".selection.json"  # ending of such a file's name


@dataclass(frozen=True)
class Selection:
    """The content of a selection.

    Attributes:
        data: the component of `--train-data`.
        source: one of its sources.
        contents: digest of each of its shards.
        left_out: numbers of samples, or rows, ascending.
    """

    data: str
    source: str
    contents: list[str]
    left_out: list[int]

    def check(self, shards: Sequence[str]) -> None:
        """UserError if the shards are not those of which the numbers are."""
        if contents_of(shards) != self.contents:
            raise UserError(
                f"the data of {self.data} has changed since samples of it were held out; call `zerovl finetune` again, which "
                "makes the list anew"
            )


def contents_of(shards: Sequence[str]) -> list[str]:
    """Digest each shard."""
    return [*shard_digests(dict.fromkeys(shards)).values()]


def save_selection(selection: Selection, path: Path) -> str:
    """Write a selection; returns its component of `--train-data`. UserError if it cannot be written."""
    write_atomically(path, json.dumps(asdict(selection)) + "\n")
    return f"{selection.source}={path}"


def load_selection(path: str) -> Selection:
    """Read a selection. UserError if it cannot be read."""
    try:
        return Selection(**json.loads(Path(path).read_text(encoding="utf-8")))
    except UNREADABLE as error:
        raise UserError(f"{path} cannot be read as a selection of samples ({error})") from error
