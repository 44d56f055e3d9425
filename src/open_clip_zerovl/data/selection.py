"""A source without some of its samples, as a list in a file: they are held out of training without a copy of the data.

    mine=/out/data/mine.selection.json

    {"data": "mine=/d/mine/train", "source": "mine", "marks": [["00000.tar", 10240, ...]], "left_out": [3, 17]}

`left_out` counts the samples of the source from 0, shard after shard; of a table its rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.files import UNREADABLE, write_atomically
from open_clip_zerovl.shards.marks import Mark, file_marks, is_same

SELECTION = ".selection.json"  # ending of such a file's name


@dataclass(frozen=True)
class Selection:
    """The content of a selection.

    Attributes:
        data: the component of `--train-data`.
        source: one of its sources.
        marks: `file_mark` of each of its shards.
        left_out: numbers of samples, or rows, ascending.
    """

    data: str
    source: str
    marks: list[Mark]
    left_out: list[int]

    def check(self, shards: Sequence[str]) -> None:
        """UserError if the shards are not those of which the numbers are."""
        current_marks = marks_of(shards)
        if len(current_marks) != len(self.marks) or not all(
            map(is_same, self.marks, current_marks)
        ):
            raise UserError(
                f"the data of {self.data} has changed since samples of it were held out; call `zerovl finetune` again, which "
                "makes the list anew"
            )


def marks_of(shards: Sequence[str]) -> list[Mark]:
    """The mark of each shard; of a remote one its name twice, since it has no size here."""
    marks_by_shard = file_marks(shards, None, "checking shards")
    return [
        marks_by_shard[shard] if len(marks_by_shard[shard]) > 1 else [shard, shard]
        for shard in dict.fromkeys(shards)
    ]


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
