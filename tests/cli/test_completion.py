"""Shell completion, as the shell function of argcomplete asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip(
    "argcomplete", reason="argcomplete is not installed here (pip install '.[shell]')"
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("zerovl al", {"align"}),
        ("zerovl data ch", {"check"}),
        ("zerovl align --data D --batch", {"--batch-size"}),
        ("zerovl train --batch-size 64 --dga-s", {"--dga-steps"}),
        ("zerovl trial --equal ", {"time", "samples"}),
    ],
)
def test_the_words_that_may_follow(tmp_path, line, words):
    request = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"),
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
    }  # fmt: skip
    command = [sys.executable, "-m", "open_clip_zerovl.cli"]
    subprocess.run(command, env={**os.environ, **request}, check=True, timeout=60)
    assert set((tmp_path / "words").read_text().split()) == words
