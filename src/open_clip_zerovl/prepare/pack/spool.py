"""A spool is a file of pictures as they come, which outlives a call that is killed.

A record is a line of JSON, followed by the bytes of the picture if there is one. Opening a spool reads the whole records and
cuts off a partial last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True)
class RowOutcome:
    """The picture of one row, or the reason why there is none.

    Attributes:
        extension, offset_bytes, size_bytes: file ending of the picture, and place of its bytes in the spool.
        reason: why there is no picture. Empty if there is one.
        transient: whether a retry may help.
        about: further facts about the picture.
    """

    extension: str = ""
    offset_bytes: int = 0
    size_bytes: int = 0
    reason: str = ""
    transient: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


class Spool:
    """The outcomes of a batch of rows. Not thread-safe: one thread appends.

    Attributes:
        number: number of the batch.
        open_rows: rows whose pictures are under way.
        submitted: True once no more rows come.
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.number = number
        self.open_rows, self.submitted = 0, False
        self.outcomes: dict[int, RowOutcome] = {}
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  # closed by `close`
        self._recover()

    def add(
        self, row: int, extension: str, content: bytes, about: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the picture of a row, and further facts about it (values of JSON)."""
        head = {"row": row, "extension": extension, "size": len(content)}
        self._append({**head, "about": dict(about)} if about else head, content)

    def fail(self, row: int, reason: str, *, transient: bool) -> None:
        """Keep why a row has no picture."""
        self._append({"row": row, "reason": reason, "transient": transient}, b"")

    def forget_transient(self) -> None:
        """Treat rows with a transient failure as not tried. The last record of a row counts."""
        self.outcomes = {
            row: outcome for row, outcome in self.outcomes.items() if not outcome.transient
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, head: dict, content: bytes) -> None:
        line = json.dumps(head).encode() + b"\n"
        self._keep(head, self._end + len(line))
        # One write: a kill in the middle of it leaves a partial last record, which the next opening cuts off.
        self._file.write(line + content)
        self._file.flush()
        self._end += len(line) + len(content)

    def _keep(self, head: dict, offset: int) -> None:
        self.outcomes[int(head["row"])] = RowOutcome(
            head.get("extension", ""),
            offset,
            head.get("size", 0),
            head.get("reason", ""),
            head.get("transient", False),
            head.get("about", {}),
        )

    def _recover(self) -> None:
        total = self._file.seek(0, os.SEEK_END)
        self._end = 0
        self._file.seek(0)
        while line := self._file.readline():
            try:
                head = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                head = None
            if head is None or self._file.tell() + head.get("size", 0) > total:
                break
            self._keep(head, self._file.tell())
            self._end = self._file.seek(head.get("size", 0), os.SEEK_CUR)
        self._file.truncate(self._end)
        self._file.seek(0, os.SEEK_END)
