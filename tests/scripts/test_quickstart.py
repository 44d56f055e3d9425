"""The quick start: its page's commands run as they stand, and print the page's output."""

from __future__ import annotations

import pytest

from open_clip_zerovl.core.errors import UserError
from scripts import quickstart


def test_printed_lines_replace_shown_ones_with_other_numbers_only():
    printed = ["a bar", "noto  1,341 pictures  5.3 MB", "Done in 7 s", "/tmp/x: table, 5 rows"]
    shown = ["noto 12 pictures 1 MB", "Done in 333 s"]
    assert quickstart.printed_again(shown, printed) == printed[1:3]
    assert quickstart.printed_again(["/tmp/x: tab ..."], printed) == ["/tmp/x: tab ..."]
    for wrong in (["noto 12 captions 1 MB"], ["Done in 3 s", "noto 12 pictures 1 MB"]):
        with pytest.raises(UserError, match="was not printed"):
            quickstart.printed_again(wrong, printed)
