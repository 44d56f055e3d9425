"""docs/security.md says of every command what it reads and writes."""

import argparse

from open_clip_zerovl.cli.program import build_parser
from support import ROOT


def commands(parser: argparse.ArgumentParser, prefix: str = "") -> list[str]:
    """`data index`, `retrieval`, ...: the commands without further ones below them."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return [prefix.strip()]
    return [name for key, each in below[0].choices.items() for name in commands(each, f"{prefix} {key}")]


def test_every_command_stands_in_the_table():
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = " ".join(rows)
    for command in commands(build_parser()):
        last = command.rpartition(" ")[2]
        assert f"`{last}`" in named or f"zerovl {command}`" in named, (
            f"docs/security.md says nothing of zerovl {command}"
        )
