"""`record.jsonl` in a run's folder: the course of a training, one JSON object a line; `examples.json`: its last retrievals.

    kind        when                                   besides `kind`, `at` and `time`
    start       a process begins or continues            settings, sources, model, batch
    step        an optimizer step is logged            loss, lr, samples_per_second, waited, memory_bytes, by_source
    retrieval   an epoch was evaluated                 metrics: set -> metric -> value
    zero-shot   an epoch was evaluated                 metrics: set -> top1, top1_chance
    lost        an epoch ends, or the run stops in it  delivered, lost: source -> samples; source -> reason -> samples
    end         the process ends                       how: done, stopped or failed; words

`at` is the position in training, in epochs: 3.25 is a quarter into the fourth. It holds for any batch and any number of ranks.
A process that continues from a checkpoint first removes the later lines, so that each position comes once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from open_clip_zerovl.core.files import read_json, write_atomically
from open_clip_zerovl.report.html import thumbnail

log = logging.getLogger(__name__)

RECORD, EXAMPLES = "record.jsonl", "examples.json"
_SAME = 1e-9  # positions closer than this are the same one, computed in two ways
_KINDS = ("start", "step", "retrieval", "zero-shot", "lost", "end")


class Record:
    """Writes the record of a run, on its first rank.

    Args:
        folder: folder of the run, which exists.
        at: the position from which the run begins or continues, in epochs. Later entries are taken back.
    """

    def __init__(self, folder: str | os.PathLike[str], at: float) -> None:
        self.path = Path(folder) / RECORD
        self.at = at
        if self.path.exists():
            earlier = [
                line
                for line in _read(self.path)
                if line["at"] <= at + _SAME and line["kind"] != "end"
            ]
            write_atomically(self.path, "".join(_as_line(line) for line in earlier))

    def add(self, kind: str, at: float, **entries: Any) -> None:
        """Write a line at the record's end.

        Raises:
            OSError: it cannot be written.
        """
        self.at = at
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_as_line({"kind": kind, "at": at, "time": round(time.time(), 3), **entries}))


def read_record(folder: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """Read the lines of a run's record, by kind, each in order of its position.

    If a position comes twice, the last line is kept.

    Raises:
        OSError: there is no record.
    """
    path = Path(folder) / RECORD
    lines_by_kind: dict[str, dict[Any, dict[str, Any]]] = {kind: {} for kind in _KINDS}
    for number, line in enumerate(_read(path)):
        once = line["kind"] in ("step", "retrieval", "zero-shot")
        lines_by_kind[line["kind"]][round(line["at"] / _SAME / 10) if once else number] = line
    return {
        kind: sorted(entries.values(), key=lambda line: line["at"])
        for kind, entries in lines_by_kind.items()
    }


def write_examples(folder: str | os.PathLike[str], epoch: int, examples: Sequence[Any]) -> None:
    """Write the retrieval examples of an evaluation in place of earlier ones.

    Args:
        examples: result of `GallerySet.examples`.
    """
    content = {"epoch": epoch, "examples": [asdict(example) for example in examples]}
    write_atomically(Path(folder) / EXAMPLES, json.dumps(content, default=thumbnail))


def read_examples(folder: str | os.PathLike[str]) -> tuple[int, list[dict[str, Any]]]:
    """Read the epoch of a run's examples, and the examples.

    Returns:
        (0, []) if it has none.

    Raises:
        UserError: the file cannot be read.
    """
    path = Path(folder) / EXAMPLES
    if not path.exists():
        return 0, []
    content = read_json(path, "delete it to get the page without examples")
    return int(content["epoch"]), content["examples"]


def _as_line(line: Mapping[str, Any]) -> str:
    return json.dumps(_finite(line)) + "\n"


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines.

    A killed process may have left half a line, and a disk may have lost some.
    """
    lines, left_out = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if (
            isinstance(line, dict)
            and line.get("kind") in _KINDS
            and isinstance(line.get("at"), int | float)
        ):
            lines.append(line)
        else:
            left_out += 1
    if left_out:
        log.warning(
            "%s: %d lines are cut off or not as training writes them, and are left out.",
            path,
            left_out,
        )
    return lines
