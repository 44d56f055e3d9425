"""docs/security.md lists the inputs and outputs of every command."""

from open_clip_zerovl.cli import ALL
from support import ROOT


def test_every_command_stands_in_the_table():
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = " ".join(rows)
    for command in ALL:
        last = command.rpartition(" ")[2]
        assert f"`{last}`" in named or f"zerovl {command}`" in named, (
            f"docs/security.md says nothing of zerovl {command}"
        )
