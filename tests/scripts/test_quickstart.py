"""The quick start: its page's commands run as they stand, and print the page's output."""

from __future__ import annotations

import pytest

from open_clip_zerovl.core.errors import UserError
from scripts import quickstart

LINES = quickstart.PAGE.read_text(encoding="utf-8").split("\n")
COMMANDS = [command.words for command in quickstart.commands_of(LINES)]


def test_the_pages_commands_and_their_output_are_found():
    assert [command.split()[0] for command in COMMANDS[:3]] == ["python", "head", "zerovl"]
    train = COMMANDS[3]
    assert train.count("\\\n") == 5 and train.endswith("--workers 0")
    shown = quickstart.commands_of(LINES)[1].shown
    assert LINES[shown[0]] == "filepath,title,site"


def test_printed_lines_replace_shown_ones_with_other_numbers_only():
    printed = ["a bar", "noto  1,341 pictures  5.3 MB", "Done in 7 s", "/tmp/x: table, 5 rows"]
    shown = ["noto 12 pictures 1 MB", "Done in 333 s"]
    assert quickstart.printed_again(shown, printed) == printed[1:3]
    assert quickstart.printed_again(["/tmp/x: tab ..."], printed) == ["/tmp/x: tab ..."]
    for wrong in (["noto 12 captions 1 MB"], ["Done in 3 s", "noto 12 pictures 1 MB"]):
        with pytest.raises(UserError, match="was not printed"):
            quickstart.printed_again(wrong, printed)
