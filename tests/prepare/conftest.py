"""One way to pack in a test: quietly, into a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from open_clip_zerovl.prepare.pack import pack
from open_clip_zerovl.prepare.settings import PackSettings, Work

QUIET = Work(threads=4, progress=False)


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`packed(INPUT, ..., out="out", work=..., SETTING=...)` packs into `tmp_path / out` and returns the report."""

    def run(
        *inputs: str | Path, out: str = "out", work: Work = QUIET, **settings: Any
    ) -> dict[str, Any]:
        return pack(
            [str(given) for given in inputs], tmp_path / out, PackSettings(**settings), work=work
        )

    return run
